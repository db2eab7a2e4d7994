"""`sticky`: a session stays with one target, as long as that one is not crowded.

When: conversations whose history is cached where they were before, or whose answers should not change in style midway.
Limits: needs a session (see docs/policies.md); when a target is added or removed, only the sessions that must move do.
"""

from __future__ import annotations

from policies.choose.option import Asked, Option
from policies.choose.prefix_affinity import placed


def sticky(options: list[Option], asked: Asked) -> tuple[list[Option], str]:
    """By weighted rendezvous hashing of the session, with bounded loads."""
    return placed(options, asked, asked.session, "requests of this session")
