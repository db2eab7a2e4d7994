"""A scripted hosted API on a real loopback socket. What it does is chosen by the model that is asked for, or by the
header `x-chaos`.

Written on plain sockets, because half of what it does is what no HTTP server would do: cut a stream, never
answer, send an event in pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from router.chaos.messages import MessagesScript
from router.chaos.scripts import Script, Seen


@dataclass
class FakeProvider:
    """Runs in a thread with a loop of its own, so that tests of any kind may use it. A context manager."""

    requests: list[Seen] = field(default_factory=list)
    url: str = ""
    retry_after: list[str] = field(default_factory=lambda: ["1"])
    """For the model `status:429`: each answer takes the next, the last one repeats."""
    alias: str | None = None
    """The script for every model, where a test cannot choose the model's name."""

    port: int = 0
    kept: int | None = None
    """How many requests it remembers, the latest; None for all."""
    _counts: dict[str, int] = field(default_factory=dict)
    _began: dict[str, float] = field(default_factory=dict)

    def count(self, script: str) -> int:
        """How many requests there were for that script, this one among them."""
        self._counts[script] = self._counts.get(script, 0) + 1
        return self._counts[script]

    def forget(self) -> None:
        """Count from nothing again."""
        self._counts.clear()
        self._began.clear()

    def since(self, script: str) -> float:
        """When the first request for that script came, on the monotonic clock."""
        return self._began.setdefault(script, time.monotonic())

    def __enter__(self) -> FakeProvider:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", self.port), self._loop)
        self._server = server.result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            self._server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def asked(self, model: str) -> list[Seen]:
        return [seen for seen in self.requests if seen.body.get("model") == model]

    # --- connections ---------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {
                    name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                seen = Seen(head[0].split()[1], headers, _object(body), raw=body)
                self.requests.append(seen)
                if self.kept is not None:
                    del self.requests[: -self.kept]
                if not await self._answer_watched(seen, reader, writer):
                    break
        writer.close()

    async def _answer_watched(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        script = MessagesScript if seen.path.endswith("/messages") else Script
        answering = asyncio.create_task(script(self, seen, writer).run())
        # A client that waits for its answer sends nothing: whatever can be read is its leaving.
        leaving = asyncio.create_task(reader.read(1))
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finished = answering.done()
        seen.left_early = not finished
        (leaving if finished else answering).cancel()
        await asyncio.gather(leaving, answering, return_exceptions=True)
        return finished and answering.result()


def _object(body: bytes) -> dict[str, Any]:
    """What is no JSON object is for the script `?`, which there is not."""
    try:
        parsed = json.loads(body or b"{}")
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"model": "?"}
