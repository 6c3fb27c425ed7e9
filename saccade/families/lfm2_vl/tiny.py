"""Tiny LFM2-VL checkpoints, for tests and benchmarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from saccade_bench.fixtures.references import (
    Reference,
    import_without_torchvision,
    resize_planes,
)
from saccade_bench.fixtures.tiny import TEXT, TOWER, Ids, Layout, Tiny
from saccade_bench.lab.qwen import tell_grid, told_grid

PATCH, UNIT = 4, 8
TILE = 16
"""Pixels of a tile's edge: 4 tokens."""
MOST = 6
"""Tiles."""
MARKS = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}
SPECIAL = (
    *MARKS.values(),
    *(f"<|img_row_{r}_col_{c}|>" for r in range(1, MOST + 1) for c in range(1, MOST + 1)),
)
CHAT_TEMPLATE = """\
{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<image>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


@cache
def arithmetic() -> Any:
    """Return transformers' image processor, of which nothing here needs torchvision."""
    module = "transformers.models.lfm2_vl.image_processing_lfm2_vl"
    return import_without_torchvision(module).Lfm2VlImageProcessor


@dataclass(frozen=True)
class ThumbnailProcessor:
    """transformers' processor: its sizes by its own methods, its resizing as by torchvision."""

    image_mean: list[float]
    image_std: list[float]
    limits: dict[str, Any]

    @classmethod
    def from_pretrained(cls, folder: Path) -> Self:
        told = json.loads((folder / "preprocessor_config.json").read_text())
        return cls(told["image_mean"], told["image_std"], told)

    def views(self, picture: np.ndarray) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Return the tiles, then the whole image; rows and columns of tiles."""
        theirs, told = arithmetic(), self.limits
        names = ("downsample_factor", "encoder_patch_size", "max_image_tokens")
        some = {name: told[name] for name in names}
        height, width = picture.shape[:2]
        across, down = theirs.smart_resize(
            None, height, width, min_image_tokens=told["min_image_tokens"], **some
        )
        planes = picture.transpose(2, 0, 1)
        whole = resize_planes(planes, (down, across), "bilinear").transpose(1, 2, 0)
        tolerance = told["max_pixels_tolerance"]
        if not theirs._is_image_too_large(
            None, height, width, max_pixels_tolerance=tolerance, **some
        ):
            return [whole], (1, 1)
        ratios = SimpleNamespace(_target_ratios=lambda *few: theirs._target_ratios(None, *few))
        columns, rows, wide, tall, _ = theirs._get_grid_layout(
            ratios, height, width, told["min_tiles"], told["max_tiles"], TILE
        )
        cut = resize_planes(planes, (tall, wide), "bilinear").transpose(1, 2, 0)
        apart = cut.reshape(rows, TILE, columns, TILE, 3).swapaxes(1, 2).reshape(-1, TILE, TILE, 3)
        return [*apart, *[whole] * self.limits["use_thumbnail"]], (rows, columns)


class ThumbnailReference(Reference):
    """transformers on an LFM2-VL checkpoint, float32.

    `pixels` are canvases: the tiles side by side over the whole image, and black beside. The grids
    of those that `resize` has drawn are known.
    """

    placeholder = "<image>"

    def resize(self, picture: np.ndarray) -> np.ndarray:
        views, (rows, columns) = self.processor.views(picture)
        tiles = views[: rows * columns] if rows * columns > 1 else []
        whole = views[-1] if len(views) > len(tiles) else np.zeros((0, 0, 3), np.uint8)
        grid = (whole.shape[0] // UNIT, whole.shape[1] // UNIT)
        if not tiles:
            return tell_grid(np.ascontiguousarray(whole), grid)
        top = rows * TILE
        size = top + whole.shape[0], max(columns * TILE, whole.shape[1])
        canvas = np.zeros((*size, 3), np.uint8)
        apart = np.stack(tiles).reshape(rows, columns, TILE, TILE, 3).transpose(0, 2, 1, 3, 4)
        canvas[:top, : columns * TILE] = apart.reshape(top, -1, 3)
        canvas[top:, : whole.shape[1]] = whole
        return tell_grid(canvas, (*grid, rows, columns))

    def views(self, canvas: np.ndarray) -> list[np.ndarray]:
        """Return the tiles, then the whole image."""
        grid = told_grid(canvas)
        if len(grid) == 2:
            return [canvas]
        rows, columns = grid[2:]
        found = [
            canvas[row * TILE :, column * TILE :][:TILE, :TILE]
            for row in range(rows)
            for column in range(columns)
        ]
        return [*found, *[canvas[rows * TILE :, : grid[1] * UNIT]] * bool(grid[0])]

    def widened(self, image: np.ndarray) -> str:
        grid = told_grid(image)
        rows, columns = grid[2:] or (1, 1)
        counts = ((TILE // UNIT) ** 2, grid[0] * grid[1])
        own: Any = SimpleNamespace(**MARKS)
        last = self.processor.limits["use_thumbnail"]
        return str(Lfm2VlProcessor._build_image_tokens(own, rows, columns, *counts, last, True))

    def features(self, pixels: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        shown = [view for canvas in pixels for view in self.views(canvas)]
        sizes = [(view.shape[0] // PATCH, view.shape[1] // PATCH) for view in shown]
        most = max(rows * columns for rows, columns in sizes)
        values = torch.zeros(len(shown), most, 3 * PATCH**2)
        mask = torch.zeros(len(shown), most, dtype=torch.int64)
        for at, (view, (rows, columns)) in enumerate(zip(shown, sizes)):
            planes = self.normal(view[None])[0]
            patches = planes.reshape(3, rows, PATCH, columns, PATCH).permute(1, 3, 2, 4, 0)
            values[at, : rows * columns] = patches.reshape(rows * columns, -1)
            mask[at, : rows * columns] = 1
        return {
            "pixel_values": values,
            "pixel_attention_mask": mask,
            "spatial_shapes": torch.tensor(sizes),
        }

    @torch.inference_mode()
    def embeddings(self, pixels: Sequence[np.ndarray]) -> list[torch.Tensor]:
        found = []
        for canvas in pixels:
            features = self.model.model.get_image_features(**self.features([canvas]))
            found.append(torch.cat(list(features.pooler_output)))
        return found


class Lfm2Tiny(Tiny):
    """LFM2-VL. A view has 2 to 6 tokens; of over 12, an image is cut."""

    architecture = "Lfm2VlForConditionalGeneration"
    tiled = True
    reference_class = ThumbnailReference
    processor_class = ThumbnailProcessor
    special = SPECIAL
    template = CHAT_TEMPLATE
    variants = {  # noqa: RUF012
        "as it is": {},
        "without thumbnails": {"layout": "old"},
        "tied": {"tie": True},
        "longer convolutions": {"text": {"conv_L_cache": 4}},
        "another tower": {"vision": {"num_patches": 49, "num_attention_heads": 2}},
    }

    def text(self, _: Ids) -> dict[str, Any]:
        return TEXT | {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "block_multiple_of": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        }

    def vision(self) -> dict[str, Any]:
        own = {"model_type": "siglip2_vision_model", "vision_use_head": False}
        return TOWER | {**own, "num_patches": 25, "patch_size": PATCH}

    def fields(self, ids: Ids) -> dict[str, Any]:
        return {"image_token_id": ids("<image>"), "projector_hidden_size": 72}

    def processor(self, layout: Layout) -> dict[str, Any]:
        return {
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "encoder_patch_size": PATCH,
            "downsample_factor": UNIT // PATCH,
            "do_image_splitting": True,
            "min_tiles": 2,
            "max_tiles": MOST,
            "tile_size": TILE,
            "min_image_tokens": 2,
            "max_image_tokens": 6,
            "max_pixels_tolerance": 2.0,
            "use_thumbnail": layout == "new",
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 2,
        }


TINY = {"lfm2_vl": Lfm2Tiny()}
