"""From one API's words to another's, where a client and its target speak different ones.

A file for each pair, named for what the client speaks and what the provider does. Where both speak the same, nothing
here is called and bytes are relayed.
"""

from backends.dialects.bridge import count, open_call

__all__ = ["count", "open_call"]
