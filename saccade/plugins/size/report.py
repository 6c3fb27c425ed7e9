"""Computes an `Estimate` from the command line's options, and prints it as a table or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from saccade.core.config import GIB, MIB, Dtype, Hardware, KVDtype, QuantizationMode
from saccade.core.config import TowerQuantization as TowerMode
from saccade.core.errors import ConfigError
from saccade.core.options import CacheOptions, EngineOptions, ModelOptions
from saccade.core.settings import EngineSettings, QuantizationSettings
from saccade.core.tuning import read_size
from saccade.engine.sizing import pick_context, pick_dtype
from saccade.families.registry import load_spec
from saccade.plugins.size.described_weights import NumberFormats, WeightBytes, count_weights
from saccade.plugins.size.estimate import Dials, Estimate, estimate
from saccade.plugins.size.hub import described_folder
from saccade.runtime.process import measure_hardware

TOKENS = 8192
HOPPER = 90


@dataclass(frozen=True, slots=True)
class SizeInput:
    """The options of the command line.

    bits: the quantization of the language model, the vision encoder, and the KV cache.
    limits: --context-length, --max-running-requests, --max-total-tokens.
    """

    model: str
    memory: str | None = None
    tokens: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", Dtype] = "auto"
    bits: tuple[QuantizationMode, TowerMode, KVDtype] = ("auto", "none", "auto")
    limits: tuple[int | None, int | None, int | None] = (None, None, None)
    fraction: float | None = None
    embedding_mb: int | None = None
    revision: str | None = None
    mmproj: str | None = None

    @property
    def dials(self) -> Dials:
        context, running, total = self.limits
        return Dials(
            ModelOptions(context_length=context),
            EngineOptions(
                max_running_requests=running,
                mem_fraction_static=self.fraction,
                max_total_tokens=total,
            ),
            CacheOptions(embedding_cache_device_mb=self.embedding_mb),
            EngineSettings(quantization=QuantizationSettings(*self.bits)),
        )


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The requested model, and the memory that it takes."""

    model: str
    family: str
    hardware: Hardware
    formats: NumberFormats
    weights: WeightBytes
    estimate: Estimate

    @property
    def fits(self) -> bool:
        return self.estimate.config is not None and self.estimate.needed <= self.estimate.total


def answer(asked: SizeInput, *, as_json: bool) -> int:
    """Print the sizes. Returns 0 if the model fits, and 1 if not. Raises StartupError."""
    found = measure(asked)
    print(json.dumps(as_data(found), indent=2)) if as_json else show(found, Console())
    return 0 if found.fits else 1


def measure(asked: SizeInput) -> ModelSize:
    """Compute the sizes. Raises CheckpointError or ConfigError, as the server would."""
    dials, hardware = asked.dials, find_hardware(asked.device, asked.memory)
    with described_folder(asked.model, asked.revision, asked.mmproj) as folder:
        spec = load_spec(folder)
        dtype = pick_dtype(asked.dtype, spec.dtype)
        formats = NumberFormats(dtype, *asked.bits[:2])
        weights = count_weights(spec, folder, torch.device(hardware.device), formats)
    context = pick_context(dials.model, spec)
    tokens = min(TOKENS, context) if asked.tokens is None else asked.tokens
    if not 1 <= tokens <= context:
        raise ConfigError(f"--tokens {tokens}: must be from 1 to {context}, the model's context")
    sizes = estimate(spec, weights, dtype, dials, hardware, tokens)
    return ModelSize(asked.model, spec.family, hardware, formats, weights, sizes)


def find_hardware(device: Literal["auto", "cpu", "cuda"], memory: str | None) -> Hardware:
    """Return this machine's hardware, or that of a machine with `memory`. Raises ConfigError."""
    here = torch.cuda.is_available()
    kind: Literal["cpu", "cuda"] = device if device != "auto" else "cuda" if here else "cpu"
    if kind == "cuda" and not here and memory is None:
        raise ConfigError("--device cuda: this machine has no GPU: set --memory, such as 24GiB")
    if memory is None:
        return measure_hardware(kind)
    total = read_size("--memory", memory)
    if kind == "cpu":
        return Hardware("cpu", "", total, total)
    arch = measure_hardware("cuda").arch if here else HOPPER
    return Hardware("cuda", "", total, total, arch=arch)


def as_data(found: ModelSize) -> dict[str, Any]:
    """Return the sizes as JSON data."""
    sizes, config = found.estimate, found.estimate.config
    return {
        "model": found.model,
        "family": found.family,
        "device": found.hardware.device,
        "dtype": found.formats.dtype,
        "quantization": found.formats.quantization,
        "quantization_tower": found.formats.tower,
        "quantised": found.weights.quantised,
        "fits": found.fits,
        "refusal": sizes.refusal or None,
        "memory_bytes": sizes.total,
        "needed_bytes": sizes.needed,
        "full_bytes": sizes.full,
        "request_tokens": sizes.tokens,
        "image_tokens": sizes.image_tokens,
        "kv_token_bytes": sizes.kv_token_bytes,
        "state_bytes": sizes.state_bytes,
        "embedding_token_bytes": sizes.embedding_token_bytes,
        "context_length": config.context_length if config else 0,
        "kv_tokens": config.kv_tokens if config else 0,
        "lines": [asdict(line) for line in sizes.lines],
    }


def show(found: ModelSize, console: Console) -> None:
    """Print the sizes as a table."""
    sizes, formats = found.estimate, found.formats
    title = f"{found.model}: {found.family}, {formats.dtype} on {found.hardware.device}"
    console.print(title, markup=False, highlight=False)
    if found.weights.quantised:
        console.print(found.weights.quantised, markup=False, highlight=False, soft_wrap=True)
    image = ", 1 image" if sizes.image_tokens else ""
    table = Table("MiB", f"one request ({sizes.tokens} tokens{image})", "at most")
    for column in table.columns[1:]:
        column.justify = "right"
    for line in sizes.lines:
        table.add_row(line.name, _mib(line.needed), _mib(line.full))
    table.add_section()
    table.add_row("total", _mib(sizes.needed), _mib(sizes.full), style="bold")
    console.print(table)
    for sentence in _sentences(found):
        console.print(escape(sentence), highlight=False, soft_wrap=True)


def _sentences(found: ModelSize) -> list[str]:
    sizes, config = found.estimate, found.estimate.config
    each = f"A token takes {sizes.kv_token_bytes / 1024:.1f} KiB of KV"
    if sizes.state_bytes:
        each += f", a running request {sizes.state_bytes / MIB:.1f} MiB of states"
    if sizes.image_tokens:
        each += (
            f", an image of 2560x1440 pixels {sizes.image_tokens} tokens, "
            f"{sizes.image_tokens * sizes.embedding_token_bytes / MIB:.1f} MiB of embeddings"
        )
    memory = f"{sizes.total / GIB:.1f} GiB"
    if config is None:
        return [f"{each}.", f"It does not fit into {memory}: {sizes.refusal}"]
    room = (
        f"a context of {config.context_length} tokens, {config.kv_tokens} tokens over all requests"
    )
    if found.fits:
        return [f"{each}.", f"It fits into {memory}: {room}."]
    return [f"{each}.", f"It does not fit into {memory}: one request needs more ({room})."]


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:,.0f}"
