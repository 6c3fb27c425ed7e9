"""What start-up decides: options, the model's facts and the machine's, made into a configuration.

`resolve` and `resolve_parallel` leave nothing open, and `describe` says what they decided. Knows
sizes and counts only; nothing of tensors.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from saccade.core.config import (
    GIB,
    MIB,
    SCORE_BLOCK_BYTES,
    Dtype,
    EmbeddingBudgets,
    EncoderConfig,
    EngineConfig,
    Hardware,
    ParallelConfig,
    PatchEmbedding,
    Role,
)
from saccade.core.errors import ConfigError
from saccade.core.family import FamilySpec
from saccade.core.options import (
    EngineOptions,
    MediaOptions,
    ModelOptions,
    ParallelOptions,
    PinOptions,
)

LARGEST_TP = 64


VIT_GRAPH_SIZES = (
    128,
    256,
    *(base * step // 4 for base in (512, 1024, 2048, 4096) for step in range(4, 8)),
    8192,
)
"""Patches.

Steps of a quarter and less: what pads is computed in vain. Larger packs keep a GPU busy without a
graph.
"""


DECODE_GRAPH_FEW = (1, 2, 4)
DECODE_GRAPH_STEP = 8
"""Rows: the language model's graphs are for 1, 2, 4, 8, 16, 24 ... of them."""
GRAPH_POOL_BYTES = 256 * MIB
GRAPH_BYTES = 4 * MIB
"""What all graphs of the language model take together, and each besides. Estimates: no graph was
ever measured. The largest one's activations are at most about 30 MiB for 256 rows of an 8B.
"""


LARGE_IMAGE_PIXELS = 2560 * 1440
LARGE_IMAGE_STEPS = 8
"""On a CPU an image of that size is encoded in so many steps, smaller ones in fewer."""

LARGEST_IMAGES = 4
"""The embedding cache has room for so many of the largest pictures, where memory allows."""


NARROW_ENCODER = 256
"""Below this many values per rank, cutting the vision tower's matrices costs more in collectives
than it saves.
"""


def pick_device(
    wanted: Literal["auto", "cpu", "cuda"], devices: int, ranks: int
) -> Literal["cpu", "cuda"]:
    """`devices`: CUDA devices that the workers see.

    Raises ConfigError when cuda is asked for and there is none, or not one for each rank.
    """
    if wanted == "cpu":
        return "cpu"
    if wanted == "cuda" and not devices:
        raise ConfigError(
            "--device cuda: torch sees no CUDA device; install a CUDA build of torch, or use "
            "--device cpu"
        )
    if 0 < devices < ranks:
        raise ConfigError(
            f"--tp-size {ranks}: torch sees {devices} CUDA devices, and each rank needs one"
        )
    return "cuda" if devices else "cpu"


def pick_dtype(wanted: str, checkpoint: str) -> Dtype:
    """The dtype asked for, else the checkpoint's own; bfloat16 where that is none the engine
    computes in.
    """
    known: dict[str, Dtype] = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}
    return known.get(checkpoint if wanted == "auto" else wanted, "bfloat16")


def share_hardware(ranks: Sequence[Hardware]) -> Hardware:
    """What each rank may use: its own device, as the fullest of them is, or its part of the
    machine.
    """
    free = min(each.free_bytes for each in ranks)
    first, count = ranks[0], len(ranks)
    if first.device == "cuda":
        return replace(first, free_bytes=free, host_free_bytes=first.host_free_bytes // count)
    return replace(first, total_bytes=first.total_bytes // count, free_bytes=free // count)


def resolve_parallel(
    options: ParallelOptions, spec: FamilySpec, device: Literal["cpu", "cuda"]
) -> ParallelConfig:
    """Fix how the model is shared.

    Raises ConfigError, which says what sizes work, where it cannot be.
    """
    size, cuda = options.tp_size, device == "cuda"
    if obstacles := spec.cuts.obstacles(size):
        sizes = ", ".join(str(n) for n in range(1, LARGEST_TP + 1) if not spec.cuts.obstacles(n))
        raise ConfigError(
            f"--tp-size {size}: {' and '.join(obstacles)} cannot be divided among {size} "
            f"ranks; sizes that work are {sizes}"
        )
    narrow = spec.cuts.encoder_width < NARROW_ENCODER * size
    uncut = spec.cuts.encoder_obstacles(size)
    encoder = options.mm_encoder_tp_mode
    if encoder == "auto":
        encoder = "data" if size > 1 and (uncut or narrow) else "weights"
    elif encoder == "weights" and uncut:
        raise ConfigError(
            f"--mm-encoder-tp-mode weights: {' and '.join(uncut)} cannot be divided among "
            f"{size} ranks; use --mm-encoder-tp-mode data"
        )
    all_reduce = options.all_reduce
    if all_reduce == "auto":
        all_reduce = "nccl" if cuda else "shm" if platform.machine() == "x86_64" else "gloo"
    elif (all_reduce in ("nccl", "symm-mem")) != cuda:
        raise ConfigError(
            f"--all-reduce {all_reduce} does not work on {device}; "
            f"{'nccl and symm-mem' if cuda else 'shm and gloo'} do"
        )
    return ParallelConfig(
        size, encoder, all_reduce, options.step_timeout or (120.0 if cuda else 1200.0)
    )


def resolve(
    model: ModelOptions,
    engine: EngineOptions,
    spec: FamilySpec,
    dtype: Dtype,
    hardware: Hardware,
    ranks: int = 1,
    keep: PinOptions = PinOptions(),  # noqa: B008 - frozen
    role: Role = "all",
) -> EngineConfig:
    """Fix every open dial. `dtype` is what the weights were loaded as; `hardware` is what one of
    `ranks` ranks has.

    Raises ConfigError where a setting cannot work.
    """
    if role == "encode":
        return resolve_tower(model, engine, spec, dtype, hardware, keep)
    cuda = hardware.device == "cuda"
    context = model.context_length or spec.context_length
    max_running = engine.max_running_requests or (256 if cuda else 32)
    chunk = engine.chunked_prefill_size or (8192 if cuda else 2048)
    fraction = engine.mem_fraction_static or (0.85 if cuda else 0.5)
    if context > spec.context_length:
        raise ConfigError(
            f"--context-length {context}: the model was made for {spec.context_length} tokens "
            "at most"
        )
    page_bytes = kv_page_bytes(spec, engine.page_size, dtype, ranks)
    used = hardware.total_bytes - hardware.free_bytes
    # A GPU is the engine's alone; of a CPU's memory only what is free is ours to count on.
    budget = (
        int(fraction * hardware.total_bytes) - used if cuda else int(fraction * hardware.free_bytes)
    )
    graphs = resolve_decode_graphs(model, max_running, cuda=cuda)
    free = max(0, hardware.free_bytes - scoring_bytes(spec, chunk) - decode_graph_bytes(graphs))
    kv_bytes = min(budget, int(0.9 * hardware.free_bytes), free)
    # More than every running request at full length would be of use to the prefix cache only.
    enough = engine.max_total_tokens or max_running * context
    kv_pages = min(kv_bytes // page_bytes, 1 + -(-enough // engine.page_size))
    # Below one context the pool itself is the limit.
    if kv_pages < 2:
        raise _no_memory(hardware, fraction, kv_bytes)
    context = min(context, (kv_pages - 1) * engine.page_size)
    left = max(0, free - kv_pages * page_bytes)
    return EngineConfig(
        device=hardware.device,
        dtype=dtype,
        context_length=context,
        max_running=max_running,
        chunk_tokens=chunk,
        page_size=engine.page_size,
        kv_pages=kv_pages,
        prefix_cache=not engine.disable_radix_cache,
        embeddings=resolve_embeddings(engine, spec, dtype, left, hardware.host_free_bytes, keep),
        encode_patches=engine.max_encode_patches or (65536 if cuda else 16384),
        tower_budget=0 if cuda else tower_budget(spec),
        encoder=resolve_encoder(engine, spec, cuda=cuda, half=dtype != "float32"),
        decode_graph_sizes=graphs,
        role=role,
    )


def resolve_tower(
    model: ModelOptions,
    engine: EngineOptions,
    spec: FamilySpec,
    dtype: Dtype,
    hardware: Hardware,
    keep: PinOptions,
) -> EngineConfig:
    """As `resolve`, for a server that only encodes: no pages, and no rows that the tower would have
    to leave time to.
    """
    cuda = hardware.device == "cuda"
    fraction = engine.mem_fraction_static or (0.85 if cuda else 0.5)
    left = int(fraction * hardware.free_bytes)
    return EngineConfig(
        device=hardware.device,
        dtype=dtype,
        context_length=model.context_length or spec.context_length,
        max_running=engine.max_running_requests or (256 if cuda else 32),
        chunk_tokens=engine.chunked_prefill_size or (8192 if cuda else 2048),
        page_size=engine.page_size,
        kv_pages=1,
        prefix_cache=False,
        embeddings=resolve_embeddings(engine, spec, dtype, left, hardware.host_free_bytes, keep),
        encode_patches=engine.max_encode_patches or (65536 if cuda else 16384),
        encoder=resolve_encoder(engine, spec, cuda=cuda, half=dtype != "float32"),
        role="encode",
    )


def _no_memory(hardware: Hardware, fraction: float, kv_bytes: int) -> ConfigError:
    used, total = hardware.total_bytes - hardware.free_bytes, hardware.total_bytes
    return ConfigError(
        f"no memory for the KV cache: {used / GIB:.1f} of {total / GIB:.1f} GiB are used, and "
        f"--mem-fraction-static {fraction} leaves {max(0, kv_bytes) / GIB:.2f}; raise it, or free "
        "memory"
    )


def resolve_decode_graphs(model: ModelOptions, max_running: int, *, cuda: bool) -> tuple[int, ...]:
    """Rows at which the language model's steps are captured. Raises ConfigError."""
    most = model.cuda_graph_max_bs
    if model.disable_cuda_graph or not cuda:
        if most is not None:
            why = "--disable-cuda-graph is set" if cuda else "graphs need --device cuda"
            raise ConfigError(f"--cuda-graph-max-bs {most}: {why}")
        return ()
    most = min(most or max_running, max_running)
    steps = range(DECODE_GRAPH_STEP, most, DECODE_GRAPH_STEP)
    return (*(few for few in DECODE_GRAPH_FEW if few < most), *steps, most)


def decode_graph_bytes(sizes: Sequence[int]) -> int:
    """Device memory that the language model's graphs take."""
    return GRAPH_POOL_BYTES + len(sizes) * GRAPH_BYTES if sizes else 0


def tower_budget(spec: FamilySpec) -> int:
    """Patch-blocks of the vision tower in a step where it shares the cores with the language model:
    a part of a large image, so that no step is much longer than others.
    """
    patches = min(LARGE_IMAGE_PIXELS, spec.image_rules.max_pixels) // spec.image_rules.patch**2
    return max(1, patches * spec.encoder_blocks // LARGE_IMAGE_STEPS)


def resolve_encoder(
    engine: EngineOptions, spec: FamilySpec, *, cuda: bool, half: bool
) -> EncoderConfig:
    """`cuda`: the device is a GPU. `half`: the dtype has 16 bits.

    Raises ConfigError where a setting cannot work.
    """
    attention = (
        ("flash" if cuda and half else "sdpa")
        if engine.mm_attention_backend == "auto"
        else engine.mm_attention_backend
    )
    if attention == "flash" and not (cuda and half):
        raise ConfigError(
            "--mm-attention-backend flash: it needs --device cuda and a dtype of 16 bits"
        )
    if attention == "triton" and not cuda:
        raise ConfigError("--mm-attention-backend triton: it needs --device cuda")
    if attention == "sdpa" or engine.disable_vit_graph:
        if engine.vit_graph_buckets:
            why = (
                "--disable-vit-graph is set"
                if engine.disable_vit_graph
                else "graphs need --device cuda, and triton or flash as --mm-attention-backend"
            )
            raise ConfigError(f"--vit-graph-buckets {engine.vit_graph_buckets[0]}: {why}")
        return EncoderConfig(attention)
    merged = spec.image_rules.merge**2
    wrong = [size for size in engine.vit_graph_buckets if size < 1 or size % merged]
    if wrong:
        raise ConfigError(
            f"--vit-graph-buckets {wrong[0]}: must be {merged}, the patches of a token, or a "
            "multiple of it"
        )
    return EncoderConfig(attention, tuple(sorted(set(engine.vit_graph_buckets))) or VIT_GRAPH_SIZES)


def arena_bytes(media: MediaOptions, spec: FamilySpec) -> int:
    """Bytes of the pixel arena. Raises ConfigError where the model's largest picture, as uint8 RGB,
    would not fit.

    `max_image_pixels` makes none smaller: it bounds what is sent, and a request's `min_pixels`
    enlarges that up to the model's bound.
    """
    most = spec.image_rules.max_pixels
    if media.arena_mb * MIB < 3 * most:
        raise ConfigError(
            f"--arena-mb {media.arena_mb}: the model's largest picture takes "
            f"{3 * most / MIB:.1f} MiB ({most} pixels after resizing); "
            f"set it to {-(-3 * most // MIB)} or more"
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if media.arena_mb * MIB > memory:
        raise ConfigError(
            f"--arena-mb {media.arena_mb}: this machine has {memory // MIB} MiB of memory"
        )
    return media.arena_mb * MIB


def resolve_embeddings(
    engine: EngineOptions,
    spec: FamilySpec,
    dtype: Dtype,
    left: int,
    host_left: int,
    keep: PinOptions,
) -> EmbeddingBudgets:
    """`left`, `host_left`: bytes of device and host that nothing else has claimed.

    Raises ConfigError.
    """
    rules = spec.image_rules
    largest = rules.max_pixels // rules.factor**2 * embedding_bytes_per_token(spec, dtype)
    device = max(64 * MIB, left // 10, min(LARGEST_IMAGES * largest, left // 4))
    device = (
        device
        if engine.embedding_cache_device_mb is None
        else engine.embedding_cache_device_mb * MIB
    )
    host = (
        host_left // 4
        if engine.embedding_cache_host_mb is None
        else engine.embedding_cache_host_mb * MIB
    )
    shared, name = keep.embedding_cache_shared, engine.embedding_cache_dir
    if shared is not None:
        check_one_disk(engine, keep)
        limit_mb = keep.embedding_cache_shared_mb
        disk = _disk_budget("--embedding-cache-shared", shared, limit_mb)
        return EmbeddingBudgets(device, host, *disk, shared=True)
    if name is None or engine.embedding_cache_disk_mb == 0:
        return EmbeddingBudgets(device, host)
    limit_mb = engine.embedding_cache_disk_mb
    return EmbeddingBudgets(device, host, *_disk_budget("--embedding-cache-dir", name, limit_mb))


def check_one_disk(engine: EngineOptions, keep: PinOptions) -> None:
    """Raises ConfigError where embeddings are to lie in two folders."""
    if keep.embedding_cache_shared is not None and engine.embedding_cache_dir is not None:
        raise ConfigError(
            "--embedding-cache-dir and --embedding-cache-shared exclude each other: the shared "
            "folder survives restarts, too"
        )


def _disk_budget(option: str, name: str, limit_mb: int | None) -> tuple[int, str]:
    """Bytes for embeddings in a folder, and the folder. Raises ConfigError."""
    folder = Path(name).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # What is saved already counts too: else the budget would shrink at each restart.
        room = shutil.disk_usage(folder).free + _bytes_below(folder)
    except FileExistsError:
        raise ConfigError(f"{option} {folder}: it is a file, not a folder") from None
    except OSError as error:
        raise ConfigError(f"{option} {folder}: {error.strerror}") from None
    return room // 4 if limit_mb is None else limit_mb * MIB, str(folder)


def _bytes_below(folder: Path) -> int:
    """Bytes of the files in the folders of `folder`: embeddings of this model and of others."""
    total = 0
    for file in folder.glob("*/*"):
        with suppress(FileNotFoundError):  # another server may have removed it
            total += file.stat().st_size
    return total


def embedding_bytes_per_token(spec: FamilySpec, dtype: Dtype) -> int:
    """Bytes of one token's embedding, deepstack levels included."""
    return spec.embedding_width * (4 if dtype == "float32" else 2)


def kv_page_bytes(spec: FamilySpec, page_size: int, dtype: Dtype, ranks: int = 1) -> int:
    """Bytes of one KV page over all layers, keys and values, on each of `ranks` ranks."""
    layout = spec.kv_layout.on_rank(ranks)
    return (
        layout.layers
        * 2
        * page_size
        * layout.kv_heads
        * layout.head_dim
        * (4 if dtype == "float32" else 2)
    )


def scoring_bytes(spec: FamilySpec, chunk_tokens: int) -> int:
    """Memory that the largest block of scored prompt rows takes for a moment: logits as the head
    gives them (and, of several ranks, gathers them), in float32, their exponentials, and which are
    larger.
    """
    rows = min(chunk_tokens, max(1, SCORE_BLOCK_BYTES // (4 * spec.vocab_size)))
    return rows * spec.vocab_size * (4 + 4 + 4 + 4 + 1)


@dataclass(frozen=True, slots=True)
class LoadFacts:
    """What was loaded, for people. `quantised`: what is in 8 bits; nothing where nothing is.
    `saved`: embeddings found on disk.
    """

    patch_embed: PatchEmbedding
    quantised: str
    saved: int


def describe(
    config: EngineConfig,
    parallel: ParallelConfig,
    spec: FamilySpec,
    hardware: Hardware,
    facts: LoadFacts,
) -> tuple[tuple[str, str], ...]:
    """What the engine decided, for people: (name, value)."""
    kv_bytes = config.kv_pages * kv_page_bytes(spec, config.page_size, config.dtype, parallel.size)
    kv = (
        f"{_count(config.kv_pages - 1, 'page')} of {config.page_size} = "
        f"{_count(config.kv_tokens, 'token')}, {kv_bytes / MIB:.0f} MiB"
    )
    rules = spec.image_rules
    each = " per rank" if parallel.size > 1 else ""
    folded = ", folded patch embedding" if facts.patch_embed == "folded" else ""
    shared = (
        f"{parallel.size}, sums by {parallel.all_reduce}, vision tower shared by {parallel.encoder}"
    )
    return (
        ("device", f"{config.device} ({hardware.name}), {config.dtype}"),
        *((("ranks", shared),) if parallel.size > 1 else ()),
        *((("quantised", facts.quantised + each),) if facts.quantised else ()),
        *(_describe_language(config, kv + each) if config.role != "encode" else ()),
        (
            "vision tower",
            f"{config.encoder.attention} attention{folded}, "
            f"{_count(config.encode_patches, 'patch')} per step",
        ),
        *(
            (("vision graphs", ", ".join(map(str, config.encoder.graph_sizes)) + " patches"),)
            if config.encoder.graph_sizes
            else ()
        ),
        *(
            (("decode graphs", f"up to {_count(max(config.decode_graph_sizes), 'sequence')}"),)
            if config.decode_graph_sizes
            else ()
        ),
        ("embedding cache", _describe_embeddings(config.embeddings, facts.saved) + each),
        ("resized pictures", f"{rules.min_pixels} to {rules.max_pixels} pixels"),
    )


def _describe_language(config: EngineConfig, kv: str) -> tuple[tuple[str, str], ...]:
    """What a server that only encodes does not have."""
    return (
        ("context", f"{config.context_length} tokens"),
        ("KV cache", kv),
        ("prefix cache", "on" if config.prefix_cache else "off"),
        (
            "batch",
            f"{_count(config.max_running, 'request')}, {_count(config.chunk_tokens, 'token')} "
            "per step",
        ),
    )


def describe_intake(media: MediaOptions) -> tuple[tuple[str, str], ...]:
    """The same of what becomes of pictures before the engine sees them."""
    return (
        (
            "sent pictures",
            f"{_count(media.max_image_pixels, 'pixel')} at most, decoded by "
            f"{_count(media.workers, 'process')}",
        ),
    )


def _describe_embeddings(budgets: EmbeddingBudgets, saved: int) -> str:
    parts = [f"{budgets.device_bytes / MIB:.0f} MiB"]
    if budgets.host_bytes:
        parts.append(f"{budgets.host_bytes / MIB:.0f} MiB on the host")
    if budgets.disk_bytes:
        found = _count(saved, "picture")
        parts.append(
            f"{budgets.disk_bytes / MIB:.0f} MiB in {budgets.folder} "
            + ("shared with other servers" if budgets.shared else f"({found} found there)")
        )
    return ", ".join(parts)


def _count(number: int, thing: str) -> str:
    """1 patch, 2 patches."""
    return (
        f"{number} {thing}"
        if number == 1
        else f"{number} {thing}es"
        if thing.endswith(("s", "ch"))
        else f"{number} {thing}s"
    )
