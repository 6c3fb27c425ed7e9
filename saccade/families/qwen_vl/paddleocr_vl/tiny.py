"""Tiny PaddleOCR-VL checkpoints, for tests and benchmarks.

Their reference is transformers' class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
    smart_resize,
)

from saccade.families.qwen_vl.tiny import QwenReference, old_rope
from saccade_bench.fixtures.references import resize_picture
from saccade_bench.fixtures.tiny import TEXT, TOWER, Ids, Layout, Tiny

PATCH, FACTOR = 8, 16
START, IMAGE, END = "<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}Assistant: {{ message.content }}<|im_end|>
{%- else -%}{{ message.role.capitalize() }}: {% if message.content is string -%}
{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>{%- else -%}
{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}{{ '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant: ' }}{%- endif -%}"""


class PaddleReference(QwenReference):
    """transformers on a PaddleOCR-VL checkpoint, float32."""

    placeholder = START + IMAGE + END

    def resize(self, picture: np.ndarray) -> np.ndarray:
        size, (height, width) = self.processor.size, picture.shape[:2]
        bounds = size["shortest_edge"], size["longest_edge"]
        target = smart_resize(height, width, FACTOR, *bounds)
        return resize_picture(picture, target, "bicubic")

    def widened(self, image: np.ndarray) -> str:
        return START + IMAGE * (image.shape[0] * image.shape[1] // FACTOR**2) + END

    def patches(self, pixels: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, grids = [], []
        for image in pixels:
            planes = self.normal(image[None])[0].numpy()
            patches, height, width = self.processor.patchify(planes, PATCH, 2, 1)
            rows.append(torch.from_numpy(patches.copy()))
            grids.append([1, height, width])
        return torch.cat(rows), torch.tensor(grids)


class PaddleTiny(Tiny):
    """PaddleOCR-VL."""

    architecture = "PaddleOCRVLForConditionalGeneration"
    reference_class = PaddleReference
    processor_class = PaddleOCRVLImageProcessorPil
    special = (START, IMAGE, END)
    template = CHAT_TEMPLATE
    variants = {  # noqa: RUF012
        "as it is": {},
        "as on the hub": {"layout": "old"},
        "tied": {"tie": True},
        "other axes": {"vision": {"rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}}},
    }

    def text(self, _: Ids) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [2, 3, 3]}
        return TEXT | {"head_dim": 16, "rope_parameters": rope}

    def vision(self) -> dict[str, Any]:
        return TOWER | {"patch_size": PATCH, "image_size": 6 * PATCH + 3}

    def fields(self, ids: Ids) -> dict[str, Any]:
        return {"image_token_id": ids(IMAGE), "vision_start_token_id": ids(START)}

    def processor(self, layout: Layout) -> dict[str, Any]:
        least, most = 4 * FACTOR**2, 64 * FACTOR**2
        bounds = {"min_pixels": least, "max_pixels": most}
        return {
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "patch_size": PATCH,
            "merge_size": 2,
            "temporal_patch_size": 1,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        } | (
            {**bounds, "size": bounds}
            if layout == "old"
            else {"size": {"shortest_edge": least, "longest_edge": most}}
        )

    def old_config(self, data: dict[str, Any]) -> dict[str, Any]:
        """Move the language model's fields to the top, as in the hub's file."""
        text = old_rope(data)
        text["rope_scaling"]["type"] = text["rope_scaling"]["rope_type"]
        data["vision_config"] |= {"model_type": data["model_type"], "temporal_patch_size": 2}
        return text | data

    def hub_tensors(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Add parts of SigLIP that answers do without."""
        name = "model.visual.vision_model"
        more = {
            f"{name}.embeddings.packing_position_embedding.weight": torch.zeros(4, 48),
            f"{name}.head.probe": torch.zeros(1, 1, 48),
        }
        return tensors | more

    def old_name(self, name: str) -> str:
        """Return the hub's name of a tensor."""
        name = name.replace("model.language_model.", "model.")
        name = name.replace("model.visual.", "visual.")
        return name.replace("model.projector.", "mlp_AR.")


TINY = {"paddleocr_vl": PaddleTiny()}
