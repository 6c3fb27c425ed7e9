"""One rank's hands: executes plans.

Decides nothing; knows nothing of requests, queues or caches beyond what plans say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from saccade.core.arena import Arena
from saccade.core.config import EncoderMode, EngineConfig
from saccade.core.errors import StartupError
from saccade.core.family import FamilySpec
from saccade.core.metrics import Metrics
from saccade.core.plan import DiskEvent, Plan, StepResult
from saccade.core.types import ImageKey
from saccade.kernels import device as device_of
from saccade.kernels.fp8 import FP8
from saccade.nn.protocol import FamilyNet
from saccade.nn.transfer import send
from saccade.parallel import WHOLE, Shard
from saccade.runtime.attention import attention_for
from saccade.runtime.batch import Batcher, PageTable
from saccade.runtime.disk import DiskTier, fingerprint_encoder
from saccade.runtime.encoder import PackedEncoder
from saccade.runtime.graphs import Capture, CudaCapture, eager
from saccade.runtime.memory import EmbeddingMemory, allocate_caches, keys_and_values
from saccade.runtime.positions import PositionCache
from saccade.runtime.sampler import Report, Sampler
from saccade.runtime.scores import Scored, Scorer
from saccade.runtime.states import StateMemory
from saccade.runtime.steps import StepGraphs, StepMemory
from saccade.runtime.vision import VisionEncoder
from saccade.runtime.warm import warm_up

MaskSource = Callable[[], npt.NDArray[np.int32] | None]
"""The words [M, ceil(V / 32)] of a plan's masked rows; None: nobody wants its tokens any more."""
POLL_SECONDS = 5e-4
"""Between two looks, where both a disk and a GPU may be the first to end."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KV_DTYPES = {"fp8_e4m3": FP8}
"""Of keys and values, where that is not the network's."""


class Step:
    """A plan that has been begun. What it drew is on its way to the host."""

    def __init__(self, plan: Plan, vision: VisionEncoder, disk: DiskTier | None) -> None:
        self._plan = plan
        self._vision = vision
        self._disk = disk
        self._tokens = torch.empty(0, dtype=torch.int64)
        self._report: Report | None = None
        self._scored: tuple[Scored, ...] = ()
        self._copied: torch.cuda.Event | None = None
        self._unfinished = False
        self._taken: tuple[tuple[ImageKey, float, float], ...] = ()

    def take_over(self, vision: VisionEncoder, embeddings: EmbeddingMemory) -> None:
        """Begin what the plan has to encode; what other servers gave is there at once."""
        encodes = self._plan.encode
        if mine := [encode for encode in encodes if not encode.given]:
            vision.begin(mine)
        for encode in encodes:
            if encode.given:
                embeddings.put(encode.key, vision.take_over(encode).rows)
                self._taken += ((encode.key, 0.0, time.monotonic()),)

    def draw(self, tokens: torch.Tensor, report: Report | None) -> None:
        """Begin to copy what was drawn, [D] in row order, to the host."""
        self._tokens, self._report = to_host(tokens), report
        if report is not None:
            chosen, best, ids = map(to_host, (report.chosen, report.best, report.ids))
            self._report = replace(report, chosen=chosen, best=best, ids=ids)
        self._note_copies(tokens)

    def score(self, scored: Sequence[Scored]) -> None:
        """Begin to copy the scores of prompts to the host."""
        for each in scored:
            ids, logprobs, ranks = map(to_host, (each.ids, each.logprobs, each.ranks))
            self._scored += (Scored(each.start, ids, logprobs, ranks),)
            self._note_copies(each.ids)

    def _note_copies(self, copied: torch.Tensor) -> None:
        if copied.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def adapted(self, unfinished: bool) -> None:
        self._unfinished = unfinished

    def ready(self) -> bool:
        """Whether `result` would not block."""
        drawn = self._copied is None or self._copied.query()
        return drawn and not (self._plan.wait and self._awaits())

    def result(self) -> StepResult:
        """Blocks until the step is done. To be called once, in the order of the steps.

        Raises RuntimeError if the thread that reads from disk has failed.
        """
        if self._copied is not None:
            self._copied.synchronize()
        alone = self._plan.wait and not (self._disk and self._disk.busy)
        encoded = self._taken + self._vision.ended(wait=alone)
        while self._plan.wait and not encoded and self._awaits() and self._vision.computing:
            time.sleep(POLL_SECONDS)
            encoded = self._vision.ended()
        disk: tuple[DiskEvent, ...] = ()
        if self._disk:
            disk = self._disk.collect(self._plan.wait and not encoded and self._disk.busy)
        tokens = tuple(self._tokens.tolist())
        logprobs = self._report.read(tokens) if self._report else (None,) * len(tokens)
        scores = tuple(scored.read() for scored in self._scored)
        return StepResult(
            self._plan.step, tokens, logprobs, encoded, disk, self._unfinished, scores
        )

    def _awaits(self) -> bool:
        """Whether something is under way in the background, and nothing of it has ended."""
        if self._vision.any_ended or (self._disk and self._disk.told):
            return False
        return self._vision.computing or bool(self._disk and self._disk.busy)


class Worker:
    """Holds the network, KV pages, embeddings and slots of one rank.

    The first rank draws every token, and the others take its tokens.
    """

    def __init__(
        self,
        net: FamilyNet,
        config: EngineConfig,
        arena: Arena,
        shard: Shard = WHOLE,
        mode: EncoderMode = "weights",
        metrics: Metrics | None = None,
    ) -> None:
        self._net = net
        self._shard = shard
        spec, size = net.spec, config.page_size
        device, dtype = torch.device(config.device), DTYPES[config.dtype]
        kept = spec.kv_spec(shard.size).keeping(config.kv.dtype)
        caches = allocate_caches(kept, config.kv_pages, size, dtype, device)
        self._states = StateMemory(kept, config.max_running + config.snapshots.count, dtype, device)
        sizes, metrics = config.graphs, metrics or Metrics()
        self._attention = attention_for(
            keys_and_values(caches),
            size,
            self._states.layers,
            dtype=dtype,
            scales=config.kv.scales,
            graphs=bool(sizes.count),
        )
        like = torch.empty((0, spec.embedding_width), dtype=dtype, device=device)
        known = PositionCache(spec, net.vision, metrics)
        encoder = PackedEncoder(net, known, config.encoder, like, begin_captures(like))
        self._vision = VisionEncoder(spec, encoder, arena, like, shard, mode)
        self.tower, self._disk = open_disk(spec, config, shard, self._vision)
        self._embeddings = EmbeddingMemory(like, shard, self._disk, config.embeddings.host_bytes)
        table = PageTable(config.max_running, 1 + config.context_length // size, device)
        self._batcher = Batcher(known, config.max_running, config.chunk_tokens, table, size)
        self._scorer = Scorer(net, keeps=not shard.rank)
        self._sampler = (
            None
            if shard.rank
            else Sampler(spec.vocab_size, config.max_running, spec.eos_token_ids, device)
        )
        if device_of.runs_triton(like):
            warm_up(net, self._attention, self._batcher, encoder, self._sampler, like)
        self._graphs: StepGraphs | None = None
        if sizes.count:
            with torch.inference_mode():
                memory = StepMemory(net, self._attention, self._batcher, sizes, like)
                self._graphs = StepGraphs(memory, sizes, begin_captures(like), metrics)

    @property
    def saved(self) -> tuple[tuple[ImageKey, int], ...]:
        """(key, tokens) of embeddings that an earlier run has left on disk, the oldest first."""
        return self._disk.found if self._disk else ()

    @property
    def store(self) -> str:
        """The folder that other servers write embeddings of this model to, too; "" for none."""
        return store_of(self._disk)

    def close(self) -> None:
        """Finish what is being written, and let go of graphs. Before ranks part: a graph holds on
        to the collectives that it captured.
        """
        self._vision.close()
        self._graphs = None
        if self._disk:
            self._disk.close()

    @torch.inference_mode()
    def begin(self, plan: Plan, masks: MaskSource | None = None) -> Step:
        """Begin a step, in the plan's order. On a CPU all of it is done on return; on a GPU it is
        launched. A second plan may be begun before the first one's result is read.

        masks: called where a row is `masked`, once all else has been launched; may block, and read
        the results of steps before.
        """
        step = Step(plan, self._vision, self._disk)
        if plan.adapt:
            step.adapted(self._vision.adapt())
            return step
        for slot in plan.close:
            self._batcher.close(slot)
            if self._sampler:
                self._sampler.close(slot)
        for opened in plan.open:
            self._batcher.open(opened)
            if self._sampler:
                self._sampler.open(
                    opened.slot, opened.sampling, opened.tokens, opened.prompt_length
                )
        for move in plan.moves:
            self._embeddings.move(move)
        self._states.copy(plan.restore)
        if plan.encode:
            step.take_over(self._vision, self._embeddings)
        for encoded in self._vision.advance(plan.tower):
            self._embeddings.put(encoded.key, encoded.rows, encoded.ready)
        if plan.rows:
            self._forward(plan, step, masks)
        self._states.copy(plan.snapshot)
        for key in plan.save:
            self._embeddings.save(key)
        return step

    def execute(self, plan: Plan) -> StepResult:
        """Do one step."""
        return self.begin(plan).result()

    def _forward(self, plan: Plan, step: Step, masks: MaskSource | None) -> None:
        rows, frame = plan.rows, None
        if self._graphs:
            decoding = self._batcher.count_decoding(rows)
            frame = self._graphs.frame(decoding, len(rows), plan.num_tokens)
        batch, draws = self._batcher.build(plan, self._embeddings, frame)
        if self._graphs and frame:
            states = self._graphs.run(frame, batch.embeddings)  # [tokens of the frame, hidden]
        else:
            self._attention.plan(batch)
            states = self._net.forward(batch, self._attention)  # [T, hidden]
        if wanted := self._batcher.scored(rows, frame):
            step.score(self._scorer(states, wanted))
        if not draws.rows:
            return
        logits = self._net.logits(states.index_select(0, batch.sample_rows))  # [D, V] float32
        report = None
        if self._sampler:
            allowed, masked = None, _masked(plan)
            if masked:
                assert masks is not None, "a row's mask follows, but nobody has it"
                words = masks()
                allowed = None if words is None else send(words, logits.device)
            tokens, report = self._sampler(logits, draws, allowed, masked)
        else:
            tokens = torch.empty(len(draws.rows), dtype=torch.int64, device=logits.device)
        tokens = self._shard.broadcast(tokens)
        self._batcher.keep(draws, tokens)
        step.draw(tokens, report)


def _masked(plan: Plan) -> list[int]:
    """Which of the rows that draw have masks."""
    drawing = [row for row in plan.rows if row.sample]
    return [index for index, row in enumerate(drawing) if row.masked]


def begin_captures(like: torch.Tensor) -> Capture:
    """For graphs that are replayed one after another. Those that run beside them, as the tower's do
    beside the language model's, need a memory pool and a workspace of their own.
    """
    return CudaCapture() if like.is_cuda else eager


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy in pinned host memory, whole when the current stream has come to it."""
    if not values.is_cuda:
        return values
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)


def store_of(disk: DiskTier | None) -> str:
    """The folder that other servers write embeddings of this model to, too; "" for none."""
    return str(disk.files.folder) if disk is not None and disk.files.room is not None else ""


def open_disk(
    spec: FamilySpec, config: EngineConfig, shard: Shard, vision: VisionEncoder
) -> tuple[str, DiskTier | None]:
    """The tower's fingerprint (hexadecimal), where embeddings of other servers, or of earlier runs,
    may be used, and where they are kept the files: of the first rank; the others only take part in
    finding out what model this is. Raises StartupError.
    """
    if config.embeddings.folder is None and config.encoder.role == "all":
        return "", None
    fingerprint = fingerprint_encoder(spec, torch.device(config.device), vision.encode_now)
    if shard.rank or config.embeddings.folder is None:
        return fingerprint.hex(), None
    try:
        return fingerprint.hex(), DiskTier(
            Path(config.embeddings.folder),
            fingerprint,
            spec.embedding_width,
            DTYPES[config.dtype],
            config.embeddings.disk_bytes if config.embeddings.shared else None,
        )
    except OSError as error:
        option = "shared" if config.embeddings.shared else "dir"
        raise StartupError(
            f"--embedding-cache-{option} {config.embeddings.folder}: {error.strerror}"
        ) from None
