"""What a prefill side has to hand over, and how far each decode side's pull of it got."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backends.disagg.transfer.peer import Peer


@dataclass(slots=True, eq=False)
class Reading:
    """One decode worker's pull of an offer."""

    peer: Peer
    pull: int
    """What the reader calls it."""
    begun: float
    sent: int
    """The next block of the prompt that this reader gets."""
    queue_s: float = 0.0
    codec_s: float = 0.0
    told: bool = False
    """READY has been sent."""
    landed: bool = False
    unfetched: int = 0
    """Frames that only named their blocks, and have not been acknowledged."""


@dataclass(slots=True, eq=False)
class Offer:
    blocks: list[int]
    prompt_tokens: int
    ready: int = 0
    """Blocks from the first whose KV is complete."""
    ready_at: float = 0.0
    first_token: int | None = None
    done_at: float = 0.0
    withdrawn: bool = False
    host: memoryview | None = None
    """All blocks one after another, where they were spilled."""
    reading: Reading | None = None
