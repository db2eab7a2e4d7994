"""A scheduler's step as tensors: which token goes where, and which rows are sampled."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Rows:
    """What every runner needs to know of a step's rows: prompt chunks first, then single tokens. int32."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    positions: array[int] = field(default_factory=lambda: array("i"))
    blocks: array[int] = field(default_factory=lambda: array("i"))
    """The KV block each row's key and value go to."""
    first: list[int] = field(default_factory=list)
    """The first row of each prompt chunk, then that of each sequence that decodes."""
    sample_rows: array[int] = field(default_factory=lambda: array("i"))
    sampled: list[Sequence] = field(default_factory=list)


def lay_out(step: Step, block_size: int) -> Rows:
    """Give each token of `step` its row."""
    rows = Rows()

    def add(seq: Sequence, start: int, end: int, sampled: bool) -> None:
        rows.first.append(len(rows.tokens))
        rows.tokens.extend(seq.tokens[start:end])
        rows.positions.extend(range(start, end))
        rows.blocks.extend(seq.blocks[at // block_size] for at in range(start, end))
        if sampled:
            rows.sample_rows.append(len(rows.tokens) - 1)
            rows.sampled.append(seq)

    for chunk in step.prefill:
        add(chunk.seq, chunk.start, chunk.start + chunk.length, chunk.last)
    for seq in step.decode:
        add(seq, seq.computed, seq.computed + 1, True)
    return rows


def build_batch(
    step: Step, block_size: int, dtype: torch.dtype, device: torch.device, window: int | None = None
) -> Batch:
    """`step` as tensors, with masks for layers that see `window` tokens only, where the model has such."""
    rows = lay_out(step, block_size)

    def tensor(values: array[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    spans = [
        _span(chunk.start, chunk.length, row, chunk.seq.blocks, block_size, dtype, device, window)
        for chunk, row in zip(step.prefill, rows.first, strict=False)
    ]
    decode = None
    if step.decode:
        tables = [seq.blocks for seq in step.decode]
        lengths = [seq.computed + 1 for seq in step.decode]
        decode = _decode_rows(rows.first[len(step.prefill)], tables, lengths, device)
    positions = tensor(rows.positions)
    return Batch(
        tokens=tensor(rows.tokens),
        positions=positions,
        slot_blocks=tensor(rows.blocks),
        slot_offsets=positions % block_size,
        prefill=spans,
        decode=decode,
        sample_rows=tensor(rows.sample_rows),
        sampled=rows.sampled,
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
