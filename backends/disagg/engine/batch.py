"""A scheduler's step as tensors: which token goes where, and which rows are sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backends.disagg.engine.attention import ChunkSpan, DecodeRows
from backends.disagg.engine.scheduler import Step
from backends.disagg.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows are prompt chunks first, then single tokens."""

    tokens: torch.Tensor
    """int64 [rows]"""
    positions: torch.Tensor
    """int64 [rows]"""
    slot_blocks: torch.Tensor
    """int64 [rows]: the KV block each row's key and value go to."""
    slot_offsets: torch.Tensor
    """int64 [rows]: the token's place in that block."""
    prefill: list[ChunkSpan]
    decode: DecodeRows | None
    sample_rows: torch.Tensor
    """int64: the rows whose next token is wanted."""
    sampled: list[Sequence]
    """The sequences of the sample rows."""


def build_batch(
    step: Step, block_size: int, dtype: torch.dtype, device: torch.device, window: int | None = None
) -> Batch:
    """Lay out `step`, with masks for layers that see `window` tokens only, where the model has such."""
    tokens: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    spans: list[ChunkSpan] = []
    sample_rows: list[int] = []
    sampled: list[Sequence] = []
    for chunk in step.prefill:
        seq, row, end = chunk.seq, len(tokens), chunk.start + chunk.length
        tokens += seq.tokens[chunk.start : end]
        positions += range(chunk.start, end)
        blocks += [seq.blocks[at // block_size] for at in range(chunk.start, end)]
        spans.append(_span(chunk.start, chunk.length, row, seq.blocks, block_size, dtype, device, window))
        if chunk.last:
            sample_rows.append(len(tokens) - 1)
            sampled.append(seq)
    first_single = len(tokens)
    tables: list[list[int]] = []
    lengths: list[int] = []
    for seq in step.decode:
        at = seq.computed
        sample_rows.append(len(tokens))
        sampled.append(seq)
        tokens.append(seq.tokens[at])
        positions.append(at)
        blocks.append(seq.blocks[at // block_size])
        tables.append(seq.blocks)
        lengths.append(at + 1)
    at_positions = torch.tensor(positions, device=device)
    return Batch(
        tokens=torch.tensor(tokens, device=device),
        positions=at_positions,
        slot_blocks=torch.tensor(blocks, device=device),
        slot_offsets=at_positions % block_size,
        prefill=spans,
        decode=_decode_rows(first_single, tables, lengths, device) if tables else None,
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
        sampled=sampled,
    )


def _decode_rows(row: int, tables: list[list[int]], lengths: list[int], device: torch.device) -> DecodeRows:
    widest = max(len(table) for table in tables)
    padded = [table + table[:1] * (widest - len(table)) for table in tables]
    return DecodeRows(
        row=row,
        tables=torch.tensor(padded, dtype=torch.int32, device=device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def _span(
    start: int,
    length: int,
    row: int,
    blocks: list[int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None,
) -> ChunkSpan:
    end = start + length
    mask = None
    used = torch.empty(0, dtype=torch.int64)
    if start:
        mask = torch.full((length, end), float("-inf"), dtype=dtype, device=device).triu(start + 1)
        used = torch.tensor(blocks[: -(-end // block_size)], device=device)
    if window is None or end <= window:
        return ChunkSpan(row, start, length, used, mask, mask)
    # Row i is the token start + i: it sees the `window` tokens that end with itself.
    places = torch.arange(end, device=device) - torch.arange(start, end, device=device)[:, None]
    seen = (places <= 0) & (places > -window)
    window_mask = torch.zeros((length, end), dtype=dtype, device=device).masked_fill(~seen, float("-inf"))
    return ChunkSpan(row, start, length, used, mask, window_mask)
