"""Tiny random checkpoints of the real architectures, and transformers on them as the reference.
Shared by all tests.

`make_checkpoint` writes a complete Hugging Face folder; `reference` loads it with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from saccade_bench.lab import tiles
from tests import internvl

FamilyName = Literal[
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "internvl",
]
FAMILIES: tuple[FamilyName, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
THIRD = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
QWEN = (
    *FAMILIES,
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    ),
)
EVERY = (*QWEN, pytest.param("internvl", marks=pytest.mark.slow))
"""For parametrised tests: what differs in the last ones has quick tests of its own
(`families/test_moe.py`, `engine/test_states.py`, `families/test_internvl.py`).
"""
HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
CLASSES = {
    "qwen2_vl": (transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (
        transformers.Qwen3VLMoeConfig,
        transformers.Qwen3VLMoeForConditionalGeneration,
    ),
    "qwen3_5": (transformers.Qwen3_5Config, transformers.Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (
        transformers.Qwen3_5MoeConfig,
        transformers.Qwen3_5MoeForConditionalGeneration,
    ),
    "internvl": (transformers.InternVLConfig, transformers.InternVLForConditionalGeneration),
}
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCAB = 600
CORPUS = (
    "the quick brown fox jumps over the lazy dog; how many red circles are there? There are two "
    "blue squares and one green star. "
)

CHAT_TEMPLATE = """\
{%- if messages[0].role != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_checkpoint(
    folder: Path,
    family: FamilyName,
    *,
    seed: int = 0,
    layout: Literal["new", "old"] = "new",
    sharded: bool = False,
    tie: bool = False,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
) -> Path:
    """Write a random checkpoint to `folder`.

    `text` and `vision` override fields of the configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _write_tokenizer(folder, family)
    config_class, model_class = CLASSES[family]
    config = config_class(**_config(family, tokenizer, tie, text or {}, vision or {}))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        _randomise(model)
    _write_config(folder, family, config, layout)
    _write_weights(folder, family, model, layout, sharded)
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    _write(
        folder / "generation_config.json",
        {"eos_token_id": ends, "pad_token_id": ends[1], "do_sample": False},
    )
    _write_processor(folder, family, layout)
    return folder


def _config(
    family: FamilyName,
    tokenizer: Tokenizer,
    tie: bool,
    text: dict[str, Any],
    vision: dict[str, Any],
) -> dict[str, Any]:
    if family == "internvl":
        return internvl.config(tokenizer, tie, VOCAB, text, vision)
    third = family in THIRD
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 5e6 if third else 1e6,
        "mrope_section": [4, 2, 2] if third else [2, 3, 3],
    }
    text_config: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope | ({"mrope_interleaved": True} if third else {}),
        "tie_word_embeddings": tie,
        "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    vision_config: dict[str, Any] = {"depth": 4, "num_heads": 4, "patch_size": 16 if third else 14}
    if family == "qwen2_vl":
        vision_config |= {"embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2}
    else:
        vision_config |= {"hidden_size": 48, "out_hidden_size": 64, "intermediate_size": 80}
    if family == "qwen2_5_vl":
        vision_config |= {"fullatt_block_indexes": [1, 3], "window_size": 56}
    if third:
        text_config |= {"head_dim": 16}
        vision_config |= {"num_position_embeddings": 36}
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        vision_config |= {"deepstack_visual_indexes": [0, 2]}
    if family == "qwen3_5_moe":
        text_config |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 48,
        }
    if family.startswith("qwen3_5"):
        rope |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
        text_config |= HYBRID | {"rope_parameters": rope | {"mrope_interleaved": True}}
    if family == "qwen3_vl_moe":
        text_config |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
        }
    return {
        "text_config": text_config | text,
        "vision_config": vision_config | vision,
        "tie_word_embeddings": tie,
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
    }


def _randomise(model: torch.nn.Module) -> None:
    """Scales that keep activations near one and logits far apart; nothing is left at a value that
    would hide a mistake.
    """
    around_zero = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module).__name__ in ("Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
    }
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.normal_(-2.0, 1.0)  # some heads remember the last tokens, some hundreds
            elif weight.dim() == 1:
                centred = name.endswith("bias") or name in around_zero
                weight.normal_(0.0, 0.2).add_(0.0 if centred else 1.0)
            elif weight.dim() == 3:  # experts [E, out, in]
                weight.normal_(0.0, 1.2 / weight.shape[-1] ** 0.5)
            elif "embed_tokens" in name or "pos_embed" in name:
                weight.normal_(0.0, 0.5)
            else:
                weight.normal_(0.0, (2.0 if "lm_head" in name else 1.2) / weight[0].numel() ** 0.5)


def _write_config(folder: Path, family: FamilyName, config: Any, layout: str) -> None:
    data = config.to_dict()
    data["architectures"] = [CLASSES[family][1].__name__]
    if family == "internvl":
        data = internvl.old_config(data) if layout == "old" else data
    elif layout == "old":
        text = data.pop("text_config")
        rope = text.pop("rope_parameters")
        text["rope_theta"] = rope.pop("rope_theta")
        text["rope_scaling"] = rope
        data["vision_config"].pop("rope_parameters", None)
        if family in THIRD:
            data["text_config"] = text
        else:
            rope["type"] = "mrope"
            rope.pop("rope_type")
            data = text | data  # the oldest files keep the text model's fields at the top
            data["vision_config"] |= {
                "model_type": family,
                "spatial_patch_size": data["vision_config"]["patch_size"],
                "in_chans": 3,
            }
    _write(folder / "config.json", data)


def _write_weights(
    folder: Path, family: FamilyName, model: torch.nn.Module, layout: str, sharded: bool
) -> None:
    tensors = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
    for name, value in tensors.items():
        # As the hub has those of Qwen3-VL-MoE: [E, in, out].
        if family == "qwen3_vl_moe" and ".mlp.experts." in name:
            tensors[name] = value.transpose(1, 2).contiguous()
    config: Any = model.config
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    if family.startswith("qwen3_5"):
        tensors["mtp.layers.0.mlp.up_proj.weight"] = torch.ones(4, 4)  # which nobody asks for
    if layout == "old" and family == "internvl":
        tensors = {internvl.old_name(name): value for name, value in tensors.items()}
    elif layout == "old" and family not in THIRD:
        tensors = {
            name.replace("model.language_model.", "model.").replace(
                "model.visual.", "visual."
            ): value
            for name, value in tensors.items()
        }
    if not sharded:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    halves = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    index = {name: file for file, part in halves.items() for name in part}
    _write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def _write_tokenizer(folder: Path, family: FamilyName) -> Tokenizer:
    tiled = family == "internvl"
    special = (*SPECIAL, *(internvl.SPECIAL if tiled else ()))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    assert tokenizer.get_vocab_size() <= VOCAB
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in special
    }
    settings = {
        "tokenizer_class": "Qwen2TokenizerFast",
        "added_tokens_decoder": added,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": tiles.CHAT_TEMPLATE if tiled else CHAT_TEMPLATE,
        **(internvl.TOKENIZER if tiled else {}),
    }
    _write(folder / "tokenizer_config.json", settings)
    return tokenizer


def _write_processor(folder: Path, family: FamilyName, layout: str) -> None:
    if family == "internvl":
        _write(folder / "preprocessor_config.json", internvl.PROCESSOR)
        return
    third = family in THIRD
    factor = 32 if third else 28
    data: dict[str, Any] = {"patch_size": factor // 2, "merge_size": 2, "temporal_patch_size": 2}
    data |= {"image_processor_type": "Qwen2VLImageProcessor"}
    if third:
        data |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    else:
        data |= {
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        }
    least, most = 4 * factor**2, 64 * factor**2
    data |= (
        {"min_pixels": least, "max_pixels": most}
        if layout == "old"
        else {"size": {"shortest_edge": least, "longest_edge": most}}
    )
    _write(folder / "preprocessor_config.json", data)


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2))


@dataclass(frozen=True)
class Reference:
    """transformers on a Qwen-VL checkpoint, float32. `placeholder`: what its template writes for an
    image.

    `pixels` are resized uint8 [H, W, 3]; tokens hold one placeholder per image token.
    """

    folder: Path
    model: Any
    processor: Any
    placeholder: str = "<|vision_start|><|image_pad|><|vision_end|>"

    def resize(self, picture: np.ndarray) -> np.ndarray:
        """A uint8 [H, W, 3] picture as the model's own processor resizes it."""
        height, width = picture.shape[:2]
        size, factor = self.processor.size, self.processor.patch_size * self.processor.merge_size
        target = smart_resize(height, width, factor, size["shortest_edge"], size["longest_edge"])
        if target == (height, width):
            return picture
        planes = (
            torch.from_numpy(picture)
            .permute(2, 0, 1)[None]
            .contiguous(memory_format=torch.channels_last)
        )
        resized = torch.nn.functional.interpolate(
            planes, target, mode="bicubic", antialias=True, align_corners=False
        )
        return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())

    def expand(self, prompt: str, pixels: Sequence[np.ndarray]) -> str:
        """What the model's processor makes of a prompt that has a placeholder for each image."""
        mark = self.placeholder.removeprefix("<|vision_start|>").removesuffix("<|vision_end|>")
        first, *others = prompt.split(mark)
        return first + "".join(
            self.widened(mark, image) + other for image, other in zip(pixels, others, strict=True)
        )

    def widened(self, mark: str, image: np.ndarray) -> str:
        """What stands for one image."""
        factor = self.processor.patch_size * self.processor.merge_size
        return mark * (image.shape[0] * image.shape[1] // factor**2)

    def patches(self, pixels: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        """(pixel_values, image_grid_thw), with the arithmetic of the torchvision processor and the
        layout of the Pillow one.
        """
        rows, grids = [], []
        mean, std = (
            torch.tensor(values) * 255.0
            for values in (self.processor.image_mean, self.processor.image_std)
        )
        for image in pixels:
            normal = (torch.from_numpy(image).float() - mean) / std
            flat, height, width = self.processor.patchify(
                normal.permute(2, 0, 1).numpy(), self.processor.patch_size, 2, 2
            )
            rows.append(torch.from_numpy(flat.copy()))
            grids.append([1, height, width])
        return torch.cat(rows), torch.tensor(grids)

    def inputs(
        self, tokens: Sequence[int], pixels: Sequence[np.ndarray] = ()
    ) -> dict[str, torch.Tensor]:
        """Keyword arguments for the model's `forward` and `generate`."""
        ids = torch.tensor([list(tokens)])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if pixels:
            values, grids = self.patches(pixels)
            types = (ids == self.model.config.image_token_id).int()
            inputs |= {"pixel_values": values, "image_grid_thw": grids, "mm_token_type_ids": types}
        return inputs

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], pixels: Sequence[np.ndarray] = ()) -> torch.Tensor:
        """[T, vocab_size]"""
        self.model.model.rope_deltas = None
        return self.model(**self.inputs(tokens, pixels)).logits[0]

    @torch.inference_mode()
    def generate(
        self, tokens: Sequence[int], pixels: Sequence[np.ndarray] = (), max_new_tokens: int = 16
    ) -> list[int]:
        """Greedy answer tokens, the end token included where it came."""
        self.model.model.rope_deltas = None
        output = self.model.generate(
            **self.inputs(tokens, pixels), max_new_tokens=max_new_tokens, do_sample=False
        )
        return output[0, len(tokens) :].tolist()

    @torch.inference_mode()
    def embeddings(self, pixels: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Per picture [num_tokens, hidden * levels]."""
        values, grids = self.patches(pixels)
        features = self.model.model.get_image_features(values, grids)
        counts = (
            grids.prod(dim=1) // self.model.config.vision_config.spatial_merge_size**2
        ).tolist()
        levels = [features.pooler_output, *features.get("deepstack_features", ())]
        # One tensor for all pictures, or one for each: that depends on transformers' version.
        apart = [x.split(counts) if isinstance(x, torch.Tensor) else x for x in levels]
        return [torch.cat(parts, dim=1) for parts in zip(*apart, strict=True)]


class TileProcessor(GotOcr2ImageProcessorPil):
    """transformers' processor, that resizes as its torchvision backend does."""

    def resize(self, image: np.ndarray, size: Any, *_: Any, **__: Any) -> np.ndarray:
        """Planes uint8 [3, H, W]."""
        target = (size.height, size.width)
        if image.shape[1:] == target:
            return image
        planes = torch.from_numpy(np.ascontiguousarray(image))[None]
        resized = torch.nn.functional.interpolate(
            planes, target, mode="bicubic", antialias=True, align_corners=False
        )
        return resized[0].numpy()


@dataclass(frozen=True)
class TileReference(Reference):
    """transformers on an InternVL checkpoint, float32.

    `pixels` are canvases: an image's tiles one below another, the thumbnail last.
    """

    placeholder: str = "<IMG_CONTEXT>"

    def resize(self, picture: np.ndarray) -> np.ndarray:
        """The canvas of a uint8 [H, W, 3] picture, as the model's own processor cuts it up."""
        tiles = self.processor(
            PIL.Image.fromarray(picture),
            crop_to_patches=True,
            do_rescale=False,
            do_normalize=False,
            return_tensors="np",
        ).pixel_values
        assert tiles.dtype == np.uint8
        return np.ascontiguousarray(tiles.transpose(0, 2, 3, 1).reshape(-1, internvl.SIDE, 3))

    def widened(self, mark: str, image: np.ndarray) -> str:
        count = len(image) // internvl.SIDE * self.model.config.image_seq_length
        return "<img>" + mark * count + "</img>"

    def values(self, pixels: Sequence[np.ndarray]) -> torch.Tensor:
        """pixel_values of all tiles, with the arithmetic of the torchvision processor."""
        tiles = np.concatenate([each.reshape(-1, *[internvl.SIDE] * 2, 3) for each in pixels])
        mean, std = (
            torch.tensor(values) * 255.0
            for values in (self.processor.image_mean, self.processor.image_std)
        )
        return ((torch.from_numpy(tiles).float() - mean) / std).permute(0, 3, 1, 2)

    def inputs(
        self, tokens: Sequence[int], pixels: Sequence[np.ndarray] = ()
    ) -> dict[str, torch.Tensor]:
        ids = torch.tensor([list(tokens)])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return inputs | ({"pixel_values": self.values(pixels)} if pixels else {})

    @torch.inference_mode()
    def embeddings(self, pixels: Sequence[np.ndarray]) -> list[torch.Tensor]:
        features = self.model.model.get_image_features(self.values(pixels)).pooler_output
        counts = [len(each) // internvl.SIDE for each in pixels]
        return [part.flatten(0, 1) for part in features.split(counts)]


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Reference:
    """Load `folder` with transformers."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(folder, dtype=dtype).eval()
    if architecture == "InternVLForConditionalGeneration":
        tiles = TileProcessor.from_pretrained(folder)
        return TileReference(folder, model, tiles)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return Reference(folder, model, processor)


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A smooth random uint8 [H, W, 3] picture with some noise on it."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [
        np.sin(x * rng.uniform(0.02, 0.3) + y * rng.uniform(0.02, 0.3) + rng.uniform(0, 6))
        for _ in range(3)
    ]
    return (
        (127 + 80 * np.stack(waves, axis=-1) + rng.integers(-40, 40, (height, width, 3)))
        .clip(0, 255)
        .astype(np.uint8)
    )
