"""The process of a worker: `python -m saccade.runtime.process`, one per rank, started by
`engine/workers.py`. A worker reports the machine to the engine, loads a slice of the model, then
carries out the plans from the socket.

Holds no scheduler state. Rank 0 answers plans. Other ranks only take part.
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
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import psutil
import torch

from saccade.core.arena import Arena
from saccade.core.config import Hardware, LanguageAttention
from saccade.core.errors import StartupError
from saccade.core.given_paths import readable, sendable
from saccade.core.metrics import Metrics
from saccade.core.plan import PLANS_IN_FLIGHT, Masks, Plan
from saccade.families.registry import load_spec
from saccade.ipc.boots import WorkerBoot
from saccade.ipc.child import HEARTBEAT_SECONDS, Channel, Disconnected, enter
from saccade.ipc.machine_memory import MachineMemory
from saccade.ipc.memory import settle
from saccade.ipc.messages import (
    PEER_LOST_STATUS,
    WORKER_END,
    Alive,
    Begin,
    Begun,
    Failed,
    Figures,
    Finish,
    Found,
    FromWorker,
    Load,
    Loaded,
    Loading,
    ToWorker,
)
from saccade.kernels.ops import pick_ops
from saccade.nn.protocol import FamilyNet
from saccade.parallel import PeerLost, Shard, join, leave
from saccade.runtime.attention import pick_attention
from saccade.runtime.begun_step import Step
from saccade.runtime.compile_ahead import begin_compiling
from saccade.runtime.memory import DTYPES
from saccade.runtime.orders import Orders
from saccade.runtime.start_facts import describe_network
from saccade.runtime.vision.streams import put_first
from saccade.runtime.vision.tower import TowerWorker
from saccade.runtime.weights.checkpoint_weights import TowerDigest, load_net, load_tower
from saccade.runtime.weights.kv_scales import read_kv_scales
from saccade.runtime.weights.quant_policy import LoadTally
from saccade.runtime.weights.tensors import ReportProgress, ignore_progress
from saccade.runtime.worker import Worker

READY_POLL_SECONDS = 20e-6
"""While the device computes, looks at it and at the next plan are this far apart."""
DISK_POLL_SECONDS = 1e-3
"""The same while a plan waits for a read from disk, or for an encoding."""

Engine = Channel[FromWorker, ToWorker]


def main() -> int:
    """Run the worker and return its exit status.

    0: the engine said so or ended. 1: this rank failed. PEER_LOST_STATUS: a peer failed.
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
    leave()
    return 0


def serve(boot: WorkerBoot, engine: Engine) -> None:
    """Serve the engine from the first facts to `Finish`. Raises Disconnected, PeerLost,
    StartupError.
    """
    engine.send(Found(torch.cuda.device_count() if torch.cuda.is_available() else 0))
    load = engine.receive()
    assert isinstance(load, Load)
    end_compiling = begin_compiling(
        torch.device(load.device), DTYPES[load.dtype], boot.rank, load.parallel.ranks
    )
    with readable(load.folder):
        make, shard, loaded = _prepare(boot, engine, load)
    engine.send(loaded)
    begin = engine.receive()
    assert isinstance(begin, Begin)
    put_first(torch.device(begin.config.device))
    arena = Arena.attach(boot.arena_fd)
    metrics = Metrics()
    if boot.rank == 0:
        engine.send(Loading("caches and kernels"))
    worker = make(begin.config, arena, shard, load.parallel.encoder, metrics)
    del make  # the network is the worker's to let go of
    end_compiling()
    settle()
    images = worker.images
    found = images.saved, images.store, images.tower, worker.kept
    engine.send(Begun(*found, worker.batch_invariant, worker.prepared))
    threading.Thread(target=_beat, args=(engine,), daemon=True).start()
    carry_out(worker, engine, metrics if boot.rank == 0 else None)
    worker.close()


def _prepare(
    boot: WorkerBoot, engine: Engine, load: Load
) -> tuple[Callable[..., Worker | TowerWorker], Shard, Loaded]:
    """Load the network. Returns what makes its worker, the rank's shard, and what was found.

    Raises OSError, PeerLost, StartupError.
    """
    tally = LoadTally()
    make: Callable[..., Worker | TowerWorker]
    scales: tuple[tuple[float, float], ...] = ()
    on_progress = partial(_tell, engine) if boot.rank == 0 else ignore_progress
    attention: Literal["auto", LanguageAttention] = "auto"
    place, dtype = torch.device(load.device), DTYPES[load.dtype]
    spec, folder = load_spec(Path(load.folder), load.family_option), Path(load.folder)
    if load.role != "encode":
        ops, shapes = pick_ops(place, dtype), spec.kv_spec().attention.values()
        attention = pick_attention(
            load.attention, ops, place, dtype, graphs=load.graphs, shapes=shapes
        )
    shard = join_ranks(load, boot.rank, boot.group_fd)
    if load.role == "encode":
        wanted = what_to_load(load, shard, tally, on_progress)
        make = partial(TowerWorker, load_tower(spec, folder, **wanted))
    else:
        make = _load_worker(load, shard, tally, on_progress, folder)
        if load.kv_dtype != "auto" and load.format != "dummy":
            scales = read_kv_scales(folder, spec.kv_spec().kv_layers)
    quantised = tally.line(dtype)
    return make, shard, Loaded(measure_hardware(load.device), quantised, scales, attention)


def carry_out(worker: Worker | TowerWorker, engine: Engine, metrics: Metrics | None) -> None:
    """Carry out plans until `Finish`. `metrics`: the worker's, on the rank that answers."""
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
            engine.send(Figures(values))
        engine.send(result)

    def await_masks() -> npt.NDArray[np.int32] | None:
        nonlocal finished
        while begun:  # the masks depend on what these have drawn
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
    """Wait until the oldest step is ready, or a plan has come that may begin before that.

    Returns True for such a plan.
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
    with suppress(Disconnected):  # the main thread finds out by itself
        while True:
            engine.send(Alive())
            time.sleep(HEARTBEAT_SECONDS)


def _tell(engine: Engine, done: int, total: int) -> None:
    engine.send(Loading("weights", done, total))


def what_to_load(
    load: Load, shard: Shard, tally: LoadTally, on_progress: ReportProgress
) -> dict[str, Any]:
    """Return the arguments that `load_net` and `load_tower` share.

    `tally` counts quantised matrices, and `on_progress` is called with the bytes read.
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
    net, digest = load_slice(load, shard, tally, on_progress, folder, folder)
    again = partial(load_slice, load, shard, LoadTally(), ignore_progress, folder)
    words = describe_network(load, folder)
    return partial(Worker, net, source=(again, folder, digest), words=words)


def load_slice(
    load: Load,
    shard: Shard,
    tally: LoadTally,
    on_progress: ReportProgress,
    first: Path,
    source: Path,
) -> tuple[FamilyNet, str]:
    """Load this rank's slice of the model in `source`. Returns it with its vision tower's digest.

    A `source` that is a file gives weights alone, for the model in the folder `first`. `tally`
    counts 8-bit matrices, and `on_progress` is called with the bytes read. Raises StartupError.
    """
    alone = source.is_file()
    folder, tower = first if alone else source, TowerDigest()
    spec = load_spec(folder, load.family_option)
    wanted = what_to_load(load, shard, tally, on_progress) | {"file": source if alone else None}
    net = load_net(spec, folder, quantization=load.quantization, tower=tower, **wanted)
    return net, tower.hex()


def join_ranks(load: Load, rank: int, group_fd: int) -> Shard:
    """Set this rank's threads and device, and link it to the other ranks."""
    torch.set_num_threads(load.threads)
    if load.device == "cuda":
        torch.cuda.set_device(rank)
        # On Hopper it is PyTorch's first choice, and plans for half a second whenever a shape is
        # new: so would every image size.
        torch.backends.cuda.enable_cudnn_sdp(False)
    how = load.parallel
    everyone = join(how.all_reduce, rank, how.ranks, group_fd)
    return everyone.spread(how.size, how.expert_runs)


def measure_hardware(device: Literal["cpu", "cuda"]) -> Hardware:
    """Return the current device and its free memory, within the cgroups' limits."""
    memory, rooms = psutil.virtual_memory(), MachineMemory().read()
    total = min([memory.total, *(room.total for room in rooms)])
    left = min([memory.available, *(room.left for room in rooms)])
    if device == "cuda":
        torch.cuda.empty_cache()  # what loading needed for a moment
        free, device_total = torch.cuda.mem_get_info()
        major, minor = torch.cuda.get_device_capability()
        name, arch = torch.cuda.get_device_name(), 10 * major + minor
        return Hardware("cuda", name, device_total, free, left, arch=arch)
    return Hardware("cpu", f"{torch.get_num_threads()} threads", total, left)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Nothing is left to be put in order, and the interpreter takes a second to take torch down.
    os._exit(status)
