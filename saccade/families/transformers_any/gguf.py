"""Language models in GGUF files that transformers' own modules serve."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from saccade.gguf.fields import MetadataFields
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


LLAMA = Layered("llama", turned=TURNED, config=_llama)
QWEN2 = Layered("qwen2")
QWEN3 = Layered("qwen3", layer=NORMED)

FACTS = GgufFacts(
    models={
        ("llama", ""): ModelKind("LlamaForCausalLM", "llama"),
        ("qwen2", ""): ModelKind("Qwen2ForCausalLM", "qwen2"),
        ("qwen3", ""): ModelKind("Qwen3ForCausalLM", "qwen3"),
    },
    texts={"llama": LLAMA.kind(), "qwen2": QWEN2.kind(), "qwen3": QWEN3.kind()},
)
