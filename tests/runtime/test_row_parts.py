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

import saccade.plugins
import saccade.runtime
from saccade.core.config import EmbeddingBudgets, KVConfig, PageTierConfig
from saccade.core.plan import Change, Plan
from saccade.core.token_rules import NoRepeat, ThinkingBudget, TokenRules
from saccade.core.types import PromptReading
from saccade.plugins.changes.adapters import AdapterTable
from saccade.plugins.scores.worker import Scorer, StateReader
from saccade.plugins.tiers.background import Background
from saccade.plugins.tiers.disk import Folder
from saccade.plugins.tiers.embedding_tiers import StoredEmbeddings
from saccade.plugins.tiers.page_host import HostPages
from saccade.plugins.tiers.page_memory import PageTierMemory
from saccade.runtime.sampling.sampler import RowByRow
from saccade.runtime.tiers import SameMemory
from tests.families.forwarding import load
from tests.fixtures.harness import Harness, set_threads

ROOMS = [Path(room.__file__ or "").parent for room in (saccade.runtime, saccade.plugins)]
STORED = {Background, Folder}
TIERS = {HostPages, PageTierMemory, SameMemory, StoredEmbeddings, *STORED}
PARTS = {AdapterTable, RowByRow, Scorer, StateReader, *TIERS}
UNASKED = {
    *("adapters", "edits", "images", "memory", "page_memory", "positions"),
    *("row_parts", "row_rules", "states", "streams", "vision_encoder"),
}
"""Modules of `runtime/` and plugins that a text need not enter."""


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


@pytest.mark.parametrize(
    ("host", "disk", "of_embeddings", "of_pages"),
    [
        (0, 0, set(), set()),
        (1 << 20, 0, {SameMemory}, {PageTierMemory, HostPages}),
        (0, 1 << 20, {StoredEmbeddings, *STORED}, {PageTierMemory, *STORED}),
    ],
    ids=["default", "host", "disk"],
)
def test_a_worker_has_the_tiers_that_options_ask_for(
    make: Callable[..., Harness],
    tmp_path: Path,
    host: int,
    disk: int,
    of_embeddings: set[type],
    of_pages: set[type],
) -> None:
    """And no object of another."""
    embeddings, pages = (str(tmp_path / each) if disk else None for each in "ep")
    budgets = EmbeddingBudgets(1 << 20, host, disk, embeddings)
    kept = make(embeddings=budgets)
    assert parts_of(kept.worker) == of_embeddings
    assert [*kept.scheduler.embeddings.tiers] == [
        "device",
        *["host"] * bool(host),
        *["disk"] * bool(disk),
    ]
    kept.close()
    config = PageTierConfig(pages, disk, b"i" * 16, host_bytes=host)
    kept = make(kv=KVConfig(pages=config))
    assert parts_of(kept.worker) == of_pages
    kept.close()


def test_a_worker_has_adapters_once_there_are_any(make: Callable[..., Harness]) -> None:
    over = make()
    result = over.worker.execute(Plan(0, change=Change("load adapter", 1, "/nowhere")))
    assert result.changed is not None and result.changed.error
    assert parts_of(over.worker) == {AdapterTable}


def test_a_texts_steps_enter_what_they_ask_for(make: Callable[..., Harness]) -> None:
    over, entered = make(), set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and any(map(path.is_relative_to, ROOMS)):
            entered.add(path.stem)

    sys.setprofile(note)
    try:
        ask(over)
    finally:
        sys.setprofile(None)
    assert "sampler" in entered
    assert not entered & UNASKED
    assert {path.stem for room in ROOMS for path in room.rglob("*.py")} >= UNASKED, (
        "each is a module"
    )
