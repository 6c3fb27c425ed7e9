"""transformers' vision tower with our weights, and its positions, to measure beside ours.

Imported only with transformers installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from saccade.core.errors import ConfigError
from saccade.core.types import Grid
from saccade.families.qwen_vl.images import ImageRules
from saccade.kernels.reference.patchify import patchify
from saccade.nn.weights import Part, Weights


class TransformersTower:
    """The tower of the checkpoint configuration in `folder`, filled from our own tower's
    `weights`.
    """

    def __init__(self, folder: Path, weights: Weights, rules: ImageRules) -> None:
        self._tower = build(folder, weights).model.visual
        self._rules = rules
        self._dtype = weights.dtype
        self._device = weights.device

    def prepare(self, pixels: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised patches, grids) from the image processor for images uint8 [H, W, 3].

        Not part of any time.
        """
        rules = self._rules
        mean, std = (
            torch.tensor(values, device=self._device) * 255.0 for values in (rules.mean, rules.std)
        )
        patches = [
            patchify(each, rules.patch, rules.merge, rules.temporal_patch, mean, std, self._dtype)
            for each in pixels
        ]
        grids = [(1, each.shape[0] // rules.patch, each.shape[1] // rules.patch) for each in pixels]
        return torch.cat(patches), torch.tensor(grids, device=self._device)

    @torch.inference_mode()
    def encode(self, patches: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
        """Embeddings [tokens of all images, width], without deepstack levels, in a list of one."""
        return [self._tower(patches, grid_thw=grids).pooler_output]


class TransformersPositions:
    """transformers' computation, at every call, for the grid of an image, and for a prompt that
    shows it.

    Raises ConfigError for an unknown version of transformers.
    """

    def __init__(self, folder: Path, weights: Weights) -> None:
        try:
            from transformers import vision_utils
        except ImportError:
            raise ConfigError(
                "positions: this version of transformers has other ways; nothing is measured "
                "beside it"
            ) from None
        self._ways = vision_utils
        self._model = build(folder, weights).model
        self._device = weights.device
        self._image_token = self._model.config.image_token_id

    @torch.inference_mode()
    def encoder(self, grid: Grid) -> list[torch.Tensor]:
        """Rotary cos and sin, attention bounds, and, for towers that have them, learned positions
        and the order of windows.
        """
        tower, ways = self._model.visual, self._ways
        grids = torch.tensor([grid], device=self._device)
        merge = tower.spatial_merge_size
        bounds, _ = ways.get_vision_attention_seqlens(grids, tower.config, kwargs={})
        found = [
            *tower.rotary_pos_emb(bounds, ways.get_vision_position_ids(grids, merge, kwargs={})),
            bounds,
        ]
        if "num_position_embeddings" in tower.config.to_dict():
            index, weight = ways.get_vision_interpolation_indices_and_weights(
                grids,
                num_grid_per_side=tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=merge,
                kwargs={},
            )
            found.append((tower.pos_embed(index) * weight[:, :, None]).sum(1))
        if "window_size" in tower.config.to_dict():
            found += ways.get_vision_window_index(
                grids,
                spatial_merge_size=merge,
                window_size=tower.window_size,
                patch_size=tower.patch_size,
                kwargs={},
            )
        return found

    @torch.inference_mode()
    def prompt(self, grid: Grid, start: int, num_tokens: int, length: int) -> torch.Tensor:
        """mRoPE positions [3, length] of a prompt with a picture of `num_tokens` at `start`."""
        tokens = torch.ones((1, length), dtype=torch.int64)
        tokens[:, start : start + num_tokens] = self._image_token
        kinds = (tokens == self._image_token).int()
        positions: torch.Tensor = self._model.get_rope_index(
            tokens, kinds, torch.tensor([grid]), attention_mask=torch.ones_like(tokens)
        )[0]
        return positions[:, 0]


def build(folder: Path, weights: Weights) -> Any:
    """The model of the checkpoint configuration in `folder` without language layers; the tower has
    the values of `weights`.
    """
    config = AutoConfig.from_pretrained(folder)
    config.text_config.num_hidden_layers = 0  # only the tower is wanted
    config.text_config.vocab_size = 1 + config.video_token_id
    with torch.device(weights.device):
        whole: Any = AutoModelForImageTextToText.from_config(  # type: ignore[no-untyped-call]
            config, dtype=weights.dtype, attn_implementation="sdpa"
        )
    with torch.no_grad():
        for name, value in whole.model.visual.state_dict().items():
            value.copy_(weights.load(Part(f"visual.{name}", tuple(value.shape))))
    return whole.eval()
