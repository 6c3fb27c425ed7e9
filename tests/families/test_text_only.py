"""A checkpoint of the language model alone sees no images, and has no memory for them."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest

from saccade.core.arena import Arena
from saccade.core.config import EmbeddingBudgets, Hardware
from saccade.core.errors import ConfigError, InvalidRequest
from saccade.core.metrics import Metrics
from saccade.core.options import (
    CacheOptions,
    EngineOptions,
    MediaOptions,
    ModelOptions,
    ServeOptions,
)
from saccade.core.settings import AdapterSettings, ParallelSettings
from saccade.engine.ranks import resolve_parallel
from saccade.engine.sizing import resolve
from saccade.engine.startup_report import LoadInfo, describe
from saccade.families.registry import load_spec
from saccade.front.assemble import arena_bytes, check_role
from saccade.media.media import Media
from saccade.media.sent_files import SentFiles
from saccade.media.sources.source import ImageSource
from tests.families.text_alone import cut_out


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut_out(checkpoint("qwen3_5"), tmp_path_factory.mktemp("alone") / "text")


def test_nothing_is_kept_for_images(folder: Path) -> None:
    spec = load_spec(folder)
    assert not spec.sees_images and spec.family == "qwen3_5"
    machine = Hardware("cuda", "H200", 139 << 30, 130 << 30, 64 << 30, arch=90)
    caches = CacheOptions(embedding_cache_device_mb=512)
    config = resolve(ModelOptions(), EngineOptions(), spec, "bfloat16", machine, caches=caches)
    assert config.embeddings == EmbeddingBudgets(0)
    assert config.encoder.graph_sizes == () and config.tower_budget == 0
    assert arena_bytes(MediaOptions(), spec) == mmap.PAGESIZE
    alone = resolve_parallel(ParallelSettings(), spec, "cuda")
    told = dict(describe(config, alone, spec, machine, LoadInfo((), "", 0)))
    assert told["vision encoder"] == "none: this model is text-only"
    assert not told.keys() & {"embedding cache", "resized images", "vision graphs"}
    for role in ("encode", "language"):
        with pytest.raises(ConfigError, match=f"--role {role}: this model has no vision encoder"):
            check_role(role, spec, AdapterSettings())


async def test_an_image_is_refused_before_its_bytes_are_looked_at(
    folder: Path,
) -> None:
    spec = load_spec(folder)
    media = Media(spec, ServeOptions(), Arena.create(mmap.PAGESIZE), Metrics())
    media.start()
    source = ImageSource("http://127.0.0.1:9/no.png", "messages[0].content[1]")
    errors = []
    for work in (media.open_all([source], ""), SentFiles(media).check(b"no image", "file")):
        with pytest.raises(InvalidRequest, match="this model supports only text") as caught:
            await work
        errors.append(caught.value)
    await media.close()
    assert [error.param for error in errors] == ["messages[0].content[1]", "file"]
    assert {error.code for error in errors} == {"no_vision"}


def test_every_token_is_text_to_it(folder: Path) -> None:
    spec = load_spec(folder)
    everything = tuple(range(spec.vocab_size))
    assert spec.expand_prompt(everything, ()) == (everything, ())
