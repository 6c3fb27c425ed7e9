"""What the JSON files of a model's folder hold.

Owns how `config.json`, `generation_config.json` and the image processor's file are read, and how
faults are worded. Leaves tensors to `runtime/weights/checkpoint_weights.py`, and the use of fields
to families.
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
"""No integer of a configuration is larger."""
MAX_LAYERS = 1000
"""Each is counted on start-up before any tensor is looked for."""
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
"""The section of config.json; the second is the older name."""
IMAGES_ADAPTER = "vision-lora"
"""A folder beside the weights with an adapter (LoRA) that images are meant to be asked with."""


def digest_weights(folder: Path) -> str:
    """Return a digest over all sources of a checkpoint's weights, byte for byte.

    The sources are the *.safetensors files, or files elsewhere, an adapter for images, and
    config.json. Runs on all cores, as fast as they are read.
    """
    digest = blake3(max_threads=blake3.AUTO)
    files = weights_elsewhere(folder) or folder.glob("*.safetensors")
    adapter = (folder / IMAGES_ADAPTER).glob("adapter_*")
    for path in sorted([*files, *adapter, folder / "config.json"]):
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file")  # opening a pipe would wait
        digest.update(f"{path.name} {path.stat().st_size} ".encode(errors="surrogateescape"))
        digest.update_mmap(path)
    return digest.hexdigest()


def weights_elsewhere(folder: Path) -> list[Path]:
    """Return the files behind a folder that was made for them, or an empty list.

    Raises CheckpointError if a file is gone.
    """
    names = read_json(folder / ELSEWHERE, required=False).data.get("files", [])
    files = [Path(str(name)) for name in names]
    if missing := [path for path in files if not path.is_file()]:
        raise CheckpointError(f"{missing[0]} was removed")
    return files


@dataclass(frozen=True, slots=True)
class Section:
    """One JSON object in a file, read field by field. A field that is null counts as absent.

    Methods take alternative names for moved fields, and the first present wins. They raise
    CheckpointError naming file and field.

    used: each field of the file that was looked up, with its section.
    """

    where: str
    data: Mapping[str, Any]
    used: set[tuple[str, str]] = field(default_factory=set, compare=False, repr=False)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of any type as in the file, also null, or `default` if it is absent."""
        self.used.add((self.where, name))
        return self.data.get(name, default)

    def looked_up(self, name: str) -> bool:
        """Return True for a field that a method has looked for, present or absent."""
        return (self.where, name) in self.used

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def filled(self, absent: Mapping[str, Any]) -> Section:
        """Return this section with values for its absent fields."""
        missing = {name: value for name, value in absent.items() if not self.has(name)}
        return self.changed(missing)

    def changed(self, values: Mapping[str, Any]) -> Section:
        """Return this section with other values."""
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
            raise CheckpointError(f"{self.where}: {names[0]} must be at most {LARGEST}")
        return value

    def count(self, *names: str, default: int | None = None) -> int:
        """Return an integer that is at least 1."""
        if (value := self.integer(*names, default=default)) < 1:
            raise CheckpointError(f"{self.where}: {names[0]} must be at least 1, not {value}")
        return value

    def layers(self, *names: str, default: int | None = None) -> int:
        """Return a layer count from 1 to MAX_LAYERS."""
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
        """Return a number above 0."""
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
        """Return a list of integers. A single integer counts as a list of one."""
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
    """Return True for a number that is a finite float or can become one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The JSON side of one model.

    `generation`, `processor` and `video` (the video processor's) are empty where their files are
    missing.
    """

    folder: Path
    config: Section
    generation: Section
    processor: Section
    video: Section

    @property
    def mentions_quantization(self) -> bool:
        """Return True if config.json has settings of a quantisation, at any depth."""
        return mentions_quantization(self.config)

    def architecture(self) -> str:
        """Return `architectures[0]` from config.json, or else `model_type`."""
        names = self.config.data.get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
        return self.config.text("model_type")

    def dtype(self, text: Section) -> str:
        """Return the number format of the weights, "bfloat16" by default.

        Files name it at the top of config.json or in `text`, the language model's section.
        """
        return self.config.text(
            "dtype", "torch_dtype", default=text.text("dtype", "torch_dtype", default="bfloat16")
        )

    def eos_token_ids(self, text: Section) -> tuple[int, ...]:
        """Return the tokens that end an answer.

        They are in generation_config.json, or else in config.json, at its top and in the language
        model's section `text`, and in the tokenizer's file. Raises CheckpointError if all are
        silent.
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
        """Look up the id of tokenizer_config.json's `eos_token` among the added tokens."""
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
    """Return True if a JSON file has settings of a quantisation, at any depth."""
    return _has_any(config.data, QUANTIZATION_FIELDS)


def _has_any(data: Mapping[str, Any], names: Collection[str]) -> bool:
    inner = (value for value in data.values() if isinstance(value, dict))
    return not data.keys().isdisjoint(names) or any(_has_any(each, names) for each in inner)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the JSON files in `folder`.

    Raises CheckpointError naming the file.
    """
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
    """Return what processor_config.json has under `name`, or else the older file.

    transformers 5 has this order for images and for videos.
    """
    return own.section(name) if own.has(name) else read_json(older, required=False)


@dataclass(frozen=True, slots=True)
class PoolingFiles:
    """The task, embedding or ranking, that sentence-transformers' files name.

    labels: token ids for a ranker's answers, yes and no. Empty: the files name none.
    """

    task: Literal["embed", "rank"]
    labels: tuple[int, ...] = ()


def read_pooling(folder: Path) -> PoolingFiles | None:
    """Return the task that the checkpoint was trained for beyond chats, if any.

    Raises CheckpointError if embeddings are made from more than the last token.
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
                f"{path}: embeddings of this model are not made of its last token, which is all "
                "that is supported"
            )
        return PoolingFiles("embed")
    return None


def read_json(path: Path, *, required: bool = True) -> Section:
    """Return the object in a JSON file, empty for a missing optional file.

    Raises CheckpointError naming the file.
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
        raise CheckpointError(f"{path} must hold a JSON object")
    return Section(str(path), data)
