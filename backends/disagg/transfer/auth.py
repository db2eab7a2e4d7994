"""`proof` over a KV connection: a stranger gets nothing of use, and has less than a kilobyte read from it."""

from __future__ import annotations

from backends.disagg import proof
from backends.disagg.transfer import sockets
from backends.disagg.transfer.sockets import Connection
from backends.disagg.transfer.wire import Kind, WireError


def prove_to_listener(peer: Connection, secret: str, until: float) -> None:
    """The connecting side. Raises WireError, EOFError or OSError; `until` as `time.monotonic`."""
    mine = proof.nonce()
    sockets.send_control(peer, Kind.CHALLENGE, mine)
    answered = sockets.receive_control(peer, Kind.PROOF, until=until, stranger=True)
    try:
        sockets.send_control(peer, Kind.PROOF, proof.connectors_proof(secret, "kv", mine, bytes(answered)))
    except proof.NotProved as error:
        raise WireError(str(error)) from None


def challenge(peer: Connection, secret: str, until: float) -> None:
    """The listening side. Raises WireError, EOFError or OSError."""
    theirs = bytes(sockets.receive_control(peer, Kind.CHALLENGE, until=until, stranger=True))
    if len(theirs) != proof.NONCE_BYTES:
        raise WireError(f"a challenge is {proof.NONCE_BYTES} bytes, not {len(theirs)}")
    mine = proof.nonce()
    sockets.send_control(peer, Kind.PROOF, proof.answer(secret, "kv", theirs, mine))
    said = bytes(sockets.receive_control(peer, Kind.PROOF, until=until, stranger=True))
    try:
        proof.check_connector(secret, "kv", theirs, mine, said)
    except proof.NotProved as error:
        raise WireError(str(error)) from None
