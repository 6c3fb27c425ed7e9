"""Tiny GLM-OCR checkpoints, for tests and benchmarks.

Their reference is transformers' class.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.models.glm46v.image_processing_pil_glm46v import (
    Glm46VImageProcessorPil,
    smart_resize,
)

from saccade.families.qwen_vl.tiny import QwenReference
from saccade_bench.fixtures.references import resize_picture
from saccade_bench.fixtures.tiny import TEXT, Ids, Layout, Tiny

PATCH, FACTOR, FRAMES = 8, 16, 2
BEGIN, IMAGE, END = "<|begin_of_image|>", "<|image|>", "<|end_of_image|>"
VIDEO_MARKS = ("<|begin_of_video|>", "<|video|>", "<|end_of_video|>")
CHAT_TEMPLATE = """\
{%- for message in messages -%}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|begin_of_image|><|image|><|end_of_image|>{%- else -%}
{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


class GlmReference(QwenReference):
    """transformers on a GLM-OCR checkpoint, float32."""

    placeholder = BEGIN + IMAGE + END

    def resize(self, picture: np.ndarray) -> np.ndarray:
        size, (height, width) = self.processor.size, picture.shape[:2]
        bounds = size["shortest_edge"], size["longest_edge"]
        target = smart_resize(FRAMES, height, width, FRAMES, FACTOR, *bounds)
        return resize_picture(picture, target, "bicubic")

    def widened(self, image: np.ndarray) -> str:
        return BEGIN + IMAGE * (image.shape[0] * image.shape[1] // FACTOR**2) + END


class GlmTiny(Tiny):
    """GLM-OCR."""

    architecture = "GlmOcrForConditionalGeneration"
    reference_class = GlmReference
    processor_class = Glm46VImageProcessorPil
    special = (BEGIN, IMAGE, END, *VIDEO_MARKS)
    template = CHAT_TEMPLATE
    variants = {  # noqa: RUF012
        "as it is": {},
        "tied": {"tie": True},
        "without biases": {"vision": {"attention_bias": False}},
    }

    def text(self, _: Ids) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        return TEXT | {"head_dim": 16, "num_nextn_predict_layers": 1, "rope_parameters": rope}

    def vision(self) -> dict[str, Any]:
        sizes = {"hidden_size": 48, "out_hidden_size": 64, "intermediate_size": 80}
        return {"depth": 3, "num_heads": 4, "patch_size": PATCH} | sizes

    def fields(self, ids: Ids) -> dict[str, Any]:
        names = {"image": IMAGE, "image_start": BEGIN, "image_end": END}
        return {f"{name}_token_id": ids(token) for name, token in names.items()}

    def processor(self, _: Layout) -> dict[str, Any]:
        least, most = 4 * FACTOR**2, 64 * FACTOR**2
        return {
            "image_processor_type": "Glm46VImageProcessor",
            "patch_size": PATCH,
            "merge_size": 2,
            "temporal_patch_size": FRAMES,
            "size": {"shortest_edge": FRAMES * least, "longest_edge": FRAMES * most},
            "image_mean": list(Glm46VImageProcessorPil.image_mean),
            "image_std": list(Glm46VImageProcessorPil.image_std),
        }

    def hub_tensors(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Add a layer behind the last, which drafts tokens."""
        last, name = "model.language_model.layers.2.", "model.language_model.layers.3."
        drafting = {
            name + key.removeprefix(last): value.clone()
            for key, value in tensors.items()
            if key.startswith(last)
        }
        return tensors | drafting | {f"{name}eh_proj.weight": torch.zeros(64, 128)}


TINY = {"glm_ocr": GlmTiny()}
