"""The demo model's architecture (Qwen3-VL, small), its first weights, and the files of its folder.

Owns: the sizes, the initialisation, and everything in the model folder but the card. Needs
transformers (training only).
Does not know: tasks, batches or the training schedule.
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
WIDTH = 192  # of the language model and of a merged picture token
FACTOR = 32  # pixels per merged cell: patch 16, merge 2


def build_config() -> Qwen3VLConfig:
    """3.6 M parameters: a vision tower of 4 layers (128 wide) and a language model of 4 layers (192
    wide).
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
    """The library's own class with fan-in weights in float32; at this width the library's std of
    0.02 does not learn.
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


@torch.no_grad()
def _look_nearby(attention: Any, sharpness: float = 4.0) -> None:
    """Let each head begin by attending to one neighbouring patch, through the biases of query and
    key alone.

    With biases q, k a rotary score is a sum of cos(f * (distance - offset)) over the frequencies f;
    the two highest of either axis are given the amplitude `sharpness`. A tower that must first find
    out what is near learns to read far more slowly.
    """
    heads, head = attention.num_heads, attention.head_dim
    half = head // 2  # of the angles, the first half belongs to rows, the second to columns
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
    """Write every file of the model folder but the weights and the card."""
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
    """Write the weights in bfloat16 as one model.safetensors with the library's names (tied head
    left out).
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
