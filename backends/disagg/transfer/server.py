"""The prefill side of the hand-over: offers prompts' KV while and after it is computed.

The engine's thread says what is ready (`offer`, `progress`, `done`, `spill`, `withdraw`); for each peer a thread reads
requests and another sends, so computing never waits for a socket. An offer outlives its first reader: where that
one dies, another may pull the same KV. Blocks belong to the engine. It moves them to host memory (`spill`) only while
nobody reads them, and frees them only after `withdraw`; READY is sent only for an offer that has not been withdrawn,
so what a decode worker accepts was never overwritten while it was read.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from backends.disagg.engine.kv_cache import KVCache, as_bytes
from backends.disagg.transfer import sockets
from backends.disagg.transfer.codecs import Codec
from backends.disagg.transfer.offers import Offer, Reading
from backends.disagg.transfer.peer import Peer
from backends.disagg.transfer.wire import Hello

if TYPE_CHECKING:
    import torch

    from backends.disagg.transfer.nixl import Nixl

_MAX_STRANGERS = 32
"""Connections that have not proved anything yet; more are closed at once."""


class KVServer:
    """Serves blocks of `cache` over `listeners`. `on_heartbeat(requests)` is called from a peer's thread."""

    def __init__(
        self,
        cache: KVCache,
        hello: Hello,
        secret: str,
        listeners: list[tuple[socket.socket, str]],
        on_heartbeat: Callable[[list[int]], None],
        codecs: Sequence[Codec] = (Codec.RAW,),
        nixl: Nixl | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`codecs`: those that may be used, the most faithful first."""
        self.nixl = nixl
        self.tls = tls
        self.cache = cache
        self.codecs = codecs
        self.hello = hello
        self.secret = secret
        self.on_heartbeat = on_heartbeat
        self._lock = threading.Lock()
        self._offers: dict[int, Offer] = {}
        self._early_pulls: dict[int, Reading] = {}
        """Pulls of what has not been offered here yet."""
        self._gone: deque[int] = deque(maxlen=4096)
        self._strangers = threading.Semaphore(_MAX_STRANGERS)
        self._peers: set[Peer] = set()
        self._listeners = [listener for listener, _ in listeners]
        self.addresses = [address for _, address in listeners]
        for listener, _ in listeners:
            threading.Thread(target=self._accept, args=(listener,), name="kv-accept", daemon=True).start()

    # --- the engine's side ---------------------------------------------------------------------------

    def offer(self, request: int, blocks: list[int], prompt_tokens: int) -> None:
        """Announce that `blocks` will hold the KV of `request`'s prompt."""
        with self._lock:
            self._offers[request] = Offer(blocks, prompt_tokens, reading=self._early_pulls.pop(request, None))

    def progress(self, request: int, ready: int) -> None:
        """The first `ready` blocks of an offer are complete."""
        with self._lock:
            offer = self._offers.get(request)
            if offer is None:
                return
            fresh = offer.blocks[offer.ready : ready]
        self.cache.publish(fresh)
        with self._lock:
            offer.ready, offer.ready_at = ready, time.monotonic()
            self._wake(offer)

    def done(self, request: int, first_token: int) -> None:
        """All blocks are complete and the first token is known."""
        with self._lock:
            offer = self._offers.get(request)
            if offer is not None:
                offer.first_token, offer.done_at = first_token, time.monotonic()
                self._wake(offer)

    def spill(self, request: int, blocks: list[int]) -> torch.Tensor | None:
        """Copy `blocks`, all that `request` has, and serve it from the copy; None where they are being read."""
        with self._lock:
            offer = self._offers.get(request)
            if offer is None or offer.first_token is None or (offer.reading is not None and not offer.reading.landed):
                return None
            saved = self.cache.save(blocks)
            offer.host = as_bytes(saved)
            return saved

    def withdraw(self, request: int) -> None:
        """The blocks are about to be freed: nothing of them may be accepted any more."""
        with self._lock:
            offer = self._offers.pop(request, None)
            early = self._early_pulls.pop(request, None)
            self._gone.append(request)
            if offer is not None:
                offer.withdrawn = True
                self._wake(offer)
            elif early is not None:
                early.peer.outbox.put((None, early))

    @staticmethod
    def _wake(offer: Offer) -> None:
        if offer.reading is not None and not offer.reading.landed:
            offer.reading.peer.outbox.put((offer, offer.reading))

    # --- the peers' side -----------------------------------------------------------------------------

    def pull(self, request: int, reading: Reading) -> None:
        """Let `reading` have the KV of `request`; whoever had begun to read it does not go on."""
        with self._lock:
            offer = self._offers.get(request)
            if offer is not None:
                offer.reading = reading
                self._wake(offer)
            elif request in self._gone:
                reading.peer.outbox.put((None, reading))
            else:
                self._early_pulls[request] = reading

    def ended(self, request: int, reading: Reading) -> None:
        """Nothing is read by `reading` any more: it has landed, or is not wanted."""
        with self._lock:
            reading.landed = True
            if self._early_pulls.get(request) is reading:
                del self._early_pulls[request]

    def forget(self, peer: Peer) -> None:
        """`peer` has gone: its offers may be pulled by another one."""
        with self._lock:
            self._peers.discard(peer)
            for offer in self._offers.values():
                if offer.reading is not None and offer.reading.peer is peer:
                    offer.reading = None
            for request in [r for r, early in self._early_pulls.items() if early.peer is peer]:
                del self._early_pulls[request]

    def is_withdrawn(self, offer: Offer) -> bool:
        with self._lock:
            return offer.withdrawn

    def close(self) -> None:
        """Stop listening and let every peer go."""
        for listener in self._listeners:
            sockets.shut(listener)
            listener.close()
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            sockets.shut(peer.connection)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=Peer(self, connection).serve, name="kv-peer", daemon=True).start()

    def known(self, peer: Peer | None) -> None:
        """A stranger has shown who it is, or has gone."""
        self._strangers.release()
        if peer is not None:
            with self._lock:
                self._peers.add(peer)
