"""Adapters (LoRA) as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors` of a
folder.

Anything unsupported is refused by name. A file is read whole, within `MOST_BYTES`, so that hashed
bytes and used bytes are the same. Knows nothing of networks.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from blake3 import blake3
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load

from saccade.core.errors import CheckpointError
from saccade.nn.low_rank import LANGUAGE, Factors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_CONFIG_BYTES = 1 << 20
MOST_BYTES = 2 << 30
MOST_RANK = 256
FINGERPRINT_BYTES = 16
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
PLAIN_STARTS = (True, False, "true", "false", "gaussian", "orthogonal", "eva")
"""`init_lora_weights` that leave the model's own weights alone."""


class AdapterConfig(Struct, rename={"rank": "r", "alpha": "lora_alpha"}):
    """The fields that decide an adapter's addition."""

    rank: int
    alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    init_lora_weights: Any = True


ABOUT = {
    # what AdapterConfig has
    *("r", "lora_alpha", "peft_type", "use_rslora", "init_lora_weights"),
    # what says where the adapter came from, how it was trained, or what its file shows anyway
    *("auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode"),
    *("layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version"),
    *("qalora_group_size", "rank_pattern", "revision", "runtime_config", "target_modules"),
    *("task_type", "eva_config", "loftq_config"),
}
NEUTRAL = {"bias": "none"}
"""What the other fields may be, beside nothing at all."""


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """A folder's content, by canonical names of modules."""

    fingerprint: str
    factors: dict[str, Factors]

    @property
    def rank(self) -> int:
        return max(len(each.a) for each in self.factors.values())

    @property
    def tower(self) -> bool:
        """True if the adapter changes the vision tower."""
        return not all(name.startswith(LANGUAGE) for name in self.factors)


def read_adapter(
    folder: Path,
    modules: Mapping[str, tuple[int, int]],
    canonical_name: Callable[[str], str],
) -> ReadAdapter:
    """modules: possible targets, [out, in] by canonical name. Raises CheckpointError."""
    if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        raise CheckpointError(
            f"{folder}: adapter_model.bin may hold code, and is not read: save the adapter as "
            f"{WEIGHTS}"
        )
    told = _read(folder / CONFIG, MOST_CONFIG_BYTES)
    config = _config(folder / CONFIG, told)
    path = folder / WEIGHTS
    data = _read(path, MOST_BYTES)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged or not complete: {error}") from None
    fingerprint = blake3(blake3(told).digest() + blake3(data).digest())
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if (match := TENSOR.fullmatch(name)) is None:
            raise CheckpointError(f"{path}: {name} is not supported: only lora_A and lora_B are")
        module = canonical_name(f"{match['module']}.weight").removesuffix(".weight")
        if module not in modules:
            raise CheckpointError(
                f"{path}: {match['module']} cannot have an adapter here: the linear layers of the "
                "language model and of the vision tower can, but for embeddings, head, routers and "
                "experts"
            )
        halves.setdefault(module, {})[match["half"]] = tensor
    if not halves:
        raise CheckpointError(f"{path} holds no adapter")
    factors = {name: _factors(path, name, halves[name], modules[name], config) for name in halves}
    return ReadAdapter(fingerprint.hexdigest(FINGERPRINT_BYTES), factors)


def _read(path: Path, most: int) -> bytes:
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise CheckpointError(f"{path} is not a file")  # opening a pipe would wait
        with path.open("rb") as file:
            data = file.read(most + 1) if about.st_size <= most else b""
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    if about.st_size > most or len(data) > most:
        raise CheckpointError(f"{path} has {about.st_size} bytes; an adapter's may have {most}")
    return data


def _config(path: Path, told: bytes) -> AdapterConfig:
    try:
        fields = msgspec.json.decode(told, type=dict[str, Any])
        config = msgspec.convert(fields, AdapterConfig)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    for name in _unsupported(fields, config):
        raise CheckpointError(f"{path}: {name} is not supported")
    if not (0 < config.rank <= MOST_RANK and math.isfinite(config.alpha)):
        raise CheckpointError(f"{path}: r is {config.rank}; it may be from 1 to {MOST_RANK}")
    return config


def _unsupported(fields: Mapping[str, Any], config: AdapterConfig) -> Iterator[str]:
    if config.peft_type != "LORA":
        yield f"peft_type {config.peft_type!r}"
    start = config.init_lora_weights
    if start is not None and start not in PLAIN_STARTS:
        yield f"init_lora_weights {start!r}, which changes the model's own weights,"
    for name, value in fields.items():
        if name not in ABOUT and value and value != NEUTRAL.get(name):
            yield f"{name} {str(value)[:100]!r}"


def _factors(
    path: Path,
    name: str,
    halves: Mapping[str, torch.Tensor],
    shape: tuple[int, int],
    config: AdapterConfig,
) -> Factors:
    """The matrices of one module, checked."""
    if halves.keys() != {"A", "B"}:
        raise CheckpointError(f"{path}: {name} has lora_{min(halves)} alone")
    a, b = halves["A"], halves["B"]
    rank = len(a) if a.dim() == 2 else 0
    if not 0 < rank <= MOST_RANK:
        raise CheckpointError(f"{path}: {name} has rank {rank}; it may be from 1 to {MOST_RANK}")
    if (tuple(a.shape), tuple(b.shape)) != ((rank, shape[1]), (shape[0], rank)):
        raise CheckpointError(
            f"{path}: {name}: lora_A {list(a.shape)} and lora_B {list(b.shape)} do not fit the "
            f"model's matrix {list(shape)}: this adapter is another model's"
        )
    for half, tensor in halves.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{path}: {name}: lora_{half} is {tensor.dtype}")
        if not tensor.isfinite().all():
            raise CheckpointError(f"{path}: {name}: lora_{half} has values that are no numbers")
    divisor = math.sqrt(rank) if config.use_rslora else rank
    return Factors(a, b, config.alpha / divisor)
