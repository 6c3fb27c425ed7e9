"""Recorded steps answer with the bits of steps that are not: at any number of rows, page and place,
on one thread and on two. Steps that no recording holds go their old way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from saccade.core.arena import Arena
from saccade.core.config import QuantizationMode
from saccade.core.plan import Change, Open, Plan, Row, StepResult
from saccade.core.types import SamplingParams
from saccade.families.registry import load_spec
from saccade.nn.protocol import FamilyNet
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade.runtime.worker import Worker
from tests.fixtures.harness import CONFIG
from tests.helpers.processor import HAS_BACKEND, needs_vnni, threads

pytestmark = pytest.mark.skipif(not HAS_BACKEND, reason="no Numba")

PAGES = 4
INT8 = pytest.param("int8", marks=needs_vnni)
CASES = [
    pytest.param("qwen3_vl", "int8", marks=needs_vnni),
    ("qwen3_vl", "none"),
    pytest.param("qwen2_5_vl", "int8", marks=needs_vnni),
    pytest.param("smolvlm", "int8", marks=needs_vnni),
    ("qwen3_5", "none"),
    pytest.param("lfm2_vl", "none", marks=pytest.mark.more),
    pytest.param("hunyuan_vl", "none", marks=pytest.mark.more),  # PyTorch's norms within a layer
]


def load(folder: Path, mode: QuantizationMode) -> FamilyNet:
    return load_net(
        load_spec(folder),
        folder,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        quantization=mode,
    )


class Steps:
    """A worker whose sequences have begun. It decodes the rows that it is told to."""

    def __init__(self, net: FamilyNet, prompt: int, *, recorded: bool) -> None:
        self.arena = Arena.create(1 << 20)
        self.worker = Worker(net, replace(CONFIG, dtype="bfloat16"), self.arena)
        if not recorded:
            self.worker.recorded = None
        self._step = 0
        self.lengths = [prompt + slot % 3 for slot in range(CONFIG.max_running)]
        opened, rows = [], []
        for slot, length in enumerate(self.lengths):
            pages = tuple(1 + PAGES * slot + (page * 3) % PAGES for page in range(PAGES))
            tokens = tuple((7 * at + slot) % 90 + 5 for at in range(length))
            sampling = SamplingParams(temperature=slot % 2, seed=slot, logprobs=20)
            opened.append(Open(slot, tokens, length, (), (), sampling, pages))
            rows.append(Row(slot, 0, length, (), sample=True))
        self._execute(Plan(0, open=tuple(opened), rows=tuple(rows)))

    def decode(self, slots: Sequence[int], quiet: Sequence[int] = ()) -> StepResult:
        """Compute one token of each slot. quiet: those whose token is told, and nothing drawn."""
        rows = [Row(slot, self.lengths[slot], 1, (), sample=True) for slot in slots]
        rows += [Row(slot, self.lengths[slot], 1, (), sample=False, tokens=(9,)) for slot in quiet]
        for row in rows:
            self.lengths[row.slot] += 1
        return self._execute(Plan(self._step, rows=tuple(rows)))

    def _execute(self, plan: Plan) -> StepResult:
        self._step += 1
        return self.worker.execute(plan)

    @property
    def replays(self) -> int:
        return self.worker.recorded.replays if self.worker.recorded else 0


Both = Callable[..., tuple[Steps, Steps]]


@pytest.fixture
def both(checkpoint: Callable[..., Path]) -> Both:
    def make(family: str, mode: QuantizationMode = "none", prompt: int = 13) -> tuple[Steps, Steps]:
        net = load(checkpoint(family), mode)
        return Steps(net, prompt, recorded=True), Steps(net, prompt, recorded=False)

    return make


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_a_recorded_step_has_the_bits_of_one_that_is_not(
    both: Both, family: str, mode: QuantizationMode
) -> None:
    with threads(1):
        ours, wanted = both(family, mode)
        for turn in range(4):
            for rows in (1, 2, 8, 5):
                slots = [(turn + each) % 8 for each in range(rows)]
                assert ours.decode(slots) == wanted.decode(slots)
        assert ours.replays == 3 * 4


@pytest.mark.parametrize("mode", [INT8, "none"])
def test_two_threads_make_the_bits_of_one(both: Both, mode: QuantizationMode) -> None:
    with threads(2):
        ours, wanted = both("qwen3_vl", mode)
        found = [ours.decode([*range(rows)]) for rows in (1, 8, 1, 8)]
    with threads(1):
        assert found == [wanted.decode([*range(rows)]) for rows in (1, 8, 1, 8)]
    assert ours.replays == 2


def test_rows_that_draw_nothing_are_recorded_too(both: Both) -> None:
    ours, wanted = both("qwen3_vl")
    for _ in range(3):
        assert ours.decode([0, 3], quiet=[1]) == wanted.decode([0, 3], quiet=[1])
        assert ours.decode([], quiet=[2]) == wanted.decode([], quiet=[2])
    assert ours.replays == 4


def test_a_context_longer_than_a_window_is_not_recorded(both: Both) -> None:
    ours, wanted = both("gemma3", prompt=2)
    for _ in range(12):
        assert ours.decode([0]) == wanted.decode([0])
    assert ours.replays == 5  # the window is of 8 keys: it ends behind the sixth step


def test_what_depends_on_values_goes_its_old_way(both: Both) -> None:
    ours, wanted = both("qwen3_vl_moe")
    for _ in range(3):
        assert ours.decode([0, 1]) == wanted.decode([0, 1])
    assert not ours.replays


def test_memory_that_moves_is_recorded_anew(both: Both) -> None:
    """A sleeping model gives its pages back: what was recorded holds their old addresses."""
    ours, _ = both("qwen3_vl")
    before = ours.worker.recorded
    for kind in ("sleep", "wake"):
        ours.worker.execute(Plan(90, change=Change(kind, memory=("kv_cache",))))
    assert ours.worker.recorded is not before
