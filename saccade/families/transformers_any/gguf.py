"""Language models in GGUF files that transformers' own modules serve."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from saccade.gguf.fields import MetadataFields, floats_in
from saccade.gguf.kinds import GgufFacts, ModelKind
from saccade.gguf.layers import LAYER, Layered

TURNED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
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
QWEN2 = Layered("qwen2")
QWEN3 = Layered("qwen3", layer=NORMED)
PHI3 = Layered(
    "phi3",
    layer=LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    config=_phi3,
)

FACTS = GgufFacts(
    models={
        ("llama", ""): ModelKind("LlamaForCausalLM", "llama"),
        ("qwen2", ""): ModelKind("Qwen2ForCausalLM", "qwen2"),
        ("qwen3", ""): ModelKind("Qwen3ForCausalLM", "qwen3"),
        ("phi3", ""): ModelKind("Phi3ForCausalLM", "phi3"),
    },
    texts={
        "llama": LLAMA.kind(),
        "qwen2": QWEN2.kind(),
        "qwen3": QWEN3.kind(),
        "phi3": PHI3.kind(),
    },
)
