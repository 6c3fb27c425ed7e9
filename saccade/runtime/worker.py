"""One rank's hands: executes plans.

Decides nothing; knows nothing of requests, queues or caches beyond what plans say.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from saccade.core.arena import Arena
from saccade.core.config import EncoderMode, EngineConfig
from saccade.core.errors import StartupError
from saccade.core.family import FamilySpec
from saccade.core.metrics import Metrics
from saccade.core.plan import Plan, StepResult
from saccade.core.types import ImageKey
from saccade.nn.protocol import FamilyNet
from saccade.parallel import WHOLE, Shard
from saccade.runtime.batch import Slot, build_batch
from saccade.runtime.disk import DiskTier, fingerprint_encoder
from saccade.runtime.encoder import PackedEncoder
from saccade.runtime.graphs import CudaCapture, eager
from saccade.runtime.memory import EmbeddingMemory, KVMemory
from saccade.runtime.positions import PositionCache
from saccade.runtime.sampler import sample
from saccade.runtime.vision import VisionEncoder

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Worker:
    """Holds the network, KV pages, embeddings and slots of one rank.

    Every rank samples every token: the logits have the same bits on each, and a draw depends on
    them and a counter alone.
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
        self._device = torch.device(config.device)
        dtype = DTYPES[config.dtype]
        self._kv = KVMemory(
            net.spec.kv_layout.on_rank(shard.size),
            config.kv_pages,
            config.page_size,
            dtype,
            self._device,
        )
        like = self._kv.layers[0][0]
        self._positions = PositionCache(net.spec, net.vision, metrics or Metrics())
        self._encoder = PackedEncoder(
            net, self._positions, config.encoder, like, CudaCapture() if like.is_cuda else eager
        )
        self._vision = VisionEncoder(net.spec, self._encoder, arena, like, shard, mode)
        self._disk = (
            open_disk(net.spec, config, shard, self._vision) if config.embeddings.folder else None
        )
        self._embeddings = EmbeddingMemory(
            net.spec.embedding_width, dtype, self._device, shard, self._disk
        )
        self._slots: list[Slot | None] = [None] * config.max_running
        self._stop_ids = net.spec.eos_token_ids

    @property
    def saved(self) -> tuple[tuple[ImageKey, int], ...]:
        """(key, tokens) of embeddings that an earlier run has left on disk, the oldest first."""
        return self._disk.found if self._disk else ()

    def close(self) -> None:
        """Finish what is being written."""
        if self._disk:
            self._disk.close()

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        """Do one step: close, open, moves, encode, forward, sample, save."""
        if plan.adapt:
            return StepResult(plan.step, unfinished=self._vision.adapt())
        for index in plan.close:
            self._slots[index] = None
        for opened in plan.open:
            assert self._slots[opened.slot] is None, "a plan opens a slot that is in use"
            self._slots[opened.slot] = Slot(
                opened, self._positions, self._kv.page_size, self._device
            )
        for move in plan.moves:
            self._embeddings.move(move)
        if plan.encode:
            for encoded in self._vision.encode(plan.encode):
                self._embeddings.put(encoded.key, encoded.rows, encoded.ready)
        result = self._forward(plan) if plan.rows else StepResult(plan.step)
        for key in plan.save:
            self._embeddings.save(key)
        disk = self._disk.collect(plan.wait) if self._disk else ()
        return replace(result, encoded=self._vision.finish(), disk=disk)

    def _forward(self, plan: Plan) -> StepResult:
        batch = build_batch(plan, self._slots, self._embeddings, self._device)
        return self._sample(
            plan, self._net.forward(batch, self._kv.layers)
        )  # logits: [R, V] float32

    def _sample(self, plan: Plan, logits: torch.Tensor) -> StepResult:
        slots = [
            slot for row in plan.rows if row.sample and (slot := self._slots[row.slot]) is not None
        ]
        if not slots:
            return StepResult(plan.step)
        tokens, logprobs = sample(logits, [slot.sampler for slot in slots], self._stop_ids)
        for slot, token in zip(slots, tokens):
            slot.append(token)
        return StepResult(plan.step, tokens, logprobs)


def open_disk(
    spec: FamilySpec, config: EngineConfig, shard: Shard, vision: VisionEncoder
) -> DiskTier | None:
    """The first rank's files; None on the others, which only take part in finding out what model
    this is. Raises StartupError.
    """
    assert config.embeddings.folder is not None
    fingerprint = fingerprint_encoder(spec, torch.device(config.device), vision.encode_now)
    if shard.rank:
        return None
    try:
        return DiskTier(
            Path(config.embeddings.folder), fingerprint, spec.embedding_width, DTYPES[config.dtype]
        )
    except OSError as error:
        raise StartupError(
            f"--embedding-cache-dir {config.embeddings.folder}: {error.strerror}"
        ) from None
