"""Marks on the fields of option dataclasses: basic options, and tuning values.

`saccade serve --help` shows basic options alone. A tuning value is a figure that Saccade otherwise
decides, here for measuring and tests: no option, but set by `--tune NAME=VALUE` or as a field.
Knows nothing of the values' use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, get_type_hints

import msgspec

from saccade.core.decoders import convert
from saccade.core.errors import ConfigError

T = TypeVar("T")
BASIC, TUNING = "basic", "tuning"
"""Keys of a field's metadata; the second one's value is the meaning of the tuning value."""
GONE = {
    "allow_unproven": "use --parity unproven",
    "check_parity": "use --parity generate",
    "cuda_graph_max_bs": "graphs are made for up to --max-running-requests sequences; "
    "--disable-cuda-graph makes none",
    "disable_vit_graph": "use --disable-cuda-graph, which holds for both",
    "documents": "a request says what is seen of a PDF: saccade.documents, else both",
    "embedding_cache_disk_mb": "use --embedding-cache-dir FOLDER:SIZE, such as /cache/images:64GiB",
    "embedding_cache_shared_mb": "use --embedding-cache-dir FOLDER:SIZE --embedding-cache-shared",
    "encoder_connections": "an encoder is asked for 16 images at a time",
    "encoder_timeout": "an encoder has as long as a URL: --tune fetch_timeout=SECONDS",
    "encoders_file": "use --encoders FILE",
    "files_mb": "use --files-dir FOLDER:SIZE, or :SIZE for the usual folder",
    "gguf_file": "name the file behind the model, as in Qwen/Qwen3-VL-2B-Instruct-GGUF:Q4_K_M",
    "kv_cache_disk_mb": "use --kv-cache-dir FOLDER:SIZE, such as /cache/kv:64GiB",
    "max_responses": "10,000 responses are kept, within --tune responses_mb=MIB",
    "mm_encoder_tp_mode": "each process holds a slice of the vision tower, or all of it "
    "where slices would be too narrow",
    "piecewise_graph_tokens": "graphs are made for up to 4096 tokens of prompts, as memory allows; "
    "--disable-cuda-graph makes none",
    "pinned_share": "requests may pin half of each cache",
    "readout_cache_mb": "64 MiB keep what embeddings, ranks and decisions have read",
    "responses_ttl": "a response is kept for a day after its last use",
    "special_tokens_in_content": "special tokens in messages are plain text; /v1/completions has "
    "them",
    "speculative_tokens": "7 tokens are guessed at most; --speculative off guesses none",
    "vit_graph_buckets": "graphs are made for the patches that images have; --disable-cuda-graph "
    "makes none",
}
"""Options and tuning values of earlier versions, and what says the same or holds without them."""


def basic(default: T) -> T:
    """Return a basic option's field."""
    return field(default=default, metadata={BASIC: True})


def tuned(default: T, meaning: str) -> T:
    """Return a tuning value's field. `meaning` is one line for people."""
    return field(default=default, metadata={TUNING: meaning})


def option(name: str) -> str:
    """Return the option as users type it."""
    return f"--{name.replace('_', '-')}"


def setting(options: object, name: str, value: object) -> str:
    """Return a field and its value as users type them, for refusals."""
    marks = next(each.metadata for each in _fields(options) if each.name == name)
    return f"--tune {name}={value}" if TUNING in marks else f"{option(name)} {value}"


def basic_options(kinds: Sequence[type]) -> frozenset[str]:
    """Return the basic options in these dataclasses, as users type them."""
    return frozenset(
        option(each.name) for kind in kinds for each in _fields(kind) if BASIC in each.metadata
    )


@dataclass(frozen=True, slots=True)
class TuningValue:
    """A tuning value by its name, its default, its type and its meaning."""

    name: str
    default: object
    hint: Any
    meaning: str

    @property
    def described(self) -> str:
        """Describe the value in a line. The meaning covers a default that is None or "auto"."""
        default = "" if self.default in (None, "auto") else f" ({self.default})"
        return f"{self.name}{default}: {self.meaning}"

    def parse(self, text: str) -> object:
        """Parse `text` as this value. Raises ConfigError."""
        try:
            return convert(text, self.hint, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--tune {self.name}={text}: {error}") from None


def tuning_values(kinds: Sequence[type]) -> dict[str, TuningValue]:
    """Return the dataclasses' tuning values by name, in field order."""
    found = {}
    for kind in kinds:
        hints = get_type_hints(kind)
        for each in _fields(kind):
            if meaning := each.metadata.get(TUNING):
                found[each.name] = TuningValue(each.name, each.default, hints[each.name], meaning)
    return found


class Tuning:
    """One command line's tuning values."""

    def __init__(self, given: Sequence[str], kinds: Sequence[type]) -> None:
        """Read `given`, each NAME=VALUE. Raises ConfigError for an unknown name or wrong value."""
        known = tuning_values(kinds)
        self._values: dict[str, object] = {}
        for each in given:
            name, _, text = each.partition("=")
            if name in GONE:
                raise ConfigError(f"--tune {name} is gone: {GONE[name]}")
            if name not in known or not text:
                raise ConfigError(
                    f"--tune {each}: give NAME=VALUE; the names are {', '.join(sorted(known))}"
                )
            self._values[name] = known[name].parse(text)

    def of(self, options: T) -> T:
        """Return `options` with this command line's tuning values.

        Raises ConfigError for a value out of bounds.
        """
        own = {each.name for each in _fields(options)} & self._values.keys()
        values = {name: self._values[name] for name in own}
        return replace(options, **values)  # type: ignore[type-var]


def _fields(options: object) -> Any:
    return fields(options)  # type: ignore[arg-type]
