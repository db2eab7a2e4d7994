"""How two processes that know the same secret show each other that they do, and nobody else anything.

Challenge and response over HMAC-SHA256 (RFC 2104), as in ISO/IEC 9798-4's three passes: whoever connects sends a
nonce; the listener answers with its own and a MAC over both; whoever connects answers with another MAC over both. The
MACs are labelled by side and purpose, so none can be sent back to its maker or used elsewhere, and the nonces are
fresh, so a recorded conversation is worth nothing.

What follows is neither encrypted nor authenticated by this: on a network that others can write to, use TLS as well.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

NONCE_BYTES = 32
MAC_BYTES = 32
ANSWER_BYTES = NONCE_BYTES + MAC_BYTES
MIN_SECRET = 16
"""Characters. What a listener answers to a stranger lets it try secrets at home: short ones would be found."""

Purpose = Literal["kv", "control"]


class NotProved(Exception):
    """The other side does not know the secret."""


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def answer(secret: str, purpose: Purpose, theirs: bytes, mine: bytes) -> bytes:
    """What a listener with the nonce `mine` says to a connector's."""
    return mine + _mac(secret, purpose, b"listener", theirs, mine)


def connectors_proof(secret: str, purpose: Purpose, mine: bytes, answered: bytes) -> bytes:
    """What a connector with the nonce `mine` says to that. Raises NotProved."""
    theirs, proof = answered[:NONCE_BYTES], answered[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _mac(secret, purpose, b"listener", mine, theirs)):
        raise NotProved("the listener does not know this cluster's secret")
    return _mac(secret, purpose, b"connector", mine, theirs)


def check_connector(secret: str, purpose: Purpose, theirs: bytes, mine: bytes, proof: bytes) -> None:
    """The listener's last step. Raises NotProved."""
    if not hmac.compare_digest(proof, _mac(secret, purpose, b"connector", theirs, mine)):
        raise NotProved("a peer that does not know this cluster's secret connected")


def _mac(secret: str, purpose: Purpose, side: bytes, connector: bytes, listener: bytes) -> bytes:
    label = b"splitroute-2 " + purpose.encode() + b" " + side
    return hmac.digest(secret.encode(), label + connector + listener, hashlib.sha256)
