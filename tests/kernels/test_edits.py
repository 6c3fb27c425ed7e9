"""The kernel for bans, biases and penalties beside what CPUs do row by row, without a GPU in
Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from saccade.core.types import SamplingParams
from saccade.runtime.edits import Edits, SlotEdits

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


def both(slots: int, device: str) -> tuple[Edits, SlotEdits]:
    return (
        Edits(VOCAB, ENDS, torch.device("cpu")),
        SlotEdits(VOCAB, slots, ENDS, torch.device(device)),
    )


def check(ours: SlotEdits, theirs: Edits, device: str, rows: list[int], drawn: int) -> None:
    """Three steps of `rows`, which have drawn so many tokens."""
    slots = torch.tensor(rows, device=device)
    for step in range(3):
        seeded = torch.Generator().manual_seed(step)
        logits = 3 * torch.randn(len(rows), VOCAB, generator=seeded)
        there = logits.to(device, copy=True)
        ours.edit(there, slots, False)
        before = logits.clone()
        theirs.edit(logits, rows, [drawn + step] * len(rows), False)
        torch.testing.assert_close(there.cpu(), logits, rtol=1e-6, atol=1e-6)
        assert not torch.equal(logits, before)
        tokens = torch.randint(0, 12, (len(rows),), generator=seeded)
        ours.count(slots, tokens.to(device))
        theirs.count(rows, tokens)


def test_every_edit_is_what_a_row_alone_would_get(device: str) -> None:
    theirs, ours = both(len(ASKED) + 2, device)
    for slot, way in enumerate(ASKED):
        for each in (theirs, ours):
            each.open(slot, SamplingParams(**way), PROMPT + ANSWER[:1], len(PROMPT))
    check(ours, theirs, device, [*reversed(range(len(ASKED)))], 1)


def test_a_slot_and_its_line_forget_whoever_had_them_before(device: str) -> None:
    theirs, ours = both(3, device)
    place = ours.tables.counts.data_ptr()
    for first, second in ((PENALTIES, {}), (ASKED[7], ASKED[3]), (ASKED[8], ASKED[6]), ({}, {})):
        for each in (theirs, ours):
            each.open(1, SamplingParams(**first), [1, 2, 3, 4, 9], 2)
            each.open(2, SamplingParams(**PENALTIES), PROMPT, len(PROMPT))
            each.close(1)
            each.open(1, SamplingParams(**second), PROMPT + ANSWER, len(PROMPT))
        check(ours, theirs, device, [1, 2], len(ANSWER))
        for each in (theirs, ours):
            each.close(1)
            each.close(2)
    assert ours.tables.counts.data_ptr() == place, "a graph may read it"


@pytest.mark.parametrize("left", [(7,), (7, 299), (7, 8), (0, 7, 150)])
def test_an_end_is_not_banned_where_a_mask_leaves_nothing_else(
    device: str, left: tuple[int, ...]
) -> None:
    theirs, ours = both(1, device)
    params = SamplingParams(min_tokens=3, logit_bias=((7, 1.5),), repetition_penalty=1.2)
    for each in (theirs, ours):
        each.open(0, params, PROMPT, len(PROMPT))
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, list(left)] = torch.tensor([2.0, 1.0, -1.0])[: len(left)]
    there = logits.to(device, copy=True)
    ours.edit(there, torch.zeros(1, dtype=torch.int64, device=device), True)
    theirs.edit(logits, [0], [0], True)
    torch.testing.assert_close(there.cpu(), logits, rtol=1e-6, atol=1e-6)
    assert (logits[0, 7] > -torch.inf) == (set(left) <= set(ENDS))
