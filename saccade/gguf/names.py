"""A checkpoint's tensors by transformers' names, and their sources in a GGUF file.

The names, and the changes by llama.cpp's converter (Qwen3.5's norms, decays and head order), are
the documented ones. Leaves bytes to `runtime/weights/gguf_tensors.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from saccade.core.errors import CheckpointError
from saccade.gguf.header import GgufFile, TensorInfo

Edit = Literal["none", "less one", "decay"]
"""What is done to the values: none; one is taken off; they become log(-x)."""

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
"""Of a layer of the language model; each has a weight, some a bias."""
BARE = {
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
}
"""Likewise, without "weight" in transformers."""
GATE, UP = "ffn_gate_exps.weight", "ffn_up_exps.weight"
BLOCK = {"ln1": "norm1", "ln2": "norm2", "attn_out": "attn.proj", "attn_qkv": "attn.qkv"}
"""Of a block of every tower."""
PATCH = "v.patch_embd.weight"


@dataclass(frozen=True, slots=True)
class Heads:
    """Value heads in llama.cpp's own order.

    Each of `keys` key heads serves `each` value heads with `size` values. These lie together in
    transformers, in turns in llama.cpp. axis: the tensor's, with heads from `start` on.
    """

    axis: int
    start: int
    keys: int
    each: int
    size: int


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor in the checkpoint, with `shape`: its sources, joined, then edited.

    join: the dimension. None: a new one, the third, with a slice for each.
    """

    sources: tuple[TensorInfo, ...]
    shape: tuple[int, ...]
    join: int | None = 0
    edit: Edit = "none"
    heads: Heads | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(source.nbytes for source in self.sources)


def made_tensors(file: GgufFile) -> dict[str, Made]:
    """Return the checkpoint's tensors in this file, by name.

    Unknown tensors keep their own name, and MTP heads are left out.

    Raises CheckpointError for a tensor with a part in another file.
    """
    made = _tower(file) if file.architecture == "clip" else _language(file)
    return dict(made)


def layer_count(file: GgufFile) -> int:
    """Count the language model's layers, without drafting layers. Raises CheckpointError."""
    arch = file.architecture
    names = (f"{arch}.block_count", f"{arch}.nextn_predict_layers")
    found = [file.metadata.get(name, 0) for name in names]
    if not all(isinstance(count, int) for count in found) or found[0] <= found[1]:
        raise file.refuse(f"{names[0]} is {found[0]!r}, of which {found[1]!r} draft")
    return int(found[0] - found[1])


def _one(tensor: TensorInfo, edit: Edit = "none", heads: Heads | None = None) -> Made:
    return Made((tensor,), tensor.shape, 0, edit, heads)


def _language(file: GgufFile) -> Iterator[tuple[str, Made]]:
    layers = layer_count(file)
    hybrid = Hybrid.of(file) if file.architecture.startswith("qwen35") else None
    for name, tensor in file.tensors.items():
        found = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if found is None:
            module, _, kind = name.rpartition(".")
            norm: Edit = "less one" if hybrid and module == "output_norm" else "none"
            yield f"{WHOLE[module]}.{kind}" if module in WHOLE else name, _one(tensor, norm)
            continue
        number, inner = int(found[1]), found[2]
        if number >= layers or inner == UP:
            continue
        within = f"{TEXT}.layers.{number}"
        if inner == GATE:
            halves = tensor, _sibling(file, tensor, f"blk.{number}.{UP}")
            count, rows, columns = tensor.shape
            joined = Made(halves, (count, 2 * rows, columns), 1)
            yield f"{within}.mlp.experts.gate_up_proj", joined
            continue
        module, _, kind = inner.rpartition(".")
        made = hybrid.made(inner, tensor) if hybrid else _one(tensor)
        if inner in BARE:
            yield f"{within}.{BARE[inner]}", made
        elif module in LAYER:
            yield f"{within}.{LAYER[module]}.{kind}", made
        else:
            yield name, made


@dataclass(frozen=True, slots=True)
class Hybrid:
    """Changes to Qwen3.5 by llama.cpp's converter.

    Norms have one added, decays are -exp, value heads lie in turn.
    """

    keys: int
    values: int
    key_size: int
    value_size: int

    @classmethod
    def of(cls, file: GgufFile) -> Hybrid:
        """Read the sizes from the metadata. Raises CheckpointError for a missing field."""
        names = ("group_count", "time_step_rank", "state_size", "inner_size")
        found = [file.metadata.get(f"{file.architecture}.ssm.{name}") for name in names]
        counts = [each for each in found if isinstance(each, int) and each > 0]
        if len(counts) < 4 or counts[1] % counts[0] or counts[3] % counts[1]:
            raise file.refuse(
                f"{file.architecture}.ssm.{', '.join(names)} are {found}, which fit no linear "
                "attention"
            )
        keys, values, key_size, inner = counts
        return cls(keys, values, key_size, inner // values)

    def made(self, inner: str, tensor: TensorInfo) -> Made:
        """Return a layer's tensor in transformers' form."""
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


def _tower(file: GgufFile) -> Iterator[tuple[str, Made]]:
    third = projector(file) == "qwen3vl_merger"
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
            yield outer[name], _one(tensor)
        elif name == PATCH:
            slices = tensor, _sibling(file, tensor, f"{PATCH}.1")
            shape = (*tensor.shape[:2], 2, *tensor.shape[2:])
            yield f"{TOWER}.patch_embed.proj.weight", Made(slices, shape, None)
        elif found := re.fullmatch(r"v\.deepstack\.(\d+)\.(norm|fc1|fc2)\.(\w+)", name):
            level, module = levels.get(int(found[1])), found[2].replace("fc", "linear_fc")
            if level is None:
                raise file.refuse(
                    f"tensor {name}, but is_deepstack_layers does not have {found[1]}"
                )
            yield f"{TOWER}.deepstack_merger_list.{level}.{module}.{found[3]}", _one(tensor)
        elif found := re.fullmatch(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)", name):
            yield from _block(file, tensor, *found.groups())
        elif name != f"{PATCH}.1":
            yield name, _one(tensor)


def _block(
    file: GgufFile, tensor: TensorInfo, number: str, module: str, kind: str
) -> Iterator[tuple[str, Made]]:
    within = f"{TOWER}.blocks.{number}"
    if module in BLOCK:
        yield f"{within}.{BLOCK[module]}.{kind}", _one(tensor)
    elif module == "attn_q":
        others = (_sibling(file, tensor, f"v.blk.{number}.attn_{each}.{kind}") for each in "kv")
        three = (tensor, *others)
        yield f"{within}.attn.qkv.{kind}", Made(three, (3 * tensor.shape[0], *tensor.shape[1:]))
    elif module.startswith("ffn_"):
        mine = _feed_forward(file, number)[module.removeprefix("ffn_")]
        yield f"{within}.mlp.{mine}.{kind}", _one(tensor)
    elif module not in ("attn_k", "attn_v"):
        yield tensor.name, _one(tensor)


def _feed_forward(file: GgufFile, number: str) -> dict[str, str]:
    """Return the names of a layer's matrices. Files from old converters swap up and down."""
    names = {
        "qwen2vl_merger": ("gate_proj", "fc1", "fc2"),
        "qwen2.5vl_merger": ("gate_proj", "up_proj", "down_proj"),
        "qwen3vl_merger": ("gate_proj", "linear_fc1", "linear_fc2"),
    }
    gate, up, down = names[projector(file)]
    found = file.tensors.get(f"v.blk.{number}.ffn_down.weight")
    if found is not None and found.shape[0] > found.shape[-1]:
        up, down = down, up
    return {"gate": gate, "up": up, "down": down}


def projector(file: GgufFile) -> str:
    """Return the way from the tower's rows to tokens, which tells the family.

    Raises CheckpointError.
    """
    for name in ("clip.projector_type", "clip.vision.projector_type"):
        if isinstance(found := file.metadata.get(name), str):
            if found in PROJECTORS:
                return found
            raise file.refuse(
                f"{name} {found} is not supported; supported are {', '.join(PROJECTORS)}"
            )
    raise file.refuse("clip.projector_type is missing: give a --mmproj file of a Qwen-VL model")


PROJECTORS = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger")


def deepstack_layers(file: GgufFile) -> tuple[int, ...]:
    """Return the tower's layers whose rows are extra levels."""
    found = file.metadata.get("clip.vision.is_deepstack_layers", [])
    return tuple(at for at, is_one in enumerate(found) if is_one) if isinstance(found, list) else ()


def _sibling(file: GgufFile, tensor: TensorInfo, name: str) -> TensorInfo:
    """Return the second tensor to join with `tensor`, in the same shape. Raises CheckpointError."""
    found = file.tensors.get(name)
    if found is None:
        raise file.refuse(
            f"no tensor {name}, which belongs to {tensor.name}: the file is not complete (of a "
            "split model: llama-gguf-split --merge)"
        )
    if found.shape != tensor.shape:
        raise CheckpointError(
            f"{file.path}: tensor {name} is {list(found.shape)}, but {tensor.name} "
            f"{list(tensor.shape)}"
        )
    return found
