"""The demo model's architecture (a small Qwen3-VL), its initial weights, and the files of its
folder, except for the model card. Needs transformers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from train.tokenizer import SPECIAL, write_tokenizer

MAX_LENGTH = 32768
MIN_PIXELS = 64 * 64
MAX_PIXELS = 2560 * 1440
VOCABULARY = 480
WIDTH = 192  # hidden size of the language model, and of a merged image token
FACTOR = 32  # pixels per merged token: patch size 16, merge size 2


def build_config() -> Qwen3VLConfig:
    """Return a configuration with 3.6 M parameters: a vision encoder with 4 layers of width 128,
    and a language model with 4 layers of width 192.
    """
    token = {name: i for i, name in enumerate(SPECIAL)}
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": MAX_LENGTH,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": token["<|im_end|>"],
        "pad_token_id": token["<|endoftext|>"],
    }
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_heads": 4,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": WIDTH,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1, 2],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token["<|image_pad|>"],
        video_token_id=token["<|video_pad|>"],
        vision_start_token_id=token["<|vision_start|>"],
        vision_end_token_id=token["<|vision_end|>"],
        tie_word_embeddings=True,
        architectures=["Qwen3VLForConditionalGeneration"],
    )


def build_model(seed: int) -> Qwen3VLForConditionalGeneration:
    """Return transformers' model in float32 with weights scaled by fan-in.

    At this width, the library's standard deviation of 0.02 does not train.
    """
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration._from_config(
        build_config(), dtype=torch.float32, attn_implementation="eager"
    )
    for name, weight in model.named_parameters():
        if "embed" in name and weight.dim() == 2:
            nn.init.normal_(weight, std=0.1)
        elif weight.dim() >= 2:
            nn.init.normal_(weight, std=1 / math.sqrt(weight[0].numel()))
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    for block in model.model.visual.blocks[:2]:
        _look_nearby(block.attn)
    model.tie_weights()
    return model


def read_model(folder: Path) -> Qwen3VLForConditionalGeneration:
    """Return transformers' model in float32 with the weights of a model folder."""
    return Qwen3VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


@torch.no_grad()
def _look_nearby(attention: Any, sharpness: float = 4.0) -> None:
    """Initialize each head to attend to one neighbouring patch, using only the biases of query and
    key.

    With biases q and k, a rotary score is a sum of cos(f * (distance - offset)) over the
    frequencies f. The two highest of each axis get the amplitude `sharpness`. Without this, the
    vision encoder must first learn which patches are near, and learns to read much more slowly.
    """
    heads, head = attention.num_heads, attention.head_dim
    half = head // 2  # the first half of the angles is for rows, the second for columns
    frequency = 1.0 / (10000.0 ** (torch.arange(0, half, 2).float() / half))
    query, key = torch.zeros(heads, head), torch.zeros(heads, head)
    for number, offset in enumerate(((0, 1), (0, -1), (1, 0), (-1, 0))):
        for axis in (0, 1):
            for i in (0, 1):
                place = axis * half // 2 + i
                size = math.sqrt(sharpness * math.sqrt(head))
                angle = float(frequency[i]) * offset[axis]
                key[number, place] = size
                query[number, place], query[number, place + half] = (
                    size * math.cos(angle),
                    size * math.sin(angle),
                )
    width = heads * head
    attention.qkv.weight[: 2 * width] *= 0.5
    attention.qkv.bias[:width], attention.qkv.bias[width : 2 * width] = (
        query.flatten(),
        key.flatten(),
    )


def write_settings(folder: Path) -> None:
    """Write every file of the model folder except for the weights and the card."""
    folder.mkdir(parents=True, exist_ok=True)
    config = build_config()
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    write_tokenizer(folder, MAX_LENGTH)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    generation = {
        "do_sample": False,
        "max_new_tokens": 256,
        "eos_token_id": [SPECIAL.index("<|im_end|>"), SPECIAL.index("<|endoftext|>")],
        "pad_token_id": SPECIAL.index("<|endoftext|>"),
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def write_weights(model: Qwen3VLForConditionalGeneration, folder: Path) -> None:
    """Write the weights in bfloat16 to one model.safetensors, by the library's names and without
    the tied head.
    """
    named = {
        name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in named.items()
    }
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)
