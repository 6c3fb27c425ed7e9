"""Reads Qwen-VL models from GGUF files, from Qwen2-VL to Qwen3.5: maps metadata and tensor names to
transformers' names. The changes that llama.cpp's converter makes to tensors (Qwen3.5's norms,
decays and order of heads) are undone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from saccade.plugins.gguf.fields import MetadataFields, require_tokens
from saccade.plugins.gguf.header import GgufFile, TensorInfo
from saccade.plugins.gguf.kinds import GgufFacts, ModelKind, NamedTensors, Seen, Source, TextKind
from saccade.plugins.gguf.layers import GATES, UPS
from saccade.plugins.gguf.made import (
    Edit,
    Heads,
    Made,
    gates_and_ups,
    layer_count,
    one,
    sibling,
    two_frames,
)

SPECIAL = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
WINDOW = 112
"""The side of an attention window in pixels, in all published Qwen2.5-VL models."""
PLACES_PER_SECOND = 2
"""Positions per second of video, in all published Qwen2.5-VL models. transformers' default is 4."""
TEXT = "model.language_model"
TOWER = "model.visual"
WHOLE = {"token_embd": f"{TEXT}.embed_tokens", "output_norm": f"{TEXT}.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
"""Modules of the language model's layers, from GGUF's names to transformers'. Each has a weight,
and some have a bias.
"""
BARE = {
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
}
"""Tensors in these layers whose names in transformers do not end in "weight"."""
BLOCK = {"ln1": "norm1", "ln2": "norm2", "attn_out": "attn.proj", "attn_qkv": "attn.qkv"}
"""Maps modules in the blocks of all vision encoders from GGUF's names to transformers'."""
PATCH = "v.patch_embd.weight"
NEWEST = "qwen3vl_merger"
PIXELS = ((56 * 56, 28 * 28 * 16384), (256 * 256, 4096 * 4096))
"""The minimum and maximum pixels in the published checkpoints. The second pair belongs to
`NEWEST`.
"""


def see(source: Source) -> Seen:
    """Derive config.json and the other JSON files from the metadata of the vision encoder's file.

    Raises CheckpointError if the file belongs to another model.
    """
    model, sight, kind = source.model, source.sight, source.kind
    tower, fields = sight.file, MetadataFields(model, f"{model.architecture}.")
    vision = _vision(sight, kind, source.check_width("mm.2.weight"))
    levels, taken = _levels(tower), fields.integer("n_deepstack_layers", 0)
    if levels != taken:
        raise tower.refuse(
            f"the vision encoder has {levels} extra levels (deepstack), but {model.path.name} "
            f"({model.architecture}) expects {taken}: pass the --mmproj file of the same model"
        )
    config = {"vision_config": vision, **require_tokens(model, SPECIAL)}
    processor = _processor(sight, vision, kind)
    return Seen(config, {"preprocessor_config.json": processor}, _defaults(sight, kind))


def _text(fields: MetadataFields, tensors: Collection[str]) -> dict[str, Any]:
    arch, layers = fields.file.architecture, layer_count(fields.file)
    vocabulary, hidden = (
        fields.tensor("token_embd.weight").shape[0],
        fields.integer("embedding_length"),
    )
    heads = fields.integer("attention.head_count")
    size = fields.integer("attention.key_length", hidden // max(1, heads))
    scaling = fields.file.metadata.get(f"{fields.prefix}rope.scaling.type", "none")
    rope: dict[str, Any] = {
        "rope_type": "default" if scaling == "none" else scaling,
        "rope_theta": fields.number("rope.freq_base"),
        "mrope_section": fields.numbers("rope.dimension_sections", 3),
        "mrope_interleaved": arch != "qwen2vl",
    }
    text: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": size,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
    }
    if arch.endswith("moe"):
        text |= _experts(fields, layers, tensors)
    else:
        text["intermediate_size"] = fields.integer("feed_forward_length")
    if arch.startswith("qwen35"):
        rope["partial_rotary_factor"] = fields.integer("rope.dimension_count", size) / size
        text |= _linear(fields, layers, tensors)
    return text


def _experts(fields: MetadataFields, layers: int, tensors: Collection[str]) -> dict[str, Any]:
    sparse = [at for at in range(layers) if f"blk.{at}.ffn_gate_inp.weight" in tensors]
    width = fields.integer("expert_feed_forward_length")
    text = {
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": width,
        "intermediate_size": fields.integer("feed_forward_length", width),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [at for at in range(layers) if at not in sparse],
    }
    if fields.has("expert_shared_feed_forward_length"):
        name = "shared_expert_intermediate_size"
        text[name] = fields.integer("expert_shared_feed_forward_length")
    return text


def _linear(fields: MetadataFields, layers: int, tensors: Collection[str]) -> dict[str, Any]:
    values = fields.integer("ssm.time_step_rank")
    return {
        "layer_types": [
            "linear_attention" if f"blk.{at}.ssm_a" in tensors else "full_attention"
            for at in range(layers)
        ],
        "linear_num_key_heads": fields.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": fields.integer("ssm.state_size"),
        "linear_value_head_dim": fields.integer("ssm.inner_size") // max(1, values),
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
    }


def _vision(fields: MetadataFields, kind: str, out: int) -> dict[str, Any]:
    depth, hidden = fields.integer("block_count"), fields.integer("embedding_length")
    # The metadata's feed_forward_length is wrong in Qwen2-VL's files.
    inner = max(fields.tensor("v.blk.0.ffn_up.weight").shape)
    vision: dict[str, Any] = {
        "depth": depth,
        "num_heads": fields.integer("attention.head_count"),
        "patch_size": fields.integer("patch_size"),
        "spatial_merge_size": fields.integer("spatial_merge_size", 2),
        "temporal_patch_size": 2,
    }
    if kind == "qwen2vl_merger":
        return vision | {"embed_dim": hidden, "hidden_size": out, "mlp_ratio": inner / hidden}
    vision |= {"hidden_size": hidden, "out_hidden_size": out, "intermediate_size": inner}
    if kind == "qwen2.5vl_merger":
        every = max(1, fields.integer("n_wa_pattern"))
        return vision | {
            "fullatt_block_indexes": list(range(every - 1, depth, every)),
            "window_size": fields.integer("window_size", WINDOW),
            "tokens_per_second": PLACES_PER_SECOND,
        }
    return vision | {
        "num_position_embeddings": fields.tensor("v.position_embd.weight").shape[0],
        "deepstack_visual_indexes": list(deepstack_layers(fields.file)),
    }


def _processor(fields: MetadataFields, vision: Mapping[str, Any], kind: str) -> dict[str, Any]:
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": 2,
        "image_mean": fields.numbers("image_mean", 3),
        "image_std": fields.numbers("image_std", 3),
    }
    for name, bound in zip(("min_pixels", "max_pixels"), PIXELS[kind == NEWEST], strict=True):
        processor[name] = fields.integer(f"image_{name}", bound)
    return processor


def _defaults(fields: MetadataFields, kind: str) -> tuple[str, ...]:
    said = [name.removeprefix(fields.prefix) for name in fields.missing]
    return (*said, "video sampling", f"two frames a patch: those of {kind}")


def deepstack_layers(file: GgufFile) -> tuple[int, ...]:
    """Return the indices of the vision encoder's layers whose outputs are deepstack levels."""
    found = file.metadata.get("clip.vision.is_deepstack_layers", [])
    return tuple(at for at, is_one in enumerate(found) if is_one) if isinstance(found, list) else ()


def _levels(tower: GgufFile) -> int:
    """Return the number of deepstack levels, or 0 if the file lists levels without tensors."""
    stored = any(name.startswith("v.deepstack.") for name in tower.tensors)
    return len(deepstack_layers(tower)) if stored else 0


def _language(file: GgufFile) -> NamedTensors:
    layers = layer_count(file)
    hybrid = Hybrid.of(file) if file.architecture.startswith("qwen35") else None
    for name, tensor in file.tensors.items():
        found = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if found is None:
            module, _, kind = name.rpartition(".")
            norm: Edit = "less one" if hybrid and module == "output_norm" else "none"
            yield f"{WHOLE[module]}.{kind}" if module in WHOLE else name, one(tensor, norm)
            continue
        number, inner = int(found[1]), found[2]
        if number >= layers or inner == UPS:
            continue
        within = f"{TEXT}.layers.{number}"
        if inner == GATES:
            yield f"{within}.mlp.experts.gate_up_proj", gates_and_ups(file, tensor)
            continue
        module, _, kind = inner.rpartition(".")
        made = hybrid.made(inner, tensor) if hybrid else one(tensor)
        if inner in BARE:
            yield f"{within}.{BARE[inner]}", made
        elif module in LAYER:
            yield f"{within}.{LAYER[module]}.{kind}", made
        else:
            yield name, made


@dataclass(frozen=True, slots=True)
class Hybrid:
    """Undoes the changes that llama.cpp's converter makes to Qwen3.5: it adds 1 to norms, stores
    decays as -exp(x), and reorders value heads.
    """

    keys: int  # number of key heads of linear attention
    values: int  # number of value heads
    key_size: int
    value_size: int

    @classmethod
    def of(cls, file: GgufFile) -> Hybrid:
        """Read the sizes of heads from the metadata. Raises CheckpointError if one is missing or
        invalid.
        """
        names = ("group_count", "time_step_rank", "state_size", "inner_size")
        found = [file.metadata.get(f"{file.architecture}.ssm.{name}") for name in names]
        counts = [each for each in found if isinstance(each, int) and each > 0]
        if len(counts) < 4 or counts[1] % counts[0] or counts[3] % counts[1]:
            raise file.refuse(
                f"{file.architecture}.ssm.{', '.join(names)} are {found}, which are not possible "
                "sizes of linear attention"
            )
        keys, values, key_size, inner = counts
        return cls(keys, values, key_size, inner // values)

    def made(self, inner: str, tensor: TensorInfo) -> Made:
        """Return how to create a layer's tensor in transformers' format.

        inner: the tensor's name within the layer.
        """
        name = inner.rpartition(".")[0] or inner
        edit: Edit = "none"
        if name.endswith("_norm") and name != "ssm_norm":
            edit = "less one"
        elif name == "ssm_a":
            edit = "decay"
        shape = tensor.shape
        if name == "ssm_conv1d":
            shape = (shape[0], 1, shape[-1])
        elif name == "ffn_gate_inp_shexp":
            shape = (1, shape[-1])
        return Made((tensor,), shape, 0, edit, self._heads(name))

    def _heads(self, name: str) -> Heads | None:
        each = self.values // self.keys
        both = 2 * self.keys * self.key_size
        match name:
            case "attn_qkv" | "ssm_conv1d":
                axis, start, size = 0, both, self.value_size
            case "attn_gate":
                axis, start, size = 0, 0, self.value_size
            case "ssm_alpha" | "ssm_beta" | "ssm_a" | "ssm_dt":
                axis, start, size = 0, 0, 1
            case "ssm_out":
                axis, start, size = 1, 0, self.value_size
            case _:
                return None
        return Heads(axis, start, self.keys, each, size) if each > 1 else None


def _tower(file: GgufFile) -> NamedTensors:
    third = _kind(file) == NEWEST
    merger = "linear_fc1", "linear_fc2"
    outer = {
        "v.patch_embd.bias": f"{TOWER}.patch_embed.proj.bias",
        "v.position_embd.weight": f"{TOWER}.pos_embed.weight",
    }
    for kind in ("weight", "bias"):
        outer[f"v.post_ln.{kind}"] = f"{TOWER}.merger.{'norm' if third else 'ln_q'}.{kind}"
        for at, name in zip((0, 2), merger):
            mine = name if third else f"mlp.{at}"
            outer[f"mm.{at}.{kind}"] = f"{TOWER}.merger.{mine}.{kind}"
    levels = {layer: at for at, layer in enumerate(deepstack_layers(file))}
    for name, tensor in file.tensors.items():
        if name in outer:
            yield outer[name], one(tensor)
        elif name == PATCH:
            yield f"{TOWER}.patch_embed.proj.weight", two_frames(file, tensor)
        elif found := re.fullmatch(r"v\.deepstack\.(\d+)\.(norm|fc1|fc2)\.(\w+)", name):
            level, module = levels.get(int(found[1])), found[2].replace("fc", "linear_fc")
            if level is None:
                raise file.refuse(
                    f"it has tensor {name}, but is_deepstack_layers does not include {found[1]}"
                )
            yield f"{TOWER}.deepstack_merger_list.{level}.{module}.{found[3]}", one(tensor)
        elif found := re.fullmatch(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)", name):
            yield from _block(file, tensor, *found.groups())
        elif name != f"{PATCH}.1":
            yield name, one(tensor)


def _block(file: GgufFile, tensor: TensorInfo, number: str, module: str, kind: str) -> NamedTensors:
    within = f"{TOWER}.blocks.{number}"
    if module in BLOCK:
        yield f"{within}.{BLOCK[module]}.{kind}", one(tensor)
    elif module == "attn_q":
        others = (sibling(file, tensor, f"v.blk.{number}.attn_{each}.{kind}") for each in "kv")
        three = (tensor, *others)
        yield f"{within}.attn.qkv.{kind}", Made(three, (3 * tensor.shape[0], *tensor.shape[1:]))
    elif module.startswith("ffn_"):
        mine = _feed_forward(file, number)[module.removeprefix("ffn_")]
        yield f"{within}.mlp.{mine}.{kind}", one(tensor)
    elif module not in ("attn_k", "attn_v"):
        yield tensor.name, one(tensor)


def _kind(file: GgufFile) -> str:
    metadata = file.metadata
    return str(metadata.get("clip.projector_type") or metadata["clip.vision.projector_type"])


def _feed_forward(file: GgufFile, number: str) -> dict[str, str]:
    """Map the names of an MLP's matrices to transformers'. In files of old converters, up and down
    are swapped.
    """
    names = {
        "qwen2vl_merger": ("gate_proj", "fc1", "fc2"),
        "qwen2.5vl_merger": ("gate_proj", "up_proj", "down_proj"),
        "qwen3vl_merger": ("gate_proj", "linear_fc1", "linear_fc2"),
    }
    gate, up, down = names[_kind(file)]
    found = file.tensors.get(f"v.blk.{number}.ffn_down.weight")
    if found is not None and found.shape[0] > found.shape[-1]:
        up, down = down, up
    return {"gate": gate, "up": up, "down": down}


MODELS = {
    ("qwen2vl", "qwen2vl_merger"): ("Qwen2VLForConditionalGeneration", "qwen2_vl"),
    ("qwen2vl", "qwen2.5vl_merger"): ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"),
    ("qwen3vl", "qwen3vl_merger"): ("Qwen3VLForConditionalGeneration", "qwen3_vl"),
    ("qwen3vlmoe", "qwen3vl_merger"): ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"),
    ("qwen35", "qwen3vl_merger"): ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    ("qwen35moe", "qwen3vl_merger"): ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    ("qwen35", ""): ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    ("qwen35moe", ""): ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
}
FACTS = GgufFacts(
    models={key: ModelKind(*names, see if key[1] else None) for key, names in MODELS.items()},
    texts={arch: TextKind(_text, _language) for arch, _ in MODELS},
    towers={kind: _tower for _, kind in MODELS if kind},
)
