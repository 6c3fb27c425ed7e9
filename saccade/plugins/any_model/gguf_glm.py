"""Reads GLM-4, GLM-4.xV and GLM-OCR from GGUF files."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from saccade.plugins.gguf.fields import MetadataFields, require_tokens
from saccade.plugins.gguf.header import GgufFile
from saccade.plugins.gguf.kinds import GgufFacts, ModelKind, NamedTensors, Seen, Source
from saccade.plugins.gguf.layers import (
    GATES,
    HEADS,
    LAYER,
    TURNED,
    Layered,
    TowerNames,
    activation,
    colours,
)
from saccade.plugins.gguf.made import Heads, from_halves, two_frames

TOWER = "model.visual"
PATCH = "v.patch_embd.weight"
PLACES = "v.position_embd.weight"
"""Name of the tensor of learned positions, which GLM-OCR lacks."""
BICUBIC = 3
PIXELS = {"shortest_edge": 12_544, "longest_edge": 9_633_792}
"""Limits on the pixels of two frames. GGUF files lack them; all published image processors have
these values.
"""
TOKENS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
NAMES = TowerNames(
    outer={
        "v.patch_embd": f"{TOWER}.patch_embed.proj",
        "v.norm_embd": f"{TOWER}.post_conv_layernorm",
        "v.position_embd": f"{TOWER}.embeddings.position_embedding",
        "v.post_ln": f"{TOWER}.post_layernorm",
        "mm.patch_merger": f"{TOWER}.downsample",
        "mm.model.fc": f"{TOWER}.merger.proj",
        "mm.post_norm": f"{TOWER}.merger.post_projection_norm",
        "mm.gate": f"{TOWER}.merger.gate_proj",
        "mm.up": f"{TOWER}.merger.up_proj",
        "mm.down": f"{TOWER}.merger.down_proj",
    },
    within=f"{TOWER}.blocks",
    block={
        "ln1": "norm1",
        "ln2": "norm2",
        "attn_qkv": "attn.qkv",
        "attn_q_norm": "attn.q_norm",
        "attn_k_norm": "attn.k_norm",
        "attn_out": "attn.proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
)


def _halves(fields: MetadataFields, heads: int, size: int) -> Heads | None:
    """Return how to reorder the values of heads with several rotary axes, or None for a single
    axis.
    """
    if not fields.has("rope.dimension_sections"):
        return None
    turned = fields.integer("rope.dimension_count", size)
    if turned % 2 or not 0 < turned <= size:
        raise fields.file.refuse(
            f"{fields.prefix}rope.dimension_count is {turned}, of heads with {size} values"
        )
    return from_halves(heads, size, turned)


def _dense(
    fields: MetadataFields, tensors: Collection[str], text: dict[str, Any]
) -> dict[str, Any]:
    rope, size = text["rope_parameters"], text["head_dim"]
    rope["partial_rotary_factor"] = fields.integer("rope.dimension_count", size) / max(1, size)
    return text | {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "pad_token_id": fields.file.metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _experts(
    fields: MetadataFields, tensors: Collection[str], text: dict[str, Any]
) -> dict[str, Any]:
    return _dense(fields, tensors, text) | {
        "n_routed_experts": fields.integer("expert_count"),
        "n_shared_experts": fields.integer("expert_shared_count", 1),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "first_k_dense_replace": fields.integer("leading_dense_block_count"),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        "norm_topk_prob": fields.flag("expert_weights_norm", True),
        "n_group": fields.integer("expert_group_count", 1),
        "topk_group": fields.integer("expert_group_used_count", 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
    }


DENSE = Layered(
    "glm4",
    layer=LAYER
    | {
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    turned=TURNED,
    order=_halves,
    config=_dense,
)
EXPERTS = Layered(
    "glm4_moe",
    layer=LAYER
    | {
        "post_attention_norm": "post_attention_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_gate_inp": "mlp.gate",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        GATES: "mlp.experts.gate_up_proj",
        "ffn_down_exps.weight": "mlp.experts.down_proj",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    config=_experts,
)


def tower_names(file: GgufFile) -> NamedTensors:
    """Map the vision encoder's tensors to their names in transformers."""
    for name, made in NAMES(file):
        if name == f"{PATCH}.1":
            continue
        (source,) = made.sources
        yield name, two_frames(file, source) if source.name == PATCH else made


def see(source: Source) -> Seen:
    """Derive config.json and the other JSON files from the metadata of the vision encoder's file.

    Raises CheckpointError.
    """
    ocr = PLACES not in source.sight.file.tensors
    return _seen(source, "GlmOcr" if ocr else "Glm4v", "glm_ocr" if ocr else "glm4v")


def see_experts(source: Source) -> Seen:
    """Derive the JSON files as `see` does, for a model with experts. Raises CheckpointError."""
    if source.text["use_qk_norm"]:
        raise source.model.refuse(
            "norms of queries and keys are not supported with a vision encoder"
        )
    return _seen(source, "Glm4vMoe", "glm4v_moe")


def _seen(source: Source, name: str, kind: str) -> Seen:
    """Derive config.json and the other JSON files from the metadata of the vision encoder's file.

    name: the prefix of `ForConditionalGeneration` in the architecture's name.
    kind: the model type.
    """
    model, sight = source.model, source.sight
    vision = _vision(source, kind)
    sections = MetadataFields(model, f"{model.architecture}.").numbers("rope.dimension_sections", 3)
    rope = source.text["rope_parameters"] | {"mrope_section": sections}
    config = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": {**source.text, "model_type": f"{kind}_text", "rope_parameters": rope},
        "vision_config": vision,
        **require_tokens(model, TOKENS),
    }
    images = "Glm46V" if kind == "glm_ocr" else "Glm4v"
    processor = {
        "image_processor_type": f"{images}ImageProcessor",
        "processor_class": f"{images}Processor",
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": 2,
        "size": PIXELS,
        "resample": BICUBIC,
        **colours(sight),
    }
    said = (*sight.missing, *(f"{edge} {count}" for edge, count in PIXELS.items()))
    return Seen(config, {"preprocessor_config.json": processor}, said)


def _vision(source: Source, kind: str) -> dict[str, Any]:
    sight = source.sight
    kernel = sight.tensor("mm.patch_merger.weight").shape
    inner = "v.blk.0.ffn_gate.weight" if kind == "glm_ocr" else "mm.gate.weight"
    return {
        "model_type": f"{kind}_vision",
        "depth": sight.integer("block_count"),
        "hidden_size": sight.integer("embedding_length"),
        "num_heads": sight.integer(HEADS),
        "image_size": sight.integer("image_size"),
        "patch_size": sight.integer("patch_size"),
        "rms_norm_eps": sight.number("attention.layer_norm_epsilon"),
        "spatial_merge_size": kernel[-1],
        "temporal_patch_size": 2,
        "out_hidden_size": source.check_width("mm.model.fc.weight"),
        "intermediate_size": sight.tensor(inner).shape[0],
        "attention_bias": "v.blk.0.attn_qkv.bias" in sight.file.tensors,
        "hidden_act": activation(sight, "silu"),
    }


FACTS = GgufFacts(
    models={
        ("glm4", ""): ModelKind("Glm4ForCausalLM", "glm4"),
        ("glm4", "glm4v"): ModelKind("Glm4vForConditionalGeneration", "glm4v", see),
        ("glm4moe", ""): ModelKind("Glm4MoeForCausalLM", "glm4_moe"),
        ("glm4moe", "glm4v"): ModelKind(
            "Glm4vMoeForConditionalGeneration", "glm4v_moe", see_experts
        ),
    },
    texts={"glm4": DENSE.kind(), "glm4moe": EXPERTS.kind()},
    towers={"glm4v": tower_names},
)
