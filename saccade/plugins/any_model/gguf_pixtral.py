"""Reads Pixtral's vision encoder from GGUF files of Pixtral, Mistral Small 3.1 and later, and
Ministral 3.
"""

from __future__ import annotations

import math
from typing import Any

from saccade.plugins.gguf.fields import MetadataFields, require_tokens
from saccade.plugins.gguf.kinds import GgufFacts, ModelKind, Seen, Source
from saccade.plugins.gguf.layers import TowerNames, activation, colours, siglip_config

TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
MERGER = "mm.patch_merger.weight"
"""Name of a tensor that Mistral 3 has, and Pixtral does not."""
BICUBIC = 3
EPSILON = 1e-5
"""The epsilon that is hard-coded in transformers' norms."""
MARKS = {"image": "[IMG]", "line": "[IMG_BREAK]", "end": "[IMG_END]"}
NAMES = TowerNames(
    outer={
        "v.patch_embd": f"{TOWER}.patch_conv",
        "v.pre_ln": f"{TOWER}.ln_pre",
        "mm.input_norm": f"{PROJECTOR}.norm",
        "mm.patch_merger": f"{PROJECTOR}.patch_merger.merging_layer",
        "mm.1": f"{PROJECTOR}.linear_1",
        "mm.2": f"{PROJECTOR}.linear_2",
    },
    within=f"{TOWER}.transformer.layers",
    block={
        "ln1": "attention_norm",
        "ln2": "ffn_norm",
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_out": "attention.o_proj",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    turned=("attn_q", "attn_k"),
)


def see(source: Source) -> Seen:
    """Derive config.json and the other JSON files from the metadata of the vision encoder's file.

    Raises CheckpointError.
    """
    sight, tensors = source.sight, source.sight.file.tensors
    source.check_width("mm.2.weight")
    vision = _vision(sight)
    side, patch = vision["image_size"], vision["patch_size"]
    config = {
        "vision_config": vision,
        "vision_feature_layer": -1,
        "multimodal_projector_bias": "mm.1.bias" in tensors,
        "image_token_index": require_tokens(source.model, MARKS)["image"],
    }
    merge = 1
    if MERGER in tensors:
        merge = sight.integer("spatial_merge_size")
        config |= {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "spatial_merge_size": merge,
        }
    else:
        config["vision_feature_select_strategy"] = "full"
    images = {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": side},
        "patch_size": {"height": patch, "width": patch},
        "resample": BICUBIC,
        **colours(sight),
    }
    processor = {
        "processor_class": "PixtralProcessor",
        "patch_size": patch,
        "spatial_merge_size": merge,
    }
    files = {"preprocessor_config.json": images, "processor_config.json": processor}
    return Seen(config, files, tuple(sight.missing))


def _vision(sight: MetadataFields) -> dict[str, Any]:
    vision = siglip_config(sight, "pixtral")
    epsilon, theta = vision.pop("layer_norm_eps"), sight.file.metadata.get("clip.rope.freq_base")
    if not math.isclose(epsilon, EPSILON):
        raise sight.file.refuse(
            f"{sight.prefix}attention.layer_norm_epsilon {epsilon} is not supported; {EPSILON} is"
        )
    if theta is not None:
        vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": theta}
    return vision | {
        "intermediate_size": sight.tensor("v.blk.0.ffn_gate.weight").shape[0],
        "hidden_act": activation(sight, "gelu"),
    }


KIND = ModelKind("LlavaForConditionalGeneration", "llava", see)
FACTS = GgufFacts(
    models={(arch, "pixtral"): KIND for arch in ("llama", "mistral3")},
    towers={"pixtral": NAMES},
)
