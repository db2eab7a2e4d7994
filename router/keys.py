"""The gateway's keys: what clients show to be let in. A file keeps hashes of them, never the keys.

A key is `sr-ID-SECRET`. The secret has 256 random bits, so one SHA-256 of it gives nothing away; the slow hashes of
passwords are for what people choose.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from router.errors import RouterError

_KEY = re.compile(r"sr-([0-9a-f]{8})-([A-Za-z0-9_-]{43})")
_LOOK_EVERY_S = 1.0
_NOBODY = hashlib.sha256(b"").hexdigest()
"""Compared with where there is no such id, so that both take the same time."""


class KeyFileError(Exception):
    """A file that is not there, or has no keys in it as we write them."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Key:
    id: str
    label: str
    """Whose it is; conditions of a policy may ask for it."""
    sha256: str
    """Of the secret."""
    created: str
    routes: tuple[str, ...] = ()
    """Those it may ask for; empty for all."""

    def may_ask(self, route: str) -> bool:
        return not self.routes or route in self.routes


def read_keys(path: Path) -> dict[str, Key]:
    """By id; none where there is no file. Raises KeyFileError, or OSError."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    try:
        return {one["id"]: Key(**{**one, "routes": tuple(one.get("routes", ()))}) for one in json.loads(text)["keys"]}
    except (ValueError, TypeError, KeyError) as error:
        raise KeyFileError(
            f"{path} is no file of keys ({type(error).__name__}: {error})",
            hint="splitroute key create makes one where there is none yet",
        ) from None


def create(path: Path, label: str, routes: Sequence[str] = ()) -> tuple[Key, str]:
    """Add a key; the key itself is told here once, and kept nowhere. Raises KeyFileError, or OSError."""
    secret = secrets.token_urlsafe(32)
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    key = Key(secrets.token_hex(4), label, hashlib.sha256(secret.encode()).hexdigest(), created, tuple(routes))
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        _write(path, {**read_keys(path), key.id: key})
    return key, f"sr-{key.id}-{secret}"


def revoke(path: Path, id_or_label: str) -> list[Key]:
    """Remove the key of that id, or every one of that label; those that were. Raises KeyFileError, or OSError."""
    if not path.exists():
        return []
    with _alone(path):
        keys = read_keys(path)
        gone = [key for key in keys.values() if id_or_label in (key.id, key.label)]
        if gone:
            _write(path, {id_: key for id_, key in keys.items() if key not in gone})
    return gone


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One at a time changes the file; its folder is what is locked, since the file itself is replaced."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, keys: Mapping[str, Key]) -> None:
    """Whole or not at all, and for its owner alone."""
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"keys": [asdict(key) for key in keys.values()]}, file, indent=2)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


class Doorkeeper:
    """Lets requests in by the keys of a file, which may change while it serves."""

    def __init__(self, path: Path) -> None:
        """Raises KeyFileError, or OSError."""
        if not path.exists():
            raise KeyFileError(
                f"{path}: there is no such file", hint=f"splitroute key create --keys {path} --label NAME"
            )
        self._path = path
        self._keys = read_keys(path)
        self._mark = self._marked()
        self._looked_at = time.monotonic()

    def check(self, headers: Mapping[bytes, bytes]) -> Key:
        """The key that an HTTP request shows, as OpenAI's clients do or as Anthropic's. Raises RouterError (401)."""
        self._look()
        shown = headers.get(b"authorization", b"").decode("latin-1")
        scheme, _, bearer = shown.partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get(b"x-api-key", b"").decode("latin-1")
        found = _KEY.fullmatch(given)
        key = self._keys.get(found[1]) if found else None
        digest = hashlib.sha256(found[2].encode() if found else b"").hexdigest()
        if not hmac.compare_digest(digest, key.sha256 if key else _NOBODY) or key is None:
            what = "no key was given" if not given else "the key given is not one of this gateway, or was revoked"
            remedy = "send one as Authorization: Bearer, or as x-api-key"
            raise RouterError(f"{what}; {remedy}", status=401, kind="authentication_error", code="invalid_api_key")
        return key

    def _look(self) -> None:
        """Take up a file that has changed. One that cannot be read changes nothing: nobody is let in by mistake."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        mark = self._marked()
        if mark != self._mark:
            try:
                self._keys, self._mark = read_keys(self._path), mark
            except (KeyFileError, OSError):
                return

    def _marked(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns
