"""Configurations of real models, and of small ones with the same architectures, for
`checkpoint.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Family = Literal[
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "internvl"
]

ARCHITECTURES: dict[Family, str] = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
}
THIRD = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families with the vision encoder of Qwen3-VL."""
REAL_WORDS = 151643
"""Tokens before the special ones in the tokenizers of Qwen2 and Qwen3."""
NEWER_WORDS = 248044
"""The same for Qwen3.5."""
FEW_WORDS = 256 + 512


@dataclass(frozen=True, slots=True)
class Preset:
    """A configuration. `text` and `vision` are fields of config.json that are not common to the
    family. `words` is the number of tokens before the special ones.
    """

    family: Family
    text: dict[str, Any]
    vision: dict[str, Any]
    tied: bool = False
    words: int = REAL_WORDS
    weights: bool = False


def _text(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int = 151936,
    **other: Any,
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        **other,
    }


def _tower(
    depth: int, hidden: int, heads: int, intermediate: int, out: int, **other: Any
) -> dict[str, Any]:
    sizes = {
        "depth": depth,
        "hidden_size": hidden,
        "num_heads": heads,
        "intermediate_size": intermediate,
        "out_hidden_size": out,
    }
    return sizes | other


def _tile_tower(depth: int, hidden: int, heads: int, intermediate: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": depth,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
    }


def _rope(sections: tuple[int, int, int], **other: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections)}
    return {"rope_parameters": rope | other}


def _delta(key_heads: int, value_heads: int, dim: int) -> dict[str, Any]:
    """Return the fields of linear attention, with full attention in every fourth layer."""
    return {
        "full_attention_interval": 4,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
        "linear_conv_kernel_dim": 4,
    }


def _experts(count: int, top: int, width: int) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_tok": top,
        "moe_intermediate_size": width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


WINDOWS = {"fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112}
NEWER = {"vocab_size": 248320, "head_dim": 256}
FEW = {"vocab_size": 1024}
SMALL = _text(512, 8, 8, 2, 1536) | FEW
TINY = _text(64, 3, 4, 2, 96) | FEW
HEADS_OF_64, HEADS_OF_16 = {"head_dim": 64}, {"head_dim": 16}
INTERNVL = _tile_tower(24, 1024, 16, 4096)
LARGE_TOWER = (27, 1152, 16, 4304)
SMALL_TOWER = _tower(6, 256, 4, 1024, 512)
TINY_TOWER = _tower(3, 64, 2, 96, 64, num_position_embeddings=36)


def _deepstack(*layers: int) -> dict[str, Any]:
    return {"deepstack_visual_indexes": [*layers]}


def _made(family: Family, text: dict[str, Any], vision: dict[str, Any]) -> Preset:
    """Return a preset with a small vocabulary and random weights, which can be served."""
    return Preset(family, text, vision, words=FEW_WORDS, weights=True)


PRESETS: dict[str, Preset] = {
    "internvl3-1b": Preset(
        "internvl", _text(896, 24, 14, 2, 4864, vocab=151674, head_dim=64), INTERNVL
    ),
    "internvl3-2b": Preset("internvl", _text(1536, 28, 12, 2, 8960, vocab=151674), INTERNVL),
    "internvl3-8b": Preset("internvl", _text(3584, 28, 28, 4, 18944, vocab=151674), INTERNVL),
    "qwen2.5-vl-3b": Preset(
        "qwen2_5_vl",
        _text(2048, 36, 16, 2, 11008),
        _tower(32, 1280, 16, 3420, 2048, **WINDOWS),
        tied=True,
    ),
    "qwen2.5-vl-7b": Preset(
        "qwen2_5_vl",
        _text(3584, 28, 28, 4, 18944, vocab=152064),
        _tower(32, 1280, 16, 3420, 3584, **WINDOWS),
    ),
    "qwen3-vl-2b": Preset(
        "qwen3_vl",
        _text(2048, 28, 16, 8, 6144, head_dim=128),
        _tower(24, 1024, 16, 4096, 2048) | _deepstack(5, 11, 17),
        tied=True,
    ),
    "qwen3-vl-4b": Preset(
        "qwen3_vl",
        _text(2560, 36, 32, 8, 9728, head_dim=128),
        _tower(24, 1024, 16, 4096, 2560) | _deepstack(5, 11, 17),
        tied=True,
    ),
    "qwen3-vl-8b": Preset(
        "qwen3_vl",
        _text(4096, 36, 32, 8, 12288, head_dim=128),
        _tower(*LARGE_TOWER, 4096) | _deepstack(8, 16, 24),
    ),
    "qwen3-vl-30b-a3b": Preset(
        "qwen3_vl_moe",
        _text(2048, 48, 32, 4, 6144, head_dim=128, **_experts(128, 8, 768)),
        _tower(*LARGE_TOWER, 2048) | _deepstack(8, 16, 24),
    ),
    "qwen3-vl-235b-a22b": Preset(
        "qwen3_vl_moe",
        _text(4096, 94, 64, 4, 12288, head_dim=128, **_experts(128, 8, 1536)),
        _tower(*LARGE_TOWER, 4096) | _deepstack(8, 16, 24),
    ),
    "qwen3.5-2b": Preset(
        "qwen3_5",
        _text(2048, 24, 8, 2, 6144) | NEWER | _delta(16, 16, 128),
        _tower(24, 1024, 16, 4096, 2048),
        tied=True,
        words=NEWER_WORDS,
    ),
    "qwen3.5-9b": Preset(
        "qwen3_5",
        _text(4096, 32, 16, 4, 12288) | NEWER | _delta(16, 32, 128),
        _tower(*LARGE_TOWER, 4096),
        words=NEWER_WORDS,
    ),
    "qwen3.5-27b": Preset(
        "qwen3_5",
        _text(5120, 64, 24, 4, 17408) | NEWER | _delta(16, 48, 128),
        _tower(*LARGE_TOWER, 5120),
        words=NEWER_WORDS,
    ),
    "qwen3.5-35b-a3b": Preset(
        "qwen3_5_moe",
        _text(2048, 40, 16, 2, 512, shared_expert_intermediate_size=512)
        | NEWER
        | _delta(16, 32, 128)
        | _experts(256, 8, 512),
        _tower(*LARGE_TOWER, 2048),
        words=NEWER_WORDS,
    ),
    "small-qwen2.5-vl": _made(
        "qwen2_5_vl",
        SMALL | _rope((8, 12, 12)),
        _tower(6, 256, 4, 704, 512, fullatt_block_indexes=[2, 5], window_size=112),
    ),
    "small-qwen3-vl": _made(
        "qwen3_vl", SMALL | HEADS_OF_64 | _rope((12, 10, 10)), SMALL_TOWER | _deepstack(1, 2, 4)
    ),
    "small-qwen3.5": _made(
        "qwen3_5",
        SMALL | HEADS_OF_64 | _delta(4, 8, 64) | _rope((3, 3, 2), partial_rotary_factor=0.25),
        SMALL_TOWER,
    ),
    # Sizes that are not multiples of common tile sizes, to compare bits.
    "wide-qwen3.5": _made(
        "qwen3_5",
        _text(640, 4, 10, 2, 1000)
        | FEW
        | HEADS_OF_64
        | _delta(5, 10, 64)
        | _rope((3, 3, 2), partial_rotary_factor=0.25),
        _tower(2, 256, 4, 1024, 640),
    ),
    "small-qwen3-vl-moe": _made(
        "qwen3_vl_moe",
        SMALL | HEADS_OF_64 | _rope((12, 10, 10)) | _experts(32, 4, 256),
        SMALL_TOWER | _deepstack(1, 2, 4),
    ),
    # Two layers of qwen3-vl-30b-a3b with a small vocabulary and experts of the real size.
    "cut-qwen3-vl-30b-a3b": _made(
        "qwen3_vl_moe",
        _text(2048, 2, 32, 4, 6144, head_dim=128) | FEW | _experts(128, 8, 768),
        _tower(2, 256, 4, 1024, 2048) | _deepstack(1),
    ),
    "tiny-qwen2-vl": _made(
        "qwen2_vl",
        _text(64, 2, 4, 2, 96) | FEW | _rope((2, 3, 3)),
        {"depth": 2, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 64},
    ),
    "tiny-qwen2.5-vl": _made(
        "qwen2_5_vl",
        _text(64, 2, 4, 2, 96) | FEW | _rope((2, 3, 3)),
        _tower(3, 64, 2, 96, 64, fullatt_block_indexes=[1], window_size=56),
    ),
    "tiny-qwen3-vl": _made(
        "qwen3_vl", TINY | HEADS_OF_16 | _rope((4, 2, 2)), TINY_TOWER | _deepstack(0, 1)
    ),
    "tiny-qwen3.5": _made(
        "qwen3_5",
        _text(64, 4, 4, 2, 96)
        | FEW
        | HEADS_OF_16
        | _delta(2, 4, 16)
        | _rope((2, 1, 1), partial_rotary_factor=0.5),
        TINY_TOWER,
    ),
    "tiny-qwen3.5-moe": _made(
        "qwen3_5_moe",
        _text(64, 4, 4, 2, 48, shared_expert_intermediate_size=48)
        | FEW
        | HEADS_OF_16
        | _delta(2, 4, 16)
        | _rope((2, 1, 1), partial_rotary_factor=0.5)
        | _experts(8, 2, 40),
        TINY_TOWER,
    ),
    "tiny-qwen3-vl-moe": _made(
        "qwen3_vl_moe",
        TINY | HEADS_OF_16 | _rope((4, 2, 2)) | _experts(8, 2, 40),
        TINY_TOWER | _deepstack(0, 1),
    ),
    "tiny-internvl": _made(
        "internvl",
        _text(64, 2, 4, 2, 96) | FEW,
        _tile_tower(2, 64, 2, 96) | {"image_size": [112, 112]},
    ),
}
