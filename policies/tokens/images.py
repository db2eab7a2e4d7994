"""Tokens of an image, as OpenAI's models count them: a base, and more for each tile of 512 pixels.

The image is first made to fit 2,048 by 2,048, and its short side to have at most 768 pixels (OpenAI's guide to images
and vision). Only images that are in the request tell their size: of one behind a URL nobody knows before it is fetched.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

_BASE = 85
_TILE = 170
_UNKNOWN = (1024, 1024)
_HEAD_CHARS = 65_536
"""Of the base64: a JPEG's size may stand behind its thumbnail."""


def image_tokens(part: Mapping[str, Any]) -> int:
    """Of a content part that has an image, in OpenAI's or Anthropic's words."""
    image = part.get("image_url")
    if isinstance(image, Mapping):
        detail, source = image.get("detail"), image.get("url")
    else:
        detail, source = part.get("detail"), image
    if detail == "low":
        return _BASE
    if isinstance(inner := part.get("source"), Mapping):
        source = inner.get("data")
    width, height = _size(source) or _UNKNOWN
    shrink = min(1.0, 2048 / max(width, height))
    shrink *= min(1.0, 768 / (min(width, height) * shrink))
    tiles = math.ceil(width * shrink / 512) * math.ceil(height * shrink / 512)
    return _BASE + _TILE * tiles


def _size(source: Any) -> tuple[int, int] | None:
    """(width, height) of base64, with or without `data:…;base64,` before it."""
    if not isinstance(source, str) or source.startswith(("http://", "https://")):
        return None
    begin = source.find(",", 0, 256) + 1
    encoded = source[begin : begin + _HEAD_CHARS]
    try:
        data = base64.b64decode(encoded[: len(encoded) // 4 * 4])
    except (binascii.Error, ValueError):
        return None
    size = _size_of(data)
    return size if size is not None and min(size) > 0 else None


def _size_of(data: bytes) -> tuple[int, int] | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) >= 24:
        return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    if data[:6] in (b"GIF87a", b"GIF89a") and len(data) >= 10:
        return int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    return _jpeg(data) if data[:2] == b"\xff\xd8" else None


def _webp(data: bytes) -> tuple[int, int] | None:
    form = data[12:16]
    if form == b"VP8X" and len(data) >= 30:
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if form == b"VP8L" and len(data) >= 25:
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if form == b"VP8 " and len(data) >= 30:
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return None


def _jpeg(data: bytes) -> tuple[int, int] | None:
    """From the frame header (SOF), wherever it stands among the segments."""
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[at + 7 : at + 9], "big"), int.from_bytes(data[at + 5 : at + 7], "big")
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None
