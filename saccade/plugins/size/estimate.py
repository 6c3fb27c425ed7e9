"""Estimates the memory of a server: for a single request, and with full caches.

Makes the same decisions as start-up (`engine/sizing.py`), from the bytes of the network and of the
machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from saccade.core.config import MIB, Dtype, EncoderConfig, EngineConfig, Hardware
from saccade.core.family import FamilySpec
from saccade.core.options import CacheOptions, EngineOptions, MediaOptions, ModelOptions
from saccade.core.settings import EngineSettings
from saccade.engine.memory_estimate import (
    StepBounds,
    cuda_bytes,
    embedding_bytes_per_token,
    step_bytes,
    tower_bytes,
)
from saccade.engine.sizing import LARGE_IMAGE, NoMemoryError, kv_page_bytes, resolve
from saccade.front.assemble import arena_bytes
from saccade.plugins.size.described_weights import WeightBytes

PROGRAM_BYTES = 360 * MIB
"""Memory in bytes of a server's processes without a model, on a CPU. They take 335 to 385 MiB (PSS)
with two cores, and 12 MiB for each additional image worker.
"""
CONTEXT_BYTES = 512 * MIB
"""Memory in bytes of CUDA and its libraries on a GPU."""


@dataclass(frozen=True, slots=True)
class Line:
    """The memory in bytes for one purpose: for a single request (`needed`), and with full caches
    (`full`).
    """

    name: str
    needed: int
    full: int


@dataclass(frozen=True, slots=True)
class Dials:
    """The options of `saccade serve` that affect memory."""

    model: ModelOptions
    engine: EngineOptions
    caches: CacheOptions
    settings: EngineSettings


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory of a server. All sizes are in bytes."""

    lines: tuple[Line, ...]
    tokens: int  # tokens of the request in `needed`
    kv_token_bytes: int
    state_bytes: int
    embedding_token_bytes: int
    image_tokens: int  # tokens of the request's image
    total: int  # the memory available to the server
    config: EngineConfig | None  # start-up's decisions; None: it would not start
    refusal: str = ""  # the reason for not starting

    @property
    def needed(self) -> int:
        return sum(line.needed for line in self.lines)

    @property
    def full(self) -> int:
        return sum(line.full for line in self.lines)


def without_model(hardware: Hardware) -> int:
    """Return the bytes that a server takes on the device in addition to its model."""
    return PROGRAM_BYTES if hardware.device == "cpu" else CONTEXT_BYTES


def estimate(
    spec: FamilySpec,
    weights: WeightBytes,
    dtype: Dtype,
    dials: Dials,
    hardware: Hardware,
    tokens: int,
) -> Estimate:
    """Estimate the memory of a server.

    hardware: the machine. Its free bytes are counted before loading.
    tokens: the length of one request, which contains a large image if the model supports images.

    Raises ConfigError for options that contradict each other.
    """
    programs = without_model(hardware)
    free = hardware.free_bytes - programs - weights.language - weights.tower
    after, config, refusal = replace(hardware, free_bytes=max(0, free)), None, ""
    options = dials.model, dials.engine, spec, dtype, after, 1, dials.caches, dials.settings
    try:
        config = resolve(*options)
    except NoMemoryError as error:
        refusal = str(error)
    image = _image_of(spec)
    lines = [
        Line("programs", programs, programs),
        Line("weights: language model", weights.language, weights.language),
        *([Line("weights: vision tower", weights.tower, weights.tower)] if image else []),
        *_caches(spec, dials, config, dtype, tokens, image),
        *_work(spec, dials, config, dtype, tokens, image),
    ]
    kept = spec.kv_spec().with_dtype(dials.settings.quantization.kv_cache_dtype)
    return Estimate(
        tuple(replace(line, full=max(line.needed, line.full)) for line in lines),
        tokens,
        kept.token_bytes(dtype),
        kept.state_bytes(dtype),
        embedding_bytes_per_token(spec, dtype),
        image.tokens if image else 0,
        hardware.total_bytes,
        config,
        refusal,
    )


@dataclass(frozen=True, slots=True)
class ImageSize:
    """The size of a `LARGE_IMAGE`, or of the model's largest image if that is smaller.

    pixels: the number of pixels after resizing.
    """

    tokens: int
    patches: int
    pixels: int


def _image_of(spec: FamilySpec) -> ImageSize | None:
    if not spec.sees_images:
        return None
    grid = spec.recipe(*LARGE_IMAGE, spec.pixel_bounds).grid
    pixels = min(math.prod(LARGE_IMAGE), spec.largest_image.pixels)
    return ImageSize(spec.num_tokens(grid), spec.num_patches(grid), pixels)


def _caches(
    spec: FamilySpec,
    dials: Dials,
    config: EngineConfig | None,
    dtype: Dtype,
    tokens: int,
    image: ImageSize | None,
) -> list[Line]:
    """Return the memory that one request takes in each cache, and the maximum size of each
    cache.
    """
    size, kept = dials.engine.page_size, dials.settings.quantization.kv_cache_dtype
    page = kv_page_bytes(spec, size, dtype, kept=kept)
    lines = [Line("KV cache", -(-tokens // size) * page, config.kv_pages * page if config else 0)]
    if state := spec.kv_spec().state_bytes(dtype):
        rows = config.max_running + config.snapshots.lines if config else 0
        lines.append(Line("states", state, state * rows))
    if image:
        embedded = image.tokens * embedding_bytes_per_token(spec, dtype)
        lines += [
            Line("image embeddings", embedded, config.embeddings.device_bytes if config else 0),
            Line("pixels", 3 * image.pixels, arena_bytes(MediaOptions(), spec)),
        ]
    return lines


def _work(
    spec: FamilySpec,
    dials: Dials,
    config: EngineConfig | None,
    dtype: Dtype,
    tokens: int,
    image: ImageSize | None,
) -> list[Line]:
    """Return the temporary memory of a step, and on a GPU the memory of CUDA graphs."""
    size = dials.engine.page_size
    if config is not None and config.device == "cuda":
        bounds = config.max_running, config.chunk_tokens, config.context_length, size
        patches, encoder = config.encode_patches, config.encoder
        steps = StepBounds(*bounds)
        taken = cuda_bytes(spec, steps, config.graphs, patches, encoder, dtype, dials.engine)
        return [Line("work and graphs", taken, taken)]
    chunk = config.chunk_tokens if config else tokens
    one = StepBounds(1, min(tokens, chunk), tokens, size)
    many = StepBounds(config.max_running, chunk, config.context_length, size) if config else one
    lines = [Line("work: a prompt", *(step_bytes(spec, each, dtype) for each in (one, many)))]
    if image:
        encoder = config.encoder if config else EncoderConfig()
        sizes = image.patches, max(image.patches, config.encode_patches if config else 0)
        lines.append(
            Line("work: an image", *(tower_bytes(spec, each, encoder, dtype) for each in sizes))
        )
    return lines
