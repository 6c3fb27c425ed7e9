"""Rank processes: what they report, how they end, and what the engine would end for.

Real processes; this one is rank 0.
"""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from saccade import LLM, SamplingParams
from saccade.core.arena import Arena
from saccade.core.config import EmbeddingBudgets, EngineConfig, ParallelConfig
from saccade.engine.ranks import Ranks
from saccade.families.registry import load_spec
from saccade.parallel import meeting_place
from saccade.runtime.rank import Load, load
from saccade.runtime.weights import load_net
from saccade.runtime.worker import Worker
from tests.checkpoints import picture
from tests.engine.harness import Harness, set_threads


def plan_load(folder: Path) -> Load:
    parallel = ParallelConfig(2, "data", "shm", step_timeout=60.0)
    return Load(0, str(folder), "cpu", "float32", "auto", 1, parallel, meeting_place())


@contextmanager
def rank_processes(
    wanted: Load, arena: Arena
) -> Iterator[tuple[Ranks, list[psutil.Process], queue.Queue[str]]]:
    """Rank 1, starting; its process; and the reasons why the engine would end.

    Nothing is left of it afterwards.
    """
    before = psutil.Process().children()
    reasons: queue.Queue[str] = queue.Queue()
    ranks = Ranks(wanted, arena, reasons.put)
    processes = [process for process in psutil.Process().children() if process not in before]
    try:
        yield ranks, processes, reasons
    finally:
        ranks.close()
    assert not any(process.is_running() for process in processes)


def test_a_rank_that_cannot_load_is_reported_once_with_its_reason(tmp_path: Path) -> None:
    with rank_processes(plan_load(tmp_path / "nothing"), Arena.create(4096)) as (_, _, reasons):
        reason = reasons.get(timeout=60)
        assert reason.startswith("rank 1: ")
        assert str(tmp_path / "nothing") in reason
    assert reasons.empty()


def test_a_rank_that_is_killed_while_it_loads_is_reported(tmp_path: Path) -> None:
    with rank_processes(plan_load(tmp_path), Arena.create(4096)) as (_, processes, reasons):
        processes[0].kill()
        assert (
            reasons.get(timeout=10) == f"rank 1 (process {processes[0].pid}) was killed by signal 9"
        )


def test_a_rank_executes_plans_and_is_missed_when_it_falls_silent(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    set_threads()
    wanted = plan_load(checkpoint("qwen3_vl"))
    whole = load_net(
        load_spec(Path(wanted.folder)),
        Path(wanted.folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=False,
    )

    def answer(harness: Harness) -> list[int]:
        placeholder = whole.spec.image_token_id  # type: ignore[attr-defined]
        images = [harness.image(picture(64 * n, 96, seed=n), str(n)) for n in (1, 2)]
        return harness.run(
            [harness.request("x", [1, placeholder, 2, placeholder, 3], images, max_tokens=8)]
        )["x"].tokens

    # Plans name places in the arena: the ranks need the harness's.
    arena = Arena.create(64 << 20)
    with rank_processes(wanted, arena) as (ranks, processes, reasons):
        net, shard = load(wanted)
        assert [hardware.device for hardware in ranks.wait_loaded()] == ["cpu"]

        class Hired:
            def hire(self, config: EngineConfig, arena: Arena) -> Ranks:
                ranks.begin(config)
                ranks.follow(Worker(net, config, arena, shard, wanted.parallel.encoder))
                return ranks

        # With a disk, the ranks encode a picture together before they begin.
        budgets = EmbeddingBudgets(1 << 20, 0, 1 << 20, str(tmp_path))
        assert answer(Harness(net, Hired(), arena, kv_pages=64, embeddings=budgets)) == answer(
            Harness(whole, kv_pages=64)
        )
        assert reasons.empty()
        processes[0].send_signal(signal.SIGSTOP)
        assert (
            reasons.get(timeout=20)
            == f"rank 1 (process {processes[0].pid}) has not been heard of for 5 s"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"all_reduce": "shm"}, {"all_reduce": "gloo", "mm_encoder_tp_mode": "weights"}],
    ids=str,
)
def test_a_model_on_two_ranks_answers_as_on_one(
    checkpoint: Callable[..., Path], options: dict[str, str]
) -> None:
    common = {"dtype": "float32", "threads": 2, "media_workers": 1, "max_total_tokens": 4096}
    chats = [
        [{"role": "user", "content": [picture(64 + n, 80, seed=n), f"picture {n}?"]}]
        for n in range(4)
    ]

    def answers(**more: object) -> list[str]:
        with LLM(checkpoint("qwen3_vl"), **common, **more) as llm:
            return [
                answer.text
                for answer in llm.chat(chats, SamplingParams(max_tokens=16), progress=False)
            ]

    assert answers(tp_size=2, **options) == answers()
