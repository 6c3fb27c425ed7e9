"""Runs the vision encoder on one rank, and stores embeddings in all cache tiers, as plans specify.

It also works without a language model, in a server that only encodes images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from saccade.core.arena import Arena
from saccade.core.config import EncoderMode, EngineConfig
from saccade.core.family import FamilySpec
from saccade.core.plan import Plan
from saccade.core.types import ImageKey
from saccade.kernels.reference.rotary import rotate_
from saccade.nn.protocol import TowerNet
from saccade.parallel import Shard
from saccade.runtime.inflight_step import Step
from saccade.runtime.memory import DTYPES, EmbeddingMemory
from saccade.runtime.tiers import open_tiers
from saccade.runtime.vision.packed_encoder import PackedEncoder
from saccade.runtime.vision.positions import PositionCache
from saccade.runtime.vision.vision_encoder import NO_TILES, VisionEncoder

if TYPE_CHECKING:
    from saccade.runtime.tiers import PageMemory


class ImageExecutor:
    """Runs the vision encoder and stores the embeddings of one rank.

    tower: the vision encoder's fingerprint, or "" if it is not needed.
    active: True if work of earlier steps may be in progress, so that each step must check it.
    """

    def __init__(
        self,
        net: TowerNet,
        config: EngineConfig,
        arena: Arena,
        shard: Shard,
        mode: EncoderMode,
        known: PositionCache,
    ) -> None:
        spec, device = net.spec, torch.device(config.device)
        if not config.encoder.rotary_kernel:
            net.ops.rotate_ = rotate_  # use PyTorch's implementation
        self.like = torch.empty(
            (0, spec.embedding_width), dtype=DTYPES[config.dtype], device=device
        )
        graphs = None
        if config.encoder.graph_sizes:
            from saccade.runtime.graphs import find_pack_graphs  # only for GPUs

            graphs = find_pack_graphs()(net, config.encoder, self.like, shard.size)
        self.encoder = PackedEncoder(net, known, config.encoder, self.like, graphs)
        self._vision = VisionEncoder(spec, self.encoder, arena, self.like, shard, mode)
        net.ops.precompile(self.like)
        self.tower = self._fingerprint(spec, config)
        tiers = open_tiers(config.embeddings, self.tower, self.like, shard.rank)
        self._disk = tiers.disk
        self._encoding = False
        self.active = self._disk is not None
        self.embeddings = EmbeddingMemory(self.like, shard, tiers)
        self._tiles = None
        if spec.tiles is not None:
            from saccade.runtime.vision.tile_assembly import TileReader

            self._tiles = TileReader(spec, spec.tiles, self.embeddings)

    @property
    def saved(self) -> tuple[tuple[ImageKey, int], ...]:
        """The (key, number of tokens) of each embedding that an earlier run left on disk, oldest
        first.
        """
        return self._disk.found if self._disk else ()

    @property
    def store(self) -> str:
        """The directory with this model's embeddings that other servers share, or ""."""
        return self._disk.shared if self._disk else ""

    def _fingerprint(self, spec: FamilySpec, config: EngineConfig) -> str:
        """Return the vision encoder's fingerprint (hexadecimal). All ranks must call it.

        Returns "" if embeddings are not exchanged with other servers or later runs.
        """
        if config.embeddings.folder is None and config.encoder.role == "all":
            return ""
        from saccade.runtime.vision.fingerprint import fingerprint_encoder  # seldom needed

        device, tower = self.like.device, config.encoder.quantization
        return fingerprint_encoder(spec, device, self._vision.encode_now, tower).hex()

    def begin_step(self, plan: Plan, pages: PageMemory | None = None) -> Step:
        """Start a step, and return it.

        pages: the KV pages outside of device memory, for `Step`.
        """
        self._encoding = bool(plan.encode) or (self._encoding and self._vision.busy)
        self.active = self._encoding or self._disk is not None
        return Step(plan, pages, self._vision if self._encoding else None, self._disk)

    def adapt(self) -> bool:
        """Adapt the vision encoder's graphs to recent images, as `VisionEncoder.adapt` does."""
        return self._vision.adapt()

    def encode(self, plan: Plan, step: Step) -> None:
        """Move embeddings between tiers, store those received from other servers, and encode
        images.

        This runs the part of the vision encoder that the plan includes in this step.
        """
        seen = NO_TILES
        if self._tiles is not None and plan.encode:
            seen = self._tiles.read(plan.encode)
        for move in plan.moves:
            self.embeddings.move(move)
        if mine := [encode for encode in plan.encode if not encode.given]:
            self._vision.queue_images(mine, seen)
        for encode in plan.encode:
            if encode.given:
                self.embeddings.put(encode.key, self._vision.take_over(encode).rows)
                step.took(encode.key)
        if self._encoding:
            for encoded in self._vision.advance(plan.tower):
                self.embeddings.put(encoded.key, encoded.rows, encoded.ready)

    def save(self, plan: Plan) -> None:
        for key in plan.save:
            self.embeddings.save(key)

    def close(self) -> None:
        """Finish all writes to disk, and release the graphs."""
        self._vision.close()
        if self._disk:
            self._disk.close()
