"""What language models in GGUF files have in common: their sizes, and the names of their tensors.

Families declare their differences as data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from saccade.plugins.gguf.fields import MetadataFields, floats_in
from saccade.plugins.gguf.header import GgufFile, TensorInfo
from saccade.plugins.gguf.kinds import NamedTensors, TextKind
from saccade.plugins.gguf.made import (
    Edit,
    Heads,
    from_pairs,
    gates_and_ups,
    layer_count,
    one,
    patch_matrix,
)

OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Maps the modules of a layer in most language models from llama.cpp's names to transformers'."""
TURNED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
"""Modules whose heads llama.cpp's converter reorders, and the field with the number of heads."""
GATES, UPS = "ffn_gate_exps.weight", "ffn_up_exps.weight"
"""Names of the first two matrices of experts, which are one tensor in transformers."""
FACTORS = "rope_freqs.weight"
"""Name of the table of divisors of rotary frequencies for long texts."""
IN_CONFIG = (FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")
"""Names of the tensors whose values are copied to config.json."""
SIGLIP_BLOCK = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
"""Maps the modules of a SigLIP block from llama.cpp's names to transformers'."""
LIMITS = ("input_min", "input_max", "output_min", "output_max")
"""Names of the limits to which some vision encoders clamp the inputs and outputs of matrices."""
HEADS = "attention.head_count"
PARTS = "|".join(("weight", "bias", *LIMITS))
LLAMA3_SHARES, LLAMA3_CONTEXT = (1.0, 4.0), 8192
"""Parameters of all published llama3 rotary embeddings. GGUF files contain only the resulting
table.
"""
FOLDER_MAY = "the model's Hugging Face folder may work"


def _pairs(_fields: MetadataFields, heads: int, size: int) -> Heads | None:
    return from_pairs(heads, size)


@dataclass(frozen=True, slots=True)
class Layered:
    """The differences of a language model from the most common one."""

    model_type: str  # in config.json
    # modules of a layer, or whole tensors, by llama.cpp's names
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)  # modules outside of layers
    within: str = "model.layers"  # the prefix of layers
    turned: Mapping[str, str] = field(default_factory=dict)  # as `TURNED`
    # the order of their heads, by the fields, the number of heads and their size
    order: Callable[[MetadataFields, int, int], Heads | None] = _pairs
    around_one: bool = False  # the weights of norms are stored plus one
    # changes the language model's part of config.json
    config: Callable[[MetadataFields, Collection[str], dict[str, Any]], dict[str, Any]] | None = (
        None
    )

    keep_space: Collection[str] | None = None  # as in `TextKind`

    def kind(self) -> TextKind:
        return TextKind(self._config, self.names, self.keep_space)

    def _config(self, fields: MetadataFields, tensors: Collection[str]) -> dict[str, Any]:
        text = {"model_type": self.model_type, **sizes(fields)}
        return text if self.config is None else self.config(fields, tensors, text)

    def names(self, file: GgufFile) -> NamedTensors:
        """Yield the file's tensors with their names in transformers. Unknown tensors keep their own
        names.
        """
        layers = layer_count(file)
        for name, tensor in file.tensors.items():
            if name in IN_CONFIG:
                continue
            found = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
            number, module_name = (int(found[1]), found[2]) if found else (None, name)
            if number is not None and number >= layers:
                continue
            if module_name == UPS and GATES in self.layer:
                continue
            known = _renamed(self.outer if number is None else self.layer, module_name)
            if known is None:
                yield name, one(tensor)
                continue
            within = "" if number is None else f"{self.within}.{number}."
            if module_name == GATES:
                yield f"{within}{known}", gates_and_ups(file, tensor)
                continue
            module = module_name.rpartition(".")[0]
            edit: Edit = "less one" if self.around_one and module.endswith("norm") else "none"
            yield f"{within}{known}", one(tensor, edit, self._heads(file, module, tensor.shape))

    def _heads(self, file: GgufFile, module: str, shape: tuple[int, ...]) -> Heads | None:
        if module not in self.turned:
            return None
        fields = MetadataFields(file, f"{file.architecture}.")
        heads = fields.integer(self.turned[module], fields.integer("attention.head_count"))
        if not heads or shape[0] % (2 * heads):
            raise file.refuse(
                f"{module} has {shape[0]} rows, which is not divisible by {heads} heads"
            )
        return self.order(fields, heads, shape[0] // heads)


@dataclass(frozen=True, slots=True)
class TowerNames:
    """Maps the tensor names of a vision encoder to its names in transformers."""

    outer: Mapping[str, str]  # modules, or whole tensors, by llama.cpp's names
    within: str  # the prefix of blocks
    block: Mapping[str, str] = field(default_factory=lambda: SIGLIP_BLOCK)  # modules of a block
    less_one: Collection[str] = ()  # tensors that are stored plus one
    # tensors with three dimensions; some converters omit dimensions of size 1
    three: Collection[str] = ()
    patches: str | None = None  # the patch embedding, if it has interleaved colors
    turned: Collection[str] = ()  # modules of a block whose heads have pairs in llama.cpp

    def __call__(self, file: GgufFile) -> NamedTensors:
        """Yield the file's tensors with their names in transformers. Unknown tensors keep their own
        names.
        """
        for name, tensor in file.tensors.items():
            edit: Edit = "less one" if name in self.less_one else "none"
            found = re.fullmatch(rf"v\.blk\.(\d+)\.(\w+)\.({PARTS})", name)
            if found is None:
                made = patch_matrix(tensor) if name == self.patches else one(tensor, edit)
                if name in self.three:
                    made = replace(made, shape=(1,) * (3 - len(made.shape)) + made.shape)
                yield _renamed(self.outer, name) or name, made
                continue
            local = f"{_straight(file, found[1], found[2])}.{found[3]}"
            known = _renamed(self.block, local)
            made = one(tensor, edit, self._heads(file, tensor, found[2]))
            if found[3] in LIMITS:
                made = replace(made, shape=())
            yield name if known is None else f"{self.within}.{found[1]}.{known}", made

    def _heads(self, file: GgufFile, tensor: TensorInfo, module: str) -> Heads | None:
        if module not in self.turned:
            return None
        heads, rows = MetadataFields(file, "clip.vision.").integer(HEADS), tensor.shape[0]
        if not heads or rows % (2 * heads):
            raise file.refuse(
                f"{tensor.name} has {rows} rows, which is not divisible by {heads} heads"
            )
        return from_pairs(heads, rows // heads)


def _renamed(known: Mapping[str, str], name: str) -> str | None:
    """Return the name of a tensor in transformers, or None if it is unknown. Its last part, such as
    `weight`, stays.
    """
    if name in known:
        return known[name]
    module, _, part = name.rpartition(".")
    return f"{known[module]}.{part}" if module in known else None


def _straight(file: GgufFile, number: str, module: str) -> str:
    """Return the module that a block's tensor belongs to. In files of old converters, up and down
    are swapped.
    """
    swapped = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    down = file.tensors.get(f"v.blk.{number}.ffn_down.weight")
    if module not in swapped or down is None or down.shape[0] <= down.shape[-1]:
        return module
    return swapped[module]


def siglip_config(sight: MetadataFields, model_type: str) -> dict[str, Any]:
    """Return vision_config for a vision encoder with square images. Raises CheckpointError."""
    return {
        "model_type": model_type,
        "hidden_size": sight.integer("embedding_length"),
        "intermediate_size": max(sight.tensor("v.blk.0.ffn_up.weight").shape),
        "num_hidden_layers": sight.integer("block_count"),
        "num_attention_heads": sight.integer(HEADS),
        "image_size": sight.integer("image_size"),
        "patch_size": sight.integer("patch_size"),
        "layer_norm_eps": sight.number("attention.layer_norm_epsilon"),
    }


def colours(sight: MetadataFields) -> dict[str, Any]:
    """Return the fields for the image processor's mean and standard deviation. Raises
    CheckpointError.
    """
    return {
        "image_mean": sight.numbers("image_mean", 3),
        "image_std": sight.numbers("image_std", 3),
    }


def activation(sight: MetadataFields, usual: str) -> str:
    """Return the vision encoder's activation, or `usual` if the file does not set it."""
    metadata = sight.file.metadata
    said = (name for name in ("gelu", "silu") if metadata.get(f"clip.use_{name}") is True)
    return next(said, usual)


def sizes(fields: MetadataFields) -> dict[str, Any]:
    """Return the fields of config.json that most language models share. Raises CheckpointError."""
    hidden = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    return {
        "vocab_size": fields.tensor("token_embd.weight").shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": layer_count(fields.file),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": fields.integer("attention.key_length", hidden // max(1, heads)),
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope(fields),
    }


def rope(fields: MetadataFields) -> dict[str, Any]:
    """Return the configuration of the rotary embedding. Raises CheckpointError for an unsupported
    type.
    """
    theta = {"rope_theta": fields.number("rope.freq_base", 10000.0)}
    if factors := fields.file.tensors.get(FACTORS):
        return theta | _llama3(fields, floats_in(fields.file, factors), theta["rope_theta"])
    kind = fields.file.metadata.get(f"{fields.prefix}rope.scaling.type", "none")
    if kind == "none":
        return theta | {"rope_type": "default"}
    factor = {"rope_type": kind, "factor": fields.number("rope.scaling.factor", 1.0)}
    if kind == "linear":
        return theta | factor
    if kind == "yarn":
        scaling = "rope.scaling."
        factor["original_max_position_embeddings"] = fields.integer(
            f"{scaling}original_context_length"
        )
        for name in ("beta_fast", "beta_slow"):
            if fields.has(f"{scaling}yarn_{name}"):
                factor[name] = fields.number(f"{scaling}yarn_{name}")
        return theta | factor
    raise fields.file.refuse(
        f"{fields.prefix}rope.scaling.type {kind!r} is not supported, and {FOLDER_MAY}"
    )


def _llama3(fields: MetadataFields, factors: list[float], theta: float) -> dict[str, Any]:
    """Return the llama3 parameters that result in this table of factors. Raises CheckpointError if
    there are none.
    """
    factor, low, high = round(max(factors), 4), *LLAMA3_SHARES
    for at, found in enumerate(factors):
        share = LLAMA3_CONTEXT / (2 * math.pi * theta ** (at / len(factors)))
        smooth = min(1.0, max(0.0, (share - low) / (high - low)))
        expected = 1 / ((1 - smooth) / factor + smooth)
        if abs(found - expected) > 1e-3 * expected:
            raise fields.file.refuse(
                f"{FACTORS} has {found:.4g} at {at}, but llama3's rule gives {expected:.4g}: this "
                f"rotary embedding is not supported, and {FOLDER_MAY}"
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }
