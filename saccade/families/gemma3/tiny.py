"""Tiny Gemma 3 checkpoints, for tests and benchmarks."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from saccade_bench.fixtures.references import Reference, resize_picture
from saccade_bench.fixtures.tiny import BLANK_LINES, CORPUS, TEXT, TOWER, Ids, Layout, Tiny

SIDE = 84
"""Pixels of an image's edge: 6 x 6 patches, 3 x 3 tokens."""
TOKENS = 9
WINDOW = 8
"""Fewer than an image's tokens: its first are beyond the window of its last."""
PATTERN = 3
"""The third and the sixth layer see all tokens."""
BEGIN, IMAGE, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
SPECIAL = (BEGIN, IMAGE, END, "<start_of_turn>", "<end_of_turn>", "<bos>")
CHAT_TEMPLATE = """\
<bos>{% for message in messages %}{{ '<start_of_turn>' }}\
{{ 'model' if message.role == 'assistant' else message.role }}
{% if message.content is string %}{{ message.content | trim }}{% else %}\
{% for part in message.content %}\
{% if part.type == 'image' %}{{ '<start_of_image>' }}{% else %}{{ part.text | trim }}{% endif %}\
{% endfor %}{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": SIDE, "width": SIDE},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "do_pan_and_scan": None,
    "image_seq_length": TOKENS,
}


class GemmaReference(Reference):
    """transformers on a Gemma 3 checkpoint, float32. `pixels` are squares.

    `placeholder` is the processor's, with blank lines around the template's.
    """

    placeholder = f"\n\n{BEGIN}\n\n"
    types = "token_type_ids"

    @property
    def mark(self) -> int:
        token: int = self.model.config.boi_token_id
        return token

    def resize(self, picture: np.ndarray) -> np.ndarray:
        side = self.processor.size["height"]
        return resize_picture(picture, (side, side), "bilinear")

    def widened(self, _: np.ndarray) -> str:
        count: int = self.model.config.mm_tokens_per_image
        return f"\n\n{BEGIN}{IMAGE * count}{END}\n\n"


class GemmaTiny(Tiny):
    """Gemma 3."""

    architecture = "Gemma3ForConditionalGeneration"
    text_architecture = "Gemma3ForCausalLM"
    reference_class = GemmaReference
    processor_class = Gemma3ImageProcessorPil
    special = SPECIAL
    corpus = (CORPUS, BLANK_LINES)
    template = CHAT_TEMPLATE
    begin, end = "<bos>", "<end_of_turn>"
    variants = {  # noqa: RUF012
        "as it is": {},
        "old": {"layout": "old"},
        "tied": {"tie": True, "text": {"query_pre_attn_scalar": 16}},
        "heads of their own size": {
            "text": {"head_dim": 24, "num_key_value_heads": 1, "layer_types": None}
        },
    }

    def text(self, _: Ids) -> dict[str, Any]:
        return TEXT | {
            "num_hidden_layers": 7,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "sliding_window_pattern": PATTERN,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "pad_token_id": 0,
        }

    def vision(self) -> dict[str, Any]:
        return TOWER | {"image_size": SIDE, "patch_size": 14, "vision_use_head": False}

    def fields(self, ids: Ids) -> dict[str, Any]:
        names = {"boi_token_index": BEGIN, "image_token_index": IMAGE, "eoi_token_index": END}
        tokens = {name: ids(token) for name, token in names.items()}
        return {"mm_tokens_per_image": TOKENS} | tokens

    def processor(self, _: Layout) -> dict[str, Any]:
        return PROCESSOR

    def old_config(self, data: dict[str, Any]) -> dict[str, Any]:
        text = data["text_config"]
        rope = text.pop("rope_parameters")
        text["rope_theta"] = rope["full_attention"].pop("rope_theta")
        text["rope_scaling"] = rope["full_attention"]
        text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        text.pop("layer_types")
        text["sliding_window_pattern"] = text.pop("_sliding_window_pattern")
        return data

    def old_name(self, name: str) -> str:
        if name == "lm_head.weight":
            return "language_model.lm_head.weight"
        name = name.removeprefix("model.").replace("language_model.", "language_model.model.", 1)
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)


TINY = {"gemma3": GemmaTiny()}
