"""What a tiny InternVL checkpoint has that `tests/checkpoints.py` has otherwise for Qwen-VL."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

SIDE = 56
"""Pixels of a tile: 4 x 4 patches, 4 tokens."""
MOST_TILES = 6
SPECIAL = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
TOKENIZER = {
    "extra_special_tokens": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
}
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


def config(
    tokenizer: Tokenizer, tie: bool, vocab: int, text: dict[str, Any], vision: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of transformers' InternVLConfig."""
    text_config: dict[str, Any] = {
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": tie,
        "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    vision_config: dict[str, Any] = {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 80,
        "attention_bias": True,
        "image_size": [SIDE, SIDE],
        "patch_size": [14, 14],
    }
    return {
        "text_config": text_config | text,
        "vision_config": vision_config | vision,
        "tie_word_embeddings": tie,
        "image_token_id": tokenizer.token_to_id("<IMG_CONTEXT>"),
        "image_seq_length": 4,
    }


def old_config(data: dict[str, Any]) -> dict[str, Any]:
    """As the hub's files have it: nothing on ties, and a scaling that begins beyond the context."""
    text = data["text_config"]
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    text["rope_scaling"] = {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}
    data.pop("tie_word_embeddings")
    return data


def old_name(name: str) -> str:
    """What the hub's files call a tensor."""
    if name == "lm_head.weight":
        return "language_model.lm_head.weight"
    return name.removeprefix("model.").replace("language_model.", "language_model.model.", 1)
