"""`saccade bench limits`: compare the CPU time of the vision encoder, a prompt and small-batch
decode with the machine's limits.

The limit of a decode step is to read the language model's matrices once. The limit of the vision
encoder and of a prompt is the number of operations in their matrix products and attention. Both use
the speeds that PyTorch reaches in the same run. The real scheduler and worker run in one process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from saccade.core.errors import ConfigError
from saccade.core.options import EngineOptions
from saccade.core.plan import Plan
from saccade.core.types import Request
from saccade.families.qwen_vl.spec import QwenVLSpec
from saccade.families.registry import load_spec
from saccade.runtime.memory import DTYPES
from saccade.runtime.weights.checkpoint_weights import load_net
from saccade_bench.lab.engine_here import EngineHere, EngineModel
from saccade_bench.lab.machine import describe
from saccade_bench.lab.options import LimitsOptions

SIDE = 1024
"""Rows and columns of the matrices whose product measures the peak speed."""
READ_BYTES = 24 << 20
TRIES = 20
MIN_KV_TOKENS = 16384
"""Enough for the default options."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The measured CPU time of some work, and its lower bound on this machine, in ms."""

    work: str
    limit: float
    measured: float

    @property
    def share(self) -> float:
        return self.limit / self.measured


@dataclass(frozen=True, slots=True)
class Peaks:
    """The speeds that PyTorch reaches, in operations and bytes per ms of CPU time."""

    products: float
    tower_products: float
    bytes: float

    @classmethod
    def measure(cls, dtype: torch.dtype, *, int8: bool) -> Peaks:
        values = torch.randn(SIDE, SIDE).to(dtype)
        numbers = torch.randint(-127, 127, (SIDE, SIDE), dtype=torch.int8)
        read = torch.ones(READ_BYTES // 4)
        tower = 2 * SIDE**3 / _least_ms(lambda: values @ values)
        text = 2 * SIDE**3 / _least_ms(lambda: torch._int_mm(numbers, numbers)) if int8 else tower
        return cls(text, tower, READ_BYTES / _least_ms(read.sum))


def _least_ms(work: Callable[[], object]) -> float:
    def once() -> float:
        begun = time.process_time()
        work()
        return 1e3 * (time.process_time() - begun)

    return min(once() for _ in range(TRIES))


def bench_limits(options: LimitsOptions) -> list[Limit]:
    """Measure and print the table. Raises ConfigError if the model is not a dense Qwen-VL."""
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    spec, dtype = load_spec(options.model), DTYPES[options.dtype]
    if not isinstance(spec, QwenVLSpec) or spec.text.experts is not None:
        raise ConfigError(f"--model {options.model}: only dense Qwen-VL's shapes are known here")
    how = options.quantization
    net = load_net(spec, options.model, dtype=dtype, device=device, quantization=how)
    room = EngineOptions(
        max_running_requests=max((8, *options.rows)),
        max_total_tokens=max(MIN_KV_TOKENS, 2 * options.prompt_tokens),
    )
    engine = EngineHere(EngineModel(net, spec, 0), "cpu", options.dtype, room)
    measure = _Measure(engine, options)
    int8 = how == "int8"
    peaks = Peaks.measure(dtype, int8=int8)
    limits = [measure.tower(spec, peaks), measure.prompt(spec, peaks)]
    read = matrix_values(spec) * (1 if int8 else dtype.itemsize)
    limits += [
        Limit(f"{rows} rows of decode", read / peaks.bytes, measure.decode(rows))
        for rows in options.rows
    ]
    engine.close()
    Console().print(table(limits, f"{describe()['cpu']}, {options.threads} threads"))
    return limits


def matrix_values(spec: QwenVLSpec) -> int:
    """Return the number of values in the language model's matrices, including its head."""
    text = spec.text
    return layer_values(spec) * text.layers + text.vocab_size * text.hidden


def layer_values(spec: QwenVLSpec) -> int:
    text = spec.text
    heads = 2 * (text.heads + text.kv_heads) * text.head_dim
    return text.hidden * (heads + 3 * text.intermediate)


def prompt_operations(spec: QwenVLSpec, tokens: int) -> float:
    """Return the operations of all layers: matrix products, and causal attention."""
    text = spec.text
    attention = 2 * tokens**2 * text.heads * text.head_dim
    return text.layers * (2.0 * tokens * layer_values(spec) + attention)


def tower_operations(spec: QwenVLSpec, patches: int) -> float:
    """Return the operations of all blocks: matrix products, and attention to all patches or to the
    patches of a window.
    """
    tower = spec.vision
    matrices = 3 if tower.variant == "qwen2_5_vl" else 2
    products = 2 * patches * tower.hidden * (4 * tower.hidden + matrices * tower.intermediate)
    window = (tower.window // tower.patch) ** 2 or patches
    full = len(tower.full_attention_layers) if tower.window else tower.depth
    seen = full * patches + (tower.depth - full) * window
    return float(tower.depth * products + 4 * patches * seen * tower.hidden)


class _Measure:
    """Runs requests, and measures the CPU ms of the relevant steps."""

    def __init__(self, engine: EngineHere, options: LimitsOptions) -> None:
        self._engine = engine
        self._options = options

    def tower(self, spec: QwenVLSpec, peaks: Peaks) -> Limit:
        draw = np.random.default_rng(0)
        found, patches = list[float](), 0
        for _ in range(self._options.repeats):
            image = draw.integers(0, 256, (*self._options.image, 3), dtype=np.uint8)
            request = self._request(1, image=image)
            steps = self._run([request])
            found.append(sum(ms for plan, ms in steps if plan.encode or not plan.rows))
            patches = request.images[0].num_patches
        operations = tower_operations(spec, patches)
        return Limit(f"tower, {patches} patches", operations / peaks.tower_products, min(found))

    def prompt(self, spec: QwenVLSpec, peaks: Peaks) -> Limit:
        count, found = self._options.prompt_tokens, []
        for _ in range(self._options.repeats):
            steps = self._run([self._request(count)])
            found.append(sum(ms for plan, ms in steps if plan.num_tokens > 1))
        operations = prompt_operations(spec, count)
        return Limit(f"prompt, {count} tokens", operations / peaks.products, min(found))

    def decode(self, rows: int) -> float:
        """Return the median CPU ms of decode steps with `rows` sequences that sample randomly."""
        asked = [self._request(24, answer=self._options.decoded) for _ in range(rows)]
        steps = self._run(asked)
        return statistics.median(ms for plan, ms in steps if plan.num_tokens == rows)

    def _request(self, length: int, answer: int = 1, image: np.ndarray | None = None) -> Request:
        return self._engine.request(length, answer, image=image, temperature=1.0)

    def _run(self, requests: Sequence[Request]) -> list[tuple[Plan, float]]:
        """Return each step's plan and CPU ms, which include the scheduler's."""
        steps: list[tuple[Plan, float]] = []
        before = time.process_time()

        def note(plan: Plan, _drawn: Sequence[str]) -> None:
            nonlocal before
            now = time.process_time()
            steps.append((plan, 1e3 * (now - before)))
            before = now

        self._engine.run(requests, note, in_flight=1)
        return steps


def table(limits: Sequence[Limit], machine: str) -> Table:
    made = Table("work", "at the limit, ms", "measured, ms", "share", box=SIMPLE_HEAD)
    made.title = f"CPU time beside the machine's limit, {machine}"
    for each in limits:
        made.add_row(
            each.work, f"{each.limit:.2f}", f"{each.measured:.2f}", f"{100 * each.share:.0f} %"
        )
    return made
