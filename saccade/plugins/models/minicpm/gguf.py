"""Reads MiniCPM-V 4.6 from GGUF files: a Qwen3.5 language model, and a vision encoder that merges
patches.
"""

from __future__ import annotations

import math

from saccade.plugins.gguf.fields import require_tokens
from saccade.plugins.gguf.kinds import GgufFacts, ModelKind, Seen, Source
from saccade.plugins.gguf.layers import TowerNames, colours, siglip_config

TOWER, INNER, MERGER = "model.vision_tower", "model.vision_tower.vit_merger", "model.merger.mlp.0"
BICUBIC = 3
MODES = {4: "16x", 2: "4x"}
"""config.json's `downsample_mode`, by the edge in patches of the square that becomes one token."""
SLICES = 9
"""Maximum slices of an image, as in the published image processor. GGUF files do not have it."""
INSERT = 6
"""The default layer after which patches are merged."""
NAMES = TowerNames(
    outer={
        "v.patch_embd": f"{TOWER}.embeddings.patch_embedding",
        "v.position_embd": f"{TOWER}.embeddings.position_embedding",
        "v.post_ln": f"{TOWER}.post_layernorm",
        "v.vit_merger.ln1": f"{INNER}.layer_norm1",
        "v.vit_merger.attn_q": f"{INNER}.self_attn.q_proj",
        "v.vit_merger.attn_k": f"{INNER}.self_attn.k_proj",
        "v.vit_merger.attn_v": f"{INNER}.self_attn.v_proj",
        "v.vit_merger.attn_out": f"{INNER}.self_attn.out_proj",
        "v.vit_merger.ds_ln": f"{INNER}.pre_norm",
        "v.vit_merger.ds_ffn_up": f"{INNER}.linear_1",
        "v.vit_merger.ds_ffn_down": f"{INNER}.linear_2",
        "mm.input_norm": f"{MERGER}.pre_norm",
        "mm.up": f"{MERGER}.linear_1",
        "mm.down": f"{MERGER}.linear_2",
    },
    within=f"{TOWER}.encoder.layers",
)


def see(source: Source) -> Seen:
    """Derive config.json and the other JSON files from the metadata of the vision encoder's file.

    Raises CheckpointError.
    """
    sight = source.sight
    vision = siglip_config(sight, "minicpmv4_6_vision")
    scale, merge = vision["image_size"], sight.integer("projector.scale_factor", 4)
    if (mode := MODES.get(merge)) is None:
        raise sight.file.refuse(f"{sight.prefix}projector.scale_factor {merge} is not supported")
    places = math.prod(sight.tensor("v.position_embd.weight").shape[:-1])
    vision["image_size"] = math.isqrt(places) * vision["patch_size"]
    inserted = sight.numbers("wa_layer_indexes", 1) if sight.has("wa_layer_indexes") else [INSERT]
    processor = {
        "image_processor_type": "MiniCPMV4_6ImageProcessor",
        "scale_resolution": scale,
        "max_slice_nums": SLICES,
        "patch_size": vision["patch_size"],
        "downsample_mode": mode,
        "resample": BICUBIC,
        **colours(sight),
    }
    config = {
        "vision_config": vision,
        "downsample_mode": mode,
        "insert_layer_id": inserted[0],
        **require_tokens(source.model, {"image_token_id": "<|image_pad|>"}),
    }
    said = (*sight.missing, f"images of at most {SLICES} slices")
    return Seen(config, {"preprocessor_config.json": processor}, said)


KIND = ModelKind("MiniCPMV4_6ForConditionalGeneration", "minicpmv4_6", see)
FACTS = GgufFacts(models={("qwen35", "minicpmv4_6"): KIND}, towers={"minicpmv4_6": NAMES})
