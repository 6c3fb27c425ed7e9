"""Reads dots.ocr from GGUF files: a Qwen2 language model, and a vision encoder with gated MLPs."""

from __future__ import annotations

from saccade.plugins.gguf.fields import require_tokens
from saccade.plugins.gguf.kinds import GgufFacts, ModelKind, Seen, Source
from saccade.plugins.gguf.layers import HEADS, TowerNames, colours

TOWER, BICUBIC = "vision_tower", 3
NAMES = TowerNames(
    outer={
        "v.patch_embd": f"{TOWER}.patch_embed.patchifier.proj",
        "v.norm_embd": f"{TOWER}.patch_embed.patchifier.norm",
        "v.pre_ln": f"{TOWER}.patch_embed.patchifier.norm",
        "mm.post_norm": f"{TOWER}.post_trunk_norm",
        "mm.input_norm": f"{TOWER}.merger.ln_q",
        "mm.0": f"{TOWER}.merger.mlp.0",
        "mm.2": f"{TOWER}.merger.mlp.2",
    },
    within=f"{TOWER}.blocks",
    block={
        "ln1": "norm1",
        "ln2": "norm2",
        "attn_qkv": "attn.qkv",
        "attn_out": "attn.proj",
        "ffn_gate": "mlp.fc1",
        "ffn_up": "mlp.fc3",
        "ffn_down": "mlp.fc2",
    },
)


def see(source: Source) -> Seen:
    """Derive config.json and the other JSON files from the metadata of the vision encoder's file.

    Raises CheckpointError.
    """
    sight, tensors = source.sight, source.sight.file.tensors
    merge = sight.integer("projector.scale_factor")
    vision = {
        "embed_dim": sight.tensor("v.blk.0.ln1.weight").shape[0],
        "hidden_size": source.check_width("mm.2.weight"),
        "intermediate_size": sight.tensor("v.blk.0.ffn_gate.weight").shape[0],
        "num_hidden_layers": sight.integer("block_count"),
        "num_attention_heads": sight.integer(HEADS),
        "patch_size": sight.integer("patch_size"),
        "spatial_merge_size": merge,
        "temporal_patch_size": 1,
        "rms_norm_eps": sight.number("attention.layer_norm_epsilon"),
        "use_bias": "v.blk.0.attn_qkv.bias" in tensors,
        "post_norm": "mm.post_norm.weight" in tensors,
    }
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision["patch_size"],
        "merge_size": merge,
        "temporal_patch_size": 1,
        "min_pixels": sight.integer("image_min_pixels"),
        "max_pixels": sight.integer("image_max_pixels"),
        "resample": BICUBIC,
        **colours(sight),
    }
    ids = require_tokens(source.model, {"image_token_id": "<|imgpad|>"})
    text = {name: value for name, value in source.text.items() if name != "model_type"}
    config = {**text, "vision_config": vision, **ids}
    return Seen(config, {"preprocessor_config.json": processor}, tuple(sight.missing))


FACTS = GgufFacts(
    models={("qwen2", "dots_ocr"): ModelKind("DotsOCRForCausalLM", "dots_ocr", see)},
    towers={"dots_ocr": NAMES},
)
