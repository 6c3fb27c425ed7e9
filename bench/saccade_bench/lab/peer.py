"""transformers' vision tower with our weights, to measure beside ours.

Imported only with transformers installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

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
