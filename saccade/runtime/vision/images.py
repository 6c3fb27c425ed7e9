"""One rank's work on images, with or without a language model: runs the vision tower and keeps
embeddings in every tier, as plans say.

Owns the tower's buffers and graphs, the disk tier and the embeddings. Knows nothing of tokens.
"""

from __future__ import annotations

import torch

from saccade.core.arena import Arena
from saccade.core.config import EncoderMode, EngineConfig
from saccade.core.family import FamilySpec
from saccade.core.plan import Plan
from saccade.core.types import ImageKey
from saccade.kernels.reference import long_attention as blockwise
from saccade.nn.protocol import TowerNet
from saccade.parallel import Shard
from saccade.runtime.begun_step import Step
from saccade.runtime.cuda.graphs import Capture, CudaCapture, eager
from saccade.runtime.cuda.warm import compiler
from saccade.runtime.memory import DTYPES, EmbeddingMemory
from saccade.runtime.tiers.embedding_tiers import open_tiers
from saccade.runtime.tiers.page_memory import PageMemory
from saccade.runtime.vision.fingerprint import fingerprint_encoder
from saccade.runtime.vision.packed_encoder import PackedEncoder
from saccade.runtime.vision.positions import PositionCache
from saccade.runtime.vision.tile_assembly import NO_TILES, TileReader
from saccade.runtime.vision.vision_encoder import VisionEncoder


class ImageExecutor:
    """One rank's vision tower and embeddings.

    `tower`: its fingerprint, or "". `active`: work from earlier steps may be under way, so that
    each step asks for news.
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
        self.like = torch.empty(
            (0, spec.embedding_width), dtype=DTYPES[config.dtype], device=device
        )
        prepare = compiler(net.ops, device, shard.size)
        self.encoder = PackedEncoder(
            net, known, config.encoder, self.like, begin_captures(self.like), prepare
        )
        self._vision = VisionEncoder(spec, self.encoder, arena, self.like, shard, mode)
        blockwise.compile_ahead(self.like)
        self.tower = self._fingerprint(spec, config)
        tiers = open_tiers(config.embeddings, self.tower, self.like, shard.rank)
        self._disk = tiers.disk.thread if tiers.disk is not None else None
        self._encoding = False
        self.active = self._disk is not None
        self.embeddings = EmbeddingMemory(self.like, shard, tiers)
        self._tiles = None
        if spec.tiles is not None:
            self._tiles = TileReader(spec, spec.tiles, self.embeddings)

    @property
    def saved(self) -> tuple[tuple[ImageKey, int], ...]:
        """(key, tokens) for embeddings left on disk by an earlier run, the oldest first."""
        return self._disk.store.found if self._disk else ()

    @property
    def store(self) -> str:
        """The folder for this model's embeddings shared with other servers, or ""."""
        return self._disk.store.shared if self._disk else ""

    def _fingerprint(self, spec: FamilySpec, config: EngineConfig) -> str:
        """Return the tower's fingerprint (hexadecimal). Every rank must call.

        It is "" unless embeddings from other servers or earlier runs may be used.
        """
        if config.embeddings.folder is None and config.encoder.role == "all":
            return ""
        device, tower = self.like.device, config.encoder.quantization
        return fingerprint_encoder(spec, device, self._vision.encode_now, tower).hex()

    def begin_step(self, plan: Plan, pages: PageMemory | None = None) -> Step:
        """Begin a step. For a plan that only adapts, fit graphs and leave all other work. pages: as
        in `Step`.
        """
        self._encoding = bool(plan.encode) or (self._encoding and self._vision.busy)
        self.active = self._encoding or self._disk is not None
        step = Step(plan, pages, self._vision if self._encoding else None, self._disk)
        if plan.adapt:
            step.adapted(self._vision.adapt())
        return step

    def encode(self, plan: Plan, step: Step) -> None:
        """Move embeddings between tiers, take in other servers', and run the tower's share of the
        step.
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
        """Finish all writing, and release the graphs."""
        self._vision.close()
        if self._disk:
            self._disk.close()


def begin_captures(like: torch.Tensor, priority: int = 0) -> Capture:
    """Return a recorder for graphs that are replayed one after another.

    Graphs that run at the same time, as the tower's do while the language model's run, need an own
    memory pool and workspace. priority: the kernels'.
    """
    return CudaCapture(priority) if like.is_cuda else eager
