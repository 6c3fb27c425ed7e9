"""`saccade make-checkpoint`: write a folder in Hugging Face's checkpoint format, for measurements
and tests.

Presets of real models have the real configuration, a synthetic tokenizer (with special tokens at
the real ids) and no weights: serve them with `--tune load_format=dummy`. Small presets have random
weights. Presets are defined by architecture in `presets.py`, or by their files in
`family_presets/`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from saccade.core.errors import ConfigError
from saccade.families.registry import family_model, load_spec
from saccade.kernels.reference.ops import Ops
from saccade.parallel import UNSHARDED
from saccade.runtime.weights.dummy import DummyWeights
from saccade_bench.lab import tiles
from saccade_bench.lab.presets import ARCHITECTURES, PRESETS, THIRD, Preset
from saccade_bench.lab.tiles import tile_config, tile_processor

CPU = torch.device("cpu")
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type in ('video', 'video_url') %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


FAMILY_PRESETS = {
    path.stem: path for path in sorted(Path(__file__).parent.glob("family_presets/*.json"))
}
"""By name: a model's files, special tokens in addition to `SPECIAL`, and vocabulary before them."""


def make_checkpoint(
    name: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write preset `name` to `folder`, which must be new or empty, so that no existing model is
    overwritten.

    `seed` and `dtype` apply to random weights, if the preset has any. Raises ConfigError.
    """
    if name in FAMILY_PRESETS:
        make_folder(folder)
        _write_family_preset(folder, FAMILY_PRESETS[name])
        return folder
    preset = PRESETS.get(name)
    if preset is None:
        raise ConfigError(f"--preset {name}: known are {', '.join((*PRESETS, *FAMILY_PRESETS))}")
    make_folder(folder)
    tiled = preset.family == "internvl"
    special = (*SPECIAL, *tiles.SPECIAL) if tiled else SPECIAL
    named = {"extra_special_tokens": tiles.NAMED} if tiled else {}
    template = tiles.CHAT_TEMPLATE if tiled else CHAT_TEMPLATE
    ids = _write_tokenizer(folder, preset.words, special, {"chat_template": template, **named})
    config = tile_config if tiled else _config
    _write(folder / "config.json", config(preset, ids, dtype))
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    _write(
        folder / "generation_config.json",
        {"eos_token_id": ends, "pad_token_id": ends[1], "do_sample": False},
    )
    _write_processor(folder, preset)
    if preset.weights:
        write_weights(folder, seed, dtype)
    return folder


def make_folder(folder: Path) -> None:
    """Create a folder. Raises ConfigError if it exists and is not empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = any(folder.iterdir())
    except OSError as error:
        raise ConfigError(
            f"--out {folder}: no such folder can be made ({error.strerror}): name another one"
        ) from None
    if occupied:
        raise ConfigError(
            f"--out {folder}: there is something in it, which is not overwritten: name another "
            "folder, or empty this one"
        )


def _write_family_preset(folder: Path, path: Path) -> None:
    preset = json.loads(path.read_text())
    special = (*SPECIAL, *preset["special"])
    _write_tokenizer(folder, preset["words"], special, preset["settings"])
    for name, data in preset["files"].items():
        _write(folder / name, data)


def _config(preset: Preset, ids: dict[str, int], dtype: torch.dtype) -> dict[str, Any]:
    third = preset.family in THIRD
    head: dict[str, Any] = {}
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 5e6 if third else 1e6,
        "mrope_section": [24, 20, 20] if third else [16, 24, 24],
    }
    if preset.family.startswith("qwen3_5"):
        rope |= {"rope_theta": 1e7, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}
        head = {"mtp_num_hidden_layers": 1}
    text: dict[str, Any] = {
        "model_type": f"{preset.family}_text",
        "max_position_embeddings": 262144 if third else 128000,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": rope,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "tie_word_embeddings": preset.tied,
        **head,
    } | preset.text
    if third:
        text["rope_parameters"] = text["rope_parameters"] | {"mrope_interleaved": True}
    vision: dict[str, Any] = {
        "model_type": preset.family,
        "patch_size": 16 if third else 14,
        "spatial_merge_size": 2,
    }
    vision |= {"temporal_patch_size": 2, "in_channels": 3}
    vision |= {"num_position_embeddings": 2304, "hidden_act": "gelu_pytorch_tanh"} if third else {}
    return {
        "architectures": [ARCHITECTURES[preset.family]],
        "model_type": preset.family,
        "text_config": text,
        "vision_config": vision | preset.vision,
        "tie_word_embeddings": preset.tied,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "dtype": str(dtype).removeprefix("torch."),
    }


def _write_tokenizer(
    folder: Path, size: int, special: Sequence[str], own: dict[str, Any]
) -> dict[str, int]:
    """Write a tokenizer and return the ids of its special tokens.

    The vocabulary has bytes, then unused words up to `size` tokens, then the special tokens. `own`
    has additional fields of tokenizer_config.json.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(size - len(alphabet))]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: size + number for number, token in enumerate(special)}
    assert all(tokenizer.token_to_id(token) == number for token, number in ids.items())
    flags = {
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    settings = {
        "tokenizer_class": "Qwen2TokenizerFast",
        "added_tokens_decoder": {
            str(number): {"content": token, **flags} for token, number in ids.items()
        },
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        **own,
    }
    _write(folder / "tokenizer_config.json", settings)
    return ids


def _write_processor(folder: Path, preset: Preset) -> None:
    if preset.family == "internvl":
        _write(folder / "preprocessor_config.json", tile_processor(preset))
        return
    third = preset.family in THIRD
    clip = {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    half = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    size = (
        {"shortest_edge": 65536, "longest_edge": 16777216}
        if third
        else {"shortest_edge": 3136, "longest_edge": 12845056}
    )
    data = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 16 if third else 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    _write(folder / "preprocessor_config.json", data | {"size": size} | (half if third else clip))


class _KeptWeights(DummyWeights):
    """Random weights for every tensor that a network loads, recorded by name."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device, ops=Ops())
        self.tensors: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator(device).manual_seed(seed)

    def make(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self.tensors:
            noise = torch.randn(shape, generator=self._generator, device=self.device)
            if len(shape) == 1:
                noise = noise * 0.1 + (0.0 if name.endswith("bias") else 1.0)
            else:
                # a tensor with all experts: [E, in, out]
                noise /= math.sqrt(shape[1] if len(shape) == 3 else math.prod(shape[1:]))
            self.tensors[name] = noise.to(self.dtype)
        return self.tensors[name]


def write_weights(
    folder: Path,
    seed: int,
    dtype: torch.dtype,
    options: Sequence[str] = (),
    device: torch.device = CPU,
) -> None:
    """Write random weights for a folder's configuration, under transformers' names. They are
    generated on `device`.

    `options` are passed to `load_spec`.
    """
    spec = load_spec(folder, options)
    weights = _KeptWeights(seed, dtype, device)
    family_model(spec).build(weights, UNSHARDED, UNSHARDED)
    tensors = {
        name if name.startswith(("lm_head.", "mtp.")) else f"model.{name}": tensor
        for name, tensor in weights.tensors.items()
    }
    write_tensors(tensors, folder / "model.safetensors")


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors to a file with default permissions. safetensors alone would restrict it to its
    owner.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")
