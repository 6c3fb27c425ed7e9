"""A feature that nobody asks for is not there: a worker makes a part with the first row that asks
for it, and a text's steps enter no part, no image and no tier.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import pytest

import saccade.runtime
from saccade.core.config import KVConfig, PageTierConfig
from saccade.core.plan import Change, Plan
from saccade.core.token_rules import NoRepeat, ThinkingBudget, TokenRules
from saccade.core.types import PromptReading
from saccade.runtime.adapters import AdapterTable
from saccade.runtime.sampling.draw_parts import RowByRow
from saccade.runtime.sampling.scores import Scorer, StateReader
from saccade.runtime.tiers.page_memory import PageMemory
from saccade_bench.fixtures.harness import Harness, set_threads
from tests.families.forwarding import load

RUNTIME = Path(saccade.runtime.__file__).parent
PARTS = {AdapterTable, PageMemory, RowByRow, Scorer, StateReader}
UNASKED = {
    *("adapters", "draw_parts", "edits", "images", "memory", "page_memory", "positions"),
    *("row_parts", "scores", "states", "streams", "token_rules", "vision_encoder"),
}
"""Modules of `runtime/` that a text need not enter."""


def parts_of(worker: object) -> set[type]:
    """The kinds of parts that can be reached from a worker."""
    seen, left = set[int](), [worker]
    found = set[type]()
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, FunctionType | ModuleType | type):
            continue
        seen.add(id(each))
        found.add(type(each))
        left += gc.get_referents(each)
    return found & PARTS


@pytest.fixture
def make(checkpoint: Callable[..., Path]) -> Callable[..., Harness]:
    set_threads()
    net = load(checkpoint("qwen3_vl"))
    return lambda **changes: Harness(net, **changes)


def ask(over: Harness, **asked: Any) -> None:
    request = over.request("a", [5, 9, 13, 17], max_tokens=4, **asked)
    (outcome,) = over.run([request]).values()
    assert outcome.error is None and outcome.finish


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        ({}, set()),
        ({"temperature": 1.0, "logprobs": 2}, set()),
        ({"prompt_logprobs": 1}, {Scorer}),
        ({"reading": PromptReading()}, {StateReader}),
        ({"frequency_penalty": 0.5}, {RowByRow}),
        ({"min_tokens": 2}, {RowByRow}),
        ({"rules": TokenRules(no_repeat=NoRepeat(2))}, {RowByRow}),
        ({"rules": TokenRules(thinking=ThinkingBudget(2, 4, 5, True))}, {RowByRow}),
    ],
    ids=str,
)
def test_a_worker_has_the_parts_that_were_asked_for(
    make: Callable[..., Harness], asked: dict[str, Any], parts: set[type]
) -> None:
    over = make()
    assert parts_of(over.worker) == set()
    ask(over, **asked)
    assert parts_of(over.worker) == parts


def test_a_worker_has_adapters_and_tiers_of_pages_once_there_are_any(
    make: Callable[..., Harness],
) -> None:
    kept = make(kv=KVConfig(pages=PageTierConfig(host_bytes=1 << 20)))
    assert parts_of(kept.worker) == {PageMemory}
    over = make()
    result = over.worker.execute(Plan(0, change=Change("load adapter", 1, "/nowhere")))
    assert result.changed is not None and result.changed.error
    assert parts_of(over.worker) == {AdapterTable}


def test_a_texts_steps_enter_what_they_ask_for(make: Callable[..., Harness]) -> None:
    over, entered = make(), set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(RUNTIME):
            entered.add(path.stem)

    sys.setprofile(note)
    try:
        ask(over)
    finally:
        sys.setprofile(None)
    assert "sampler" in entered
    assert not entered & UNASKED
    assert {path.stem for path in RUNTIME.rglob("*.py")} >= UNASKED, "each is a module"
