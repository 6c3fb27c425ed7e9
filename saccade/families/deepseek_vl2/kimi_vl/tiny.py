"""Tiny Kimi-VL checkpoints in the hub's layout, for tests and benchmarks.

transformers has no class for them. Their reference is its DeepSeek-V3 behind MoonViT and the
projector, as published, written anew in plain PyTorch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F

from saccade.families.deepseek_vl2.tiny import CORRECTED, DeepseekTiny, language_model, text_tensors
from saccade_bench.fixtures.references import BehindTower
from saccade_bench.fixtures.tiny import Ids, Options, Tiny, randomise, write_json

PATCH, MERGE, WIDTH, HEADS, LIMIT = 8, 2, 48, 4, 96
FACTOR = PATCH * MERGE
IMAGE = "<|media_pad|>"
SPECIAL = (IMAGE, "<|media_start|>", "<|media_content|>", "<|media_end|>")
CHAT_TEMPLATE = """\
{%- for message in messages -%}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|media_start|>image<|media_content|><|media_pad|><|media_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
VISION: dict[str, Any] = {
    "model_type": "moonvit",
    "hidden_size": WIDTH,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "init_pos_emb_height": 6,
    "init_pos_emb_width": 8,
    "merge_kernel_size": [MERGE, MERGE],
    "patch_size": PATCH,
}
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "KimiVLImageProcessor",
    "in_token_limit": LIMIT,
    "merge_kernel_size": [MERGE, MERGE],
    "pad_input": True,
    "patch_size": PATCH,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def turned(heads: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Turn [N, H, D] by complex numbers: those of the column and of the row take turns."""
    size = heads.shape[-1]
    steps = 1.0 / 10000.0 ** (torch.arange(0, size, 4) / size)
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    angles = torch.stack([each.reshape(-1, 1) * steps for each in (column, row)], dim=-1)
    turns = torch.polar(torch.ones(()), angles.flatten(1))[:, None]
    pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2)


class MoonBlock(nn.Module):
    """A block of MoonViT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm0, self.norm1 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        inner = VISION["intermediate_size"]
        parts = {"fc0": nn.Linear(WIDTH, inner), "fc1": nn.Linear(inner, WIDTH)}
        self.mlp = nn.ModuleDict(parts)
        self.wqkv, self.wo = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
        q, k, v = self.wqkv(self.norm0(x)).view(len(x), 3, HEADS, -1).unbind(1)
        q, k = (turned(each, height, width) for each in (q, k))
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
        x = x + self.wo(seen)
        inner = F.gelu(self.mlp["fc0"](self.norm1(x)), approximate="tanh")
        found: torch.Tensor = x + self.mlp["fc1"](inner)
        return found


class MoonPatches(nn.Module):
    """Turns pixels into rows, with learned positions."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.pos_emb = nn.ParameterDict({"weight": torch.empty(rows, columns, WIDTH)})

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Map a normalised image [3, H, W] to rows [N, WIDTH] in reading order."""
        rows = self.proj(image[None])[0]  # [WIDTH, h, w]
        learned = self.pos_emb["weight"].permute(2, 0, 1)
        if learned.shape != rows.shape:
            learned = F.interpolate(learned[None], rows.shape[1:], mode="bicubic")[0]
        found: torch.Tensor = (rows + learned).flatten(1).t()
        return found


class MoonEncoder(nn.Module):
    """MoonViT's blocks."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MoonBlock() for _ in range(depth))
        self.final_layernorm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, height, width)
        found: torch.Tensor = self.final_layernorm(x)
        return found


class Moon(nn.Module):
    """Tower and projector. Its tensors have the hub's names."""

    def __init__(self, vision: dict[str, Any], out: int) -> None:
        super().__init__()
        rows, columns = vision["init_pos_emb_height"], vision["init_pos_emb_width"]
        parts = {
            "patch_embed": MoonPatches(rows, columns),
            "encoder": MoonEncoder(vision["num_hidden_layers"]),
        }
        self.vision_tower = nn.ModuleDict(parts)
        merged = WIDTH * MERGE**2
        ends = {"linear_1": nn.Linear(merged, merged), "linear_2": nn.Linear(merged, out)}
        self.multi_modal_projector = nn.ModuleDict({"pre_norm": nn.LayerNorm(WIDTH), **ends})

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Map a normalised image [3, H, W] to tokens [M, out]."""
        height, width = (edge // PATCH for edge in image.shape[1:])
        x = self.vision_tower["encoder"](self.vision_tower["patch_embed"](image), height, width)
        cut = x.view(height // MERGE, MERGE, width // MERGE, MERGE, WIDTH).permute(0, 2, 1, 3, 4)
        last = self.multi_modal_projector
        merged = last["pre_norm"](cut).reshape(-1, WIDTH * MERGE**2)
        found: torch.Tensor = last["linear_2"](F.gelu(last["linear_1"](merged)))
        return found


def published_pixels(image: PIL.Image.Image, limit: int = LIMIT, patch: int = PATCH) -> np.ndarray:
    """Make smaller and pad, in the published processor's words and floats."""
    w, h = image.size
    if (w // patch) * (h // patch) > limit:
        scale = math.sqrt(limit / ((w // patch) * (h // patch)))
        image = image.resize((int(w * scale), int(h * scale)), PIL.Image.Resampling.BICUBIC)
    pixels, whole = np.asarray(image), patch * MERGE
    pad_h, pad_w = ((whole - edge % whole) % whole for edge in pixels.shape[:2])
    padded = np.pad(pixels, ((0, pad_h), (0, pad_w), (0, 0)))
    if max(padded.shape[:2]) // patch >= 512:
        raise ValueError("Exceed pos emb")
    return padded


class MoonReference(BehindTower):
    """transformers' DeepSeek-V3 behind MoonViT."""

    placeholder = IMAGE

    def resize(self, picture: np.ndarray) -> np.ndarray:
        return published_pixels(PIL.Image.fromarray(picture))

    def widened(self, image: np.ndarray) -> str:
        return IMAGE * (image.shape[0] * image.shape[1] // FACTOR**2)

    @torch.inference_mode()
    def embeddings(self, pixels: Sequence[np.ndarray]) -> list[torch.Tensor]:
        normal = ((torch.from_numpy(each.copy()).float() / 255 - 0.5) / 0.5 for each in pixels)
        return [self.processor(each.permute(2, 0, 1)) for each in normal]


class KimiTiny(DeepseekTiny):
    """Kimi-VL."""

    architecture = "KimiVLForConditionalGeneration"
    sees = True
    special = SPECIAL
    template = CHAT_TEMPLATE
    settings = {}  # noqa: RUF012
    begin, end = Tiny.begin, Tiny.end
    variants = {  # noqa: RUF012
        "as on the hub": {},
        "queries of latents": {"text": {"q_lora_rank": 20}},
        "another square": {"vision": {"init_pos_emb_height": 9, "num_hidden_layers": 2}},
    }

    def text(self, ids: Ids) -> dict[str, Any]:
        own = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        return super().text(ids) | CORRECTED | own

    def data(self, text: dict[str, Any], options: Options) -> dict[str, Any]:
        return {
            "architectures": [self.architecture],
            "model_type": "kimi_vl",
            "text_config": text,
            "vision_config": VISION | options.get("vision", {}),
            "torch_dtype": options.get("dtype", "float32"),
        }

    def write_settings(self, folder: Path, ids: Ids, options: Options) -> None:
        data = self.data(self.text(ids) | options.get("text", {}), options)
        write_json(folder / "config.json", data | {"media_placeholder_token_id": ids(IMAGE)})
        processor = PROCESSOR | options.get("processor", {})
        write_json(folder / "preprocessor_config.json", processor)

    def write(self, folder: Path, tokenizer: Tokenizer, seed: int, options: Options) -> None:
        """Write the reference's own weights beside the hub's, too."""
        self.write_settings(folder, tokenizer.get_vocab().__getitem__, options)
        model, seeing = parts(folder)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for each in (seeing, model):
                randomise(each)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, 0.3)
        tensors = text_tensors(model, "language_model.") | seeing.state_dict()
        kept = {f"text.{name}": value for name, value in model.state_dict().items()}
        beside = folder / "reference"
        beside.mkdir(exist_ok=True)
        for where, found in ((folder, tensors), (beside, kept)):
            found = {name: each.detach().clone().contiguous() for name, each in found.items()}
            save_file(found, where / "model.safetensors", {"format": "pt"})

    def read_reference(self, folder: Path, _: torch.dtype) -> MoonReference:  # type: ignore[override]
        model, seeing = parts(folder)
        kept = load_file(folder / "reference" / "model.safetensors")
        model.load_state_dict({name.removeprefix("text."): each for name, each in kept.items()})
        tensors = load_file(folder / "model.safetensors")
        own = [name for name in tensors if not name.startswith("language_model.")]
        seeing.load_state_dict({name: tensors[name] for name in own})
        return MoonReference(folder, model.eval(), seeing.eval())


def parts(folder: Path) -> tuple[Any, Moon]:
    """Return the language model and the tower that a folder asks for, with weights of any kind."""
    data = json.loads((folder / "config.json").read_text())
    text = data["text_config"]
    return language_model(text), Moon(data["vision_config"], text["hidden_size"])


TINY = {"kimi_vl": KimiTiny()}
