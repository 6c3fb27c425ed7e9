"""Guesses under grammars: masks follow the guesses, forced tokens come between them, and answers
are those without guesses, whatever is right.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from saccade.plugins.drafts.drafter import Drafter, Speculation
from saccade.sched.sequence import Sequence
from tests.helpers.breadth import broad
from tests.plugins.grammar.test_masked_rows import COLOURS, LETTERS, draw_schemas
from tests.sched.drawing import Answer, Drawing
from tests.sched.simulator import guess_with
from tests.text.lexicons import DEMO_VOCAB

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 0},  # forced tokens are drawn one by one
    {"frequency_penalty": 0.5},
    {"min_tokens": 9},
    {"max_tokens": 23},
    {"ignore_eos": True, "max_tokens": 60},
)


KEPT = 4
"""Seeds that run by default."""
PROMPT = range(5, 35)


class Oracle(Drafter):
    """Knows the answers, and guesses each token right so likely as `accuracy`."""

    def __init__(self, answers: Mapping[str, Answer], seed: int, accuracy: float) -> None:
        super().__init__(6)
        self._known, self._accuracy = answers, accuracy
        self._rng = random.Random(seed)

    def propose(
        self, sequence: Sequence, speculation: Speculation, budget: int, rows: int
    ) -> list[int]:
        grammar_state = sequence.grammar_state
        if budget <= 0 or (grammar_state is not None and not grammar_state.foresees):
            return []
        first = sequence.length - sequence.prompt_length
        right = self._known[sequence.request.id].tokens[first:]
        return [
            token if self._rng.random() < self._accuracy else self._rng.randrange(DEMO_VOCAB)
            for token in right[: self._rng.randrange(min(budget, self.most) + 1)]
        ]


def answer(drawing: Drawing, seed: int) -> dict[str, Answer]:
    grammars = [grammar for _, grammar in draw_schemas(8, seed)] + [COLOURS, LETTERS, ""]
    for index, grammar in enumerate(grammars):
        for sampling in random.Random(seed + index).sample(SAMPLINGS, 2):
            length = {"max_tokens": 120 if grammar else 40}
            name = f"{index} {sampling}"
            drawing.add(name, grammar, seed=index, prompt=PROMPT, **{**length, **sampling})
    return drawing.run()


@pytest.mark.first
@pytest.mark.parametrize(
    "limits", [{}, {"pages": 12}, {"chunk": 24}], ids=["", "preempted", "chunks"]
)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", broad(range(100), keep=range(KEPT)))
def test_answers_in_grammars_are_those_without_guesses(
    seed: int, depth: int, limits: dict[str, Any]
) -> None:
    plain = answer(Drawing(depth, slow_seconds=10.0), seed)
    preempted = 0
    for accuracy in (0.0, 0.7, 1.0):
        drawing = Drawing(depth, slow_seconds=10.0, drafts=6, **limits)
        guess_with(drawing.scheduler, oracle := Oracle(plain, seed, accuracy))
        assert answer(drawing, seed) == plain
        guessed, right = oracle.proposed.total(), oracle.accepted.total()
        preempted += drawing.scheduler.counts.preemptions
        assert guessed > 100 and (right > guessed / 4) == (accuracy > 0)
    assert ("pages" in limits and (preempted > 0 or seed >= KEPT)) or not preempted


def test_a_grammar_with_slow_masks_is_not_guessed_in() -> None:
    drawing = Drawing(2, slow_seconds=0.0, drafts=6)
    plain = answer(Drawing(2, slow_seconds=0.0), 1)
    guess_with(drawing.scheduler, oracle := Oracle(plain, 1, 1.0))
    assert answer(drawing, 1) == plain
    assert oracle.proposed.total() > 0, "the texts without a grammar are"
    assert not any(row.draft and row.masked for plan in drawing.plans for row in plan.rows)


def test_right_guesses_in_a_grammar_save_steps() -> None:
    steps = []
    plain: dict[str, Answer] = {}
    for drafts in (0, 6):
        drawing = Drawing(1, slow_seconds=10.0, drafts=drafts)
        if drafts:
            guess_with(drawing.scheduler, Oracle(plain, 1, 1.0))
        drawing.add("letters", LETTERS, max_tokens=200)
        plain = drawing.run()
        steps.append(len(drawing.plans))
    assert steps[1] < steps[0] / 2


@pytest.mark.more
@pytest.mark.parametrize("seed", broad(range(100), keep=range(3)))
def test_forced_tokens_have_rows_of_their_own_as_drawn_ones_and_guesses_have(seed: int) -> None:
    """Rows of several tokens round otherwise than rows of one, and which tokens are foreseen in
    time depends on guesses.
    """
    plain: dict[str, Answer] = {}
    for accuracy in (None, 0.8):
        drawing = Drawing(2, slow_seconds=10.0, drafts=0 if accuracy is None else 6, chunk=4096)
        if accuracy is not None:
            guess_with(drawing.scheduler, Oracle(plain, seed, accuracy))
        for index, (_, grammar) in enumerate(draw_schemas(16, seed)):
            drawing.add(f"{index}", grammar, seed=index, prompt=PROMPT, max_tokens=200)
        plain = drawing.run()
        rows = [row for plan in drawing.plans for row in plan.rows if row.start >= len(PROMPT)]
        assert all(row.length == 1 for row in rows)
        assert not all(row.sample for row in rows), "forced tokens are not drawn"


def test_where_rows_are_not_exact_forced_tokens_share_a_row() -> None:
    drawing = Drawing(2, slow_seconds=10.0, batch_invariant=False)
    for index, (_, grammar) in enumerate(draw_schemas(16, 1)):
        drawing.add(f"{index}", grammar, seed=index, prompt=PROMPT, max_tokens=200)
    drawing.run()
    rows = [row for plan in drawing.plans for row in plan.rows if row.start >= len(PROMPT)]
    assert max(row.length for row in rows) > 1 and all(row.sample for row in rows)
