"""Tiny InternVL checkpoints, for tests and benchmarks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image
import torch
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from saccade_bench.fixtures.references import Reference, resize_planes
from saccade_bench.fixtures.tiny import TEXT, TOWER, Ids, Layout, Tiny
from saccade_bench.lab import tiles

SIDE = 56
"""Pixels of a tile: 4 x 4 patches, 4 tokens."""
MOST_TILES = 6
SPECIAL = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
SETTINGS = {
    "extra_special_tokens": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
}
QWEN3 = {"model_type": "qwen3", "head_dim": 16}
LARGER = {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": False}
LARGER |= {"use_mean_pooling": False, "num_hidden_layers": 2}
"""The tower of the larger models, and a norm behind it, which none has but transformers knows."""
PROCESSOR = {
    "image_processor_type": "GotOcr2ImageProcessor",
    "size": {"height": SIDE, "width": SIDE},
    "crop_to_patches": False,  # as the hub has it: transformers' InternVLProcessor says otherwise
    "min_patches": 1,
    "max_patches": MOST_TILES,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
}


QIANFAN_TEMPLATE = """\
{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{ '<image>\n' }}{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
HUB_NAMES = (
    (r"^model\.vision_tower\.layers\.", "vision_model.encoder.layers."),
    (r"^model\.vision_tower\.", "vision_model."),
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"\.lambda_", ".ls"),
    (r"\.attention\.projection_layer\.", ".attn.proj."),
    (r"\.attention\.", ".attn."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.cls_token$", ".class_embedding"),
    (r"\.position_embeddings$", ".position_embedding"),
    (r"\.patch_embeddings\.projection\.", ".patch_embedding."),
    (r"^model\.multi_modal_projector\.layer_norm\.", "mlp1.0."),
    (r"^model\.multi_modal_projector\.linear_1\.", "mlp1.1."),
    (r"^model\.multi_modal_projector\.linear_2\.", "mlp1.3."),
)
"""Of Qianfan-OCR's tensors."""


class TileProcessor(GotOcr2ImageProcessorPil):
    """transformers' processor, resizing as its torchvision backend does."""

    def resize(self, image: np.ndarray, size: Any, *_: Any, **__: Any) -> np.ndarray:
        """Planes uint8 [3, H, W]."""
        return resize_planes(image, (size.height, size.width), "bicubic")


class TileReference(Reference):
    """transformers on an InternVL checkpoint, float32.

    `pixels` are canvases: an image's tiles one below another, the thumbnail last.
    """

    placeholder = "<IMG_CONTEXT>"

    def resize(self, picture: np.ndarray) -> np.ndarray:
        cut = self.processor(
            PIL.Image.fromarray(picture),
            crop_to_patches=True,
            do_rescale=False,
            do_normalize=False,
            return_tensors="np",
        ).pixel_values
        assert cut.dtype == np.uint8
        return np.ascontiguousarray(cut.transpose(0, 2, 3, 1).reshape(-1, SIDE, 3))

    def widened(self, image: np.ndarray) -> str:
        count: int = len(image) // SIDE * self.model.config.image_seq_length
        return "<img>" + self.placeholder * count + "</img>"

    def values(self, pixels: Sequence[np.ndarray]) -> torch.Tensor:
        return self.normal(np.concatenate([each.reshape(-1, SIDE, SIDE, 3) for each in pixels]))

    @torch.inference_mode()
    def embeddings(self, pixels: Sequence[np.ndarray]) -> list[torch.Tensor]:
        features = self.model.model.get_image_features(self.values(pixels)).pooler_output
        counts = [len(each) // SIDE for each in pixels]
        return [part.flatten(0, 1) for part in features.split(counts)]


class InternTiny(Tiny):
    """InternVL."""

    architecture = "InternVLForConditionalGeneration"
    tiled = True
    reference_class = TileReference
    processor_class = TileProcessor
    special = SPECIAL
    template = tiles.CHAT_TEMPLATE
    settings = SETTINGS
    grids = frozenset((count,) for count in (1, 3, 4, 5, 6, 7))  # thumbnails included
    variants = {  # noqa: RUF012
        "as it is": {},
        "as on the hub": {"layout": "old"},
        "tied": {"tie": True},
        "qwen3": {"text": QWEN3},
        "the larger tower": {"vision": LARGER},
    }

    def text(self, _: Ids) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 1e6}
        return TEXT | {"model_type": "qwen2", "rope_parameters": rope}

    def vision(self) -> dict[str, Any]:
        sizes = {"image_size": [SIDE, SIDE], "patch_size": [14, 14]}
        return TOWER | {"attention_bias": True} | sizes

    def fields(self, ids: Ids) -> dict[str, Any]:
        return {"image_token_id": ids("<IMG_CONTEXT>"), "image_seq_length": 4}

    def processor(self, _: Layout) -> dict[str, Any]:
        return PROCESSOR

    def old_config(self, data: dict[str, Any]) -> dict[str, Any]:
        """The hub's files have no ties, and a scaling that begins beyond the context."""
        text = data["text_config"]
        text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
        text["rope_scaling"] = {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}
        data.pop("tie_word_embeddings")
        return data

    def old_name(self, name: str) -> str:
        if name == "lm_head.weight":
            return "language_model.lm_head.weight"
        return name.removeprefix("model.").replace("language_model.", "language_model.model.", 1)


class QianfanTiny(InternTiny):
    """Qianfan-OCR. Its files have InternVL's first names, its template a text for an image."""

    architecture = "QianfanOCRForConditionalGeneration"
    template = QIANFAN_TEMPLATE
    variants = {  # noqa: RUF012
        "as it is": {},
        "tied": {"tie": True},
        "another norm": {"vision": LARGER | {"attention_bias": True, "use_qk_norm": False}},
    }

    def text(self, ids: Ids) -> dict[str, Any]:
        return super().text(ids) | QWEN3

    def hub_tensors(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name, each in tensors.items():
            for pattern, hub in HUB_NAMES:
                name = re.sub(pattern, hub, name)
            found[name] = each
        for name in [name for name in found if ".attn.q_proj." in name]:
            parts = [found.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
            found[name.replace(".q_proj.", ".qkv.")] = torch.cat(parts)
        return found


TINY = {"internvl": InternTiny(), "qianfan_ocr": QianfanTiny()}
