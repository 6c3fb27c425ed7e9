"""Reads the JSON files of a checkpoint: `config.json`, `generation_config.json`, and the files of
its image and video processors. Errors name the file and the field.

Families interpret the fields. `runtime/weights/checkpoint_weights.py` reads the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from blake3 import blake3

from saccade.core.errors import CheckpointError
from saccade.core.given_paths import read_text
from saccade.core.model_folder import ELSEWHERE

LARGEST = 2**31 - 1
"""The maximum absolute value of an integer in a configuration."""
MAX_LAYERS = 1000
"""The maximum number of layers. A limit is needed because layers are processed one by one at
startup, before any tensor is read.
"""
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
"""The names of the quantization section in config.json. The second one is the older name."""
IMAGES_ADAPTER = "vision-lora"
"""A subdirectory with a LoRA adapter that the model requires for prompts with images."""


def digest_weights(folder: Path) -> str:
    """Return a hash of all files that determine a checkpoint's weights.

    These are the *.safetensors files or the files listed by `weights_elsewhere`, the adapter for
    images, and config.json. Hashing uses all cores. Raises CheckpointError.
    """
    digest = blake3(max_threads=blake3.AUTO)
    files = weights_elsewhere(folder) or folder.glob("*.safetensors")
    adapter = (folder / IMAGES_ADAPTER).glob("adapter_*")
    for path in sorted([*files, *adapter, folder / "config.json"]):
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file")  # opening a pipe would block
        digest.update(f"{path.name} {path.stat().st_size} ".encode(errors="surrogateescape"))
        digest.update_mmap(path)
    return digest.hexdigest()


def weights_elsewhere(folder: Path) -> list[Path]:
    """Return the weight files outside of `folder` that it refers to.

    Directories created for GGUF files do this. For an ordinary checkpoint, the list is empty.
    Raises CheckpointError if a file was removed.
    """
    names = read_json(folder / ELSEWHERE, required=False).data.get("files", [])
    files = [Path(str(name)) for name in names]
    if missing := [path for path in files if not path.is_file()]:
        raise CheckpointError(f"{missing[0]} was removed while the checkpoint was read")
    return files


@dataclass(frozen=True, slots=True)
class Section:
    """One JSON object in a file, with methods that check the types of fields. Null counts as
    missing.

    If a method accepts more than one name, it uses the first field that is present. Methods raise
    CheckpointError with the file and the field if a field has the wrong type, or is missing and
    there is no default.
    """

    where: str  # the file and the section, for errors
    data: Mapping[str, Any]
    # (section, field) of all lookups in this file
    used: set[tuple[str, str]] = field(default_factory=set, compare=False, repr=False)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value in the file, which may be null, or `default` if the field is missing."""
        self.used.add((self.where, name))
        return self.data.get(name, default)

    def looked_up(self, name: str) -> bool:
        """Return True if any method has looked up the field, whether it exists or not."""
        return (self.where, name) in self.used

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def filled(self, absent: Mapping[str, Any]) -> Section:
        """Return a copy of this section in which missing fields have the values in `absent`."""
        missing = {name: value for name, value in absent.items() if not self.has(name)}
        return self.changed(missing)

    def changed(self, values: Mapping[str, Any]) -> Section:
        """Return a copy of this section in which fields have the values in `values`."""
        return replace(self, data={**self.data, **values})

    def section(self, name: str) -> Section:
        """Return the object under `name`, or an empty section if it is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {name} must be an object, not {value!r}")
        return Section(f"{self.where}: {name}", value or {}, self.used)

    def integer(self, *names: str, default: int | None = None) -> int:
        value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self.where}: {names[0]} must be an integer, not {value!r}")
        if abs(value) > LARGEST:
            raise CheckpointError(
                f"{self.where}: {names[0]} must be at most {LARGEST}, not {value}"
            )
        return value

    def count(self, *names: str, default: int | None = None) -> int:
        """Return an integer field, which must be at least 1."""
        if (value := self.integer(*names, default=default)) < 1:
            raise CheckpointError(f"{self.where}: {names[0]} must be at least 1, not {value}")
        return value

    def layers(self, *names: str, default: int | None = None) -> int:
        """Return a field with a number of layers, which must be from 1 to MAX_LAYERS."""
        if (value := self.count(*names, default=default)) > MAX_LAYERS:
            raise CheckpointError(
                f"{self.where}: {names[0]} must be at most {MAX_LAYERS}, not {value}"
            )
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        value = self._first(names, default)
        if not _is_finite(value):
            raise CheckpointError(f"{self.where}: {names[0]} must be a number, not {value!r}")
        return float(value)

    def positive(self, *names: str, default: float | None = None) -> float:
        """Return a number field, which must be above 0."""
        if (value := self.number(*names, default=default)) <= 0:
            raise CheckpointError(f"{self.where}: {names[0]} must be above 0, not {value}")
        return value

    def flag(self, *names: str, default: bool = False) -> bool:
        value = self._first(names, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {names[0]} must be true or false, not {value!r}")
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        value = self._first(names, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.where}: {names[0]} must be a string, not {value!r}")
        return value

    def integers(self, *names: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Return a list of integers as a tuple. A single integer counts as a list of one."""
        value = self._first(names, default)
        items = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise CheckpointError(
                f"{self.where}: {names[0]} must be a list of integers, not {value!r}"
            )
        return tuple(items)

    def numbers(self, *names: str, default: tuple[float, ...] | None = None) -> tuple[float, ...]:
        value = self._first(names, default)
        if not isinstance(value, list | tuple) or not all(map(_is_finite, value)):
            raise CheckpointError(
                f"{self.where}: {names[0]} must be a list of numbers, not {value!r}"
            )
        return tuple(float(item) for item in value)

    def _first(self, names: tuple[str, ...], default: object) -> Any:
        values = [self.get(name) for name in names]
        for value in values:
            if value is not None:
                return value
        if default is None:
            raise CheckpointError(f"{self.where}: {' or '.join(names)} is missing")
        return default


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The JSON files of one model. Sections of missing files are empty."""

    folder: Path
    config: Section
    generation: Section
    processor: Section  # settings of the image processor
    video: Section  # settings of the video processor

    @property
    def mentions_quantization(self) -> bool:
        """True if config.json has a quantization section, at any depth."""
        return mentions_quantization(self.config)

    def architecture(self) -> str:
        """Return `architectures[0]` from config.json, or `model_type` if it has none."""
        names = self.config.data.get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
        return self.config.text("model_type")

    def dtype(self, text: Section) -> str:
        """Return the data type of the weights, or "bfloat16" if config.json does not specify it.

        The top level of config.json has priority.

        text: the section of the language model.
        """
        return self.config.text(
            "dtype", "torch_dtype", default=text.text("dtype", "torch_dtype", default="bfloat16")
        )

    def eos_token_ids(self, text: Section) -> tuple[int, ...]:
        """Return the end tokens from generation_config.json.

        If it has none, return the ids in config.json (at the top level and in `text`) and in the
        tokenizer's file. Raises CheckpointError if no file has any.

        text: the section of the language model.
        """
        if self.generation.has("eos_token_id"):
            return self.generation.integers("eos_token_id")
        found = [
            token
            for section in (self.config, text)
            for token in section.integers("eos_token_id", default=())
        ] + self._tokenizer_eos()
        if not found:
            raise CheckpointError(
                f"{self.folder}: neither generation_config.json nor config.json has eos_token_id"
            )
        return tuple(dict.fromkeys(found))

    def _tokenizer_eos(self) -> list[int]:
        """Return the ids of added tokens that are the `eos_token` of tokenizer_config.json."""
        settings = read_json(self.folder / "tokenizer_config.json", required=False)
        token = settings.data.get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        added = settings.section("added_tokens_decoder").data.items()
        return [
            int(number)
            for number, entry in added
            if number.isdecimal() and isinstance(entry, dict) and entry.get("content") == content
        ]


def mentions_quantization(config: Section) -> bool:
    """Return True if a JSON file has a quantization section, at any depth."""
    return _has_any(config.data, QUANTIZATION_FIELDS)


def _has_any(data: Mapping[str, Any], names: Collection[str]) -> bool:
    inner = (value for value in data.values() if isinstance(value, dict))
    return not data.keys().isdisjoint(names) or any(_has_any(each, names) for each in inner)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the JSON files in `folder`. Raises CheckpointError with the file's name."""
    own = read_json(folder / "processor_config.json", required=False)
    config = read_json(folder / "config.json")
    return Checkpoint(
        folder=folder,
        config=config,
        generation=read_json(folder / "generation_config.json", required=False),
        processor=_processor(own, "image_processor", folder / "preprocessor_config.json"),
        video=_processor(own, "video_processor", folder / "video_preprocessor_config.json"),
    )


def _processor(own: Section, name: str, older: Path) -> Section:
    """Return the section `name` of processor_config.json, or the older file if there is none.

    This is the order of transformers 5.
    """
    return own.section(name) if own.has(name) else read_json(older, required=False)


@dataclass(frozen=True, slots=True)
class PoolingFiles:
    """The task that the files of sentence-transformers specify, and the tokens whose logits are
    scores.
    """

    task: Literal["embed", "rank"]
    labels: tuple[int, ...] = ()  # a ranker's token ids for "yes" and "no", if specified


def read_pooling(folder: Path) -> PoolingFiles | None:
    """Return the task of an embedding or ranking model, or None for other models.

    Raises CheckpointError if embeddings are not computed from the last token.
    """
    for path in sorted(folder.glob("*_LogitScore/config.json")):
        scores = read_json(path)
        names = ("true_token_id", "false_token_id")
        return PoolingFiles("rank", tuple(scores.integer(n) for n in names if scores.has(n)))
    for path in sorted(folder.glob("*_Pooling/config.json")):
        pooling = read_json(path)
        last = pooling.data.get("pooling_mode") == "lasttoken"
        if not last and not pooling.flag("pooling_mode_lasttoken"):
            raise CheckpointError(
                f"{path}: this model's embeddings are not computed from the last token; no other "
                "pooling is supported"
            )
        return PoolingFiles("embed")
    return None


def read_json(path: Path, *, required: bool = True) -> Section:
    """Read the object in a JSON file. If an optional file is missing, return an empty section.

    Raises CheckpointError with the file's name.
    """
    if not path.is_file():
        if required:
            raise CheckpointError(f"{path} is missing")
        return Section(str(path), {})
    try:
        data = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must contain a JSON object")
    return Section(str(path), data)
