"""Reads LFM2-VL from GGUF files: short convolutions, and SigLIP 2."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from saccade.plugins.gguf.fields import MetadataFields, require_tokens
from saccade.plugins.gguf.header import GgufFile
from saccade.plugins.gguf.kinds import GgufFacts, ModelKind, NamedTensors, Seen, Source, TextKind
from saccade.plugins.gguf.layers import LAYER, Layered, TowerNames, colours, rope, siglip_config
from saccade.plugins.gguf.made import layer_count

LANGUAGE, TOWER = "model.language_model", "model.vision_tower.vision_model"
PROJECTOR = "model.multi_modal_projector"
BILINEAR = 2
TILES = {
    "do_image_splitting": True,
    "min_tiles": 2,
    "max_tiles": 10,
    "tile_size": 512,
    "min_image_tokens": 64,
    "max_image_tokens": 256,
    "use_thumbnail": True,
}
"""Fields of all published image processors that GGUF files do not contain."""
TEXT = Layered(
    "lfm2",
    layer=LAYER
    | {
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
    },
    outer={
        "token_embd": f"{LANGUAGE}.embed_tokens",
        "token_embd_norm": f"{LANGUAGE}.embedding_norm",
        "output_norm": f"{LANGUAGE}.embedding_norm",
        "output": "lm_head",
    },
    within=f"{LANGUAGE}.layers",
)
SIGHT = TowerNames(
    outer={
        "v.patch_embd": f"{TOWER}.embeddings.patch_embedding",
        "v.position_embd": f"{TOWER}.embeddings.position_embedding",
        "v.post_ln": f"{TOWER}.post_layernorm",
        "mm.input_norm": f"{PROJECTOR}.layer_norm",
        "mm.1": f"{PROJECTOR}.linear_1",
        "mm.2": f"{PROJECTOR}.linear_2",
    },
    within=f"{TOWER}.encoder.layers",
    patches="v.patch_embd.weight",
)


def text_config(fields: MetadataFields, _tensors: Collection[str]) -> dict[str, Any]:
    """Return the language model's section of config.json. Raises CheckpointError."""
    layers = layer_count(fields.file)
    kv_heads = fields.integers("attention.head_count_kv", layers)
    return {
        "model_type": "lfm2",
        "vocab_size": fields.tensor("token_embd.weight").shape[0],
        "hidden_size": fields.integer("embedding_length"),
        "block_ff_dim": fields.integer("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": layers,
        "num_attention_heads": fields.integer("attention.head_count"),
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "conv_L_cache": fields.integer("shortconv.l_cache"),
        "max_position_embeddings": fields.integer("context_length"),
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope(fields),
    }


def text_names(file: GgufFile) -> NamedTensors:
    """Map the language model's tensors to their names in transformers."""
    for name, made in TEXT.names(file):
        if name.endswith(".conv.conv.weight"):
            made = replace(made, shape=(made.shape[0], 1, made.shape[-1]))
        yield name, made


def see(source: Source) -> Seen:
    """Derive config.json and the other JSON files from the metadata of the vision encoder's file.

    Raises CheckpointError.
    """
    sight, tensors = source.sight, source.sight.file.tensors
    vision = siglip_config(sight, "siglip2_vision_model")
    del vision["image_size"]  # images keep their aspect ratio
    vision["num_patches"] = math.prod(sight.tensor("v.position_embd.weight").shape[:-1])
    merge = sight.integer("projector.scale_factor", 2)
    processor = {
        "image_processor_type": "Lfm2VlImageProcessor",
        "encoder_patch_size": vision["patch_size"],
        "downsample_factor": merge,
        "resample": BILINEAR,
        **TILES,
        **colours(sight),
    }
    config = {
        "vision_config": vision,
        "downsample_factor": merge,
        "projector_hidden_size": sight.tensor("mm.1.weight").shape[0],
        "projector_bias": "mm.1.bias" in tensors,
        "projector_use_layernorm": "mm.input_norm.weight" in tensors,
        **require_tokens(source.model, {"image_token_id": "<image>"}),
    }
    said = (*sight.missing, *(f"{name} {value}" for name, value in TILES.items()))
    return Seen(config, {"preprocessor_config.json": processor}, said)


FACTS = GgufFacts(
    models={("lfm2", "lfm2"): ModelKind("Lfm2VlForConditionalGeneration", "lfm2_vl", see)},
    texts={"lfm2": TextKind(text_config, text_names)},
    towers={"lfm2": SIGHT},
)
