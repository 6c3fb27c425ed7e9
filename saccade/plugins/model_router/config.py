"""The file of `saccade route --models`: its fields, and their limits.

    memory = "40GiB"                        # of all servers together
    idle = "10m"                            # "never" does not stop idle servers
    [qwen]                                  # the name in requests
    model = "Qwen/Qwen3-VL-2B-Instruct"     # as for `saccade serve`
    args = ["--quantization", "int8"]
    aliases = ["gpt-4o"]
    memory = "6GiB"                         # of this server

Durations are numbers with a unit, such as 30s or 10m.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from saccade.core.config import GIB, MIB
from saccade.core.decoders import convert
from saccade.core.errors import ConfigError
from saccade.core.given_paths import read_text, reason, shown
from saccade.core.model_folder import DEMO
from saccade.core.tuning import read_size

MAX_MODELS = 64
MAX_NAME_CHARS = 128
DEFAULT_SHARE = 0.8
"""The default fraction of the memory that is free when the router starts."""
PROCESS_BYTES = 512 * MIB
"""Estimated bytes that a server uses before its first request, in addition to its weights
(measured: 0.47 GiB).
"""
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
ROUTER_OPTIONS = {
    "--host": "each server gets an address from the router",
    "--port": "each server gets an address from the router",
    "--served-model-name": "the table's name and its `aliases` are the model's names",
    "--api-key": "set SACCADE_API_KEY where the router starts, or `api-keys-file` in the file",
    "--api-keys-file": "write `api-keys-file` above all tables, as the router checks keys too",
    "--cors-origins": "give it to the router",
    "--role": "a server encodes and answers",
    "--encoders": "a server encodes and answers",
}
"""Options that are not allowed in a model's `args`, and how to set them instead."""
SHARED_OPTIONS = ("--files-dir",)
"""Options that must have the same value for all servers, because any server may use an upload."""


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    args: list[str] = []
    aliases: list[str] = []
    memory: str = ""


class _Top(msgspec.Struct, forbid_unknown_fields=True, rename="kebab"):
    memory: str = ""
    idle: str = "10m"
    stay: str = "10s"
    patience: str = "5m"
    queue: int = 128
    max_waiting: int = 256
    args: list[str] = []
    api_keys_file: str | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of one model.

    args: the arguments of its server, including those for all servers.
    """

    name: str
    model: str
    args: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    memory: int | None = None  # bytes, as declared

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use for this model, including names of adapters in `args`."""
        return (self.name, *self.aliases, *self._adapters)

    @property
    def serve_options(self) -> list[str]:
        served = [word for name in (self.name, *self.aliases) for word in (_SERVED, name)]
        return [*self.args, *served]

    @property
    def _adapters(self) -> list[str]:
        pairs = zip(self.args, (*self.args[1:], ""), strict=False)
        values = [
            after if word == "--lora" else word.removeprefix("--lora=")
            for word, after in pairs
            if word.partition("=")[0] == "--lora"
        ]
        return [value.partition("=")[0] for value in values]


_SERVED = "--served-model-name"


@dataclass(frozen=True, slots=True)
class ModelsConfig:
    """The contents of the file. Durations are in seconds, memory in bytes."""

    models: tuple[ModelConfig, ...]  # the first one is the default
    memory: int | None = None  # None: a fraction of the free memory
    idle: float | None = 600.0  # time without requests until a server is stopped; None: never
    stay: float = 10.0  # minimum time between a server's start and its eviction
    patience: float = 300.0  # maximum time that a request waits for its model
    queue: int = 128  # maximum requests that wait for one model
    max_waiting: int = 256  # maximum waiting requests in total; one client may have half
    api_keys_file: str | None = None


def read_models(file: str) -> ModelsConfig:
    """Parse the file. Raises ConfigError with the table and field."""
    try:
        content = tomllib.loads(read_text(Path(file)))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"--models {shown(file)}: {why}") from None
    try:
        return _parse(content)
    except ConfigError as error:
        raise ConfigError(f"--models {shown(file)}: {error}") from None


def _parse(content: Mapping[str, Any]) -> ModelsConfig:
    tables = {name: value for name, value in content.items() if isinstance(value, dict)}
    rest = {name: value for name, value in content.items() if name not in tables}
    top = _converted("", rest, _Top)
    if not 1 <= len(tables) <= MAX_MODELS:
        raise ConfigError(
            f"the file must have 1 to {MAX_MODELS} tables, one per model, not {len(tables)}"
        )
    if top.queue < 1 or top.max_waiting < 1:
        raise ConfigError("queue and max-waiting must be at least 1")
    _check_args("", top.args, ROUTER_OPTIONS)
    models = tuple(_model(name, value, top.args) for name, value in tables.items())
    names = [name for model in models for name in model.names]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two models have the name {twice[0]!r}: names and aliases must differ")
    memory = read_size("memory", top.memory) if top.memory else None
    for model in models:
        if memory is not None and model.memory is not None and model.memory > memory:
            raise ConfigError(
                f"[{model.name}] memory is {in_gib(model.memory)}; all servers together may have "
                f"{in_gib(memory)} (memory)"
            )
    return ModelsConfig(
        models,
        memory,
        None if top.idle == "never" else _duration("idle", top.idle),
        _duration("stay", top.stay),
        _duration("patience", top.patience),
        top.queue,
        top.max_waiting,
        top.api_keys_file,
    )


def _model(name: str, table: Mapping[str, Any], shared: Sequence[str]) -> ModelConfig:
    given = _converted(name, table, _Table)
    for each in (name, *given.aliases):
        if len(each) > MAX_NAME_CHARS or not _NAME.fullmatch(each):
            raise ConfigError(
                f"[{name}] {each[:MAX_NAME_CHARS]!r} is not a name: use letters, digits and "
                f"._:/@- (at most {MAX_NAME_CHARS} characters)"
            )
    if given.model.startswith("-") or not given.model:
        raise ConfigError(f"[{name}] model {given.model!r}: write a folder, a hub id, or demo")
    why = "write it in `args` above all tables: all servers need the same"
    _check_args(name, given.args, ROUTER_OPTIONS | dict.fromkeys(SHARED_OPTIONS, why))
    memory = read_size(f"[{name}] memory", given.memory) if given.memory else None
    return ModelConfig(name, given.model, (*shared, *given.args), tuple(given.aliases), memory)


def _converted(name: str, table: Mapping[str, Any], kind: type[Any]) -> Any:
    try:
        return convert(table, kind)
    except msgspec.ValidationError as error:
        place = f"[{name}] " if name else ""
        raise ConfigError(f"{place}{error}") from None


def _check_args(name: str, args: Sequence[str], refused: Mapping[str, str]) -> None:
    for arg in args:
        option = arg.partition("=")[0].replace("_", "-")
        if option in refused:
            raise ConfigError(f"{f'[{name}] ' if name else ''}args: {option}: {refused[option]}")


def _duration(field: str, text: str) -> float:
    parts = _AMOUNT.fullmatch(text.strip())
    if parts is None or (unit := _SECONDS.get(parts[2])) is None:
        raise ConfigError(f'{field} = {text!r}: write a duration, such as "30s", "10m" or "2h"')
    return float(parts[1]) * unit


def in_gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def estimated_bytes(model: str) -> int | None:
    """Return the estimated memory of a server in bytes, from its weights on disk, or None if they
    are not there.
    """
    path = DEMO if model == "demo" else Path(model).expanduser()
    if path.is_file():
        return path.stat().st_size + PROCESS_BYTES
    if not path.is_dir():
        path = _hub_cache() / f"models--{model.partition(':')[0].replace('/', '--')}" / "snapshots"
    files = [*path.rglob("*.safetensors"), *path.rglob("*.gguf")]
    sizes = {file.resolve(): file.stat().st_size for file in files if file.is_file()}
    return sum(sizes.values()) + PROCESS_BYTES if sizes else None


def _hub_cache() -> Path:
    if given := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(home).expanduser() / "hub"
