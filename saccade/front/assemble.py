"""Builds a `RequestManager` from options, for the HTTP server and for `LLM`.

Loads the checkpoint's spec, tokenizer and chat template, and creates the media code and the
connection to the engine process.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from saccade.core.arena import Arena
from saccade.core.config import MIB, Role
from saccade.core.errors import ConfigError
from saccade.core.family import FamilySpec
from saccade.core.given_paths import readable
from saccade.core.metrics import Metrics
from saccade.core.options import MediaOptions, ServeOptions
from saccade.core.settings import (
    AdapterSettings,
    CheckpointSettings,
    ParitySettings,
    Pooling,
    PoolingSettings,
    TierSettings,
)
from saccade.engine.link import EarlyEngine, EngineProcess
from saccade.families.checkpoint import read_pooling
from saccade.families.registry import load_spec, resolve_checkpoint
from saccade.front.answer_defaults import load_answer_defaults
from saccade.front.input_processor import InputProcessor
from saccade.front.request_manager import RequestManager
from saccade.media.media import Media
from saccade.plugin import Plugin
from saccade.plugins import builder, option_groups
from saccade.text.answer.answer_format import find_answer_format
from saccade.text.prompt.template import ChatTemplate, Tokenizer

if TYPE_CHECKING:
    from saccade.front.score_prompts import Scoring

log = logging.getLogger("saccade")

POOLED_OUTPUT_BYTES = 64 * MIB
"""Maximum memory for cached embeddings, scores and decisions, in bytes."""
UNPROVEN = "only a few prompts were compared with transformers at load"
UNUSUAL = 61, 67
"""An image size (height, width) that is not cached. Its preprocessing is computed early, to start
the helper process before the first image arrives.
"""


def build_front(
    model: str,
    serving: ServeOptions,
    early: EarlyEngine | None = None,
    plugins: Sequence[Plugin] = (),
) -> RequestManager:
    """Build a `RequestManager`, which the caller then starts.

    early: the engine process, if it was started before.
    plugins: the plugins that requests may use.

    Call this on a running event loop. Raises StartupError for unusable files or options.
    """
    with readable(model):
        return _assemble(model, serving, early, plugins)


def _assemble(
    model: str, serving: ServeOptions, early: EarlyEngine | None, plugins: Sequence[Plugin]
) -> RequestManager:
    options, stated = serving.model, serving.engine_settings
    folder = resolve_checkpoint(model, options.revision, serving.of(CheckpointSettings).mmproj)
    spec = load_spec(folder, options.family_option)
    check_proven(spec, folder, serving.of(ParitySettings))
    adapter_settings = serving.of(AdapterSettings)
    check_role(serving.role, spec, adapter_settings)
    if spec.sees_images and spec.sample.own is not None:
        spec.recipe(*UNUSUAL, spec.pixel_bounds)
    tokenizer = Tokenizer.load(folder)
    override = Path(options.chat_template) if options.chat_template else None
    template = ChatTemplate.load(folder, tokenizer, override, spec.templates)
    metrics = Metrics()
    memory = None if early is None else early.arena_fd
    arena = Arena.create(arena_bytes(serving.media, spec), memory)
    defaults = load_answer_defaults(folder, spec)
    answers = serving.answers
    if answers.default_max_tokens is not None:
        limited = replace(defaults.sampling, max_tokens=answers.default_max_tokens)
        defaults = replace(defaults, sampling=limited)
    intake = InputProcessor(
        spec,
        tokenizer,
        template,
        Media(
            spec,
            serving,
            arena,
            metrics,
            metadata_folder=_metadata_folder(stated.tiers),
            cards=[card for plugin in plugins for card in plugin.requests.media],
        ),
        defaults,
        find_answer_format(template.sources, options.tool_parser, options.reasoning_parser),
        serving,
        f"{model} {folder}",
        plugins,
    )
    caches, role, parts = serving.caches, serving.role, engine_parts(serving, plugins)
    load = folder, options, serving.engine, arena, caches, role, stated
    link = EngineProcess(*load, early, parts)
    scoring = find_task(serving.of(PoolingSettings).pooling, folder, spec, tokenizer)
    most = serving.server.max_queued_requests
    return RequestManager(
        intake, link, metrics, most, scoring, POOLED_OUTPUT_BYTES, adapter_settings
    )


def find_task(
    wanted: Pooling, folder: Path, spec: FamilySpec, tokenizer: Tokenizer
) -> Scoring | None:
    """Return how the model embeds or ranks, or None if it only generates. Raises ConfigError if the
    model does not support `wanted`.
    """
    files = read_pooling(folder)
    trained = spec.templates.late is not None or (files is not None and files.task is not None)
    if wanted == "none" or (wanted == "auto" and not trained):
        return None
    from saccade.front.score_prompts import find_scoring

    return find_scoring(wanted, files, spec, tokenizer)


def arena_bytes(media: MediaOptions, spec: FamilySpec) -> int:
    """Return the size of the pixel arena in bytes. For a model without images, it is one memory
    page.

    Raises ConfigError if the model's largest image, as uint8 RGB, does not fit.

    The size does not depend on `max_image_pixels`, which limits images as received. With
    `min_pixels`, a request can enlarge an image up to the model's limit.
    """
    if not spec.sees_images:
        return mmap.PAGESIZE
    most = spec.largest_image.pixels
    if media.arena_mb * MIB < 3 * most:
        raise ConfigError(
            f"--tune arena_mb={media.arena_mb}: the model's largest image takes "
            f"{3 * most / MIB:.1f} MiB ({most} pixels after resizing); "
            f"set it to {-(-3 * most // MIB)} or more"
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if media.arena_mb * MIB > memory:
        raise ConfigError(
            f"--tune arena_mb={media.arena_mb}: this machine has {memory // MIB} MiB of memory"
        )
    return media.arena_mb * MIB


def describe_media_limits(media: MediaOptions) -> tuple[tuple[str, str], ...]:
    """Return the limits on received images as (name, value) pairs, for the start-up report."""
    processes = f"{media.workers} process" + ("es" if media.workers > 1 else "")
    return (("sent images", f"{media.max_image_pixels} pixels at most, decoded by {processes}"),)


def engine_parts(serving: ServeOptions, plugins: Sequence[Plugin]) -> dict[str, dict[str, Any]]:
    """Return the options of the plugins that extend the engine, by plugin name."""
    return {
        plugin.name: msgspec.to_builtins(serving.of(option_groups()[plugin]))
        for plugin in plugins
        if plugin.scheduling.engine_part is not None
    }


def check_proven(spec: FamilySpec, folder: Path, settings: ParitySettings) -> None:
    """Raise ConfigError if no test compares the architecture with transformers, unless --parity
    allows that.
    """
    if not (name := spec.unproven):
        return
    if settings.parity == "auto":
        raise ConfigError(
            f"{folder}: {name} is not among the architectures whose answers are compared with "
            "transformers before a release (see docs/models.md). To serve it anyway, start with "
            "--parity unproven: then only a few prompts are compared, at load"
        )
    log.warning("%s is unproven: %s", name, UNPROVEN)


def parity_check(
    front: RequestManager, model: str, options: ServeOptions
) -> Callable[[], Awaitable[None]] | None:
    """Return a function that implements `--parity generate`, or None if that option is not set.

    Call it after the front end has started. Raises ConfigError if no plugin implements the option.
    """
    if options.of(ParitySettings).parity != "generate":
        return None
    check = builder(lambda plugin: plugin.checkpoints.parity)
    if check is None:
        raise ConfigError("--parity generate: no installed plugin compares answers")
    return partial(check, front, model, options)


def _metadata_folder(tiers: TierSettings) -> Path | None:
    """Return the directory for metadata of media files, or None if embeddings are not cached on
    disk.
    """
    disk = tiers.embedding_disk
    if disk is None or disk.nbytes == 0:
        return None
    from saccade.core.store import CARDS

    return Path(disk.path).expanduser().absolute() / CARDS


def check_role(role: Role, spec: FamilySpec, adapters: AdapterSettings) -> None:
    """Raise ConfigError if a role other than all is combined with adapters, or with a model that
    has no vision encoder.
    """
    if role != "all" and adapters.lora:
        raise ConfigError(f"--lora: adapters are for --role all, not for {role}")
    if role != "all" and not spec.sees_images:
        raise ConfigError(
            f"--role {role}: this model has no vision encoder, so there are no images to encode; "
            "use --role all"
        )
