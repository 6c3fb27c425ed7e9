"""PaddleOCR-VL's vision encoder, for packed images of any size, and its projector: SigLIP's blocks
with heads that are rotated by row and column.

The grid of learned positions is interpolated to the size of each image.
"""

from __future__ import annotations

from dataclasses import replace

from saccade.core.types import Grid
from saccade.families.kit.native_images import MAX_SIDE, ImageRules
from saccade.nn.norm import LayerNorm
from saccade.nn.patches import PatchKernel, fit_positions
from saccade.nn.protocol import GridFacts
from saccade.nn.tower import AxialRope, load_merger
from saccade.nn.weights import Part, Weights
from saccade.parallel import Shard
from saccade.plugins.models.kit.axial_tower import AxialTower
from saccade.plugins.models.kit.siglip import siglip_block
from saccade.plugins.models.paddleocr_vl.config import FittedConfig

TOWER, PROJECTOR = "visual.vision_model", "projector"
PROJECTOR_EPS = 1e-5


class FittedTower(AxialTower):
    """Encodes uint8 pixels to embeddings with SigLIP and its projector."""

    __slots__ = ("positions",)

    def __init__(
        self, weights: Weights, config: FittedConfig, rules: ImageRules, shard: Shard
    ) -> None:
        name, sizes = f"{TOWER}.embeddings", (config.hidden, config.patch, config.merge)
        colours = rules.mean, rules.std
        kernel = PatchKernel(weights, f"{name}.patch_embedding", sizes, colours)
        part = Part(f"{name}.position_embedding.weight", (config.across**2, config.hidden))
        self.positions = weights.load(part).view(config.across, config.across, -1)
        names = (f"{TOWER}.encoder.layers.{i}" for i in range(config.depth))
        layers = [siglip_block(weights, each, config, shard) for each in names]
        last = f"{TOWER}.post_layernorm"
        last_norm = LayerNorm(weights, last, config.hidden, config.norm_eps)
        parts = f"{PROJECTOR}.pre_norm", f"{PROJECTOR}.linear_1", f"{PROJECTOR}.linear_2"
        merged = config.hidden, config.merge**2, config.out_hidden
        projector = load_merger(weights, parts, merged, PROJECTOR_EPS, shard)
        rope = AxialRope(weights, config.head_dim, config.rope_theta, MAX_SIDE)
        super().__init__(config, kernel, layers, last_norm, projector, rope)

    def grid_facts(self, grid: Grid) -> GridFacts:
        _, height, width = grid
        fitted = fit_positions(self.positions, (height, width), self.merge, "bilinear")
        return replace(super().grid_facts(grid), position_embedding=fitted)
