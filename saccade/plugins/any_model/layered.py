"""Inputs of a decoder in addition to token and image embeddings.

These are features for some layers (deepstack), and learned embeddings for the markers around an
image. The code is the same for all models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from saccade.nn.protocol import Batch
from saccade.plugins.any_model.facts import Deepstack


class Learned:
    """Replaces the embeddings of some tokens with learned ones."""

    __slots__ = ("rows", "tokens")

    def __init__(self, found: Mapping[int, torch.Tensor]) -> None:
        """Store the learned embedding [hidden] of each token in `found`."""
        kept = sorted(found)
        self.tokens = torch.tensor(kept, device=found[kept[0]].device)
        self.rows = torch.stack([found[token] for token in kept]).clone()

    def put_rows(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return x [T, hidden] with the rows replaced whose tokens [T] have a learned embedding."""
        places, which = (tokens[:, None] == self.tokens).nonzero(as_tuple=True)
        return x.index_copy(0, places, self.rows[which].to(x.dtype))


def one_tensor(made: Any) -> torch.Tensor:
    """Concatenate one image's features, a tensor or a list of them, as [rows, hidden]."""
    if not isinstance(made, torch.Tensor):
        made = torch.cat([each.flatten(0, -2) for each in made])
    rows: torch.Tensor = made.flatten(0, -2)
    return rows


def levels_of(deepstack: Deepstack, made: Any) -> list[torch.Tensor]:
    """Return the vision encoder's features for one image as a list of [rows, hidden].

    The first are the embeddings for the decoder's input, if there are any. The features for each
    layer follow in order.
    """
    if deepstack.by_number:
        found = {layer: one_tensor(each) for layer, each in made.deepstack_features}
        return [found[layer] for layer in deepstack.layers]
    return [one_tensor(made.pooler_output), *map(one_tensor, made.deepstack_features)]


def own_rows(deepstack: Deepstack, batch: Batch, hidden: int) -> torch.Tensor:
    """Return the rows [S, hidden] that replace the embeddings of the batch's image tokens."""
    if deepstack.by_number:
        return batch.embeddings.new_zeros((len(batch.embeddings), hidden))
    return batch.embeddings[:, :hidden]


def for_layers(
    deepstack: Deepstack, batch: Batch, hidden: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the decoder arguments that contain the features of all image tokens, in token
    order.
    """
    order = batch.splice_rows.argsort()
    shown = torch.zeros(len(batch.tokens), dtype=torch.bool, device=batch.tokens.device)
    shown[batch.splice_rows] = True
    levels = torch.split(batch.embeddings[order].to(dtype), hidden, dim=1)
    if deepstack.by_number:
        mask = shown[None, :, None]
        return {
            "vision_mask": mask,
            "deepstack_features": dict(zip(deepstack.layers, levels, strict=True)),
        }
    return {"visual_pos_masks": shown[None], "deepstack_visual_embeds": list(levels[1:])}
