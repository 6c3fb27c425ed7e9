"""Reads Gemma 3 from GGUF files, with or without a vision encoder."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from saccade.plugins.gguf.fields import MetadataFields, require_tokens, token_ids
from saccade.plugins.gguf.kinds import GgufFacts, ModelKind, Seen, Source
from saccade.plugins.gguf.layers import LAYER, Layered, TowerNames, colours, siglip_config

EVERY = 6
"""Every sixth layer has full attention by default. The others have a sliding window."""
LARGEST, MAX_LAYERS = "27B", 62
"""The size name and layer count of the model whose query scaling is derived from its hidden size
and number of heads instead of the head size.
"""
NEAR_THETA = 10_000.0
BILINEAR = 2
TOKENS = {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"}
ROWS = ("<image_soft_token>", "[multimodal]", "<unused0>")
"""Names of the image token, in order of preference. Its embedding in the file is never used."""
NAMES = TowerNames(
    outer={
        "v.patch_embd": "model.vision_tower.embeddings.patch_embedding",
        "v.position_embd": "model.vision_tower.embeddings.position_embedding",
        "v.post_ln": "model.vision_tower.post_layernorm",
        "mm.input_projection.weight": "model.multi_modal_projector.mm_input_projection_weight",
        "mm.soft_emb_norm": "model.multi_modal_projector.mm_soft_emb_norm",
    },
    within="model.vision_tower.encoder.layers",
    less_one=("mm.soft_emb_norm.weight",),
)


def _text(
    fields: MetadataFields, _tensors: Collection[str], text: dict[str, Any]
) -> dict[str, Any]:
    if fields.has("final_logit_softcapping"):
        raise fields.file.refuse(f"{fields.prefix}final_logit_softcapping is not supported")
    everywhere = text.pop("rope_parameters")
    nearby = {
        "rope_type": "default",
        "rope_theta": fields.number("rope.freq_base_swa", NEAR_THETA),
    }
    layers, hidden = text["num_hidden_layers"], text["hidden_size"]
    scalar = hidden // text["num_attention_heads"] if layers == MAX_LAYERS else None
    every = fields.integer("attention.sliding_window_pattern", EVERY)
    return text | {
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (at + 1) % max(1, every) else "full_attention"
            for at in range(layers)
        ],
        "query_pre_attn_scalar": scalar or text["head_dim"],
        "rope_parameters": {"full_attention": everywhere, "sliding_attention": nearby},
    }


TEXT = Layered(
    "gemma3_text",
    layer=LAYER
    | {
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    around_one=True,
    config=_text,
)


def see(source: Source) -> Seen:
    """Derive config.json and the other JSON files from the metadata of the vision encoder's file.

    Raises CheckpointError.
    """
    sight = source.sight
    vision = siglip_config(sight, "siglip_vision_model") | {"vision_use_head": False}
    merge = max(1, sight.integer("projector.scale_factor", 4))
    tokens = (vision["image_size"] // vision["patch_size"] // merge) ** 2
    side = {"height": vision["image_size"], "width": vision["image_size"]}
    processor = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": side,
        "image_seq_length": tokens,
        "resample": BILINEAR,
        **colours(sight),
    }
    known = token_ids(source.model, ROWS)
    row = next((token for token in ROWS if token in known), ROWS[0])
    config = {
        "vision_config": vision,
        "mm_tokens_per_image": tokens,
        **require_tokens(source.model, TOKENS),
        **require_tokens(source.model, {"image_token_index": row}),
    }
    return Seen(config, {"preprocessor_config.json": processor})


FACTS = GgufFacts(
    models={
        ("gemma3", ""): ModelKind("Gemma3ForCausalLM", "gemma3_text"),
        ("gemma3", "gemma3"): ModelKind("Gemma3ForConditionalGeneration", "gemma3", see),
    },
    texts={"gemma3": TEXT.kind()},
    towers={"gemma3": NAMES},
)
