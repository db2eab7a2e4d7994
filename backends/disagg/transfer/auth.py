"""Who may speak at all: both sides of a connection prove that they know a secret, and neither shows it.

Challenge and response over HMAC-SHA256 (RFC 2104), as in ISO/IEC 9798-4's three passes: whoever connects sends a
nonce; the listener answers with its own and a MAC over both; whoever connects answers with another MAC over both. The
MACs are labelled by side, so none can be sent back to its maker, and the nonces are fresh, so a recorded conversation
is worth nothing. The listener has sent nothing of use to a stranger, and read less than a kilobyte from it.

What follows is neither encrypted nor authenticated by this: on a network that others can write to, use TLS as well.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket

from backends.disagg.transfer import sockets
from backends.disagg.transfer.wire import Kind, WireError

_NONCE_BYTES = 32
_MAC_BYTES = 32
MIN_SECRET = 16
"""Characters. What a listener answers to a stranger lets it try secrets at home: short ones would be found."""


def prove_to_listener(peer: socket.socket, secret: str, until: float) -> None:
    """The connecting side. Raises WireError, EOFError or OSError; `until` as `time.monotonic`."""
    mine = secrets.token_bytes(_NONCE_BYTES)
    sockets.send_control(peer, Kind.CHALLENGE, mine)
    answer = sockets.receive_control(peer, Kind.PROOF, until=until, stranger=True)
    theirs, proof = bytes(answer[:_NONCE_BYTES]), bytes(answer[_NONCE_BYTES:])
    if not hmac.compare_digest(proof, _mac(secret, b"listener", mine, theirs)):
        raise WireError("the listener does not know this cluster's secret")
    sockets.send_control(peer, Kind.PROOF, _mac(secret, b"connector", mine, theirs))


def challenge(peer: socket.socket, secret: str, until: float) -> None:
    """The listening side. Raises WireError, EOFError or OSError."""
    theirs = bytes(sockets.receive_control(peer, Kind.CHALLENGE, until=until, stranger=True))
    if len(theirs) != _NONCE_BYTES:
        raise WireError(f"a challenge is {_NONCE_BYTES} bytes, not {len(theirs)}")
    mine = secrets.token_bytes(_NONCE_BYTES)
    sockets.send_control(peer, Kind.PROOF, mine + _mac(secret, b"listener", theirs, mine))
    proof = bytes(sockets.receive_control(peer, Kind.PROOF, until=until, stranger=True))
    if not hmac.compare_digest(proof, _mac(secret, b"connector", theirs, mine)):
        raise WireError("a peer that does not know this cluster's secret connected")


def _mac(secret: str, side: bytes, connector: bytes, listener: bytes) -> bytes:
    return hmac.digest(secret.encode(), b"splitroute-2 " + side + connector + listener, hashlib.sha256)
