"""One rank's hands where there is no language model: encodes, keeps embeddings, and copies them
into the arena, from which they are sent. Executes the same plans as `worker.py`, none of which has
rows.
"""

from __future__ import annotations

import torch

from saccade.core.arena import Arena
from saccade.core.config import EncoderMode, EngineConfig
from saccade.core.metrics import Metrics
from saccade.core.plan import Deliver, Plan
from saccade.core.types import ImageKey
from saccade.nn.protocol import TowerNet
from saccade.parallel import WHOLE, Shard
from saccade.runtime.encoder import PackedEncoder
from saccade.runtime.memory import EmbeddingMemory
from saccade.runtime.positions import PositionCache
from saccade.runtime.vision import VisionEncoder
from saccade.runtime.worker import (
    DTYPES,
    MaskSource,
    Step,
    begin_captures,
    open_disk,
    store_of,
)


class TowerWorker:
    """Holds the vision tower and the embeddings of one rank. `tower`: its fingerprint."""

    def __init__(
        self,
        net: TowerNet,
        config: EngineConfig,
        arena: Arena,
        shard: Shard = WHOLE,
        mode: EncoderMode = "weights",
        metrics: Metrics | None = None,
    ) -> None:
        spec, device = net.spec, torch.device(config.device)
        like = torch.empty((0, spec.embedding_width), dtype=DTYPES[config.dtype], device=device)
        known = PositionCache(spec, net.vision, metrics or Metrics())
        encoder = PackedEncoder(net, known, config.encoder, like, begin_captures(like))
        self._vision = VisionEncoder(spec, encoder, arena, like, shard, mode)
        self.tower, self._disk = open_disk(spec, config, shard, self._vision)
        self._embeddings = EmbeddingMemory(like, shard, self._disk, config.embeddings.host_bytes)
        self._out = None if shard.rank else torch.from_numpy(arena.whole())

    @property
    def saved(self) -> tuple[tuple[ImageKey, int], ...]:
        """(key, tokens) of embeddings that an earlier run has left on disk, the oldest first."""
        return self._disk.found if self._disk else ()

    @property
    def store(self) -> str:
        """The folder that other servers write embeddings of this model to, too; "" for none."""
        return store_of(self._disk)

    def close(self) -> None:
        """Finish what is being written, and let go of graphs."""
        self._vision.close()
        if self._disk:
            self._disk.close()

    @torch.inference_mode()
    def begin(self, plan: Plan, _: MaskSource | None = None) -> Step:
        """Begin a step: moves, encode, deliver, save. What is delivered is in the arena on
        return.
        """
        assert not (plan.rows or plan.open), "there is no language model here"
        step = Step(plan, self._vision, self._disk)
        if plan.adapt:
            step.adapted(self._vision.adapt())
            return step
        for move in plan.moves:
            self._embeddings.move(move)
        if plan.encode:
            step.take_over(self._vision, self._embeddings)
        for encoded in self._vision.advance(plan.tower):
            self._embeddings.put(encoded.key, encoded.rows, encoded.ready)
        for delivery in plan.deliver:
            self._deliver(delivery)
        for key in plan.save:
            self._embeddings.save(key)
        return step

    def _deliver(self, delivery: Deliver) -> None:
        if self._out is None:
            return
        rows = self._embeddings.gather([(delivery.key, 0, delivery.num_tokens)])
        flat = rows.contiguous().view(torch.uint8).view(-1)
        self._out[delivery.offset : delivery.offset + flat.numel()].copy_(flat)
