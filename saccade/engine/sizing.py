"""Derives the engine's configuration at start-up, from options, the model and the machine.

`resolve` sets every option. `ranks.py` divides a model among ranks, and `startup_report.py`
describes the result. This module works with sizes and counts only, not with tensors.
"""

from __future__ import annotations

from dataclasses import replace

from saccade.core.config import (
    GIB,
    MIB,
    PAGE_PIECE_BYTES,
    PAGE_PIECES,
    POSITION_CACHE_BYTES,
    Dtype,
    EmbeddingBudgets,
    EncoderConfig,
    EngineConfig,
    Hardware,
    KVConfig,
    KVDtype,
    PageTierConfig,
    SnapshotConfig,
    StepGraphSizes,
)
from saccade.core.errors import ConfigError
from saccade.core.family import FamilySpec, KVSpec
from saccade.core.options import (
    CacheOptions,
    EngineOptions,
    ModelOptions,
)
from saccade.core.plan import PLANS_IN_FLIGHT
from saccade.core.settings import (
    CudaSettings,
    DraftSettings,
    EngineSettings,
    QuantizationSettings,
    TierSettings,
)
from saccade.engine.memory_estimate import (
    StepBounds,
    cuda_bytes,
    embedding_bytes_per_token,
    least_embedding_bytes,
    scoring_bytes,
    step_graph_bytes,
)
from saccade.kernels.backend import find_backend

MAX_DRAFT_TOKENS = 7
"""Maximum draft tokens per sequence and step."""
VIT_GRAPH_SIZES = (
    128,
    256,
    *(base * step // 4 for base in (512, 1024, 2048, 4096) for step in range(4, 8)),
    8192,
)
"""Sizes of the vision encoder's graphs, in patches.

From 512 on, each size is at most a quarter larger than the one before, because computing padding is
wasted work. Larger batches use a GPU fully without a graph.
"""
WHOLE_PATCHES = 2048
"""Maximum size of a graph for a server with a language model. A graph is replayed without
interruption: one of this size takes about as long as a decoding step (estimated: 7 ms on an H100).
Larger images are encoded in parts between steps, without a graph.
"""

DECODE_GRAPH_FEW = (1, 2, 4)
DECODE_GRAPH_STEP = 8
"""The language model has graphs for batch sizes of 1, 2, 4, 8, 16, 24 ... when decoding."""
MIXED_GRAPH_ROWS = (0, 4, 16, 64)
"""Decoding rows in the graphs of steps with prompts. The maximum number of running requests is
added.
"""
MIXED_GRAPH_TOKENS = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
PROMPT_PAUSE = 0.025
"""Maximum time in seconds of a step with prompts on a GPU while other requests are streamed, unless
`--chunked-prefill-size` is set (`sched/step_pace.py`).
"""
MIN_PROMPT_TOKENS = 256
"""Minimum prompt tokens in a step that also decodes. With fewer, a GPU spends more time reading the
weights than computing.
"""
MAX_MIXED_TOKENS = 4096
"""Maximum prompt tokens in a graph."""
MIXED_GRAPH_SHARE = 8
"""The number of graphs with prompts is reduced until all graphs together take at most
1/MIXED_GRAPH_SHARE of the free memory.
"""
MAX_HOST_BYTES = 8 * GIB
"""Default maximum size of the host tier, for all ranks together. All of it is pinned memory."""
CUDA_ENCODE_PATCHES = 16_384
"""Default for the patches to encode in a step on a GPU. They need 1.2 GiB, and twice as many are
not faster per patch.
"""

LARGE_IMAGE = 1440, 2560
"""(height, width) in pixels."""
LARGE_IMAGE_STEPS = {"cpu": 8, "cuda": 27}
"""While the language model has work, an image of that size is encoded over this many steps, and
smaller ones over fewer. On a GPU this is the initial value: a part is one block of Qwen3-VL's
vision encoder, estimated at 4 ms on an H100, where a decoding step takes 7 ms. After that, the
value is adapted to measured times (`sched/step_pace.py`).
"""

MAX_IMAGES = 4
"""The embedding cache has space for this many of the largest images, if there is enough memory."""

STATES_PART = 4
"""By default, the states of running sequences take at most 1/STATES_PART of the memory for states
and pages.
"""
SNAPSHOTS_PART = 3
"""Snapshots of states get 1/SNAPSHOTS_PART of the remaining memory, and pages the rest."""
BETWEEN_PART = 8
"""States between draft tokens get at most 1/BETWEEN_PART of the remaining memory."""
MIN_SNAPSHOT_TOKENS = 256
SNAPSHOTS_RUNNING = 4
FEWEST_SNAPSHOTS = 2
"""With fewer snapshots, the prefix cache of a model with recurrent states is disabled."""


def pick_dtype(wanted: str, checkpoint: str) -> Dtype:
    """Return the requested dtype, or the checkpoint's dtype for "auto".

    Returns bfloat16 if the engine does not support that dtype.
    """
    known: dict[str, Dtype] = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}
    return known.get(checkpoint if wanted == "auto" else wanted, "bfloat16")


def resolve(
    model: ModelOptions,
    engine: EngineOptions,
    spec: FamilySpec,
    dtype: Dtype,
    hardware: Hardware,
    ranks: int = 1,
    caches: CacheOptions = CacheOptions(),  # noqa: B008 - frozen
    settings: EngineSettings = EngineSettings(),  # noqa: B008 - frozen
) -> EngineConfig:
    """Return the engine's configuration, with every option that is not set derived.

    Raises ConfigError if a setting is not possible, and NoMemoryError if the model is too large.

    dtype: the dtype of the loaded weights.
    hardware: the resources of each of `ranks` ranks.
    settings: the options of plugins.
    """
    cuda, page_size = hardware.device == "cuda", engine.page_size
    context, chunk = pick_context(model, spec), pick_chunk(engine, spec, cuda=cuda)
    fraction = engine.mem_fraction_static or (0.85 if cuda else 0.5)
    kv = resolve_kv(settings.quantization, hardware, spec)
    kept = spec.kv_spec(ranks).with_dtype(kv.dtype)
    page_bytes = page_size * kept.token_bytes(dtype)
    budget = memory_budget(hardware, fraction)
    max_running = resolve_running(engine, kept.state_bytes(dtype), budget, cuda=cuda)
    tiers = settings.tiers
    graphs = resolve_step_graphs(settings.cuda, max_running, chunk, spec, dtype, hardware)
    half, patches = dtype != "float32", pick_encode_patches(engine, cuda=cuda)
    encoder = resolve_encoder(settings, spec, cuda=cuda, half=half, arch=hardware.arch, beside=True)
    claimed, embedded = scoring_bytes(spec, chunk) + page_copy_bytes(hardware, tiers), 0
    if cuda:
        steps = StepBounds(max_running, chunk, context, page_size)
        claimed += cuda_bytes(spec, steps, graphs, patches, encoder, dtype, engine)
        embedded = least_embedding_bytes(caches, spec, dtype, hardware.free_bytes)
    free = max(0, hardware.free_bytes - claimed - embedded)
    # More tokens than all running requests at full length would only benefit the prefix cache.
    enough = engine.max_total_tokens or max_running * context
    available = min(budget, free)
    snapshots = resolve_snapshots(
        settings.drafts, caches, kept, dtype, available, max_running, enough, cuda=cuda
    )
    states = (max_running + snapshots.lines) * kept.state_bytes(dtype)
    kv_pages = min((available - states) // page_bytes, 1 + -(-enough // page_size))
    # Page 0 is the dummy page. If the pool is smaller than a context, it limits the context
    # instead.
    if kv_pages < 2:
        raise _no_memory(hardware, fraction, available - states)
    context = min(context, (kv_pages - 1) * page_size)
    left = max(0, free - kv_pages * page_bytes - states) + embedded
    prefix_cache = not caches.disable_radix_cache and bool(snapshots.count or not states)
    if tiers.kv_disk is not None and not prefix_cache:
        why = "disable_radix_cache is set" if caches.disable_radix_cache else "no snapshot fits"
        raise ConfigError(
            f"--kv-cache-dir {tiers.kv_disk.path}: {why}, so no KV would be stored there; omit the "
            "option"
        )
    host, host_pages = pick_host_bytes(hardware, ranks), hardware.host_free_bytes // HOST_KV_PART
    return EngineConfig(
        device=hardware.device,
        dtype=dtype,
        context_length=context,
        max_running=max_running,
        chunk_tokens=chunk,
        page_size=page_size,
        kv_pages=kv_pages,
        prefix_cache=prefix_cache,
        embeddings=resolve_embeddings(caches, tiers, spec, dtype, left, host),
        encode_patches=patches,
        chunk_aware=settings.switches.chunk_aware,
        kv=replace(kv, pages=resolve_pages(tiers, ranks, host_pages)) if prefix_cache else kv,
        tower_budget=tower_budget(spec, LARGE_IMAGE_STEPS[hardware.device]),
        prompt_pause=PROMPT_PAUSE if cuda and engine.chunked_prefill_size is None else 0.0,
        encoder=encoder,
        graphs=graphs,
        snapshots=snapshots,
    )


def resolve_tower(
    model: ModelOptions,
    engine: EngineOptions,
    spec: FamilySpec,
    dtype: Dtype,
    hardware: Hardware,
    caches: CacheOptions,
    settings: EngineSettings,
) -> EngineConfig:
    """Return the configuration of a server that only encodes images.

    It has no KV pages, and encoding need not leave time for other work.
    """
    cuda = hardware.device == "cuda"
    fraction = engine.mem_fraction_static or (0.85 if cuda else 0.5)
    left = int(fraction * hardware.free_bytes)
    host_bytes = pick_host_bytes(hardware)
    return EngineConfig(
        device=hardware.device,
        dtype=dtype,
        context_length=model.context_length or spec.context_length,
        max_running=engine.max_running_requests or (256 if cuda else 32),
        chunk_tokens=engine.chunked_prefill_size or (8192 if cuda else 2048),
        page_size=engine.page_size,
        kv_pages=1,
        prefix_cache=False,
        embeddings=resolve_embeddings(caches, settings.tiers, spec, dtype, left, host_bytes),
        encode_patches=pick_encode_patches(engine, cuda=cuda),
        encoder=resolve_encoder(
            settings, spec, cuda=cuda, half=dtype != "float32", arch=hardware.arch
        ),
    )


def pick_context(model: ModelOptions, spec: FamilySpec) -> int:
    """Return the context length in tokens. Raises ConfigError if the model does not support it."""
    context = model.context_length or spec.context_length
    if context > spec.context_length:
        raise ConfigError(
            f"--context-length {context}: the model supports at most {spec.context_length} tokens"
        )
    return context


def pick_chunk(engine: EngineOptions, spec: FamilySpec, *, cuda: bool) -> int:
    """Return the maximum number of tokens in a step.

    Raises ConfigError if the model's images must not be split and the largest one has more tokens.
    """
    chunk = engine.chunked_prefill_size or (8192 if cuda else 2048)
    if spec.kv_spec().whole_images and chunk < (least := spec.largest_image.tokens):
        raise ConfigError(
            f"--chunked-prefill-size {chunk}: the tokens of an image attend to each other in both "
            f"directions in this model, so a step must contain all {least} of them: set at least "
            f"{least}"
        )
    return chunk


def memory_budget(hardware: Hardware, fraction: float) -> int:
    """Return the bytes for KV pages and recurrent states.

    On a GPU, all memory belongs to the engine. On a CPU, only memory that is free now can be used.
    """
    most = int(fraction * hardware.free_bytes)
    if hardware.device == "cuda":
        used = hardware.total_bytes - hardware.free_bytes
        most = int(fraction * hardware.total_bytes) - used
    return min(most, int(0.9 * hardware.free_bytes))


def resolve_running(engine: EngineOptions, state_bytes: int, budget: int, *, cuda: bool) -> int:
    """Return the maximum number of running sequences. Raises ConfigError.

    state_bytes: the size of the recurrent state of one sequence, or 0.
    budget: the bytes for pages and states.
    """
    wanted = engine.max_running_requests
    if wanted is not None and wanted * state_bytes > budget:
        raise ConfigError(
            f"--max-running-requests {wanted}: the state of a sequence takes "
            f"{state_bytes / MIB:.1f} MiB, and memory allows at most "
            f"{max(0, budget) // state_bytes}"
        )
    most = wanted or (256 if cuda else 32)
    if wanted is None and state_bytes:
        most = max(1, min(most, budget // STATES_PART // state_bytes))
    return most


def count_between(drafts: DraftSettings, state_bytes: int, left: int, *, cuda: bool) -> int:
    """Return the number of slots for the states after draft tokens.

    They are enough for one sequence in each of two plans in flight. The number is 0 on a GPU, where
    draft tokens are computed in parallel. It is also 0 unless `--speculative always` is set,
    because storing a state costs more than most drafts save (decision 015).

    left: the bytes that remain after the states of running sequences.
    """
    if cuda or not state_bytes or drafts.speculative != "always":
        return 0
    most = PLANS_IN_FLIGHT * MAX_DRAFT_TOKENS
    return max(0, min(most, left // BETWEEN_PART // state_bytes))


def resolve_snapshots(
    drafts: DraftSettings,
    caches: CacheOptions,
    kept: KVSpec,
    dtype: Dtype,
    budget: int,
    max_running: int,
    enough: int,
    *,
    cuda: bool,
) -> SnapshotConfig:
    """Return the number of snapshots for the prefix cache, and their distance in a long prompt.

    The KV between two snapshots takes as many bytes as one snapshot.

    budget: the bytes for states and pages.
    enough: the number of tokens beyond which more pages would not be useful.
    """
    state_bytes = kept.state_bytes(dtype)
    if not state_bytes:
        return SnapshotConfig()
    every = max(MIN_SNAPSHOT_TOKENS, -(-state_bytes // kept.token_bytes(dtype)))
    left = budget - max_running * state_bytes
    between = count_between(drafts, state_bytes, left, cuda=cuda)
    if caches.disable_radix_cache:
        return SnapshotConfig(0, every, between)
    available = (left - between * state_bytes) // SNAPSHOTS_PART // state_bytes
    # Each running sequence writes a new snapshot while it keeps an older one.
    count = min(available, SNAPSHOTS_RUNNING * max_running + enough // every)
    return SnapshotConfig(count if count >= FEWEST_SNAPSHOTS else 0, every, between)


class NoMemoryError(ConfigError):
    """Raised if the loaded weights leave too little memory for KV pages."""


def _no_memory(hardware: Hardware, fraction: float, kv_bytes: int) -> NoMemoryError:
    used, total = hardware.total_bytes - hardware.free_bytes, hardware.total_bytes
    return NoMemoryError(
        f"no memory for the KV cache: {used / GIB:.1f} of {total / GIB:.1f} GiB are used, and "
        f"--mem-fraction-static {fraction} leaves {max(0, kv_bytes) / GIB:.2f}; raise it, or free "
        "memory"
    )


def resolve_kv(settings: QuantizationSettings, hardware: Hardware, spec: FamilySpec) -> KVConfig:
    """Return how keys and values are stored. The checkpoint's scales are added after loading.

    Raises ConfigError.
    """
    if settings.kv_cache_dtype == "fp8_e4m3" and not hardware.has_fp8:
        raise ConfigError(
            f"--kv-cache-dtype fp8_e4m3: {hardware.name} has no FP8 (compute capability 8.9 or "
            "later does); use --kv-cache-dtype auto"
        )
    if settings.kv_cache_dtype != "auto" and spec.kv_spec().latent:
        raise ConfigError(
            f"--kv-cache-dtype {settings.kv_cache_dtype}: {spec.family} caches latents (MLA), "
            "which do not support 8 bits; use --kv-cache-dtype auto"
        )
    return KVConfig(settings.kv_cache_dtype)


def uses_graphs(settings: CudaSettings, spec: FamilySpec) -> bool:
    """Return True if steps and encodings are captured as CUDA graphs."""
    return spec.supports_cuda_graphs and not settings.disable_cuda_graph


def resolve_step_graphs(
    settings: CudaSettings,
    max_running: int,
    chunk_tokens: int,
    spec: FamilySpec,
    dtype: Dtype,
    hardware: Hardware,
) -> StepGraphSizes:
    """Return the sizes of the language model's CUDA graphs, as many as memory allows."""
    if hardware.device != "cuda" or not uses_graphs(settings, spec):
        return StepGraphSizes()
    steps = range(DECODE_GRAPH_STEP, max_running, DECODE_GRAPH_STEP)
    rows = (*(few for few in DECODE_GRAPH_FEW if few < max_running), *steps, max_running)
    # A step has at most `chunk_tokens` prompt tokens, and its buffers have no space for more.
    tokens = min(MAX_MIXED_TOKENS, chunk_tokens)
    beside = (*(few for few in MIXED_GRAPH_ROWS if few < max_running), max_running)
    sizes = (*(few for few in MIXED_GRAPH_TOKENS if few < tokens), tokens)
    graphs = StepGraphSizes(rows, beside, sizes)
    return afford(graphs, spec, dtype, hardware.free_bytes // MIXED_GRAPH_SHARE)


def afford(sizes: StepGraphSizes, spec: FamilySpec, dtype: Dtype, most: int) -> StepGraphSizes:
    """Return `sizes` without the largest graphs with prompts, so that all graphs fit in `most`
    bytes.
    """
    while sizes.mixed_tokens and step_graph_bytes(sizes, spec, dtype) > most:
        sizes = replace(sizes, mixed_tokens=sizes.mixed_tokens[:-1])
    return sizes


def page_copy_bytes(hardware: Hardware, tiers: TierSettings) -> int:
    """Return the device bytes of the buffers for copying KV to host memory and back."""
    used = hardware.device == "cuda" and (hardware.host_free_bytes or tiers.kv_cache_host_mb)
    return PAGE_PIECE_BYTES * (PAGE_PIECES + 2) if used else 0


HOST_KV_PART = 10
"""KV offloaded from a GPU gets 1/HOST_KV_PART of the free host memory."""


def pick_host_bytes(hardware: Hardware, ranks: int = 1) -> int:
    """Return the default size in bytes of a rank's host tier."""
    return min(hardware.host_free_bytes // 4, MAX_HOST_BYTES // ranks)


def pick_encode_patches(engine: EngineOptions, *, cuda: bool) -> int:
    return engine.max_encode_patches or (CUDA_ENCODE_PATCHES if cuda else 16_384)


def prompt_sizes(chunk_tokens: int) -> tuple[int, ...]:
    """Return the numbers of prompt tokens that a step with decoding rows may have, ascending.

    Graphs exist for these sizes, so no padding is computed.
    """
    sizes = (size for size in MIXED_GRAPH_TOKENS if MIN_PROMPT_TOKENS <= size < chunk_tokens)
    return (*sizes, chunk_tokens)


def tower_budget(spec: FamilySpec, steps: int) -> int:
    """Return the vision encoder's budget per step, in patch-blocks (patches x blocks).

    The encoder and the language model share cores or multiprocessors. A step encodes 1/`steps` of a
    large image, so that steps take about equally long. Returns 0 for a model without vision.
    """
    if not spec.sees_images:
        return 0
    patches = spec.num_patches(spec.recipe(*LARGE_IMAGE, spec.pixel_bounds).grid)
    return max(1, patches * spec.encoder_blocks // steps)


def check_tower_attention(wanted: str, device: str) -> None:
    """Raise ConfigError if the vision encoder cannot use the attention backend `wanted` on the
    device.
    """
    backend = find_backend(device, installed=False)
    names = ("sdpa",) if backend is None else backend.towers
    if wanted not in ("auto", *names):
        raise ConfigError(
            f"--tune mm_attention_backend={wanted}: not available on {device}; use auto, "
            f"{', '.join(names)} (others need --device cuda)"
        )


def pick_tower_attention(wanted: str, device: str, arch: int, *, half: bool) -> str:
    """Return the attention backend of the vision encoder. For "auto", the device determines it.

    Raises ConfigError if the requested backend is not supported.

    arch: the compute capability of the GPU.
    half: True if the dtype has 16 bits.
    """
    check_tower_attention(wanted, device)
    backend = find_backend(device, installed=False)
    if backend is None or backend.pick_tower is None:
        return "sdpa"
    return backend.pick_tower(wanted, arch, half)


def resolve_encoder(
    settings: EngineSettings,
    spec: FamilySpec,
    *,
    cuda: bool,
    half: bool,
    arch: int = 0,
    beside: bool = False,
) -> EncoderConfig:
    """Return the vision encoder's settings. A model without one gets no graphs for it.

    Raises ConfigError if a setting is not possible.

    cuda: True if the device is a GPU, with compute capability `arch`.
    half: True if the dtype has 16 bits.
    beside: True if the device also computes steps of a language model.
    """
    attention = pick_tower_attention(
        settings.cuda.mm_attention_backend, "cuda" if cuda else "cpu", arch, half=half
    )
    switches = settings.switches
    config = EncoderConfig(
        attention,
        position_cache_bytes=POSITION_CACHE_BYTES if switches.position_cache else 0,
        rotary_kernel=switches.rotary_kernel,
    )
    graphs = switches.vit_graphs and spec.sees_images and uses_graphs(settings.cuda, spec)
    if attention == "sdpa" or not graphs:
        return config
    sizes: tuple[int, ...] = VIT_GRAPH_SIZES
    if beside:
        sizes = tuple(size for size in sizes if size <= WHOLE_PATCHES)
    unit = spec.patch_unit
    rounded = {-(-size // unit) * unit for size in sizes}
    return replace(config, graph_sizes=tuple(sorted(rounded)))


def resolve_embeddings(
    caches: CacheOptions,
    tiers: TierSettings,
    spec: FamilySpec,
    dtype: Dtype,
    left: int,
    host_bytes: int,
) -> EmbeddingBudgets:
    """Return the size in bytes of each tier of the embedding cache, 0 for a model without vision.

    Raises ConfigError.

    left: the device bytes that are not reserved yet.
    host_bytes: the size of the host tier, unless an option sets it.
    """
    if not spec.sees_images:
        return EmbeddingBudgets(0)
    largest = spec.largest_image.tokens * embedding_bytes_per_token(spec, dtype)
    device = max(64 * MIB, left // 10, min(largest, left), min(MAX_IMAGES * largest, left // 4))
    if caches.embedding_cache_device_mb is not None:
        device = caches.embedding_cache_device_mb * MIB
    if tiers.embedding_cache_host_mb is not None:
        host_bytes = tiers.embedding_cache_host_mb * MIB
    disk = tiers.embedding_disk
    if disk is None or disk.nbytes == 0:
        return EmbeddingBudgets(device, host_bytes)
    from saccade.engine.disk_budget import embedding_budget

    nbytes, folder = embedding_budget(disk)
    shared = tiers.embedding_cache_shared
    store = "shared" if shared else "disk"
    return EmbeddingBudgets(device, host_bytes, nbytes, folder, shared, store)


def resolve_pages(tiers: TierSettings, ranks: int, host_bytes: int) -> PageTierConfig:
    """Return the tiers for KV pages that are evicted from the pool.

    Their identity is added once the model is loaded. Raises ConfigError.

    host_bytes: the host memory of a rank for pages, unless an option sets it.
    """
    if tiers.kv_cache_host_mb is not None:
        host_bytes = tiers.kv_cache_host_mb * MIB
    if (disk := tiers.kv_disk) is None:
        return PageTierConfig(host_bytes=host_bytes, ranks=ranks)
    from saccade.engine.disk_budget import page_budget

    nbytes, folder = page_budget(disk)
    return PageTierConfig(folder, nbytes, ranks=ranks, host_bytes=host_bytes)


def kv_page_bytes(
    spec: FamilySpec, page_size: int, dtype: Dtype, ranks: int = 1, *, kept: KVDtype = "auto"
) -> int:
    """Return the size in bytes of one KV page over all layers, on each of `ranks` ranks.

    dtype: the dtype of the model.
    kept: the dtype of the cache, as in `KVConfig.dtype`.
    """
    return page_size * spec.kv_spec(ranks).with_dtype(kept).token_bytes(dtype)
