"""Reads Gemma 4 from GGUF files, with or without a vision encoder."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from saccade.plugins.gguf.fields import MetadataFields, floats_in, require_tokens, token_ids
from saccade.plugins.gguf.header import GgufFile
from saccade.plugins.gguf.kinds import GgufFacts, ModelKind, NamedTensors, Seen, Source, TextKind
from saccade.plugins.gguf.layers import (
    FACTORS,
    LAYER,
    OUTER,
    Layered,
    TowerNames,
    colours,
    siglip_config,
)
from saccade.plugins.gguf.made import layer_count

FULL, NEAR = "full_attention", "sliding_attention"
BICUBIC = 3
TOKENS_OF_AN_IMAGE = 280
"""Maximum tokens of an image, as in all published image processors."""
MERGE = 3
"""Default edge, in patches, of the square that becomes one token."""
TOKENS = {
    "boi_token_id": "<|image>",
    "image_token_id": "<|image|>",
    "eoi_token_id": "<image|>",
}
SILENT = {"video_token_id": "<|video|>", "audio_token_id": "<|audio|>"}
CLIPPED = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The matrices in a block whose inputs and outputs are clamped."""
TOWER = TowerNames(
    outer={
        "v.patch_embd": "model.vision_tower.patch_embedder.input_proj",
        "v.position_embd.weight": "model.vision_tower.patch_embedder.position_embedding_table",
        "v.std_bias": "model.vision_tower.std_bias",
        "v.std_scale": "model.vision_tower.std_scale",
        "mm.input_projection": "model.embed_vision.embedding_projection",
    },
    within="model.vision_tower.encoder.layers",
    block={
        "ln1": "input_layernorm",
        "ln2": "pre_feedforward_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        **CLIPPED,
        **{f"{name}.weight": f"{module}.linear.weight" for name, module in CLIPPED.items()},
    },
    patches="v.patch_embd.weight",
)
TEXT = Layered(
    "gemma4_text",
    layer=LAYER
    | {
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "layer_output_scale.weight": "layer_scalar",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "ffn_gate_up_exps.weight": "experts.gate_up_proj",
        "ffn_down_exps.weight": "experts.down_proj",
    },
    outer=OUTER
    | {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
)


def text_config(fields: MetadataFields, tensors: Collection[str]) -> dict[str, Any]:
    """Return the language model's section of config.json. Raises CheckpointError."""
    layers = layer_count(fields.file)
    near = fields.flags("attention.sliding_window_pattern", layers)
    if all(near):
        raise fields.file.refuse(f"{fields.prefix}attention.sliding_window_pattern has no false")
    full = near.index(False)
    kv_heads = fields.integers("attention.head_count_kv", layers)
    widths = fields.integers("feed_forward_length", layers)
    per_layer = fields.integer("embedding_length_per_layer_input", 0)
    text: dict[str, Any] = {
        "model_type": "gemma4_text",
        "vocab_size": fields.tensor("token_embd.weight").shape[0],
        "hidden_size": fields.integer("embedding_length"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] > widths[0],
        "num_hidden_layers": layers,
        "num_attention_heads": fields.integer("attention.head_count"),
        "num_key_value_heads": kv_heads[near.index(True)] if any(near) else kv_heads[full],
        "num_global_key_value_heads": kv_heads[full],
        "head_dim": fields.integer("attention.key_length_swa"),
        "global_head_dim": fields.integer("attention.key_length"),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
        "num_kv_shared_layers": fields.integer("attention.shared_kv_layers", 0),
        "layer_types": [NEAR if each else FULL for each in near],
        "sliding_window": fields.integer("attention.sliding_window"),
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _ropes(fields),
        "hidden_size_per_layer_input": per_layer,
        # Not in the file. Small models, which have per-layer embeddings, use causal attention.
        "use_bidirectional_attention": None if per_layer else "vision",
        "pad_token_id": fields.file.metadata.get("tokenizer.ggml.padding_token_id", 0),
    }
    if per_layer:
        text["vocab_size_per_layer_input"] = fields.tensor("per_layer_token_embd.weight").shape[0]
    if fields.has("final_logit_softcapping"):
        text["final_logit_softcapping"] = fields.number("final_logit_softcapping")
    if fields.has("expert_count"):
        text |= {
            "enable_moe_block": True,
            "num_experts": fields.integer("expert_count"),
            "top_k_experts": fields.integer("expert_used_count"),
            "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        }
    return text


def _ropes(fields: MetadataFields) -> dict[str, Any]:
    """Return the configurations of both rotary embeddings.

    In layers with full attention, only part of each head is rotated: the fraction of frequency
    factors in the file that equal 1.
    """
    factors = floats_in(fields.file, fields.tensor(FACTORS))
    return {
        FULL: {
            "rope_type": "proportional",
            "rope_theta": fields.number("rope.freq_base"),
            "partial_rotary_factor": factors.count(1.0) / max(1, len(factors)),
        },
        NEAR: {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa")},
    }


def tower_names(file: GgufFile) -> NamedTensors:
    """Map the vision encoder's tensors to their names in transformers. The audio encoder's tensors
    get names that no module uses.
    """
    for name, made in TOWER(file):
        yield (f"model.audio_tower.{name}" if name.startswith(("a.", "mm.a.")) else name), made


def see(source: Source) -> Seen:
    """Derive config.json and the other JSON files from the metadata of the vision encoder's file.

    Raises CheckpointError.
    """
    sight, tensors = source.sight, source.sight.file.tensors
    vision = siglip_config(sight, "gemma4_vision")
    heads, queries = vision["num_attention_heads"], sight.tensor("v.blk.0.attn_q.weight").shape[0]
    merge = max(1, sight.integer("projector.scale_factor", MERGE))
    places = sight.tensor("v.position_embd.weight").shape[1]
    budget = min(TOKENS_OF_AN_IMAGE, places // merge)  # since all tokens may be in one row
    vision |= {
        "num_key_value_heads": heads,
        "head_dim": queries // max(1, heads),
        "rms_norm_eps": vision.pop("layer_norm_eps"),
        "pooling_kernel_size": merge,
        "position_embedding_size": places,
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in tensors,
        "standardize": "v.std_scale" in tensors,
    }
    processor = {
        "image_processor_type": "Gemma4ImageProcessor",
        "do_normalize": False,
        "patch_size": vision["patch_size"],
        "pooling_kernel_size": merge,
        "max_soft_tokens": budget,
        "resample": BICUBIC,
        **colours(sight),
    }
    known = token_ids(source.model, set(SILENT.values()))
    config = {
        "vision_config": vision,
        **require_tokens(source.model, TOKENS),
        **{name: known[token] for name, token in SILENT.items() if token in known},
    }
    said = (*sight.missing, f"images of at most {budget} tokens")
    return Seen(config, {"preprocessor_config.json": processor}, said)


FACTS = GgufFacts(
    models={
        ("gemma4", ""): ModelKind("Gemma4ForCausalLM", "gemma4_text"),
        ("gemma4", "gemma4v"): ModelKind("Gemma4ForConditionalGeneration", "gemma4", see),
    },
    texts={"gemma4": TextKind(text_config, TEXT.names)},
    towers={"gemma4v": tower_names},
)
