"""Reads text-only models from GGUF files: Llama, Mistral, Qwen2, Qwen3 and Phi-3."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from saccade.plugins.gguf.fields import MetadataFields, floats_in
from saccade.plugins.gguf.kinds import GgufFacts, ModelKind
from saccade.plugins.gguf.layers import GATES, LAYER, TURNED, Layered

NORMED = LAYER | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def _llama(
    fields: MetadataFields, tensors: Collection[str], text: dict[str, Any]
) -> dict[str, Any]:
    if fields.has("expert_count"):
        raise fields.file.refuse("a llama with experts (Mixtral) is not supported")
    return text | {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _mistral3(
    fields: MetadataFields, _tensors: Collection[str], text: dict[str, Any]
) -> dict[str, Any]:
    if not fields.has("attention.temperature_scale"):
        return text | {"sliding_window": None}
    rope = text["rope_parameters"]
    if rope["rope_type"] != "yarn":
        raise fields.file.refuse(f"{fields.prefix}rope.scaling.type must be yarn")
    rope |= {
        "mscale": 1.0,
        "mscale_all_dim": fields.number("rope.scaling.yarn_log_multiplier", 0.0),
        "llama_4_scaling_beta": fields.number("attention.temperature_scale"),
    }
    return text | {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"]}


def _qwen3moe(
    fields: MetadataFields, _tensors: Collection[str], text: dict[str, Any]
) -> dict[str, Any]:
    return text | {
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # as in every published model
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _phi3(
    fields: MetadataFields, _tensors: Collection[str], text: dict[str, Any]
) -> dict[str, Any]:
    rope, size = text["rope_parameters"], text["head_dim"]
    rope["partial_rotary_factor"] = fields.integer("rope.dimension_count", size) / size
    near = fields.integer("rope.scaling.original_context_length", text["max_position_embeddings"])
    tensors = fields.file.tensors
    if (long := tensors.get(LONG)) and (short := tensors.get(SHORT)):
        rope |= {
            "rope_type": "longrope",
            "long_factor": floats_in(fields.file, long),
            "short_factor": floats_in(fields.file, short),
            "original_max_position_embeddings": near,
        }
    return text | {
        "original_max_position_embeddings": near,
        "sliding_window": fields.integer("attention.sliding_window", 0) or None,
        "pad_token_id": fields.file.metadata.get("tokenizer.ggml.padding_token_id"),
    }


LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
LLAMA = Layered("llama", turned=TURNED, config=_llama)
MISTRAL3 = Layered("mistral", turned=TURNED, config=_mistral3)
QWEN2 = Layered("qwen2")
QWEN3 = Layered("qwen3", layer=NORMED)
QWEN3MOE = Layered(
    "qwen3_moe",
    layer=NORMED
    | {
        "ffn_gate_inp": "mlp.gate",
        GATES: "mlp.experts.gate_up_proj",
        "ffn_down_exps.weight": "mlp.experts.down_proj",
    },
    config=_qwen3moe,
)
PHI3 = Layered(
    "phi3",
    layer=LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    config=_phi3,
    keep_space=("<unk>", "<s>", "<|endoftext|>"),
)

FACTS = GgufFacts(
    models={
        ("llama", ""): ModelKind("LlamaForCausalLM", "llama"),
        ("mistral3", ""): ModelKind("MistralForCausalLM", "mistral"),
        ("qwen2", ""): ModelKind("Qwen2ForCausalLM", "qwen2"),
        ("qwen3", ""): ModelKind("Qwen3ForCausalLM", "qwen3"),
        ("qwen3moe", ""): ModelKind("Qwen3MoeForCausalLM", "qwen3_moe"),
        ("phi3", ""): ModelKind("Phi3ForCausalLM", "phi3"),
    },
    texts={
        "llama": LLAMA.kind(),
        "mistral3": MISTRAL3.kind(),
        "qwen2": QWEN2.kind(),
        "qwen3": QWEN3.kind(),
        "qwen3moe": QWEN3MOE.kind(),
        "phi3": PHI3.kind(),
    },
)
