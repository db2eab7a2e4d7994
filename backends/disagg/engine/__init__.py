"""The inference engine: one code path for prefill, decode and both together, on CPU and CUDA.

`scheduler` and `blocks` decide (plain Python); `runner` computes (torch). Neither opens a socket.
"""
