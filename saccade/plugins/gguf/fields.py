"""Reads the metadata in a GGUF file field by field, and the settings for generation.

Families interpret their own fields.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from saccade.core.errors import CheckpointError
from saccade.core.types import STORED_SAMPLING
from saccade.plugins.gguf.header import GgufFile, TensorInfo

ENDS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"),
    *("<end_of_utterance>", "<turn|>"),
)
"""Tokens that end an answer, in addition to those in the metadata, as in llama.cpp."""
MAX_FLOATS = 4096
"""Maximum number of values in a tensor that is copied to config.json. Rotary factors have one value
per pair.
"""


@dataclass(slots=True)
class MetadataFields:
    """Reads the metadata fields of one file whose names start with a prefix.

    `missing` collects the absent fields that have a default. Raises CheckpointError with the file
    and field.
    """

    file: GgufFile
    prefix: str
    missing: list[str] = field(default_factory=list)

    def integer(self, name: str, default: int | None = None) -> int:
        found = self._find(name, default)
        if isinstance(found, list) and len(set(map(str, found))) == 1:  # the same for all layers
            found = found[0]
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise self._refuse(name, found, "a whole number")
        return found

    def integers(self, name: str, count: int) -> list[int]:
        """Read `count` integers, one per layer. The file may have a single integer for all
        layers.
        """
        found = self._find(name, None)
        listed = found if isinstance(found, list) else [found] * count
        if len(listed) != count or not all(type(each) is int and each >= 0 for each in listed):
            raise self._refuse(name, found, f"a whole number, or {count}")
        return listed

    def flag(self, name: str, default: bool | None = None) -> bool:
        found = self._find(name, default)
        if not isinstance(found, bool):
            raise self._refuse(name, found, "true or false")
        return found

    def flags(self, name: str, count: int) -> list[bool]:
        found = self._find(name, None)
        good = isinstance(found, list) and len(found) == count
        if not good or not all(isinstance(each, bool) for each in found):
            raise self._refuse(name, found, f"a list of {count} booleans")
        return list(found)

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
                f"it has no tensor {name}: the file is incomplete, or belongs to another model"
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


def floats_in(file: GgufFile, tensor: TensorInfo) -> list[float]:
    """Read all values of a small tensor. Raises CheckpointError."""
    count = tensor.nbytes // 4
    if tensor.kind != "F32" or count > MAX_FLOATS:
        raise file.refuse(
            f"tensor {tensor.name} is {list(tensor.shape)} of {tensor.kind}; at most {MAX_FLOATS} "
            "numbers of F32 are read"
        )
    with file.path.open("rb") as opened:
        opened.seek(tensor.start)
        raw = opened.read(tensor.nbytes)
    return list(struct.unpack(f"<{count}f", raw))


def token_ids(file: GgufFile, wanted: Collection[str]) -> dict[str, int]:
    """Return the IDs of those `wanted` tokens that are in the vocabulary."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    listed = tokens if isinstance(tokens, list) else []
    return {token: at for at, token in enumerate(listed) if token in wanted}


def require_tokens(file: GgufFile, wanted: Mapping[str, str]) -> dict[str, int]:
    """Return the ID of each token in `wanted`, by field. Raises CheckpointError for a missing
    token.
    """
    known = token_ids(file, set(wanted.values()))
    if missing := [token for token in wanted.values() if token not in known]:
        raise file.refuse(f"its vocabulary has no {missing[0]}, so it cannot read images")
    return {name: known[token] for name, token in wanted.items()}


def read_generation(file: GgufFile) -> dict[str, Any]:
    """Return the content of generation_config.json: the stop tokens, and the sampling
    parameters.
    """
    known = token_ids(file, ENDS)
    names = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    named = [file.metadata[name] for name in names if name in file.metadata]
    ends = dict.fromkeys([*named, *(known[token] for token in ENDS if token in known)])
    found: dict[str, Any] = {"eos_token_id": list(ends)}
    for theirs, name in STORED_SAMPLING.values():
        if (value := file.metadata.get(f"general.sampling.{name}")) is not None:
            found[theirs] = value
    return found
