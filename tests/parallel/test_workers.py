"""Worker processes: every rank is started in the same way, computes what it is sent, and how it
ends is told. Real processes; this one plays the engine.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from saccade import LLM, SamplingParams
from saccade.core.arena import Arena
from saccade.core.config import EmbeddingBudgets
from saccade.engine.workers import WorkersLost
from saccade.families.registry import load_spec
from saccade.runtime.weights.checkpoint_weights import load_net
from tests.fixtures.harness import Harness, set_threads
from tests.fixtures.rank_group import ProcessRankGroup
from tests.fixtures.tiny import picture
from tests.helpers.breadth import broad

pytestmark = pytest.mark.more


def test_ranks_are_the_same_program_and_one_that_cannot_load_is_reported_with_its_reason(
    tmp_path: Path,
) -> None:
    with ProcessRankGroup(2, Arena.create(4096)) as rank_group:
        # Of the arguments, the numbers of two descriptors may differ.
        programs = {tuple(process.cmdline()[4:5]) for process in rank_group.processes}
        assert programs == {("saccade.runtime.process",)}
        assert len(rank_group.processes) == 2
        with pytest.raises(WorkersLost, match=r"^rank [01]: ") as caught:
            rank_group.load(tmp_path / "nothing")
        assert str(tmp_path / "nothing") in str(caught.value)


@pytest.mark.parametrize("rank", broad([0, 1], keep=[1]))
def test_a_worker_that_is_killed_while_it_loads_is_reported(
    checkpoint: Callable[..., Path], rank: int
) -> None:
    with ProcessRankGroup(2, Arena.create(4096)) as rank_group:
        rank_group.processes[rank].kill()
        with pytest.raises(WorkersLost) as caught:
            rank_group.load(checkpoint("qwen3_vl"))
        pid = rank_group.processes[rank].pid
        assert str(caught.value) == f"rank {rank} (process {pid}) was killed by signal 9"


@pytest.mark.parametrize("rank", broad([0, 1], keep=[1]))
def test_workers_execute_plans_and_are_missed_when_they_fall_silent(
    checkpoint: Callable[..., Path], tmp_path: Path, rank: int
) -> None:
    set_threads()
    folder = checkpoint("qwen3_vl")
    whole = load_net(
        load_spec(folder),
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )

    def answer(harness: Harness) -> list[int]:
        placeholder = whole.spec.image_token_id  # type: ignore[attr-defined]
        images = [harness.image(picture(64 * n, 96, seed=n), str(n)) for n in (1, 2)]
        return harness.run(
            [harness.request("x", [1, placeholder, 2, placeholder, 3], images, max_tokens=8)]
        )["x"].tokens

    # Plans name places in the arena: the workers need the harness's.
    arena = Arena.create(64 << 20)
    with ProcessRankGroup(2, arena) as rank_group:
        assert [hardware.device for hardware in rank_group.load(folder)] == ["cpu", "cpu"]
        # With a disk, the ranks encode a picture together before they begin.
        budgets = EmbeddingBudgets(1 << 20, 0, 1 << 20, str(tmp_path))
        harness = Harness(whole, rank_group, arena, kv_pages=64, embeddings=budgets)
        assert answer(harness) == answer(Harness(whole, kv_pages=64))
        assert rank_group.metrics.value(
            "saccade_position_cache_lookups_total", kind="encoder", outcome="miss"
        ), "the worker's figures come with its answers"
        stopped = rank_group.processes[rank]
        stopped.send_signal(signal.SIGSTOP)
        with pytest.raises(WorkersLost) as caught:
            harness.run([harness.request("y", [1, 2, 3], max_tokens=8)])
        expected = f"rank {rank} (process {stopped.pid}) sent no heartbeat for 5 s"
        assert str(caught.value) == expected
        assert "it was expected to take" in rank_group.overdue, "seen before that: no step ends"
    assert not any(process.is_running() for process in rank_group.processes)


@pytest.mark.slow
def test_a_step_that_takes_too_long_is_reported(checkpoint: Callable[..., Path]) -> None:
    set_threads()
    folder, arena = checkpoint("qwen3_vl"), Arena.create(1 << 20)
    net = load_net(
        load_spec(folder),
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    with ProcessRankGroup(1, arena) as rank_group:
        rank_group.load(folder, step_timeout=1.0)
        harness = Harness(net, rank_group, arena, kv_pages=64)
        harness.run([harness.request("x", [1, 2, 3], max_tokens=2)])
        rank_group.processes[0].send_signal(signal.SIGSTOP)
        with pytest.raises(WorkersLost, match=r"longer than 1 s \(--tune step_timeout\)"):
            harness.run([harness.request("y", [1, 2, 3], max_tokens=2)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_vl", {"tp_size": 2, "all_reduce": "shm"}),
        ("qwen3_vl", {"tp_size": 2, "all_reduce": "gloo"}),
        ("qwen3_vl_moe", {"ep_size": 2}),
        ("qwen3_vl_moe", {"tp_size": 2, "ep_size": 4, "all_reduce": "gloo"}),
    ],
    ids=str,
)
def test_a_model_on_several_ranks_answers_as_on_one(
    checkpoint: Callable[..., Path], family: str, options: dict[str, object]
) -> None:
    common = {"dtype": "float32", "threads": 2, "media_workers": 1, "max_total_tokens": 4096}
    chats = [
        [{"role": "user", "content": [picture(64 + n, 80, seed=n), f"picture {n}?"]}]
        for n in range(4)
    ]

    def answers(**more: object) -> list[str]:
        with LLM(checkpoint(family), **common, **more) as llm:
            return [answer.text for answer in llm.chat(chats, SamplingParams(max_tokens=16))]

    assert answers(**options) == answers()
