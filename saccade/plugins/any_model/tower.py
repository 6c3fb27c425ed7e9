"""Runs transformers' vision encoder on one image at a time. Its input is a canvas that contains the
output tensors of the image processor.

The code is the same for all models.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from saccade.core.errors import CheckpointError
from saccade.core.recipe import PreprocessParams
from saccade.core.types import Grid
from saccade.nn.protocol import GridFacts, Pack, Pieces
from saccade.plugins.any_model.layered import levels_of, one_tensor
from saccade.plugins.any_model.pixel_tensors import ROW_BYTES, placed
from saccade.plugins.any_model.spec import AnySpec


class AnyTower:
    """Encodes canvases to embeddings. Implements `nn.protocol.VisionNet`.

    The rows of a pack are the bytes of canvases. Each canvas starts with the numbers of its grid,
    so that `blocks` needs only the pack.
    """

    __slots__ = ("device", "dtype", "features", "names", "spec")

    axes = 1
    depth = 1
    hidden = ROW_BYTES
    longest_segments: tuple[int | None, ...] = ()

    def __init__(self, model: Any, spec: AnySpec) -> None:
        self.spec = spec
        self.features = features_of(model)
        self.names = frozenset(inspect.signature(self.features).parameters)
        first = next(iter(model.parameters()))
        self.device, self.dtype = first.device, first.dtype

    def rows(self, patches: int) -> int:
        return patches

    def grid_facts(self, grid: Grid) -> GridFacts:
        places = torch.zeros((1, grid[3]), dtype=torch.int64)
        assert len(grid) < grid[3], "a canvas has more rows than its grid has numbers"
        places[0, 0] = len(grid)
        places[0, 1 : 1 + len(grid)] = torch.tensor(grid)
        return GridFacts(places.to(self.device), segments=())

    def embed(self, pixels: torch.Tensor, _facts: GridFacts) -> torch.Tensor:
        return pixels.reshape(-1, ROW_BYTES)

    def blocks(self, pack: Pack) -> Pieces:
        places, at = pack.places[0].tolist(), 0
        found = []
        while at < len(places):
            grid = tuple(places[at + 1 : at + 1 + places[at]])
            yield grid[3]
            found.append(self._encode(pack.rows[at : at + grid[3]].reshape(-1), grid))
            at += grid[3]
        return torch.cat(found)

    def _encode(self, data: torch.Tensor, grid: Grid) -> torch.Tensor:
        inputs: dict[str, Any] = {}
        for each, start in placed(self.spec.tensors(grid)):
            if each.name in self.names:
                flat = data[start : start + each.nbytes].clone()
                value = flat.view(getattr(torch, each.dtype)).view(each.shape)
                # Masks are summed to count positions, for which 16-bit formats are too imprecise.
                cast = value.is_floating_point() and not each.name.endswith("mask")
                inputs[each.name] = value.to(self.dtype) if cast else value
        if is_blank(inputs):
            shape = grid[0], self.spec.embedding_width
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        if "rows" in self.names:
            inputs["rows"] = grid[0]
        made = self.features(**inputs)
        images = self.spec.images
        if images.deepstack is None:
            rows = one_tensor(
                made if isinstance(made, torch.Tensor | list | tuple) else made.pooler_output
            )
        else:
            rows = torch.cat(levels_of(images.deepstack, made), dim=1)
        if rows.shape != (grid[0], self.spec.embedding_width):
            raise CheckpointError(
                f"{self.spec.facts.architecture} returned embeddings of shape {list(rows.shape)} "
                f"for an image of {grid[2]} x {grid[1]} px; expected {grid[0]} tokens of "
                f"{self.spec.embedding_width} values"
            )
        return rows

    def encode_canvas(
        self, recipe: PreprocessParams, canvas: npt.NDArray[np.uint8]
    ) -> torch.Tensor:
        """Encode one canvas, and return its embeddings [rows, embedding_width]."""
        data = torch.from_numpy(canvas).to(self.device).reshape(-1)
        return self._encode(data, recipe.grid)

    def split(self, embeddings: torch.Tensor, facts: Sequence[GridFacts]) -> list[torch.Tensor]:
        counts = [int(fact.places[0, 1]) for fact in facts]
        return [part.clone() for part in torch.split(embeddings, counts)]


def is_blank(inputs: Mapping[str, torch.Tensor]) -> bool:
    """Return True for the blank canvas that start-up encodes to compile the encoder's kernels. It
    contains sizes of zero, which most encoders do not accept.

    A real image may also have a size of zero, such as its number of tiles, but its pixels are not
    all 0.
    """
    counted = any(not value.is_floating_point() for value in inputs.values())
    return counted and not any(bool(value.any()) for value in inputs.values())


def features_of(model: Any) -> Any:
    """Return the model's method that computes image embeddings from the processor's tensors."""
    base = model.base_model
    if "embed_tokens_extend" in dir(base):
        return InPlaceOfTokens(base.embed_tokens_extend.image_embed).features
    owner = base if "get_image_features" in dir(base) else model
    return owner.get_image_features


class InPlaceOfTokens:
    """Phi-4-multimodal's vision encoder, which overwrites the embeddings of an image's tokens."""

    __slots__ = ("tower",)

    def __init__(self, tower: Any) -> None:
        self.tower = tower

    def features(
        self,
        rows: int,
        image_pixel_values: torch.Tensor,
        image_sizes: torch.Tensor,
        image_attention_mask: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the features of one image."""
        config = self.tower.config
        tokens = image_sizes.new_full((1, rows), config.vision_config.image_token_id)
        made: torch.Tensor = self.tower(
            tokens,
            image_pixel_values.new_zeros((1, rows, config.hidden_size)),
            image_pixel_values=image_pixel_values,
            image_sizes=image_sizes,
            image_attention_mask=image_attention_mask,
        )
        return made
