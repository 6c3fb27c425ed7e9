"""The parts of an InternVL checkpoint that differ from Qwen-VL's in `checkpoint.py`: special
tokens, chat template, config.json and preprocessor_config.json.
"""

from __future__ import annotations

from typing import Any

import torch

from saccade_bench.lab.presets import ARCHITECTURES, Preset

SPECIAL = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<img>", "</img>", "<IMG_CONTEXT>"),
    *("<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>"),
)
"""InternVL's special tokens. They follow the tokens that Qwen2.5's tokenizer shares with
Qwen-VL.
"""
CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type in ('image', 'image_url') %}<IMG_CONTEXT>
{% elif part.type == 'video' %}<video>
{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NAMED = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
}
SIDE = 448


def tile_config(preset: Preset, ids: dict[str, int], dtype: torch.dtype) -> dict[str, Any]:
    """Return config.json. `ids` are the ids of the special tokens."""
    vision: dict[str, Any] = {
        "model_type": "internvl_vision",
        "image_size": [SIDE, SIDE],
        "patch_size": [14, 14],
        "attention_bias": True,
        "use_qk_norm": False,
        "norm_type": "layer_norm",
        "use_mean_pooling": True,
    } | preset.vision
    text = {
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "tie_word_embeddings": preset.tied,
    }
    across = vision["image_size"][0] // vision["patch_size"][0] // 2
    return {
        "architectures": [ARCHITECTURES[preset.family]],
        "model_type": preset.family,
        "text_config": text | preset.text,
        "vision_config": vision,
        "tie_word_embeddings": preset.tied,
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "image_seq_length": across**2,
        "image_token_id": ids["<IMG_CONTEXT>"],
        "dtype": str(dtype).removeprefix("torch."),
    }


def tile_processor(preset: Preset) -> dict[str, Any]:
    """Return preprocessor_config.json."""
    height, width = preset.vision.get("image_size", (SIDE, SIDE))
    return {
        "image_processor_type": "GotOcr2ImageProcessor",
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 12,
        "resample": 3,
        "size": {"height": height, "width": width},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
