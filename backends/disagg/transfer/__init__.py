"""Handing a prompt's KV cache from the worker that prefilled it to the one that decodes.

The decode side pulls: it opens one connection per prefill worker (`puller`), agrees on the geometry once
(`wire.Hello`), and asks for a request's KV as soon as it has blocks for it. The prefill side (`server`)
answers with frames, chunk by chunk while the prompt is still being computed, and keeps the blocks until they
are released or their lease ends. Over a Unix socket the payload stays where it is, in shared memory; over
TCP it follows the frame's header.
"""
