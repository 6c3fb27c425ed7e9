"""The kernel for bans, biases and penalties beside what CPUs do row by row, without a GPU in
Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from saccade.core.plan import Open
from saccade.core.types import SamplingParams
from saccade.plugins.gpu.slot_edits import SlotEdits
from saccade.runtime.row_parts import Draws, SamplePart
from saccade.runtime.sampling.edits import Edit
from saccade.runtime.sampling.sampler import RowByRow

pytest.importorskip("triton")

VOCAB = 300
ENDS = (7, 299)
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
}
ASKED: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.05},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.7},
    PENALTIES,
    {"logit_bias": ((0, 5.0), (9, -3.0), (299, 1.0))},
    {"min_tokens": 4, "stop_token_ids": (9, 11)},
    # tokens that are biased, banned and have been
    {**PENALTIES, "logit_bias": ((3, 2.5), (7, 50.0), (9, -3.0)), "min_tokens": 3},
    {**PENALTIES, "logit_bias": tuple((token, token / 300) for token in range(290))},
]
ANSWER = [3, 3, 9, 41]
PROMPT = [3, 5, 5, 298, 7]


def both(slots: int, device: str) -> tuple[RowByRow, SlotEdits]:
    return (
        RowByRow(lambda opened: Edit.of(opened, VOCAB, ENDS, torch.device("cpu"))),
        SlotEdits(VOCAB, slots, ENDS, torch.device(device)),
    )


def enter(
    part: SamplePart, slot: int, way: dict[str, Any], tokens: list[int], prompt_length: int
) -> None:
    params = SamplingParams(**way)
    if params.edits:
        part.open(Open(slot, tuple(tokens), prompt_length, (), (), params, ()))


def leave(part: SamplePart, slot: int, way: dict[str, Any]) -> None:
    if SamplingParams(**way).edits:
        part.close(slot)


def drawing(rows: list[int], counts: list[int], device: str) -> Draws:
    slots = torch.tensor(rows, device=device)
    return Draws(rows, counts, slots, torch.zeros(len(rows), dtype=torch.float64))


def check(ours: SlotEdits, theirs: RowByRow, device: str, rows: list[int], drawn: int) -> None:
    """Three steps of `rows`, which have drawn so many tokens."""
    for step in range(3):
        draws = drawing(rows, [drawn + step] * len(rows), device)
        seeded = torch.Generator().manual_seed(step)
        logits = 3 * torch.randn(len(rows), VOCAB, generator=seeded)
        there = logits.to(device, copy=True)
        ours.edit(there, draws, False)
        before = logits.clone()
        theirs.edit(logits, draws, False)
        torch.testing.assert_close(there.cpu(), logits, rtol=1e-6, atol=1e-6)
        assert not torch.equal(logits, before)
        tokens = torch.randint(0, 12, (len(rows),), generator=seeded)
        ours.count(draws, tokens.to(device))
        theirs.count(draws, tokens)


def test_every_edit_is_what_a_row_alone_would_get(device: str) -> None:
    theirs, ours = both(len(ASKED) + 2, device)
    for slot, way in enumerate(ASKED):
        for each in (theirs, ours):
            enter(each, slot, way, PROMPT + ANSWER[:1], len(PROMPT))
    check(ours, theirs, device, [*reversed(range(len(ASKED)))], 1)


def test_a_slot_and_its_line_forget_whoever_had_them_before(device: str) -> None:
    theirs, ours = both(3, device)
    place = ours.tables.counts.data_ptr()
    for first, second in ((PENALTIES, {}), (ASKED[7], ASKED[3]), (ASKED[8], ASKED[6]), ({}, {})):
        for each in (theirs, ours):
            enter(each, 1, first, [1, 2, 3, 4, 9], 2)
            enter(each, 2, PENALTIES, PROMPT, len(PROMPT))
            leave(each, 1, first)
            enter(each, 1, second, PROMPT + ANSWER, len(PROMPT))
        check(ours, theirs, device, [1, 2], len(ANSWER))
        for each in (theirs, ours):
            leave(each, 1, second)
            leave(each, 2, PENALTIES)
    assert ours.tables.counts.data_ptr() == place, "a graph may read it"


@pytest.mark.parametrize("left", [(7,), (7, 299), (7, 8), (0, 7, 150)])
def test_an_end_is_not_banned_where_a_mask_leaves_nothing_else(
    device: str, left: tuple[int, ...]
) -> None:
    theirs, ours = both(1, device)
    way = {"min_tokens": 3, "logit_bias": ((7, 1.5),), "repetition_penalty": 1.2}
    for each in (theirs, ours):
        enter(each, 0, way, PROMPT, len(PROMPT))
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, list(left)] = torch.tensor([2.0, 1.0, -1.0])[: len(left)]
    there = logits.to(device, copy=True)
    draws = drawing([0], [0], device)
    ours.edit(there, draws, True)
    theirs.edit(logits, draws, True)
    torch.testing.assert_close(there.cpu(), logits, rtol=1e-6, atol=1e-6)
    assert (logits[0, 7] > -torch.inf) == (set(left) <= set(ENDS))
