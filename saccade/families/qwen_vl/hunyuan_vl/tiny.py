"""Tiny HunyuanOCR checkpoints, for tests and benchmarks.

Their reference is transformers' class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import (
    HunYuanVLImageProcessorPil,
    smart_resize,
)

from saccade.families.qwen_vl.tiny import QwenReference
from saccade_bench.fixtures.references import resize_picture
from saccade_bench.fixtures.tiny import TEXT, TOWER, Ids, Layout, Tiny

PATCH, FACTOR = 8, 16
START, IMAGE, END = "<|image_start|>", "<|image|>", "<|image_end|>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|image_start|><|image|><|image_end|>{%- else -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
XDROPE = {
    "rope_type": "dynamic",
    "factor": 1.0,
    "alpha": 50.0,
    "rope_theta": 1e4,
    "mrope_section": [3, 2, 2, 1],
}


class LineReference(QwenReference):
    """transformers on a HunyuanOCR checkpoint, float32."""

    placeholder = START + IMAGE + END

    def resize(self, picture: np.ndarray) -> np.ndarray:
        size, (height, width) = self.processor.size, picture.shape[:2]
        bounds = size["shortest_edge"], size["longest_edge"]
        target = smart_resize(height, width, FACTOR, *bounds)
        return resize_picture(picture, target, "bicubic")

    def widened(self, image: np.ndarray) -> str:
        rows, columns = (edge // FACTOR for edge in image.shape[:2])
        return START + IMAGE * (rows * (columns + 1) + 2) + END

    def patches(self, pixels: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, grids = [], []
        for image in pixels:
            height, width = (edge // PATCH for edge in image.shape[:2])
            planes = self.normal(image[None])[0].reshape(3, height, PATCH, width, PATCH)
            rows.append(planes.permute(1, 3, 0, 2, 4).reshape(height * width, -1))
            grids.append([1, height, width])
        return torch.cat(rows), torch.tensor(grids)

    @torch.inference_mode()
    def embeddings(self, pixels: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return list(self.model.model.get_image_features(*self.patches(pixels)).pooler_output)


class HunyuanTiny(Tiny):
    """HunyuanOCR."""

    architecture = "HunYuanVLForConditionalGeneration"
    reference_class = LineReference
    processor_class = HunYuanVLImageProcessorPil
    special = (START, IMAGE, END)
    template = CHAT_TEMPLATE
    variants = {  # noqa: RUF012
        "as it is": {},
        "as on the hub": {"layout": "old", "tie": True},
        "an axis less": {"text": {"rope_parameters": XDROPE | {"mrope_section": [2, 3, 3]}}},
        "plain rope": {"text": {"rope_parameters": XDROPE | {"rope_type": "default"}}},
        "cubic": {"vision": {"interpolate_mode": "bicubic"}},
    }

    def text(self, _: Ids) -> dict[str, Any]:
        return TEXT | {"head_dim": 16, "rope_parameters": dict(XDROPE)}

    def vision(self) -> dict[str, Any]:
        return TOWER | {"patch_size": PATCH, "max_image_size": 6 * PATCH, "out_hidden_size": 64}

    def fields(self, ids: Ids) -> dict[str, Any]:
        return {"image_token_id": ids(IMAGE), "im_start_id": ids(START), "im_end_id": ids(END)}

    def processor(self, layout: Layout) -> dict[str, Any]:
        least, most = 4 * FACTOR**2, 64 * FACTOR**2
        return {
            "image_processor_type": "HunYuanVLImageProcessor",
            "patch_size": PATCH,
            "merge_size": 2,
            "temporal_patch_size": 1,
            "resample": 1,
        } | (
            {"min_pixels": least, "max_pixels": most}
            if layout == "old"
            else {"size": {"shortest_edge": least, "longest_edge": most}}
        )

    def old_config(self, data: dict[str, Any]) -> dict[str, Any]:
        """The hub's file has the text model's fields at the top."""
        text = data.pop("text_config")
        rope = text.pop("rope_parameters")
        theta, sections = rope.pop("rope_theta"), rope.pop("mrope_section")
        rope.pop("rope_type")
        own = {
            "rope_theta": theta,
            "rope_scaling": rope | {"type": "xdrope", "xdrope_section": sections},
            "attention_head_dim": text.pop("head_dim"),
        }
        return text | own | data

    def old_name(self, name: str) -> str:
        """The hub's name of a tensor."""
        for new, old in (
            ("model.vision_tower.", "vit."),
            ("model.language_model.", "model."),
            (".patch_merger.proj_conv.", ".perceive.proj.0."),
            (".patch_merger.proj_out.", ".perceive.proj.2."),
            (".patch_merger.", ".perceive."),
            (".mlp.fc1.", ".mlp.dense_h_to_4h."),
            (".mlp.fc2.", ".mlp.dense_4h_to_h."),
            (".layer_norm1.", ".input_layernorm."),
            (".layer_norm2.", ".post_attention_layernorm."),
        ):
            name = name.replace(new, old)
        return name


TINY = {"hunyuan_vl": HunyuanTiny()}
