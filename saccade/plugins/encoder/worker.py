"""Executes plans on one rank without a language model: encodes images, caches embeddings, and
copies them to the arena to be sent. Plans have the same type as those for `worker.py`, but no rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from saccade.core.arena import Arena
from saccade.core.config import EncoderMode, EngineConfig
from saccade.core.family import FamilySpec
from saccade.core.metrics import Metrics
from saccade.core.plan import Deliver, Plan
from saccade.ipc.memory import trim
from saccade.nn.protocol import TowerNet
from saccade.parallel import UNSHARDED, Shard
from saccade.runtime.inflight_step import MaskSource, Step
from saccade.runtime.vision.images import ImageExecutor
from saccade.runtime.vision.positions import PositionCache
from saccade.runtime.weights.checkpoint_weights import load_tower


def load_worker(spec: FamilySpec, folder: Path, **wanted: Any) -> Callable[..., TowerWorker]:
    """Load the vision encoder, and return a factory of workers.

    wanted: as in `load_tower`.
    """
    return partial(TowerWorker, load_tower(spec, folder, **wanted))


class TowerWorker:
    """Encodes images on one rank, and caches their embeddings."""

    def __init__(
        self,
        net: TowerNet,
        config: EngineConfig,
        arena: Arena,
        shard: Shard = UNSHARDED,
        mode: EncoderMode = "weights",
        metrics: Metrics | None = None,
    ) -> None:
        kept = config.encoder.position_cache_bytes
        known = PositionCache(net.spec, net.vision, metrics or Metrics(), kept)
        self.images = ImageExecutor(net, config, arena, shard, mode, known)
        self.kept: tuple[tuple[bytes, int], ...] = ()  # there are no KV pages
        self.batch_invariant, self.prepared = False, ""  # there is no decoding
        shard = shard.everyone
        self._out = None if shard.rank else torch.from_numpy(arena.whole())

    def close(self) -> None:
        """Finish pending writes, and release the CUDA graphs."""
        self.images.close()

    @torch.inference_mode()
    def begin_step(self, plan: Plan, _: MaskSource | None = None) -> Step:
        """Start a step: move, encode, deliver, save. Delivered embeddings are in the arena when it
        returns.
        """
        assert not (plan.rows or plan.open), "there is no language model here"
        step = self.images.begin_step(plan)
        if plan.adapt:
            step.adapted(self.images.adapt())
            return step
        self.images.encode(plan, step)
        for delivery in plan.deliver:
            self._deliver(delivery)
        self.images.save(plan)
        if plan.unused is not None:
            trim()
        return step

    def _deliver(self, delivery: Deliver) -> None:
        if self._out is None:
            return
        rows = self.images.embeddings.gather([(delivery.key, 0, delivery.num_tokens)])
        flat = rows.contiguous().view(torch.uint8).view(-1)
        self._out[delivery.offset : delivery.offset + flat.numel()].copy_(flat)
