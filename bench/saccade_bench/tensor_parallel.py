"""What tensor parallelism costs and saves here: the broadcast of a plan, one all-reduce, and steps
on one rank and on two.

    python -m saccade_bench.tensor_parallel [--rounds 5] [--hidden 512] [--layers 8]

Steps run on a random Qwen3-VL checkpoint, float32, in turns: one rank with one thread and with two,
two ranks with one thread each, always in processes of their own. Medians, with the 90th percentile
in brackets.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from saccade.core.arena import Arena
from saccade.core.config import AllReduce, EncoderMode, EngineConfig
from saccade.core.plan import Open, Plan, Row, StepResult
from saccade.core.types import SamplingParams
from saccade.families.registry import load_spec
from saccade.ipc.child import Channel, Child, Codec, Disconnected, enter
from saccade.ipc.environment import engine_environment
from saccade.parallel import Backend, join, leave
from saccade.runtime.begun_step import MaskSource
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade_bench.fixtures.harness import Harness
from saccade_bench.fixtures.rank_group import ProcessRankGroup
from saccade_bench.fixtures.tiny import make_checkpoint, picture

ENCODER = msgspec.msgpack.Encoder()
PLANS = {
    "64 rows that decode": Plan(
        step=1000,
        rows=tuple(
            Row(slot, 4000 + slot, 1, (slot,) if slot % 16 == 0 else (), True) for slot in range(64)
        ),
    ),
    "a new prompt of 8192 tokens": Plan(
        step=1000,
        open=(Open(0, tuple(range(100000, 108192)), 8192, (), (), SamplingParams(), ()),),
        rows=(Row(0, 0, 8192, tuple(range(512)), False),),
    ),
}
SHAPES = ((1, 4096), (64, 4096), (2048, 4096))


def spread(seconds: Sequence[float], unit: float = 1e3) -> str:
    """Median and 90th percentile in ms."""
    ordered = sorted(seconds)
    return (
        f"{statistics.median(ordered) * unit:.3f} "
        f"({ordered[int(0.9 * (len(ordered) - 1))] * unit:.3f})"
    )


# ---- the other process: a child that listens for plans, and `tensor_parallel.py sum BACKEND FD`


@dataclass(frozen=True)
class Listening:
    """The boot message of the child that listens."""


@dataclass(frozen=True)
class Decoded:
    """When a plan was ready."""

    when: float


def listen() -> None:
    """Decode plans; say when each was ready."""
    _, parent = enter(Listening)
    channel: Channel[Decoded, Plan] = Channel(parent.socket, Codec(Decoded, Plan))
    with suppress(Disconnected):
        while True:
            channel.receive()
            channel.send(Decoded(time.monotonic()))


def sum_up(backend: Backend, fd: int, rank: int) -> list[tuple[tuple[int, int], list[float]]]:
    """Times of all-reduces by two ranks."""
    torch.set_num_threads(1)
    shard = join(backend, rank, 2, fd)
    timed = []
    for shape in SHAPES:
        times = []
        for _ in range(300 if shape[0] < 2048 else 20):
            x = torch.ones(shape)
            begun = time.perf_counter()
            shard.all_reduce(x)
            times.append(time.perf_counter() - begun)
        timed.append((shape, times))
    leave()
    return timed


def other(*arguments: str, fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "saccade_bench.tensor_parallel", *arguments]
    return subprocess.Popen(command, pass_fds=fds)


# ---- what is measured


def broadcast(table: Table) -> None:
    """Encoding and writing (the engine's waiting time), and the time until the plan is decoded in a
    second process.
    """
    child = Child.spawn("saccade_bench.tensor_parallel", Listening())
    channel: Channel[Plan, Decoded] = Channel(child.socket, Codec(Plan, Decoded))
    for name, plan in PLANS.items():
        busy, there = [], []
        for _ in range(300):
            begun = time.monotonic()
            channel.send(plan)
            busy.append(time.monotonic() - begun)
            there.append(channel.receive().when - begun)
            time.sleep(0.001)
        table.add_row(
            f"plan, {name} ({len(ENCODER.encode(plan))} bytes)",
            "ipc/child.py",
            f"sent {spread(busy)}, decoded {spread(there)}",
        )
    child.end_sync()


def all_reduce(table: Table) -> None:
    for backend in ("shm", "gloo"):
        fd = os.memfd_create("ranks")
        process = other("sum", backend, str(fd), fds=(fd,))
        for shape, times in sum_up(backend, fd, 0):
            table.add_row(f"all-reduce of {list(shape)} float32, 2 ranks", backend, spread(times))
        process.wait()


class Timed:
    """Executes plans on worker processes and records the time of each kind of step."""

    def __init__(
        self,
        folder: Path,
        size: int,
        threads: int,
        arena: Arena,
        backend: AllReduce = "shm",
        encoder: EncoderMode = "weights",
    ) -> None:
        self.rank_group = ProcessRankGroup(size, arena)
        self.rank_group.load(folder, encoder, backend, threads, step_timeout=600.0)
        self.times: dict[str, list[float]] = {}
        self.batch_invariant = False

    def hire(self, config: EngineConfig, arena: Arena) -> Timed:
        self.batch_invariant = self.rank_group.hire(config, arena).batch_invariant
        return self

    def execute(self, plan: Plan, masks: MaskSource | None = None) -> StepResult:
        kind = (
            "encode and prefill"
            if plan.encode
            else "prefill"
            if plan.num_tokens > 64
            else f"decode, {len(plan.rows)} rows"
        )
        begun = time.perf_counter()
        result = self.rank_group.execute(plan, masks)
        if plan.rows:
            self.times.setdefault(kind, []).append(time.perf_counter() - begun)
        return result


def steps(table: Table, folder: Path, options: argparse.Namespace) -> None:
    rope = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    }
    text = {
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "head_dim": 128,
    }
    vision = {
        "depth": 6,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_heads": 6,
        "out_hidden_size": options.hidden,
    }
    make_checkpoint(
        folder,
        "qwen3_vl",
        text=text | {"rope_parameters": rope},
        vision=vision | {"deepstack_visual_indexes": [1, 3]},
    )
    arena = Arena.create(64 << 20)
    rank_groups = {
        f"1 rank, {threads} threads": Timed(folder, 1, threads, arena) for threads in (1, 2)
    }
    rank_groups |= {
        f"2 ranks, shm, {mode}": Timed(folder, 2, 1, arena, encoder=mode)
        for mode in get_args(EncoderMode)
    }
    rank_groups |= {"2 ranks, gloo, weights": Timed(folder, 2, 1, arena, "gloo")}
    net = load_net(load_spec(folder), folder, dtype=torch.float32, device=torch.device("cpu"))
    harnesses = {
        name: Harness(net, rank_group, arena, kv_pages=1024, prefix_cache=False)
        for name, rank_group in rank_groups.items()
    }
    for round in range(options.rounds):
        for harness in harnesses.values():
            placeholder = harness.net.spec.image_token_id  # type: ignore[attr-defined]
            images = [harness.image(picture(480, 640, seed=n), f"{round}-{n}") for n in range(2)]
            harness.run(
                [
                    harness.request(
                        "pictures", [1, placeholder, placeholder, 3], images, max_tokens=2
                    )
                ]
            )
            harness.run([harness.request("long", [n % 200 for n in range(512)], max_tokens=32)])
            harness.run([harness.request(str(n), [n + 1, 7], max_tokens=32) for n in range(8)])
    for name, rank_group in rank_groups.items():
        for kind, times in rank_group.times.items():
            if len(times) >= options.rounds:
                table.add_row(f"step: {kind}", name, spread(times))
        rank_group.rank_group.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    table = Table(
        "what",
        "how",
        "ms: median (p90)",
        title=f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}",
    )
    with tempfile.TemporaryDirectory() as folder:
        broadcast(table)
        all_reduce(table)
        steps(table, Path(folder) / "model", options)
    Console().print(table)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1].isdigit():
        listen()
    elif sys.argv[1:2] == ["sum"]:
        sum_up(sys.argv[2], int(sys.argv[3]), 1)  # type: ignore[arg-type]
    elif os.environ == engine_environment():
        main()
    else:  # torch reads it when it is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], engine_environment())
