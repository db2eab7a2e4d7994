"""A scheduler's step as tensors: which token goes where, and which rows are sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backends.disagg.engine.attention import ChunkSpan, DecodeRows
from backends.disagg.engine.scheduler import Step
from backends.disagg.engine.sequence import Sequence

MIN_ROWS = 4
"""Matrix products of fewer rows take another kernel on CPU, which rounds differently: a batch is filled up
to this many with rows that write to a scratch block, so that a token's value never depends on the batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows are prompt chunks first, then single tokens, then padding (single tokens of no sequence)."""

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
    """int64: the rows whose next token is wanted, padded to MIN_ROWS."""
    sampled: list[Sequence]
    """The sequences of the first `len(sampled)` sample rows."""


def build_batch(step: Step, block_size: int, scratch_block: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """Lay out `step`. `scratch_block` is a block that belongs to nobody."""
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
        spans.append(_span(chunk.start, chunk.length, row, seq.blocks, block_size, dtype, device))
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
    for _ in range(MIN_ROWS - len(tokens)):
        tokens.append(0)
        positions.append(0)
        blocks.append(scratch_block)
        tables.append([scratch_block])
        lengths.append(1)
    sample_rows += [0] * (MIN_ROWS - len(sample_rows)) if sample_rows else []
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
) -> ChunkSpan:
    if start == 0:
        return ChunkSpan(row, start, length, torch.empty(0, dtype=torch.int64), None)
    end = start + length
    mask = torch.full((length, end), float("-inf"), dtype=dtype, device=device).triu(start + 1)
    used = torch.tensor(blocks[: -(-end // block_size)], device=device)
    return ChunkSpan(row, start, length, used, mask)
