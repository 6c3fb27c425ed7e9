"""A checkpoint's JSON files, made from the metadata in its GGUF files.

Owns which metadata stand for which field, and the defaults where files are silent. The families
read the result like any other checkpoint. Leaves tokenizers to `tokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from saccade.core.errors import CheckpointError
from saccade.gguf.header import GgufFile, TensorInfo
from saccade.gguf.names import deepstack_layers, layer_count, projector

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
"""Architecture and model type, by those of the two files; "" without a tower."""
ARCHITECTURES = tuple(dict.fromkeys(arch for arch, _ in MODELS))
SPECIAL = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
ENDS = ("<|im_end|>", "<|endoftext|>")
"""Tokens that end an answer, beside those that the metadata name."""
SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
WINDOW = 112
"""Pixels, of every published Qwen2.5-VL."""
PLACES_PER_SECOND = 2
"""On the time axis of a video, of every published Qwen2.5-VL; transformers' own default is 4."""


@dataclass(slots=True)
class MetadataFields:
    """Metadata in one file under a prefix, read one by one.

    `missing` collects those that were absent and have a default. Raises CheckpointError naming file
    and field.
    """

    file: GgufFile
    prefix: str
    missing: list[str] = field(default_factory=list)

    def integer(self, name: str, default: int | None = None) -> int:
        found = self._find(name, default)
        if isinstance(found, list) and len(set(map(str, found))) == 1:  # one for each layer
            found = found[0]
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise self._refuse(name, found, "a whole number")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        found = self._find(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self._refuse(name, found, "a number")
        return float(found)

    def numbers(self, name: str, count: int) -> list[Any]:
        found = self._find(name, None)
        good = isinstance(found, list) and len(found) >= count
        if not good or not all(isinstance(each, int | float) for each in found):
            raise self._refuse(name, found, f"a list of {count} numbers")
        return list(found[:count])

    def has(self, name: str) -> bool:
        return self.prefix + name in self.file.metadata

    def tensor(self, name: str) -> TensorInfo:
        found = self.file.tensors.get(name)
        if found is None:
            raise self.file.refuse(
                f"no tensor {name}: the file is not complete, or that of another model"
            )
        return found

    def _find(self, name: str, default: Any) -> Any:
        found = self.file.metadata.get(self.prefix + name)
        if found is None:
            if default is None:
                raise self.file.refuse(f"{self.prefix}{name} is missing: convert the model again")
            self.missing.append(self.prefix + name)
            return default
        return found

    def _refuse(self, name: str, found: object, wanted: str) -> CheckpointError:
        return self.file.refuse(f"{self.prefix}{name} must be {wanted}, not {str(found)[:80]}")


@dataclass(frozen=True, slots=True)
class Configs:
    """config.json, generation_config.json and preprocessor_config.json.

    defaults: what no file says, for people.
    """

    config: dict[str, Any]
    generation: dict[str, Any]
    processor: dict[str, Any]
    defaults: tuple[str, ...]


def make_configs(model: GgufFile, tower: GgufFile | None, tensors: set[str]) -> Configs:
    """Make the configs from a language model's file, its tower's, and all tensor names.

    A split model gives its first file. Raises CheckpointError naming file and field, for files that
    do not belong together too.
    """
    kind = projector(tower) if tower else ""
    architecture, model_type = _model(model, tower, kind)
    fields = MetadataFields(model, f"{model.architecture}.")
    text = _text(fields, tensors)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    generation, tokens = _generation(model)
    if tower is None:
        return Configs(text | config, generation, {}, ())
    sight = MetadataFields(tower, "clip.vision.")
    config |= {"text_config": text, "vision_config": _vision(sight, kind, text["hidden_size"])}
    levels = fields.integer("n_deepstack_layers", 0)
    if model.architecture.startswith("qwen3vl") and levels != len(deepstack_layers(tower)):
        raise tower.refuse(
            f"a tower of {len(deepstack_layers(tower))} extra levels, but {model.path.name} takes "
            f"{levels}: give the --mmproj file of the same model"
        )
    config |= {name: _token(model, tokens, text) for name, text in SPECIAL.items()}
    processor = _processor(sight, config["vision_config"])
    return Configs(config, generation, processor, _defaults(sight, kind))


def _model(model: GgufFile, tower: GgufFile | None, kind: str) -> tuple[str, str]:
    arch = model.architecture
    if arch == "clip":
        raise model.refuse("it is a vision tower: give the language model's file, this as --mmproj")
    if arch not in ARCHITECTURES:
        raise model.refuse(
            f"architecture {arch} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    if (arch, kind) in MODELS:
        return MODELS[arch, kind]
    if tower is None:
        raise model.refuse(f"{arch} has a vision tower in a file of its own: give it as --mmproj")
    raise tower.refuse(
        f"a tower of {kind}, which does not go with {arch} ({model.path.name}): give the --mmproj "
        "file of the same model"
    )


def _text(fields: MetadataFields, tensors: set[str]) -> dict[str, Any]:
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


def _experts(fields: MetadataFields, layers: int, tensors: set[str]) -> dict[str, Any]:
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


def _linear(fields: MetadataFields, layers: int, tensors: set[str]) -> dict[str, Any]:
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


def _vision(fields: MetadataFields, kind: str, text_hidden: int) -> dict[str, Any]:
    depth, hidden = fields.integer("block_count"), fields.integer("embedding_length")
    out = fields.tensor("mm.2.weight").shape[0]
    if out != text_hidden:
        raise fields.file.refuse(
            f"the tower puts out {out} values, the language model takes {text_hidden}: give the "
            "--mmproj file of the same model"
        )
    # The metadata's feed_forward_length is another figure in Qwen2-VL's files.
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


def _processor(fields: MetadataFields, vision: Mapping[str, Any]) -> dict[str, Any]:
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": 2,
        "image_mean": fields.numbers("image_mean", 3),
        "image_std": fields.numbers("image_std", 3),
    }
    for name in ("min_pixels", "max_pixels"):
        if fields.has(f"image_{name}"):
            processor[name] = fields.integer(f"image_{name}")
        else:
            fields.missing.append(f"{fields.prefix}image_{name}")
    return processor


def _defaults(fields: MetadataFields, kind: str) -> tuple[str, ...]:
    said = [name.removeprefix(fields.prefix) for name in fields.missing]
    return (*said, "video sampling", f"two frames a patch: those of {kind}")


def _generation(model: GgufFile) -> tuple[dict[str, Any], Mapping[str, int]]:
    """Return generation_config.json, and the vocabulary's tokens for images and ends of answers."""
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    listed: Sequence[Any] = tokens if isinstance(tokens, list) else ()
    wanted = {*ENDS, *SPECIAL.values()}
    known = {token: at for at, token in enumerate(listed) if token in wanted}
    names = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    named = [model.metadata[name] for name in names if name in model.metadata]
    ends = dict.fromkeys([*named, *(known[token] for token in ENDS if token in known)])
    found: dict[str, Any] = {"eos_token_id": list(ends)}
    for name, field_name in SAMPLING.items():
        if (value := model.metadata.get(f"general.sampling.{name}")) is not None:
            found[field_name] = value
    return found, known


def _token(model: GgufFile, tokens: Mapping[str, int], text: str) -> int:
    if text not in tokens:
        raise model.refuse(f"its vocabulary has no {text}, so it cannot be shown images")
    return tokens[text]
