"""The logit edits from `runtime/sampling/edits.py`, for all requests of a step in one launch: bans
and biases, then penalties for past tokens. They are read from tables by slot on the device.

There are two launches per step, before and after sampling. Their grids depend only on the number of
requests, and the host reads no values. Imported only on a GPU, or in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Number of logits of a row that a program edits."""
ENTRIES = 256
"""Number of listed tokens that are read at a time."""
WARPS = 8
SEEN = tl.constexpr(1 << 30)
"""A bit of a token's count: the token occurs in the prompt or in the output so far."""
LISTED = tl.constexpr(1 << 29)
"""A bit of a token's count: it is in the slot's list, so the program for the list edits it."""
BANNED = tl.constexpr(1 << 30)
"""A bit of a list entry: the token would end the output before the minimum length."""


@dataclass(frozen=True, slots=True)
class EditTables:
    """The edit options of S slots."""

    # the row in `counts`, or -1; the number of tokens in the list; the number of tokens to generate
    # before the output may end
    facts: torch.Tensor  # [S, 3] int32
    weights: torch.Tensor  # [S, 3] float32; repetition, presence and frequency penalty
    entries: torch.Tensor  # [S, E] int32; distinct tokens, with BANNED if banned
    amounts: torch.Tensor  # [S, E] float32; added to these tokens' logits
    counts: torch.Tensor  # [S, V] int32; each token's count in the output, with SEEN and LISTED


@triton.jit
def penalised(x, state, repetition, presence, frequency):
    """The logits of past tokens after CTRL's repetition penalty and OpenAI's penalties."""
    times = (state & (LISTED - 1)).to(tl.float32)
    harder = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    return harder - (tl.where(times > 0, presence, 0.0) + frequency * times)


@triton.jit
def others_left(logits, entries, number, vocab, block: tl.constexpr, room: tl.constexpr):
    """The number of tokens that can be sampled if those marked BANNED are excluded.

    Other programs may apply penalties concurrently, but these keep a logit finite.
    """
    left = tl.zeros([], tl.int32)
    for at in tl.range(0, vocab, block):
        c = at + tl.arange(0, block)
        x = tl.load(logits + c, mask=c < vocab, other=float("-inf"))
        left += tl.sum((x != float("-inf")).to(tl.int32), 0)
    for at in tl.range(0, number, room):
        i = at + tl.arange(0, room)
        entry = tl.load(entries + i, mask=i < number, other=0)
        banned = (entry & BANNED) != 0
        x = tl.load(logits + (entry & (BANNED - 1)), mask=banned, other=float("-inf"))
        left -= tl.sum((x != float("-inf")).to(tl.int32), 0)
    return left


# The alignment of `slots` depends on the size of the step. Do not compile a variant for each.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _edit(
    logits,
    slots,
    facts,
    weights,
    entries,
    amounts,
    counts,
    vocab,
    row_stride,
    width,
    block: tl.constexpr,
    room: tl.constexpr,
    has_mask: tl.constexpr,
):
    """Program (row, part): part 0 edits the tokens in the row's list, and each other part a block
    of the vocabulary, except for listed tokens.
    """
    logits += tl.program_id(0).to(tl.int64) * row_stride
    part = tl.program_id(1)
    slot = tl.load(slots + tl.program_id(0))
    line = tl.load(facts + slot * 3).to(tl.int64)
    repetition = tl.load(weights + slot * 3)
    presence = tl.load(weights + slot * 3 + 1)
    frequency = tl.load(weights + slot * 3 + 2)
    counts += line * vocab
    if part > 0:
        if line >= 0:
            c = (part - 1) * block + tl.arange(0, block)
            state = tl.load(counts + c, mask=c < vocab, other=0)
            mine = (state != 0) & ((state & LISTED) == 0)
            x = tl.load(logits + c, mask=mine, other=0.0)
            x = penalised(x, state, repetition, presence, frequency)
            tl.store(logits + c, x, mask=mine)
        return
    number = tl.load(facts + slot * 3 + 1)
    entries += slot * width
    amounts += slot * width
    bans = tl.load(facts + slot * 3 + 2) > 0
    if has_mask:  # noqa: SIM102  # `has_mask` is a compile-time constant, `bans` is not
        if bans:
            bans = others_left(logits, entries, number, vocab, block, room) > 0
    for at in tl.range(0, number, room):
        i = at + tl.arange(0, room)
        here = i < number
        entry = tl.load(entries + i, mask=here, other=0)
        c = entry & (BANNED - 1)
        x = tl.load(logits + c, mask=here, other=0.0)
        x = tl.where(bans & ((entry & BANNED) != 0), float("-inf"), x)
        x += tl.load(amounts + i, mask=here, other=0.0)
        state = tl.load(counts + c, mask=tl.where(here, line, -1) >= 0, other=0)
        harder = penalised(x, state, repetition, presence, frequency)
        x = tl.where((state & ~LISTED) != 0, harder, x)
        tl.store(logits + c, x, mask=here)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _count(slots, facts, counts, drawn, vocab):
    """Program (row): count the row's sampled token."""
    slot = tl.load(slots + tl.program_id(0))
    line = tl.load(facts + slot * 3).to(tl.int64)
    left = tl.load(facts + slot * 3 + 2)
    tl.store(facts + slot * 3 + 2, tl.maximum(left - 1, 0))
    if line >= 0:
        at = counts + line * vocab + tl.load(drawn + tl.program_id(0))
        tl.store(at, tl.load(at) + 1)


def launch_edit(
    logits: torch.Tensor, slots: torch.Tensor, tables: EditTables, masked: bool
) -> None:
    """Edit logits [D, V] float32 in place, for the rows in slots `slots` [D] int64.

    masked: whether some logits are -inf. A ban that would exclude all remaining tokens is then
    lifted.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and tables.counts.shape[1] == vocab
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocab))
        _edit[(rows, 1 + triton.cdiv(vocab, block))](
            logits,
            slots,
            tables.facts,
            tables.weights,
            tables.entries,
            tables.amounts,
            tables.counts,
            vocab,
            logits.stride(0),
            tables.entries.shape[1],
            block=block,
            room=ENTRIES,
            has_mask=masked,
            num_warps=WARPS,
        )


def launch_count(slots: torch.Tensor, tables: EditTables, tokens: torch.Tensor) -> None:
    """Count the sampled `tokens` [D] int64 in the slots `slots` [D] int64 of their rows."""
    if len(tokens):
        _count[(len(tokens),)](
            slots, tables.facts, tables.counts, tokens, tables.counts.shape[1], num_warps=1
        )
