"""Marks fields of option dataclasses as basic options or tuning values, and checks the bounds of
values.

`saccade serve --help` lists only basic options. A tuning value is normally chosen by Saccade. It
exists for measurements and tests, and is set with `--tune NAME=VALUE` or as a field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, get_type_hints

import msgspec

from saccade.core.decoders import convert
from saccade.core.errors import ConfigError

T = TypeVar("T")
BASIC, TUNING = "basic", "tuning"
"""Keys in the metadata of a field. The value of `TUNING` is the description for users."""
GONE = {
    "allow_unproven": "use --parity unproven",
    "check_parity": "use --parity generate",
    "cuda_graph_max_bs": "graphs are captured for up to --max-running-requests sequences; "
    "--disable-cuda-graph disables them",
    "disable_vit_graph": "use --tune vit_graphs=false",
    "documents": "set saccade.documents in the request; the default is both",
    "embedding_cache_disk_mb": "use --embedding-cache-dir FOLDER:SIZE, such as /cache/images:64GiB",
    "embedding_cache_shared_mb": "use --embedding-cache-dir FOLDER:SIZE --embedding-cache-shared",
    "encoder_connections": "each encoder gets at most 16 images at a time",
    "encoder_timeout": "encoders share the limit of URLs: --tune fetch_timeout=SECONDS",
    "encoders_file": "use --encoders FILE",
    "files_mb": "use --files-dir FOLDER:SIZE, or :SIZE for the default directory",
    "gguf_file": "put the file after the model, as in Qwen/Qwen3-VL-2B-Instruct-GGUF:Q4_K_M",
    "kv_cache_disk_mb": "use --kv-cache-dir FOLDER:SIZE, such as /cache/kv:64GiB",
    "max_responses": "at most 10,000 responses are stored, within --tune responses_mb=MIB",
    "mm_encoder_tp_mode": "each process holds a slice of the vision encoder, or all of it "
    "where slices would be too narrow",
    "piecewise_graph_tokens": "graphs are captured for up to 4096 prompt tokens, as memory allows; "
    "--disable-cuda-graph disables them",
    "pinned_share": "at most half of each cache can be pinned",
    "readout_cache_mb": "embeddings, ranks and decisions are cached in 64 MiB",
    "responses_ttl": "responses are stored for a day after their last use",
    "special_tokens_in_content": "special tokens in messages are plain text; /v1/completions "
    "supports them",
    "speculative_tokens": "at most 7 draft tokens per step; --speculative off disables them",
    "vit_graph_buckets": "graphs are captured for the patch counts of images; "
    "--disable-cuda-graph disables them",
}
"""Removed options and tuning values, with what replaces each of them or what the server does
now.
"""


def basic(default: T) -> T:
    """Declare a dataclass field as a basic option."""
    return field(default=default, metadata={BASIC: True})


def tuned(default: T, meaning: str) -> T:
    """Declare a dataclass field as a tuning value. meaning: a one-line description for users."""
    return field(default=default, metadata={TUNING: meaning})


def option(name: str) -> str:
    """Return the command-line spelling of a field's name."""
    return f"--{name.replace('_', '-')}"


def setting(options: object, name: str, value: object) -> str:
    """Return a field and its value as written on the command line, for error messages."""
    marks = next(each.metadata for each in _fields(options) if each.name == name)
    return f"--tune {name}={value}" if TUNING in marks else f"{option(name)} {value}"


def basic_options(kinds: Sequence[type]) -> frozenset[str]:
    """Return the basic options among the fields of these dataclasses, as spelled on the command
    line.
    """
    return frozenset(
        option(each.name) for kind in kinds for each in _fields(kind) if BASIC in each.metadata
    )


@dataclass(frozen=True, slots=True)
class TuningValue:
    """The name, default, type and description of a tuning value."""

    name: str
    default: object
    hint: Any
    meaning: str

    @property
    def described(self) -> str:
        """A line with the name, default and meaning. A default of None or "auto" is left out,
        because `meaning` explains it.
        """
        default = "" if self.default in (None, "auto") else f" ({self.default})"
        return f"{self.name}{default}: {self.meaning}"

    def parse(self, text: str) -> object:
        """Convert `text` to the field's type. Raises ConfigError."""
        try:
            return convert(text, self.hint, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--tune {self.name}={text}: {error}") from None


def tuning_values(kinds: Sequence[type]) -> dict[str, TuningValue]:
    """Return the tuning values in these dataclasses by name, in field order."""
    found = {}
    for kind in kinds:
        hints = get_type_hints(kind)
        for each in _fields(kind):
            if meaning := each.metadata.get(TUNING):
                found[each.name] = TuningValue(each.name, each.default, hints[each.name], meaning)
    return found


class Tuning:
    """The tuning values set on one command line."""

    def __init__(self, given: Sequence[str], kinds: Sequence[type]) -> None:
        """Parse `given`, in which each entry is NAME=VALUE. kinds: the option dataclasses.

        Raises ConfigError for an unknown name or an invalid value.
        """
        known = tuning_values(kinds)
        self._values: dict[str, object] = {}
        for each in given:
            name, _, text = each.partition("=")
            if name in GONE:
                raise ConfigError(f"--tune {name} was removed: {GONE[name]}")
            if name not in known or not text:
                raise ConfigError(
                    f"--tune {each}: expected NAME=VALUE; the names are {', '.join(sorted(known))}"
                )
            self._values[name] = known[name].parse(text)

    def of(self, options: T) -> T:
        """Return a copy of `options` with its tuning values set as on the command line.

        Raises ConfigError if a value is out of bounds.
        """
        own = {each.name for each in _fields(options)} & self._values.keys()
        values = {name: self._values[name] for name in own}
        return replace(options, **values)  # type: ignore[type-var]


def take_options(kind: type[T], named: dict[str, Any]) -> T:
    """Return a `kind` whose fields are set from `named`, and remove these entries from `named`."""
    names = {each.name for each in _fields(kind)} & named.keys()
    return kind(**{name: named.pop(name) for name in names})


def _fields(options: object) -> Any:
    return fields(options)  # type: ignore[arg-type]


MAX_IMAGE_WORKERS = 240
"""Each worker needs a file descriptor in a message of a Unix socket, which can carry at most
253.
"""

UNITS = {
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
"""Number of bytes by unit, in lower case."""
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)\s*([a-z]+)", re.ASCII | re.IGNORECASE)


def read_size(name: str, text: str) -> int:
    """Convert a size such as 40GiB or 1.5 TiB to bytes.

    name: the option or field, for error messages. Raises ConfigError.
    """
    parts = _SIZE.fullmatch(text.strip())
    if parts is None or (unit := UNITS.get(parts[2].lower())) is None or not float(parts[1]):
        raise ConfigError(f'{name} = {text!r}: write a size, such as "40GiB" or "500MiB"')
    return int(float(parts[1]) * unit)


def at_least(bound: float, options: object, *names: str) -> None:
    """Raise ConfigError if any of the fields `names` is below `bound`. Fields that are None are
    accepted.
    """
    _check(options, names, lambda value: value >= bound, f"at least {bound}")


def at_most(bound: float, options: object, *names: str) -> None:
    """Raise ConfigError if any of the fields `names` is above `bound`. Fields that are None are
    accepted.
    """
    _check(options, names, lambda value: value <= bound, f"at most {bound}")


def above(bound: float, options: object, *names: str) -> None:
    """Raise ConfigError unless each of the fields `names` is above `bound`. Fields that are None
    are accepted.
    """
    _check(options, names, lambda value: value > bound, f"above {bound}")


def named(options: object, *names: str) -> None:
    """Raise ConfigError if a list in one of the fields `names` contains "". A shell passes "" for
    an unset variable.
    """
    for name in names:
        if "" in getattr(options, name):
            raise ConfigError(f"{option(name)} is empty: set a value, or omit the option")


def _check(
    options: object, names: tuple[str, ...], right: Callable[[float], bool], allowed: str
) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and not right(value):
            raise ConfigError(f"{setting(options, name, value)}: must be {allowed}")
