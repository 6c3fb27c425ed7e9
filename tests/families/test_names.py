"""Each family's names: layers find a tensor whatever age its file is of."""

from __future__ import annotations

import pytest

from saccade.families.qwen_vl.net import QwenVLModel
from saccade.nn.family_model import FamilyModel
from saccade.plugins.models.colqwen.net import PROJECTION, ColQwenModel
from saccade.plugins.models.deepseek_vl2.net import DeepseekModel
from saccade.plugins.models.dots_ocr.net import DotsModel
from saccade.plugins.models.gemma3.net import Gemma3Model
from saccade.plugins.models.gemma4.net import Gemma4Model
from saccade.plugins.models.glm_ocr.net import GlmModel
from saccade.plugins.models.hunyuan_vl.net import HunyuanModel
from saccade.plugins.models.internvl.net import InternVLModel
from saccade.plugins.models.kimi_vl.net import KimiModel
from saccade.plugins.models.minicpm.net import MiniCPMModel
from saccade.plugins.models.paddleocr_vl.net import PaddleModel
from saccade.plugins.models.qwen3_5.net import Qwen35Model
from saccade.plugins.models.smolvlm.net import SmolVLMModel

LAYER = "layers.0.mlp.up_proj.weight"
TEXT = f"language_model.{LAYER}"
HEAD = "lm_head.weight"
EMBEDDED = "vision_model.embeddings.patch_embedding.weight"
NAMES: dict[type[FamilyModel], dict[str, tuple[str, ...]]] = {
    QwenVLModel: {
        TEXT: (f"model.{LAYER}", f"model.language_model.{LAYER}", f"language_model.model.{LAYER}"),
        "visual.pos_embed.weight": ("visual.pos_embed.weight", "model.visual.pos_embed.weight"),
        HEAD: (HEAD,),
    },
    ColQwenModel: {
        TEXT: (
            f"vlm.model.language_model.{LAYER}",
            f"vlm.language_model.{LAYER}",
            f"model.{LAYER}",
        ),
        "visual.merger.x": ("vlm.model.visual.merger.x", "vlm.visual.merger.x", "visual.merger.x"),
        f"{PROJECTION}.bias": ("embedding_proj_layer.bias", "custom_text_proj.bias"),
        HEAD: (f"vlm.{HEAD}", HEAD),
    },
    Qwen35Model: {TEXT: (f"model.language_model.{LAYER}",), f"mtp.{LAYER}": (f"mtp.{LAYER}",)},
    InternVLModel: {
        TEXT: (f"language_model.model.{LAYER}", f"model.language_model.{LAYER}"),
        "vision_tower.layernorm.bias": ("vision_tower.layernorm.bias",),
        HEAD: (HEAD, f"language_model.{HEAD}"),
    },
    SmolVLMModel: {
        TEXT: (f"model.text_model.{LAYER}",),
        "connector.x": ("model.connector.x",),
        HEAD: (HEAD,),
    },
    Gemma3Model: {
        TEXT: (f"model.{LAYER}", f"model.language_model.{LAYER}", f"language_model.model.{LAYER}"),
        EMBEDDED: (f"model.vision_tower.{EMBEDDED}", f"vision_tower.{EMBEDDED}"),
        "multi_modal_projector.x": ("multi_modal_projector.x", "model.multi_modal_projector.x"),
        HEAD: (HEAD, f"language_model.{HEAD}"),
    },
    Gemma4Model: {
        TEXT: (f"model.{LAYER}", f"model.language_model.{LAYER}"),
        "embed_vision.x": ("model.embed_vision.x",),
        "audio_tower.x": ("model.audio_tower.x",),
        HEAD: (HEAD,),
    },
    DotsModel: {
        TEXT: (f"model.{LAYER}",),
        "vision_tower.blocks.3.mlp.up_proj.weight": ("vision_tower.blocks.3.mlp.fc3.weight",),
        "vision_tower.blocks.3.mlp.down_proj.weight": ("vision_tower.blocks.3.mlp.fc2.weight",),
        HEAD: (HEAD,),
    },
    HunyuanModel: {
        TEXT: (f"model.{LAYER}", f"model.language_model.{LAYER}"),
        "vision_tower.layers.3.layer_norm2.bias": (
            "vit.layers.3.post_attention_layernorm.bias",
            "model.vision_tower.layers.3.layer_norm2.bias",
        ),
        "vision_tower.layers.3.mlp.fc1.bias": ("vit.layers.3.mlp.dense_h_to_4h.bias",),
        "vision_tower.patch_merger.proj_out.bias": ("vit.perceive.proj.2.bias",),
        "language_model.layers.0.input_layernorm.weight": (
            "model.layers.0.input_layernorm.weight",
        ),
        HEAD: (HEAD,),
    },
    GlmModel: {
        TEXT: (f"model.language_model.{LAYER}",),
        "visual.downsample.bias": ("model.visual.downsample.bias",),
        HEAD: (HEAD,),
    },
    PaddleModel: {
        TEXT: (f"model.{LAYER}", f"model.language_model.{LAYER}"),
        f"visual.{EMBEDDED}": (f"visual.{EMBEDDED}", f"model.visual.{EMBEDDED}"),
        "projector.linear_1.bias": ("mlp_AR.linear_1.bias", "model.projector.linear_1.bias"),
        HEAD: (HEAD,),
    },
    KimiModel: {
        TEXT: (f"language_model.model.{LAYER}",),
        "vision_tower.encoder.blocks.3.wqkv.bias": ("vision_tower.encoder.blocks.3.wqkv.bias",),
        HEAD: (f"language_model.{HEAD}",),
    },
    MiniCPMModel: {TEXT: (f"model.language_model.{LAYER}",), "merger.x": ("model.merger.x",)},
    DeepseekModel: {
        TEXT: (f"language.model.{LAYER}", f"model.{LAYER}"),
        EMBEDDED: ("vision.patch_embed.proj.weight",),
        "vision_model.encoder.layers.3.layer_norm2.bias": ("vision.blocks.3.norm2.bias",),
        "vision_model.encoder.layers.3.self_attn.out_proj.bias": (
            "vision.blocks.3.attn.proj.bias",
        ),
        "projector.layers.0.weight": ("projector.layers.0.weight",),
        HEAD: (f"language.{HEAD}", HEAD),
    },
}


@pytest.mark.parametrize("model", NAMES, ids=lambda model: model.__name__)
def test_a_tensor_has_one_name_whatever_its_file_calls_it(model: type[FamilyModel]) -> None:
    for canonical, stored in NAMES[model].items():
        assert {model.canonical_name(name) for name in (canonical, *stored)} == {canonical}
