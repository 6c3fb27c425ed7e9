"""Configurations of real models, as fields over those of the tiny checkpoints of their families.

Facts only; `checkpoint.py` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from saccade_bench.lab.presets import NEWER_WORDS, REAL_WORDS
from saccade_bench.screens.layouts import CANDIDATES

Fields = dict[str, Any]
PLACES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
"""SmolVLM's marks of tiles."""


@dataclass(frozen=True, slots=True)
class FamilyPreset:
    """Fields of config.json, and of the image processor's file, that differ from `tiny`'s.

    words: tokens before the special ones. special: beside those of the tiny checkpoint.
    """

    tiny: str
    text: Fields
    vision: Fields
    processor: Fields
    fields: Fields = field(default_factory=dict)
    tie: bool = False
    words: int = REAL_WORDS
    special: tuple[str, ...] = ()

    @property
    def options(self) -> Mapping[str, Any]:
        """Return options of `Tiny.write_settings`."""
        own = {"text": self.text, "vision": self.vision, "processor": self.processor}
        return own | {"fields": self.fields, "tie": self.tie, "dtype": "bfloat16"}


def _text(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> Fields:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
    }


def _siglip(side: int, patch: int, depth: int = 27, hidden: int = 1152) -> Fields:
    large = hidden == 1152
    return {
        "hidden_size": hidden,
        "num_hidden_layers": depth,
        "num_attention_heads": 16 if large else hidden // 64,
        "intermediate_size": 4304 if large else 4 * hidden,
        "image_size": side,
        "patch_size": patch,
    }


def _split(side: int, across: int) -> Fields:
    edges = {"size": {"longest_edge": side * across}, "max_image_size": {"longest_edge": side}}
    return edges | {"resample": 1}


def _smolvlm(
    text: Fields, vision: Fields, processor: Fields, merge: int, theta: float
) -> FamilyPreset:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    size = {"vocab_size": 49280, "max_position_embeddings": 8192, "head_dim": 64}
    fields = {"scale_factor": merge}
    return FamilyPreset(
        "smolvlm", text | size | rope, vision, processor, fields, words=49152, special=PLACES
    )


def _step3(layers: int, depth: int) -> FamilyPreset:
    return FamilyPreset(
        "step3_vl",
        _text(4096, layers, 32, 8, 12288)
        | {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 65536},
        {
            "width": 1536,
            "layers": depth,
            "heads": 16,
            "mlp_ratio": 8960 / 1536,
            "image_size": 728,
            "patch_size": 14,
        },
        {"size": {"height": 728, "width": 728}, "patch_size": 504, "max_image_size": 3024},
    )


def _deepseek(text: Fields, vocab: int, words: int) -> FamilyPreset:
    """The tower is the same in all sizes."""
    candidates = {"candidate_resolutions": [[*size] for size in CANDIDATES]}
    experts = {"n_shared_experts": 2, "num_experts_per_tok": 6, "n_routed_experts": 64}
    return FamilyPreset(
        "deepseek_vl_v2",
        experts | {"vocab_size": vocab, "max_position_embeddings": 4096} | text,
        {
            "image_size": 384,
            "width": 1152,
            "layers": 27,
            "heads": 16,
            "mlp_ratio": 3.7362,
        },
        candidates,
        candidates,
        words=words,
    )


HEADS = {"use_mla": False, "kv_lora_rank": None} | dict.fromkeys(
    ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0
)
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
CORRECTED = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.0,
}

FAMILY_PRESETS: dict[str, FamilyPreset] = {
    "step3-vl-10b": _step3(36, 47),
    # Two layers of each part, as wide as they are.
    "cut-step3-vl-10b": _step3(2, 2),
    "smolvlm-256m": _smolvlm(
        _text(576, 30, 9, 3, 1536), _siglip(512, 16, 12, 768), _split(512, 4), 4, 1e5
    ),
    "smolvlm2-2.2b": _smolvlm(
        _text(2048, 24, 32, 32, 8192), _siglip(384, 14), _split(384, 4), 3, 1.3e5
    ),
    "idefics3-8b": FamilyPreset(
        "idefics3",
        _text(4096, 32, 32, 8, 14336)
        | {"vocab_size": 128259, "head_dim": 128, "max_position_embeddings": 131072}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        _siglip(364, 14),
        _split(364, 4),
        {"scale_factor": 2},
        words=128000,
        special=PLACES,
    ),
    "minicpm-v-4.6": FamilyPreset(
        "minicpmv4_6",
        _text(1024, 24, 8, 2, 3584)
        | {"vocab_size": 248320, "head_dim": 256, "max_position_embeddings": 262144}
        | {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}
            | {"partial_rotary_factor": 0.25}
        },
        _siglip(980, 14),
        {"scale_resolution": 448, "max_slice_nums": 9, "patch_size": 14},
        {"insert_layer_id": 6},
        tie=True,
        words=NEWER_WORDS,
    ),
    "deepseek-vl2-tiny": _deepseek(
        _text(1280, 12, 10, 10, 6848) | HEADS | {"moe_intermediate_size": 896}, 129280, 128000
    ),
    "deepseek-vl2-small": _deepseek(
        _text(2048, 27, 16, 16, 10944) | LATENT | {"moe_intermediate_size": 1408}, 102400, 100000
    ),
    "deepseek-vl2": _deepseek(
        _text(2560, 30, 32, 32, 12288)
        | LATENT
        | CORRECTED
        | {"moe_intermediate_size": 1536, "n_routed_experts": 72},
        129280,
        128000,
    ),
    "hunyuan-ocr": FamilyPreset(
        "hunyuan_vl",
        _text(1024, 24, 16, 8, 3584)
        | {"vocab_size": 120818, "head_dim": 128, "max_position_embeddings": 32768}
        | {
            "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 1e4}
            | {"alpha": 1000.0, "mrope_section": [16, 16, 16, 16]}
        },
        {
            "hidden_size": 1152,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "intermediate_size": 4304,
            "patch_size": 16,
            "max_image_size": 2048,
            "out_hidden_size": 1024,
        },
        {"patch_size": 16, "size": {"shortest_edge": 512**2, "longest_edge": 2048**2}},
        tie=True,
        words=120000,
    ),
    "dots-ocr": FamilyPreset(
        "dots_ocr",
        _text(1536, 28, 12, 2, 8960) | {"vocab_size": 151936, "max_position_embeddings": 131072},
        {
            "embed_dim": 1536,
            "hidden_size": 1536,
            "num_hidden_layers": 42,
            "num_attention_heads": 12,
            "intermediate_size": 4224,
            "patch_size": 14,
        },
        {"patch_size": 14, "min_pixels": 3136, "max_pixels": 11289600},
    ),
    "kimi-vl-a3b": FamilyPreset(
        "kimi_vl",
        _text(2048, 27, 16, 16, 11264)
        | LATENT
        | CORRECTED
        | {"vocab_size": 163840, "max_position_embeddings": 131072, "rope_theta": 8e5}
        | {"moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6}
        | {"n_shared_experts": 2, "routed_scaling_factor": 2.446},
        {
            "hidden_size": 1152,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "intermediate_size": 4304,
            "init_pos_emb_height": 64,
            "init_pos_emb_width": 64,
            "patch_size": 14,
        },
        {"patch_size": 14, "in_token_limit": 4096},
        words=163584,
    ),
}
