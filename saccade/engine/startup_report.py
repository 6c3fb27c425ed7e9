"""Formats the start-up report. `sizing.py` makes the decisions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from saccade.core.config import (
    MIB,
    EmbeddingBudgets,
    EngineConfig,
    Hardware,
    KVConfig,
    PageTierConfig,
    ParallelConfig,
)
from saccade.core.family import FamilySpec, KVSpec
from saccade.engine.sizing import kv_page_bytes
from saccade.kernels.backend import find_backend


@dataclass(frozen=True, slots=True)
class LoadInfo:
    """What the start-up report shows about the loaded model."""

    options: tuple[str, ...]  # options of the model's family
    quantised: str  # as in `messages.Loaded`
    saved: int  # embeddings found on disk
    drafts: int = 0  # draft tokens per sequence and step
    no_drafts_reason: str = ""  # why drafting is disabled, or ""
    prepared: str = ""  # as in `messages.Started`
    pixels: int = 0  # size of the arena in bytes


def describe(
    config: EngineConfig,
    parallel: ParallelConfig,
    spec: FamilySpec,
    hardware: Hardware,
    facts: LoadInfo,
) -> tuple[tuple[str, str], ...]:
    """Return the derived settings as (name, value) pairs of text."""
    page_bytes = kv_page_bytes(
        spec, config.page_size, config.dtype, parallel.size, kept=config.kv.dtype
    )
    kv = (
        f"{_count(config.kv_pages - 1, 'page')} of {config.page_size} = "
        f"{_count(config.kv_tokens, 'token')}, {config.kv_pages * page_bytes / MIB:.0f} MiB"
        f"{_describe_kv(config.kv)}"
    )
    state_bytes = spec.kv_spec(parallel.size).state_bytes(config.dtype)
    each = " per rank" if parallel.ranks > 1 else ""
    shared = (
        f"{parallel.ranks}, all-reduce by {parallel.all_reduce}, vision encoder divided by "
        f"{parallel.encoder}{_describe_experts(parallel, spec.cuts.experts)}"
    )
    language, kept = config.encoder.role != "encode", spec.kv_spec()
    return (
        ("device", f"{config.device} ({hardware.name}), {config.dtype}"),
        *((("ranks", shared),) if parallel.ranks > 1 else ()),
        *((("quantised", facts.quantised + each),) if facts.quantised else ()),
        *((("family options", ", ".join(facts.options)),) if facts.options else ()),
        *(_describe_language(config, kv + each, state_bytes, each) if language else ()),
        *((("tokens see", _describe_sight(kept, config)),) if language and kept.sight else ()),
        *(_describe_drafts(config, facts, state_bytes) if language else ()),
        ("vision encoder", _describe_tower(config, spec)),
        *_describe_graphs(config),
        *(_describe_growth(config, page_bytes, facts.pixels) if config.device == "cpu" else ()),
        *((("start-up", facts.prepared),) if facts.prepared else ()),
        *(_describe_images(config, spec, facts.saved, each) if spec.sees_images else ()),
    )


def _describe_tower(config: EngineConfig, spec: FamilySpec) -> str:
    if not spec.sees_images:
        return "none: this model is text-only"
    patches = _count(config.encode_patches, "patch")
    return f"{config.encoder.attention} attention, {patches} per step"


def _describe_images(
    config: EngineConfig, spec: FamilySpec, saved: int, each: str
) -> tuple[tuple[str, str], ...]:
    bounds = spec.pixel_bounds
    return (
        ("embedding cache", _describe_embeddings(config.embeddings, saved) + each),
        ("resized images", f"{bounds.min_pixels} to {bounds.max_pixels} pixels"),
    )


def _describe_experts(parallel: ParallelConfig, experts: int) -> str:
    if parallel.expert_runs == 1:
        return ""
    slices = parallel.ranks // parallel.expert_runs
    return (
        f"; {experts // parallel.expert_runs} of {experts} experts on each rank"
        f"{f', a slice of {slices}' if slices > 1 else ', whole'}, "
        f"all else {f'in {parallel.size} slices' if parallel.size > 1 else 'whole'}"
    )


def _describe_language(
    config: EngineConfig, kv: str, state_bytes: int, each: str
) -> tuple[tuple[str, str], ...]:
    return (
        ("context", f"{config.context_length} tokens"),
        ("KV cache", kv),
        *((("KV kept", _describe_kept(config.kv.pages)),) if config.kv.pages else ()),
        ("attention", f"{config.kv.attention}, over pages"),
        ("prefix cache", _describe_prefix_cache(config, state_bytes)),
        *(
            (("states", f"{state_bytes / MIB:.1f} MiB for each running request" + each),)
            if state_bytes
            else ()
        ),
        (
            "batch",
            f"{_count(config.max_running, 'request')}, {_count(config.chunk_tokens, 'token')} "
            "per step",
        ),
    )


def _describe_drafts(
    config: EngineConfig, facts: LoadInfo, state_bytes: int
) -> Iterator[tuple[str, str]]:
    if facts.no_drafts_reason:
        yield "speculation", f"off: {facts.no_drafts_reason}"
    if facts.drafts:
        lines = config.snapshots.between
        taken = (
            f", {lines} states after draft tokens = {lines * state_bytes / MIB:.0f} MiB"
            if lines
            else ""
        )
        yield "speculation", f"up to {_count(facts.drafts, 'token')}{taken}"


def _describe_sight(kept: KVSpec, config: EngineConfig) -> str:
    backend = find_backend(config.device, installed=False)
    remark = "" if backend is None else backend.remarks.get(config.kv.attention, "")
    return ", ".join(kept.sight) + remark


def _describe_kept(pages: PageTierConfig) -> str:
    host = f"{pages.host_bytes / MIB:.0f} MiB of host memory" if pages.host_bytes else ""
    each = " per rank" if host and pages.ranks > 1 else ""
    disk = f"{pages.disk_bytes / MIB:.0f} MiB in {pages.folder}" if pages.folder else ""
    return ", ".join(part for part in (host + each, disk) if part)


def _describe_graphs(config: EngineConfig) -> Iterator[tuple[str, str]]:
    if config.encoder.graph_sizes:
        yield "vision graphs", ", ".join(map(str, config.encoder.graph_sizes)) + " patches"
    if rows := config.graphs.rows:
        yield "decode graphs", f"up to {_count(max(rows), 'sequence')}"
    if tokens := config.graphs.mixed_tokens:
        yield "prompt graphs", f"up to {_count(max(tokens), 'token')} in a step"


def _describe_growth(
    config: EngineConfig, page_bytes: int, pixels: int
) -> Iterator[tuple[str, str]]:
    kv, embeddings = (config.kv_pages - 1) * page_bytes, config.embeddings.device_bytes
    parts = (
        (kv, "KV (--max-total-tokens)"),
        (embeddings, "embeddings (--embedding-cache-device-mb)"),
        (pixels, "pixels (--tune arena_mb)"),
    )
    listed = " + ".join(f"{nbytes / MIB:.0f} of {what}" for nbytes, what in parts if nbytes)
    total = sum(nbytes for nbytes, _ in parts)
    yield "memory", f"grows by at most {total / MIB:.0f} MiB as the caches fill: {listed}"


def _describe_kv(kv: KVConfig) -> str:
    if kv.dtype == "auto":
        return ""
    return f" in {kv.dtype}, scales {'of the checkpoint' if kv.scales else '1.0'}"


def _describe_prefix_cache(config: EngineConfig, state_bytes: int) -> str:
    if not config.prefix_cache:
        return "off"
    if not state_bytes:
        return "on"
    taken = config.snapshots.count * state_bytes / MIB
    return (
        f"on, {_count(config.snapshots.count, 'snapshot')} of states = {taken:.0f} MiB, "
        f"one in at most {_count(config.snapshots.tokens, 'token')}"
    )


def _describe_embeddings(budgets: EmbeddingBudgets, saved: int) -> str:
    parts = [f"{budgets.device_bytes / MIB:.0f} MiB"]
    if budgets.host_bytes:
        parts.append(f"{budgets.host_bytes / MIB:.0f} MiB on the host")
    if budgets.disk_bytes:
        found = _count(saved, "image")
        parts.append(
            f"{budgets.disk_bytes / MIB:.0f} MiB in {budgets.folder} "
            + ("shared with other servers" if budgets.shared else f"({found} found there)")
        )
    return ", ".join(parts)


def _count(number: int, thing: str) -> str:
    return (
        f"{number} {thing}"
        if number == 1
        else f"{number} {thing}es"
        if thing.endswith(("s", "ch"))
        else f"{number} {thing}s"
    )
