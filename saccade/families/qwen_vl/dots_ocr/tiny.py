"""Tiny dots.ocr checkpoints in the hub's layout, for tests and benchmarks.

transformers has no class for them. Their reference is its Qwen2 behind the published tower, written
anew in plain PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

from saccade_bench.fixtures.references import BehindTower, resize_picture
from saccade_bench.fixtures.tiny import TEXT, Ids, Options, Tiny, randomise, write_json

PATCH, MERGE, WIDTH, HEADS = 8, 2, 48, 4
FACTOR = PATCH * MERGE
START, IMAGE, END = "<|img|>", "<|imgpad|>", "<|endofimg|>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|img|><|imgpad|><|endofimg|>{%- else -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
VISION: dict[str, Any] = {
    "model_type": "dots_vit",
    "embed_dim": WIDTH,
    "hidden_size": TEXT["hidden_size"],
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_channels": 3,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 1,
    "rms_norm_eps": 1e-5,
    "use_bias": False,
    "post_norm": True,
    "is_causal": False,
}
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 1,
    "min_pixels": 4 * FACTOR**2,
    "max_pixels": 64 * FACTOR**2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


class Patchifier(nn.Module):
    """Turns patches into normalised rows."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.norm = nn.RMSNorm(WIDTH, VISION["rms_norm_eps"])

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.norm(self.proj(patches.view(-1, 3, PATCH, PATCH)).flatten(1))
        return rows


class DotsAttention(nn.Module):
    """Attention over one image, turned by row and column."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias)
        self.proj = nn.Linear(WIDTH, WIDTH, bias)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, HEADS, -1).unbind(1)
        both = angles.repeat(1, 2)
        q, k = apply_rotary_pos_emb_vision(q, k, both.cos(), both.sin())
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
        found: torch.Tensor = self.proj(seen)
        return found


class DotsGated(nn.Module):
    """An MLP with a gate."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, VISION["intermediate_size"], bias)
        self.fc2 = nn.Linear(VISION["intermediate_size"], WIDTH, bias)
        self.fc3 = nn.Linear(WIDTH, VISION["intermediate_size"], bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.fc2(F.silu(self.fc1(x)) * self.fc3(x))
        return found


class DotsBlock(nn.Module):
    """A block of the tower."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(WIDTH, VISION["rms_norm_eps"]) for _ in range(2))
        self.attn, self.mlp = DotsAttention(bias), DotsGated(bias)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), angles)
        found: torch.Tensor = x + self.mlp(self.norm2(x))
        return found


class DotsMerger(nn.Module):
    """Turns a token's patches into the language model's row."""

    def __init__(self, out: int) -> None:
        super().__init__()
        merged = WIDTH * MERGE**2
        self.ln_q = nn.LayerNorm(WIDTH, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.mlp(self.ln_q(x).view(-1, WIDTH * MERGE**2))
        return found


class PublishedTower(nn.Module):
    """The tower and its merger. Patches come in the order of Qwen2-VL's processor."""

    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        bias = vision["use_bias"]
        self.patch_embed = nn.ModuleDict({"patchifier": Patchifier()})
        self.blocks = nn.ModuleList(DotsBlock(bias) for _ in range(vision["num_hidden_layers"]))
        last = nn.RMSNorm(WIDTH, vision["rms_norm_eps"]) if vision["post_norm"] else nn.Identity()
        self.post_trunk_norm = last
        self.merger = DotsMerger(vision["hidden_size"])

    def forward(self, patches: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Map one image's patches [N, 3 * patch^2] to tokens [M, out]."""
        rows = torch.arange(height)[:, None].expand(-1, width)
        columns = torch.arange(width)[None].expand(height, -1)
        cut = (height // MERGE, MERGE, width // MERGE, MERGE)
        size = WIDTH // HEADS // 2
        steps = 1.0 / 10000.0 ** (torch.arange(0, size, 2) / size)
        apart = [each.reshape(cut).permute(0, 2, 1, 3).reshape(-1, 1) for each in (rows, columns)]
        angles = torch.cat([each * steps for each in apart], dim=1)
        x = self.patch_embed["patchifier"](patches)
        for block in self.blocks:
            x = block(x, angles)
        found: torch.Tensor = self.merger(self.post_trunk_norm(x))
        return found


class DotsReference(BehindTower):
    """transformers' Qwen2 behind the published tower."""

    placeholder = IMAGE

    @property
    def images(self) -> Any:
        return Qwen2VLImageProcessorPil.from_pretrained(self.folder)

    def resize(self, picture: np.ndarray) -> np.ndarray:
        size = self.images.size
        bounds = size["shortest_edge"], size["longest_edge"]
        height, width = picture.shape[:2]
        target = smart_resize(height, width, FACTOR, *bounds)
        return resize_picture(picture, target, "bicubic")

    def widened(self, image: np.ndarray) -> str:
        return IMAGE * (image.shape[0] * image.shape[1] // FACTOR**2)

    @torch.inference_mode()
    def embeddings(self, pixels: Sequence[np.ndarray]) -> list[torch.Tensor]:
        found = []
        for image in pixels:
            mean, std = (torch.tensor(PROCESSOR[f"image_{each}"]) * 255 for each in ("mean", "std"))
            planes = ((torch.from_numpy(image).float() - mean) / std).permute(2, 0, 1)
            flat, *grid = self.images.patchify(planes.numpy(), PATCH, MERGE, 1)
            found.append(self.processor(torch.from_numpy(flat.copy()), *grid))
        return found


class DotsTiny(Tiny):
    """dots.ocr."""

    architecture = "DotsOCRForCausalLM"
    special = (START, IMAGE, END)
    template = CHAT_TEMPLATE
    variants = {  # noqa: RUF012
        "as on the hub": {},
        "tied": {"tie": True},
        "with biases": {"vision": {"use_bias": True}},
        "without the last norm": {"vision": {"post_norm": False}},
    }

    def text(self, ids: Ids) -> dict[str, Any]:
        rope = {"rope_theta": 1e6, "rope_scaling": None, "attention_bias": True}
        ends = {"bos_token_id": ids("<|endoftext|>"), "eos_token_id": ids("<|im_end|>")}
        return TEXT | rope | ends | {"rms_norm_eps": 1e-6, "use_sliding_window": False}

    def write_settings(self, folder: Path, ids: Ids, options: Options) -> None:
        data = {
            "architectures": [self.architecture],
            "model_type": "dots_ocr",
            **self.text(ids),
            **options.get("text", {}),
            "image_token_id": ids(IMAGE),
            "video_token_id": ids("<|video_pad|>"),
            "vision_config": VISION | options.get("vision", {}),
            "tie_word_embeddings": options.get("tie", False),
            "torch_dtype": options.get("dtype", "float32"),
        }
        write_json(folder / "config.json", data)
        processor = PROCESSOR | options.get("processor", {})
        write_json(folder / "preprocessor_config.json", processor)

    def write(self, folder: Path, tokenizer: Tokenizer, seed: int, options: Options) -> None:
        self.write_settings(folder, tokenizer.get_vocab().__getitem__, options)
        model, tower = models(folder)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for each in (model, tower):
                randomise(each)
        tensors = {f"vision_tower.{name}": each for name, each in tower.state_dict().items()}
        tensors |= model.state_dict()
        if options.get("tie", False):
            tensors.pop("lm_head.weight")
        tensors = {name: each.detach().clone().contiguous() for name, each in tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def read_reference(self, folder: Path, _: torch.dtype) -> DotsReference:
        model, tower = models(folder)
        tensors = load_file(folder / "model.safetensors")
        seeing = [name for name in tensors if name.startswith("vision_tower.")]
        tower.load_state_dict(
            {name.removeprefix("vision_tower."): tensors[name] for name in seeing}
        )
        theirs = {name: each for name, each in tensors.items() if name not in seeing}
        theirs.setdefault("lm_head.weight", theirs["model.embed_tokens.weight"])
        model.load_state_dict(theirs)
        return DotsReference(folder, model.eval(), tower.eval())


def models(folder: Path) -> tuple[Any, PublishedTower]:
    """Return the language model and the tower that a folder asks for, with weights of any kind."""
    data = json.loads((folder / "config.json").read_text())
    vision = data.pop("vision_config")
    text = {name: value for name, value in data.items() if name not in ("architectures",)}
    text |= {"model_type": "qwen2", "torch_dtype": "float32"}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**text)), PublishedTower(vision)


TINY = {"dots_ocr": DotsTiny()}
