"""Reads LoRA adapters in PEFT's format: a directory with `adapter_config.json` and
`adapter_model.safetensors`.

Unsupported features are rejected by name from the header, before tensors are read. The file is then
read into memory at once, within `MAX_BYTES`, so that the bytes hashed are the bytes used.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from blake3 import blake3
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load

from saccade.core.decoders import convert, json_decoder
from saccade.core.errors import CheckpointError
from saccade.core.given_paths import read_bytes, reason, regular, shown
from saccade.nn.low_rank import LANGUAGE, Factors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 4 << 20
MAX_BYTES = 2 << 30
MAX_RANK = 256
FINGERPRINT_BYTES = 16
DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes per value."""
TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
PLAIN_STARTS = (True, False, "true", "false", "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that do not change the model's own weights."""


class AdapterConfig(Struct, rename={"rank": "r", "alpha": "lora_alpha"}):
    """The fields of `adapter_config.json` that determine what an adapter computes."""

    rank: int
    alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    init_lora_weights: Any = True


ABOUT = {
    # the fields of AdapterConfig
    *("r", "lora_alpha", "peft_type", "use_rslora", "init_lora_weights"),
    # fields about the adapter's origin and training, or that only repeat information in the file
    *("auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode"),
    *("layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version"),
    *("qalora_group_size", "rank_pattern", "revision", "runtime_config", "target_modules"),
    *("task_type", "eva_config", "loftq_config"),
}
NEUTRAL = {"bias": "none"}
"""The supported values of all other fields, which may also be empty."""


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter that was read from a directory: its matrices by canonical names of modules."""

    fingerprint: str
    factors: dict[str, Factors]

    @property
    def rank(self) -> int:
        return max(len(each.a) for each in self.factors.values())

    @property
    def tower(self) -> bool:
        """True if the adapter changes the vision encoder."""
        return not all(name.startswith(LANGUAGE) for name in self.factors)


def read_adapter(
    folder: Path,
    modules: Mapping[str, tuple[int, int]],
    canonical_name: Callable[[str], str],
) -> ReadAdapter:
    """Read the adapter in a directory, and return it. Raises CheckpointError or OSError.

    modules: the supported target modules, as [out, in] by canonical name.
    canonical_name: converts a module's name in the file to the name that layers use.
    """
    if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        raise CheckpointError(
            f"{folder}: adapter_model.bin may contain code, so it is not read: save the adapter "
            f"as {WEIGHTS}"
        )
    config_json = _read_config(folder / CONFIG)
    config = _config(folder / CONFIG, config_json)
    path = folder / WEIGHTS
    with _opened(path) as file:
        header, stored = _header(path, file, most=2 * len(modules))
        halves: dict[str, dict[str, str]] = {}
        for name in stored:
            if (match := TENSOR.fullmatch(name)) is None:
                raise CheckpointError(
                    f"{path}: {name} is not supported: only lora_A and lora_B are"
                )
            module = canonical_name(f"{match['module']}.weight").removesuffix(".weight")
            if module not in modules:
                raise CheckpointError(
                    f"{path}: {match['module']} does not support adapters: only linear layers of "
                    "the language model and of the vision encoder do, but not the embeddings, the "
                    "head, routers and experts"
                )
            halves.setdefault(module, {})[match["half"]] = name
        if not halves:
            raise CheckpointError(f"{path} contains no adapter")
        for module, named in halves.items():
            shapes = {half: stored[name] for half, name in named.items()}
            _check_shapes(path, module, shapes, modules[module])
        data = _whole(path, file, header, stored)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged or incomplete: {error}") from None
    fingerprint = blake3(blake3(config_json).digest() + blake3(data).digest())
    factors = {
        module: _factors(
            path, module, {half: tensors[name] for half, name in named.items()}, config
        )
        for module, named in halves.items()
    }
    return ReadAdapter(fingerprint.hexdigest(FINGERPRINT_BYTES), factors)


class StoredHalf(Struct):
    """The header's entry for one of the two matrices that an adapter has for each module."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype]


_STORED: msgspec.json.Decoder[StoredHalf] = json_decoder(StoredHalf)


def _read_config(path: Path) -> bytes:
    try:
        return read_bytes(path, MAX_CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{shown(path)}: {reason(error)}") from None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file of at most `MAX_BYTES`, and close it on exit.

    Raises CheckpointError if the file cannot be opened, or if a later read fails.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
                raise CheckpointError(f"{path} has {size} bytes; the limit is {MAX_BYTES}")
            yield file
    except OSError as error:
        raise CheckpointError(f"{shown(path)}: {reason(error)}") from None


def _header(path: Path, file: BinaryIO, most: int) -> tuple[bytes, dict[str, StoredHalf]]:
    """Return the bytes of the header, and the entries of its tensors. Raises CheckpointError.

    most: the maximum number of tensors.
    """
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is damaged: its header has {length} bytes; the limit is {MAX_HEADER_BYTES}"
        )
    header = file.read(length)
    try:
        fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)
        if len(fields) > most:
            raise CheckpointError(
                f"{path} has {len(fields)} tensors; an adapter of this model has at most {most}"
            )
        stored = {name: _STORED.decode(each) for name, each in fields.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or incomplete: {error}") from None
    return first + header, stored


def _whole(path: Path, file: BinaryIO, header: bytes, stored: Mapping[str, StoredHalf]) -> bytes:
    """Return the bytes of the entire file, whose size must match its header. Raises
    CheckpointError.
    """
    size = os.fstat(file.fileno()).st_size
    wanted = len(header) + sum(each.nbytes for each in stored.values())
    if size != wanted:
        raise CheckpointError(
            f"{path} is damaged or incomplete: it has {size} bytes, and {wanted} by its header"
        )
    file.seek(0)
    data = file.read(size)
    if len(data) != size or not data.startswith(header):
        raise CheckpointError(f"{path} was changed while it was read")
    return data


def _config(path: Path, config_json: bytes) -> AdapterConfig:
    try:
        fields = msgspec.json.decode(config_json, type=dict[str, Any])
        config = convert(fields, AdapterConfig)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    for name in _unsupported(fields, config):
        raise CheckpointError(f"{path}: {name} is not supported")
    if not (0 < config.rank <= MAX_RANK and math.isfinite(config.alpha)):
        raise CheckpointError(f"{path}: r must be from 1 to {MAX_RANK}, not {config.rank}")
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


def _check_shapes(
    path: Path, name: str, halves: Mapping[str, StoredHalf], shape: tuple[int, int]
) -> None:
    if halves.keys() != {"A", "B"}:
        raise CheckpointError(f"{path}: {name} has only lora_{min(halves)}")
    a, b = halves["A"].shape, halves["B"].shape
    rank = a[0] if len(a) == 2 else 0
    if not 0 < rank <= MAX_RANK:
        raise CheckpointError(f"{path}: {name}: the rank must be from 1 to {MAX_RANK}, not {rank}")
    if (a, b) != ((rank, shape[1]), (shape[0], rank)):
        raise CheckpointError(
            f"{path}: {name}: lora_A {list(a)} and lora_B {list(b)} do not fit the "
            f"model's matrix {list(shape)}: this adapter belongs to a different model"
        )
    for half, each in halves.items():
        if each.dtype not in DTYPES:
            raise CheckpointError(f"{path}: {name}: lora_{half} is {each.dtype}")


def _factors(
    path: Path, name: str, halves: Mapping[str, torch.Tensor], config: AdapterConfig
) -> Factors:
    for half, tensor in halves.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"{path}: {name}: lora_{half} contains NaN or infinity")
    rank = len(halves["A"])
    divisor = math.sqrt(rank) if config.use_rslora else rank
    return Factors(halves["A"], halves["B"], config.alpha / divisor)
