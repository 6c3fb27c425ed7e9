"""Tiny checkpoints of MiniCPM-V 4.6 and 4.7 and of MiniCPM-OCR, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import torch
from transformers import BatchFeature
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

from saccade_bench.fixtures.references import Reference, resize_planes
from saccade_bench.fixtures.tiny import HYBRID, TOWER, Ids, Layout, Tiny
from saccade_bench.lab.qwen import tell_grid, told_grid

PATCH = 4
SCALE = 48
"""Pixels of an edge of a square slice: of 9 tokens."""
PAGE_SCALE = 24
"""The same where a token is 2 x 2 patches."""
MOST = 6
"""Slices."""
COARSE, FINE = {"downsample_mode": "16x"}, {"downsample_mode": "4x"}
IMAGE = "<|image_pad|>"
TOKENS = {
    "image_token": IMAGE,
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
SPECIAL = tuple(TOKENS.values())[2:]
SETTINGS = {"extra_special_tokens": TOKENS}
PROCESSOR = {
    "image_processor_type": "MiniCPMV4_6ImageProcessor",
    "max_slice_nums": MOST,
    "scale_resolution": SCALE,
    "patch_size": PATCH,
    "slice_mode": True,
    "downsample_mode": "16x",
    "use_image_id": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
}
CHAT_TEMPLATE = """\
{%- macro shown(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for part in content -%}{{ '' if loop.first else '\\n' }}
{%- if part.type == 'image' -%}<|image_pad|>{%- elif part.type == 'video' -%}<|video_pad|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + shown(message.content) | trim + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}
{%- if not enable_thinking -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}{%- endif -%}"""


@cache
def page_processor() -> Any:
    """Return the processor's class. Older transformers lack MiniCPM-OCR."""
    from transformers.models.minicpm_ocr.image_processing_minicpm_ocr import (
        MiniCPMOcrImageProcessor,
        MiniCPMOcrImageProcessorKwargs,
    )

    class PageProcessor(MiniCPMV4_6ImageProcessorPil):
        """MiniCPM-OCR's processor, resizing as its torchvision backend does."""

        downsample_mode = "4x"
        small_image_upsize = "always"
        valid_kwargs = MiniCPMOcrImageProcessorKwargs

        def _preprocess(  # type: ignore[override]
            self, images: list[np.ndarray], **settings: Any
        ) -> BatchFeature:
            """Plan, resize and cut by transformers' class, of which no more needs torchvision."""
            theirs: Any = object.__new__(MiniCPMOcrImageProcessor)
            theirs.resize = lambda image, size, **_: torch.from_numpy(
                resize_planes(image.numpy(), (size.height, size.width), "bicubic")
            )
            theirs.rescale_and_normalize = lambda bytes_as_floats, *_: bytes_as_floats
            planes = [torch.from_numpy(np.ascontiguousarray(each)) for each in images]
            own = {"disable_grouping": True} | settings | {"return_tensors": None}
            made = dict(MiniCPMOcrImageProcessor._preprocess(theirs, planes, **own))
            made["pixel_values"] = made["pixel_values"].to(torch.uint8).numpy()
            made["target_sizes"] = made["target_sizes"].numpy()
            return BatchFeature(made)

    return PageProcessor


class SliceReference(Reference):
    """transformers on a MiniCPM-V 4.6 checkpoint, float32.

    `pixels` are canvases: the slices side by side under the whole image, and black beside. The
    grids of those that `resize` has drawn are known.
    """

    placeholder = IMAGE

    @property
    def unit(self) -> int:
        """Pixels of an edge of a token."""
        across = 2 if self.processor.downsample_mode == "4x" else 4
        return across * int(self.processor.patch_size)

    def resize(self, picture: np.ndarray) -> np.ndarray:
        made = self.processor(
            [PIL.Image.fromarray(picture)],
            do_rescale=False,
            do_normalize=False,
            return_tensors="np",
        )
        (strip,), patch = made["pixel_values"], self.processor.patch_size
        assert strip.dtype == np.uint8
        views, done = [], 0
        for height, width in made["target_sizes"].tolist():
            cut = strip[:, :, done : done + height * width * patch]
            done += cut.shape[2]
            apart = cut.reshape(3, patch, height, width, patch).transpose(2, 1, 3, 4, 0)
            views.append(apart.reshape(height * patch, width * patch, 3))
        whole, *slices = views
        grid = tuple(edge // self.unit for edge in whole.shape[:2])
        if not slices:
            return tell_grid(np.ascontiguousarray(whole), grid)
        ((rows, columns),) = made["grids"]
        tall, wide = slices[0].shape[:2]
        canvas = np.zeros(
            (whole.shape[0] + rows * tall, max(whole.shape[1], columns * wide), 3), np.uint8
        )
        canvas[: whole.shape[0], : whole.shape[1]] = whole
        for number, each in enumerate(slices):
            top = whole.shape[0] + number // columns * tall
            left = number % columns * wide
            canvas[top : top + tall, left : left + wide] = each
        return tell_grid(canvas, (*grid, rows, columns, tall // self.unit, wide // self.unit))

    def views(self, canvas: np.ndarray) -> list[np.ndarray]:
        """The whole image, and its slices."""
        grid, unit = told_grid(canvas), self.unit
        top = grid[0] * unit
        found = [canvas[:top, : grid[1] * unit]]
        if len(grid) > 2:
            rows, columns, tall, wide = grid[2], grid[3], grid[4] * unit, grid[5] * unit
            found += [
                canvas[top + row * tall :, column * wide :][:tall, :wide]
                for row in range(rows)
                for column in range(columns)
            ]
        return found

    def patches(self, pixels: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        """(pixel_values, target_sizes), with the arithmetic of the Pillow processor."""
        made, patch = self.processor, self.processor.patch_size
        strips, sizes = [], []
        for canvas in pixels:
            for view in self.views(canvas):
                scaled = made.rescale(view.transpose(2, 0, 1), made.rescale_factor)
                normal = made.normalize(scaled, made.image_mean, made.image_std)
                strips.append(made.reshape_by_patch(normal, patch))
                sizes.append([edge // patch for edge in view.shape[:2]])
        values = np.concatenate(strips, axis=-1)[None]
        return torch.from_numpy(values), torch.tensor(sizes, dtype=torch.int32)

    def expand(self, prompt: str, pixels: Sequence[np.ndarray]) -> str:
        if not pixels:
            return prompt
        grids = [told_grid(canvas) for canvas in pixels]
        counts = [len(self.views(canvas)) for canvas in pixels]
        _, sizes = self.patches(pixels)
        made = {
            "grids": [grid[2:4] if len(grid) > 2 else (0, 0) for grid in grids],
            "num_patches_per_image": counts,
            "target_sizes": sizes.numpy(),
        }
        # Its methods, without a tokenizer and a video processor, which they do not use.
        own: Any = SimpleNamespace(slice_mode=self.processor.slice_mode, **TOKENS)
        divisor = (self.unit // self.processor.patch_size) ** 2
        texts: list[str] = [
            MiniCPMV4_6Processor.replace_image_token(own, made, k, image_token_divisor=divisor)
            for k in range(len(pixels))
        ]
        if self.processor.use_image_id:
            numbered = MiniCPMV4_6Processor._prepend_local_ids
            texts = numbered(own, [prompt], texts, self.placeholder)
        first, *others = prompt.split(self.placeholder)
        return first + "".join(text + other for text, other in zip(texts, others, strict=True))

    def features(self, pixels: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        return dict(zip(("pixel_values", "target_sizes"), self.patches(pixels)))

    @torch.inference_mode()
    def embeddings(self, pixels: Sequence[np.ndarray]) -> list[torch.Tensor]:
        features = self.model.model.get_image_features(*self.patches(pixels)).pooler_output
        found, done = [], 0
        for canvas in pixels:
            count = len(self.views(canvas))
            found.append(torch.cat(list(features[done : done + count])))
            done += count
        return found


class CanvasReference(SliceReference):
    """The same on one of MiniCPM-V 4.7, whose positions follow from what tokens are."""

    types = "mm_token_type_ids"


class MiniTiny(Tiny):
    """MiniCPM-V 4.6, with Qwen3.5's language model."""

    architecture = "MiniCPMV4_6ForConditionalGeneration"
    tiled = True
    reference_class = SliceReference
    processor_class = MiniCPMV4_6ImageProcessorPil
    special = SPECIAL
    template = CHAT_TEMPLATE
    settings = SETTINGS
    variants = {  # noqa: RUF012
        "as it is": {},
        "as on the hub": {"layout": "old"},
        "tied": {"tie": True},
        "heads of one key": {"text": {"num_key_value_heads": 1}},
        "another tower": {"vision": {"image_size": 36, "num_attention_heads": 2}},
    }

    def text(self, _: Ids) -> dict[str, Any]:
        return HYBRID | {"model_type": "qwen3_5_text", "rms_norm_eps": 1e-6}

    def vision(self) -> dict[str, Any]:
        return TOWER | {"num_hidden_layers": 4, "image_size": 10 * PATCH, "patch_size": PATCH}

    def fields(self, ids: Ids) -> dict[str, Any]:
        return super().fields(ids) | {"insert_layer_id": 1}

    def processor(self, _: Layout) -> dict[str, Any]:
        return PROCESSOR

    def old_config(self, data: dict[str, Any]) -> dict[str, Any]:
        """The hub's has no sections of positions, all of whose axes are alike."""
        for name in ("mrope_section", "mrope_interleaved"):
            data["text_config"]["rope_parameters"].pop(name)
        return data


class CanvasTiny(MiniTiny):
    """MiniCPM-V 4.7: images stand on a canvas of positions."""

    architecture = "MiniCPMV4_7ForConditionalGeneration"
    reference_class = CanvasReference
    variants = {  # noqa: RUF012
        "as it is": {},
        "tied": {"tie": True},
        "4x": {"fields": FINE, "processor": FINE | {"scale_resolution": PAGE_SCALE}},
    }

    def fields(self, ids: Ids) -> dict[str, Any]:
        places = ("image_start", "image_end", "slice_start", "slice_end")
        marks = {f"{place}_id": ids(TOKENS[f"{place}_token"]) for place in places}
        return super().fields(ids) | marks | {"newline_id": ids("Ċ")}


class PageTiny(MiniTiny):
    """MiniCPM-OCR: four times as many tokens, from slices a quarter as large."""

    architecture = "MiniCPMOcrForConditionalGeneration"
    variants = {  # noqa: RUF012
        "as it is": {},
        "tied": {"tie": True},
        "16x": {"fields": COARSE, "processor": COARSE},
    }

    def processor(self, _: Layout) -> dict[str, Any]:
        own = {"image_processor_type": "MiniCPMOcrImageProcessor", "downsample_mode": "4x"}
        return PROCESSOR | own | {"scale_resolution": PAGE_SCALE, "max_slice_nums": 3}

    def image_processor(self, folder: Path) -> Any:
        return page_processor().from_pretrained(folder)


TINY = {"minicpmv4_6": MiniTiny(), "minicpmv4_7": CanvasTiny(), "minicpm_ocr": PageTiny()}
