"""Reads InternVL from GGUF files: Qwen language models, and InternViT."""

from __future__ import annotations

from saccade.plugins.gguf.fields import require_tokens
from saccade.plugins.gguf.kinds import GgufFacts, ModelKind, Seen, Source
from saccade.plugins.gguf.layers import TowerNames, colours, siglip_config

TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
NAMES = TowerNames(
    outer={
        "v.class_embd": f"{TOWER}.embeddings.cls_token",
        "v.patch_embd": f"{TOWER}.embeddings.patch_embeddings.projection",
        "v.position_embd.weight": f"{TOWER}.embeddings.position_embeddings",
        "mm.model.mlp.0": f"{PROJECTOR}.layer_norm",
        "mm.model.mlp.1": f"{PROJECTOR}.linear_1",
        "mm.model.mlp.3": f"{PROJECTOR}.linear_2",
    },
    three=("v.class_embd", "v.position_embd.weight"),
    within=f"{TOWER}.encoder.layer",
    block={
        "ln1": "layernorm_before",
        "ln2": "layernorm_after",
        "ls1.weight": "lambda_1",
        "ls2.weight": "lambda_2",
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_q_norm": "attention.q_norm",
        "attn_k_norm": "attention.k_norm",
        "attn_out": "attention.projection_layer",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    },
)
BICUBIC = 3


def see(source: Source) -> Seen:
    """Derive config.json and the other JSON files from the metadata of the vision encoder's file.

    Raises CheckpointError.
    """
    sight, tensors = source.sight, source.sight.file.tensors
    vision = siglip_config(sight, "internvl_vision") | {
        "hidden_act": "gelu",
        "attention_bias": "v.blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in tensors,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in tensors else "rms_norm",
        "use_mean_pooling": True,
    }
    side = {"height": vision["image_size"], "width": vision["image_size"]}
    processor = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "crop_to_patches": True,
        "min_patches": sight.integer("preproc_min_tiles", 1),
        "max_patches": sight.integer("preproc_max_tiles", 12),
        "size": side,
        "resample": BICUBIC,
        **colours(sight),
    }
    merge = max(1, sight.integer("projector.scale_factor"))
    config = {
        "vision_config": vision,
        "downsample_ratio": 1 / merge,
        "image_seq_length": (vision["image_size"] // vision["patch_size"] // merge) ** 2,
        **require_tokens(source.model, {"image_token_id": "<IMG_CONTEXT>"}),
    }
    said = (*sight.missing, "video sampling")
    return Seen(config, {"preprocessor_config.json": processor}, said)


KIND = ModelKind("InternVLForConditionalGeneration", "internvl", see)
FACTS = GgufFacts(
    models={(arch, "internvl"): KIND for arch in ("qwen2", "qwen3", "llama")},
    towers={"internvl": NAMES},
)
