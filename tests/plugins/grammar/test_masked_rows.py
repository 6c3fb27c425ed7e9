"""Rows with masks, as the scheduler plans them: with a worker that draws at random what it may."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from llguidance import LLParserLimits

from saccade.core.errors import InvalidRequest
from saccade.core.plan import Masks, Plan, StepResult
from saccade.plugins.grammar import matchers as masks
from saccade.plugins.grammar import vocabulary as lexicon
from saccade.plugins.grammar.grammars import Grammars
from saccade.text.grammar.constraint import OutputConstraint
from tests.fixtures.schemas import SchemaMaker
from tests.sched.drawing import Drawing
from tests.text.lexicons import DEMO_VOCAB, demo_lexicon

GRAMMARS = Grammars(demo_lexicon(), DEMO_VOCAB)
COLOURS = GRAMMARS.compile(
    OutputConstraint("choice", ["red", "green", "greenish", "blue"], "x")
).text
LETTERS = GRAMMARS.compile(OutputConstraint("regex", "[a-z]{300,400}", "x")).text


def draw_schemas(count: int, seed: int) -> list[tuple[Any, str]]:
    """Schemas that can be kept to, and their grammars."""
    maker, found = SchemaMaker(seed), list[tuple[Any, str]]()
    while len(found) < count:
        schema = maker.schema()
        try:
            found.append((schema, GRAMMARS.compile(OutputConstraint("json", schema, "x")).text))
        except InvalidRequest as error:
            assert error.param and error.param.startswith("x")
    return found


def rows_of(plans: list[Plan], slot: int) -> list[int]:
    """The steps in which a slot has a row that draws."""
    return [plan.step for plan in plans for row in plan.rows if row.slot == slot and row.sample]


@pytest.mark.more
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("slow_seconds", [10.0, 0.0], ids=["quick", "slow"])
def test_answers_are_whole_documents_however_masks_come(depth: int, slow_seconds: float) -> None:
    drawing = Drawing(depth, slow_seconds=slow_seconds)
    schemas = draw_schemas(16, seed=1)
    for index, (_, grammar) in enumerate(schemas):
        drawing.add(f"g{index}", grammar, seed=index)
        drawing.add(f"p{index}", seed=index, max_tokens=20, ignore_eos=True)
    answers = drawing.run()
    for index, (schema, _) in enumerate(schemas):
        answer = answers[f"g{index}"]
        assert answer.finish == "stop", (schema, answer)
        jsonschema.validate(json.loads(answer.text), schema)
        assert answers[f"p{index}"].finish == "length"


def test_two_plans_in_flight_draw_what_one_does_and_what_others_do_not_change() -> None:
    tokens = []
    schemas = draw_schemas(8, seed=2)
    for depth, slow, beside in ((1, 10.0, 0), (2, 10.0, 0), (2, 0.0, 5), (2, 10.0, 5)):
        drawing = Drawing(depth, slow_seconds=slow)
        for index in range(beside):
            drawing.add(f"p{index}", seed=index, max_tokens=50, ignore_eos=True)
        for index, (_, grammar) in enumerate(schemas):
            drawing.add(f"g{index}", grammar, seed=index)
        answers = drawing.run()
        tokens.append([answers[f"g{index}"].tokens for index in range(len(schemas))])
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]


def test_rows_without_a_grammar_draw_in_every_step_and_so_do_quick_masks() -> None:
    drawing = Drawing(2, slow_seconds=10.0)
    drawing.add("plain", max_tokens=30, ignore_eos=True)
    drawing.add("letters", LETTERS, max_tokens=20)
    drawing.run()
    assert rows_of(drawing.plans, 0) == list(range(30))
    assert rows_of(drawing.plans, 1)[:20] == list(range(20))


def test_a_row_whose_masks_are_slow_gives_up_its_look_ahead_and_no_one_elses() -> None:
    drawing = Drawing(2, slow_seconds=0.0)
    drawing.add("plain", max_tokens=30, ignore_eos=True)
    drawing.add("letters", LETTERS, max_tokens=10)
    alone = Drawing(2)
    alone.add("plain", max_tokens=30, ignore_eos=True)
    answers = drawing.run()
    assert rows_of(drawing.plans, 0) == list(range(30))
    assert answers["plain"].tokens == alone.run()["plain"].tokens
    steps = rows_of(drawing.plans, 1)
    assert len(steps) == len(answers["letters"].tokens) == 10, "nothing was computed in vain"
    assert all(later - step >= 2 for step, later in pairwise(steps) if later < 30)


def test_an_answer_that_nothing_can_follow_ends_without_an_end_token() -> None:
    drawing = Drawing()
    drawing.add("a", COLOURS, seed=3)
    drawing.add("ignoring", COLOURS, seed=3, ignore_eos=True)
    drawing.add("exact", COLOURS, seed=3, max_tokens=2)
    answers = drawing.run()
    for answer in answers.values():
        assert answer.text in ("red", "green", "greenish", "blue") or answer.finish == "length"
    assert answers["a"].finish == answers["ignoring"].finish == "stop"
    empty = GRAMMARS.compile(OutputConstraint("choice", [""], "x")).text
    drawing.add("nothing", empty)
    assert (drawing.run()["nothing"].finish, answers["nothing"].text) == ("stop", "")


def test_a_document_is_cut_by_its_length_alone_and_that_is_said() -> None:
    drawing = Drawing()
    for index, (_, grammar) in enumerate(schemas := draw_schemas(12, seed=4)):
        drawing.add(f"{index}", grammar, seed=index, max_tokens=1 + index)
    for index, answer in enumerate(drawing.run().values()):
        if answer.finish == "stop":
            jsonschema.validate(json.loads(answer.text), schemas[index][0])
        else:
            assert answer.finish == "length" and len(answer.tokens) == 1 + index


@pytest.mark.parametrize("slow_seconds", [10.0, 0.0], ids=["quick", "slow"])
def test_a_preempted_answer_goes_on_where_it_was(slow_seconds: float) -> None:
    schemas = draw_schemas(16, seed=5)
    found = []
    for pages in (4096, 28):
        drawing = Drawing(2, pages=pages, slow_seconds=slow_seconds)
        for index, (_, grammar) in enumerate(schemas):
            drawing.add(f"{index}", grammar, seed=index, prompt=range(5, 35), max_tokens=300)
        found.append({id: answer.tokens for id, answer in drawing.run().items()})
        assert (drawing.scheduler.counts.preemptions > 0) == (pages == 28)
    assert found[0] == found[1]


def test_an_abort_leaves_the_others_as_they_are() -> None:
    drawing = Drawing()
    for index in range(4):
        drawing.add(f"{index}", LETTERS, seed=index)
    for _ in range(5):
        drawing.step()
    for delta in drawing.scheduler.abort("1"):
        drawing.answers[delta.id].finish = delta.finish
    answers = drawing.run()
    assert answers["1"].finish == "abort"
    assert all(300 <= len(answers[id].text) <= 400 for id in ("0", "2", "3"))


@pytest.mark.first
@pytest.mark.parametrize("slow_seconds", [10.0, 0.0], ids=["quick", "slow"])
def test_a_grammar_whose_masks_take_too_long_together_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, slow_seconds: float
) -> None:
    lark = 'start: e "!!"\ne: e e | e e e | e e e e | /[a-z ]{1,5}/ | " "'
    slow = GRAMMARS.compile(OutputConstraint("lark", lark, "x")).text
    monkeypatch.setattr(masks, "MASK_SECONDS", 0.2)  # of one answer to `slow`: many seconds
    drawing = Drawing(slow_seconds=slow_seconds)
    drawing.add("slow", slow, max_tokens=400)
    drawing.add("letters", LETTERS)
    drawing.add("plain", max_tokens=30, ignore_eos=True)
    answers = drawing.run()
    assert (answers["slow"].finish, answers["slow"].code) == ("error", "grammar_too_complex")
    said = answers["slow"].error or ""
    assert re.search(r"too slow to follow: .* s of CPU time for \d+ tokens", said)
    assert answers["plain"].finish == "length" and answers["letters"].finish == "stop"


def test_a_grammar_that_becomes_too_complex_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pattern = "(.*[ab].{14}c)|(.*[bd].{15}e)|(.*[ac].{16}f)"
    heavy = GRAMMARS.compile(OutputConstraint("regex", pattern, "x")).text
    few = LLParserLimits(max_lexer_states=500, verbose_errors=False)
    drawing = Drawing()
    with monkeypatch.context() as patch:
        patch.setattr(lexicon, "_LIMITS", few)
        drawing.add("heavy", heavy)
    drawing.add("letters", LETTERS)
    drawing.add("plain", max_tokens=30, ignore_eos=True)
    answers = drawing.run()
    assert answers["heavy"].finish == "error" and answers["heavy"].code == "grammar_too_complex"
    assert "simplify" in (answers["heavy"].error or "")
    assert answers["plain"].finish == "length" and answers["letters"].finish == "stop"


class Faulty(Drawing):
    """A worker of which the rows of some seeds come to no numbers, or to tokens that their masks
    forbid, about once in 16 draws.
    """

    def draw(self, allowed: list[int], seed: int, position: int) -> int:
        if seed % 3 == 1 and random.Random(f"{seed} {position}").random() < 1 / 16:
            forbidden = sorted({*range(DEMO_VOCAB)} - {*allowed})
            return random.Random(position).choice(forbidden or allowed)
        return super().draw(allowed, seed, position)

    def result(self, plan: Plan, masks: Masks | None) -> StepResult:
        told = super().result(plan, masks)
        non_finite = tuple(
            place
            for place, row in enumerate(plan.rows)
            if (seed := self.seed_of(row.slot)) % 3 == 2
            and random.Random(f"{seed} {row.start}").random() < 1 / 16
        )
        return replace(told, non_finite=non_finite)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("slow_seconds", [10.0, 0.0], ids=["quick", "slow"])
@pytest.mark.parametrize("pages", [4096, 40])
def test_a_token_that_no_mask_allows_or_a_row_of_no_numbers_ends_its_request_alone(
    depth: int, slow_seconds: float, pages: int
) -> None:
    schemas = draw_schemas(24, seed=11)
    found = []
    for kind in (Drawing, Faulty):
        drawing = kind(depth, pages=pages, slow_seconds=slow_seconds)
        for index, (_, grammar) in enumerate(schemas):
            sampling = {"logprobs": 0} if index % 2 else {}  # forced tokens are drawn one by one
            prompt = range(5 + index % 4, 45)
            drawing.add(f"{index}", grammar, prompt, seed=index, max_tokens=200, **sampling)
        found.append(drawing.run())
        scheduler = drawing.scheduler
        assert scheduler.idle
        scheduler.flush(embeddings=True)
        assert scheduler.pool.free == scheduler.pool.capacity, "all pages are given back"
    ends = Counter[str]()
    for index in range(len(schemas)):
        sound, answer = (answers[f"{index}"] for answers in found)
        if answer.finish == "error":
            ends[{1: "stray", 2: "broken"}[index % 3]] += 1
            assert answer.code == "internal_error" and sound.finish in ("stop", "length")
            assert sound.tokens[: len(answer.tokens) - 1] == answer.tokens[:-1]
        else:
            assert (answer.finish, answer.tokens) == (sound.finish, sound.tokens)
    assert min(ends["stray"], ends["broken"]) > 1, ends


def test_pages_of_rows_that_are_no_numbers_are_never_findable() -> None:
    drawing = Drawing()
    drawing.result = lambda plan, masks: replace(  # type: ignore[method-assign]
        Drawing.result(drawing, plan, masks),
        non_finite=tuple(place for place, row in enumerate(plan.rows) if row.start >= 480),
    )
    drawing.add("a", prompt=range(700), max_tokens=4, ignore_eos=True)  # chunks of 512 tokens
    assert drawing.run()["a"].code == "internal_error"
    drawing.add("b", prompt=range(700), max_tokens=4, ignore_eos=True)
    assert drawing.run()["b"].code == "internal_error"
    shared = [len(opened.pages) for plan in drawing.plans for opened in plan.open]
    assert shared == [0, 512 // 16], "what was sound before stays"


def test_forced_tokens_are_computed_together_and_never_drawn() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a_long_name_of_a_property": {"enum": [True, False]},
            "another_name_which_is_long": {"enum": [1, 2]},
        },
        "required": ["a_long_name_of_a_property", "another_name_which_is_long"],
        "additionalProperties": False,
    }
    grammar = GRAMMARS.compile(OutputConstraint("json", schema, "x")).text
    for depth in (1, 2):
        drawing = Drawing(depth)
        drawing.add("a", grammar, seed=1)
        answer = drawing.run()["a"]
        jsonschema.validate(json.loads(answer.text), schema)
        drawn = sum(row.sample for plan in drawing.plans for row in plan.rows)
        assert drawn < 8 < 20 < len(answer.tokens)
        assert drawing.scheduler.counts.generated_tokens == len(answer.tokens)
        first = drawing.plans[0].open[0]
        assert demo_lexicon().decode_str(list(first.tokens[3:])).startswith('{"a_long_name')


@pytest.mark.parametrize("chunk", [13, 20])
def test_forced_tokens_are_computed_in_small_chunks_too(chunk: int) -> None:
    """A chunk of one token that a row in flight has drawn is no row that decodes."""
    schemas, found = draw_schemas(12, seed=7), []
    for most in (512, chunk):
        drawing = Drawing(chunk=most)
        for index, (_, grammar) in enumerate(schemas):
            drawing.add(f"{index}", grammar, seed=index, max_tokens=120)
        found.append({id: answer.tokens for id, answer in drawing.run().items()})
    assert found[0] == found[1]


def test_an_answer_is_the_same_where_forced_tokens_are_drawn_one_by_one() -> None:
    schemas = draw_schemas(6, seed=6)
    found = []
    for sampling in ({}, {"logprobs": 0}, {"frequency_penalty": 0.1}):
        drawing = Drawing()
        for index, (_, grammar) in enumerate(schemas):
            drawing.add(f"{index}", grammar, seed=index, max_tokens=120, **sampling)
        found.append({id: answer.tokens for id, answer in drawing.run().items()})
    drawn = sum(row.sample for plan in drawing.plans for row in plan.rows)
    assert drawn >= drawing.scheduler.counts.generated_tokens
    assert found[0] == found[1] == found[2]


def test_an_answer_that_is_forced_whole_takes_no_step_and_may_be_cut() -> None:
    drawing = Drawing()
    whole = GRAMMARS.compile(OutputConstraint("choice", ["nothing else"], "x")).text
    drawing.add("whole", whole)
    drawing.add("cut", whole, max_tokens=2)
    answers = drawing.answers
    assert (answers["whole"].finish, answers["whole"].text) == ("stop", "nothing else")
    assert (answers["cut"].finish, len(answers["cut"].tokens)) == ("length", 2)
    assert not drawing.plans and drawing.scheduler.idle
