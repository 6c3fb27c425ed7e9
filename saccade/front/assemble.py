"""Puts a front together from options: checkpoint folder, spec, tokenizer, template, media, engine
process. The server and `LLM` use it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from saccade.core.arena import Arena
from saccade.core.config import MIB, Role
from saccade.core.errors import ConfigError
from saccade.core.family import FamilySpec
from saccade.core.given_paths import readable
from saccade.core.metrics import Metrics
from saccade.core.options import AnswerOptions, CacheOptions, ModelOptions, ServeOptions
from saccade.core.store import CARDS
from saccade.engine.link import EarlyEngine, EngineProcess
from saccade.engine.sizing import arena_bytes, resolve_encoder
from saccade.families.checkpoint import read_pooling
from saccade.families.registry import gguf_facts, load_spec
from saccade.front.adapters import AdapterBook, read_names
from saccade.front.answer_rules import load_sampling_defaults
from saccade.front.changes import EngineChanges
from saccade.front.compiler import Compiler
from saccade.front.input_processor import InputProcessor
from saccade.front.pooled_output_cache import PooledOutputCache
from saccade.front.request_manager import RequestManager
from saccade.front.score_prompts import find_scoring
from saccade.front.sessions.sessions import Sessions
from saccade.gguf.folder import resolve_checkpoint
from saccade.media.media import Media
from saccade.text.answer.answer_format import find_answer_format
from saccade.text.prompt.template import ChatTemplate, Tokenizer

log = logging.getLogger("saccade")

POOLED_OUTPUT_BYTES = 64 * MIB
"""Memory for what embeddings, ranks and decisions have read."""
UNPROVEN = "a few prompts were compared with transformers' own answers at load, no more"
UNUSUAL = 61, 67
"""A size that nobody has asked about, so that the process that answers starts before images do."""


def build_front(
    model: str, serving: ServeOptions, early: EarlyEngine | None = None
) -> RequestManager:
    """Build a front that is still to be started. `early`: its engine, if that has begun.

    Call on a running event loop. Raises StartupError for unusable files or options.
    """
    with readable(model):
        return _assemble(model, serving, early)


def _assemble(model: str, serving: ServeOptions, early: EarlyEngine | None) -> RequestManager:
    options, engine, role = serving.model, serving.engine, serving.role
    folder = resolve_checkpoint(model, options, gguf_facts)
    spec = load_spec(folder, options.family_option)
    check_proven(spec, folder, options)
    # The engine decides this, once it sees the device; what works on no device need not wait for
    # it.
    check_role(role.role, spec, serving.answers)
    if spec.sees_images and spec.sample.own is not None:
        spec.recipe(*UNUSUAL, spec.pixel_bounds)
    half = options.dtype != "float32"
    resolve_encoder(engine, spec, cuda=options.device != "cpu", half=half)
    tokenizer = Tokenizer.load(folder)
    override = Path(options.chat_template) if options.chat_template else None
    template = ChatTemplate.load(folder, tokenizer, override, spec.templates)
    words = tokenizer.backend.to_str()
    metrics = Metrics()
    memory = None if early is None else early.arena_fd
    arena = Arena.create(arena_bytes(serving.media, spec), memory)
    defaults = load_sampling_defaults(folder)
    answers = serving.answers
    if answers.default_max_tokens is not None:
        defaults = replace(defaults, max_tokens=answers.default_max_tokens)
    intake = InputProcessor(
        spec,
        tokenizer,
        template,
        Media(
            spec,
            serving.media,
            arena,
            metrics,
            role,
            metadata_folder=_metadata_folder(serving.caches),
        ),
        defaults,
        Compiler(words, spec.vocab_size, spec.eos_token_ids),
        find_answer_format(template.sources, options.tool_parser, options.reasoning_parser),
        Sessions() if serving.caches.prepares_next else None,
        f"{model} {folder}",
    )
    load = folder, options, engine, serving.parallel
    link = EngineProcess(*load, arena, words, serving.caches, role.role, early)
    scoring = find_scoring(answers.pooling, read_pooling(folder), spec, tokenizer)
    pooled_outputs = PooledOutputCache(POOLED_OUTPUT_BYTES)
    most = serving.server.max_queued_requests
    adapters = AdapterBook(EngineChanges(link.send), answers.max_loras, read_names(answers.lora))
    return RequestManager(intake, link, metrics, most, scoring, pooled_outputs, adapters)


def check_proven(spec: FamilySpec, folder: Path, options: ModelOptions) -> None:
    """Raise ConfigError for an unproven architecture unless the user allows it."""
    if not (name := spec.unproven):
        return
    if options.parity == "auto":
        raise ConfigError(
            f"{folder}: {name} is none of the architectures whose answers are compared with "
            "transformers' own before a release (docs/models.md lists them); start with "
            "--parity unproven to serve it: a few prompts are then compared at load alone"
        )
    log.warning("%s is unproven: %s", name, UNPROVEN)


def _metadata_folder(caches: CacheOptions) -> Path | None:
    """Return the folder of image metadata that outlives the server, if embeddings do."""
    disk = caches.embedding_disk
    if disk is None or disk.nbytes == 0:
        return None
    return Path(disk.path).expanduser().absolute() / CARDS


def check_role(role: Role, spec: FamilySpec, answers: AnswerOptions) -> None:
    """Raise ConfigError if a role other than all has adapters or a model without a vision tower."""
    if role != "all" and answers.lora:
        raise ConfigError(f"--lora: adapters are for --role all, not for {role}")
    if role != "all" and not spec.sees_images:
        raise ConfigError(
            f"--role {role}: this model has no vision tower, so no images to encode; use --role all"
        )
