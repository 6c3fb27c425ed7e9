"""Runs the worker process, `python -m saccade.runtime.process`. `engine/workers.py` starts one per
rank.

A worker reports its hardware to the engine, loads its slice of the model, and then executes the
plans that it receives from a socket. All ranks execute the same plans. Only rank 0 sends results.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import psutil
import torch

from saccade.core.arena import Arena
from saccade.core.config import Hardware
from saccade.core.errors import StartupError
from saccade.core.given_paths import readable, sendable
from saccade.core.metrics import Metrics
from saccade.core.options import usable_cores
from saccade.core.plan import PLANS_IN_FLIGHT, CancelSteps, Masks, Plan
from saccade.families.registry import load_spec
from saccade.ipc.boots import WorkerBoot
from saccade.ipc.child import HEARTBEAT_SECONDS, Channel, Disconnected, enter
from saccade.ipc.memory import MachineMemory, settle
from saccade.ipc.messages import (
    PEER_LOST_STATUS,
    WORKER_END,
    Failed,
    Finish,
    FoundDevices,
    FromWorker,
    Heartbeat,
    Load,
    Loaded,
    Loading,
    MetricValues,
    Started,
    StartWorker,
    ToWorker,
)
from saccade.kernels.ops import pick_ops
from saccade.nn.protocol import FamilyNet
from saccade.parallel import UNSHARDED, PeerLost, Shard
from saccade.plugins import builder
from saccade.runtime.attention import pick_attention
from saccade.runtime.inflight_step import MaskSource, Step
from saccade.runtime.memory import DTYPES
from saccade.runtime.start import Origin
from saccade.runtime.vision.images import ImageExecutor
from saccade.runtime.weights.checkpoint_weights import TowerDigest, load_net
from saccade.runtime.weights.quant_policy import LoadTally
from saccade.runtime.weights.tensors import ReportProgress, ignore_progress
from saccade.runtime.worker import Worker

READY_POLL_SECONDS = 20e-6
"""How often to check whether the device has finished, or the next plan has arrived."""
DISK_POLL_SECONDS = 1e-3
"""The same interval if the plan waits for a read from disk or for an encoding."""

Engine = Channel[FromWorker, ToWorker]


class StepWorker(Protocol):
    """Executes plans on one rank. `messages.Started` explains the attributes."""

    images: ImageExecutor
    batch_invariant: bool
    prepared: str

    @property
    def kept(self) -> tuple[tuple[bytes, int], ...]: ...

    def begin_step(self, plan: Plan, masks: MaskSource | None = None, /) -> Step:
        """Start a step, and return it while its results are being copied. Plans must be started in
        order.
        """
        ...

    def close(self) -> None:
        """Finish all writes to disk, and release the graphs."""
        ...


def main() -> int:
    """Run the worker and return its exit status.

    0: the engine requested the exit, or has exited itself.
    1: this rank failed.
    PEER_LOST_STATUS: another rank failed.
    """
    boot, parent = enter(WorkerBoot)
    engine: Engine = Channel(parent.socket, WORKER_END)
    try:
        serve(boot, engine)
    except Disconnected:
        return 0
    except PeerLost:
        return PEER_LOST_STATUS
    except Exception as error:
        known = isinstance(error, StartupError)
        if not known:
            traceback.print_exc()
        with suppress(Disconnected):
            why = str(error) if known else f"{type(error).__name__}: {error}"
            engine.send(Failed(sendable(why)))
        return 1
    return 0


def serve(boot: WorkerBoot, engine: Engine) -> None:
    """Load the model and execute the engine's orders until `Finish`.

    Raises Disconnected, PeerLost, StartupError.
    """
    engine.send(FoundDevices(torch.cuda.device_count() if torch.cuda.is_available() else 0))
    load = engine.receive()
    assert isinstance(load, Load)
    end_compiling = compile_in_background(load) if boot.rank == 0 else None
    with readable(load.folder):
        make, shard, loaded = _prepare(boot, engine, load)
    engine.send(loaded)
    begin = engine.receive()
    assert isinstance(begin, StartWorker)
    if begin.config.device == "cuda":
        from saccade.runtime.vision.streams import put_first

        put_first(torch.device("cuda"))
    arena = Arena.attach(boot.arena_fd)
    metrics = Metrics()
    if boot.rank == 0:
        engine.send(Loading("caches and kernels"))
    worker = make(begin.config, arena, shard, load.parallel.encoder, metrics)
    del make  # the worker releases the network
    if end_compiling is not None:
        end_compiling()
    settle()
    images = worker.images
    found = images.saved, images.store, images.tower, worker.kept
    engine.send(Started(*found, worker.batch_invariant, worker.prepared))
    threading.Thread(target=_beat, args=(engine,), daemon=True).start()
    execute_orders(worker, engine, metrics if boot.rank == 0 else None)
    worker.close()
    if shard.group is not None:
        shard.group.leave()


def compile_in_background(load: Load) -> Callable[[], None] | None:
    """Start compiling kernels that are not cached on disk, on a core that the ranks do not use.

    Returns a function that stops the compilation, or None if there is nothing to compile or no such
    core.
    """
    if usable_cores() <= load.parallel.ranks:
        return None
    return pick_ops(torch.device(load.device), DTYPES[load.dtype]).compile_in_background()


def _prepare(
    boot: WorkerBoot, engine: Engine, load: Load
) -> tuple[Callable[..., StepWorker], Shard, Loaded]:
    """Load the network, and return three values:

    1. a function that creates the worker
    2. the rank's shard
    3. the message for the engine

    Raises OSError, PeerLost, StartupError.
    """
    tally = LoadTally()
    make: Callable[..., StepWorker]
    scales: tuple[tuple[float, float], ...] = ()
    on_progress = partial(_report, engine) if boot.rank == 0 else ignore_progress
    attention = "auto"
    place, dtype = torch.device(load.device), DTYPES[load.dtype]
    folder = Path(load.folder)
    spec = load_spec(folder, load.family_option, checked=True)
    if load.role != "encode":
        ops, shapes = pick_ops(place, dtype), spec.kv_spec().attention.values()
        attention = pick_attention(
            load.attention, ops, place, dtype, graphs=load.graphs, shapes=shapes
        )
    shard = join_ranks(load, boot.rank, boot.group_fd)
    if build := builder(lambda plugin: plugin.runtime.worker, load):
        make = build(spec, folder, **what_to_load(load, shard, tally, on_progress))
    else:
        make = _load_worker(load, shard, tally, on_progress, folder)
        if load.kv_dtype != "auto" and load.format != "dummy":
            # only for an 8-bit KV cache
            from saccade.runtime.weights.kv_scales import read_kv_scales

            scales = read_kv_scales(folder, spec.kv_spec().kv_layers)
    quantised = tally.line(dtype)
    return make, shard, Loaded(measure_hardware(load.device), quantised, scales, attention)


class Orders:
    """Receives the engine's orders, and splits plans of more than one step into single steps.

    After a `CancelSteps`, the remaining steps of a plan are returned without rows.
    """

    def __init__(self, engine: Channel[FromWorker, ToWorker]) -> None:
        self._engine = engine
        self._early: deque[ToWorker] = deque()
        self._left: Plan | None = None  # the remaining steps of a plan

    def waiting(self) -> bool:
        """Return True if `receive` would not block, because it would return an order or raise
        Disconnected.
        """
        return self._left is not None or bool(self._early) or self._engine.waiting()

    def receive(self) -> ToWorker:
        """Wait for the next order, and return it. Execute only the first step of a returned plan.

        The next calls return the remaining steps of the plan. Raises Disconnected.
        """
        plan = self._left
        while plan is None:
            message = self._early.popleft() if self._early else self._engine.receive()
            if isinstance(message, Plan) and message.steps > 1:
                plan = message
            elif not isinstance(message, CancelSteps):  # ignore it if the plan's steps have ended
                return message
        if plan.steps > 1 and self._halted():
            self._left = None
            return replace(plan, steps=0)
        self._left = plan.rest if plan.steps > 1 else None
        return plan

    def _halted(self) -> bool:
        """Queue all messages that have arrived. Return True if one is a `CancelSteps` or
        `Finish`.
        """
        while self._engine.waiting():
            self._early.append(self._engine.receive())
            if isinstance(self._early[-1], CancelSteps | Finish):
                return True
        return False


def execute_orders(worker: StepWorker, engine: Engine, metrics: Metrics | None) -> None:
    """Execute plans until `Finish`, and send the results to the engine from rank 0.

    metrics: the worker's metrics on rank 0, and None on other ranks.
    """
    begun: deque[tuple[Plan, Step]] = deque()
    orders = Orders(engine)
    finished = False

    def answer() -> None:
        plan, step = begun.popleft()
        result = step.result()
        if metrics is None:
            return
        beside = plan.open or plan.close or plan.encode or plan.unused
        if beside and (values := metrics.changed()):
            engine.send(MetricValues(values))
        engine.send(result)

    def await_masks() -> npt.NDArray[np.int32] | None:
        nonlocal finished
        while begun:  # the masks depend on the tokens that these steps sampled
            answer()
        match orders.receive():
            case Masks() as masks:
                assert masks.step == plan.step, "masks come for the newest plan"
                return masks.rows()
            case other:
                assert isinstance(other, Finish), "nothing comes between a plan and its masks"
        finished = True
        return None

    while not finished:
        while begun and not _next_may_begin(begun, orders):
            answer()
        match orders.receive():
            case Plan() as plan:
                begun.append((plan, worker.begin_step(plan, await_masks)))
            case Finish():
                return


def _next_may_begin(begun: deque[tuple[Plan, Step]], orders: Orders) -> bool:
    """Wait until the oldest step has finished, or another order arrives.

    Returns True if that order can be received before the step has finished.
    """
    plan, oldest = begun[0]
    pause = DISK_POLL_SECONDS if plan.wait else READY_POLL_SECONDS
    while not oldest.ready():
        if len(begun) == PLANS_IN_FLIGHT:
            return False
        if orders.waiting():
            return True
        time.sleep(pause)
    return False


def _beat(engine: Engine) -> None:
    with suppress(Disconnected):  # the main thread handles it
        while True:
            engine.send(Heartbeat())
            time.sleep(HEARTBEAT_SECONDS)


def _report(engine: Engine, done: int, total: int) -> None:
    engine.send(Loading("weights", done, total))


def what_to_load(
    load: Load, shard: Shard, tally: LoadTally, on_progress: ReportProgress
) -> dict[str, Any]:
    """Return the arguments that `load_net` and `load_tower` have in common.

    tally: counts quantized matrices.
    on_progress: called with the bytes read so far.
    """
    return {
        "dtype": DTYPES[load.dtype],
        "device": torch.device(load.device),
        "shard": shard,
        "encoder": load.parallel.encoder,
        "load_format": load.format,
        "quantization_tower": load.quantization_tower,
        "tally": tally,
        "on_progress": on_progress,
    }


def _load_worker(
    load: Load, shard: Shard, tally: LoadTally, on_progress: ReportProgress, folder: Path
) -> Callable[..., Worker]:
    net, digest = load_slice(load, shard, tally, on_progress, folder, folder, checked=True)
    again = partial(load_slice, load, shard, LoadTally(), ignore_progress, folder)
    return partial(Worker, net, source=(again, folder, digest), origin=Origin(load, folder))


def load_slice(
    load: Load,
    shard: Shard,
    tally: LoadTally,
    on_progress: ReportProgress,
    first: Path,
    source: Path,
    *,
    checked: bool = False,
) -> tuple[FamilyNet, str]:
    """Load this rank's slice of the model in `source`.

    Returns the network, and the digest of the vision encoder's weights. Raises StartupError.

    first: the directory whose configuration is used if `source` is a single file with weights.
    tally: counts quantized matrices.
    on_progress: called with the bytes read so far.
    checked: as in `load_spec`.
    """
    alone = source.is_file()
    folder, tower = first if alone else source, TowerDigest()
    spec = load_spec(folder, load.family_option, checked=checked)
    wanted = what_to_load(load, shard, tally, on_progress) | {"file": source if alone else None}
    net = load_net(spec, folder, quantization=load.quantization, tower=tower, **wanted)
    return net, tower.hex()


def join_ranks(load: Load, rank: int, group_fd: int) -> Shard:
    """Set the threads and the device of this rank, connect it to all ranks, and return its
    shard.
    """
    torch.set_num_threads(load.threads)
    if load.device == "cuda":
        torch.cuda.set_device(rank)
        # On Hopper, PyTorch prefers cuDNN's attention, which takes half a second to plan for each
        # new shape, and so for each new image size.
        torch.backends.cuda.enable_cudnn_sdp(False)
    how = load.parallel
    if how.ranks == 1:
        return UNSHARDED
    join = builder(lambda plugin: plugin.runtime.collectives)
    assert join is not None
    everyone: Shard = join(how.all_reduce, rank, how.ranks, group_fd)
    return everyone.spread(how.size, how.expert_runs)


def measure_hardware(device: Literal["cpu", "cuda"]) -> Hardware:
    """Return the device's properties and its free memory, within the limits of cgroups."""
    memory, rooms = psutil.virtual_memory(), MachineMemory().read()
    total = min([memory.total, *(room.total for room in rooms)])
    left = min([memory.available, *(room.left for room in rooms)])
    if device == "cuda":
        torch.cuda.empty_cache()  # release temporary memory of loading
        free, device_total = torch.cuda.mem_get_info()
        major, minor = torch.cuda.get_device_capability()
        name, arch = torch.cuda.get_device_name(), 10 * major + minor
        return Hardware("cuda", name, device_total, free, left, arch=arch)
    return Hardware("cpu", f"{torch.get_num_threads()} threads", total, left)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Exit without cleaning up, because the interpreter takes a second to unload torch.
    os._exit(status)
