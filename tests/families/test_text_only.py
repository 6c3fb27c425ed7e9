"""A checkpoint of the language model alone: it answers as transformers, sees no images, and has no
memory for them.
"""

from __future__ import annotations

import asyncio
import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from saccade.core.answer_options import AnswerOptions
from saccade.core.arena import Arena
from saccade.core.config import EmbeddingBudgets, Hardware
from saccade.core.errors import ConfigError, InvalidRequest
from saccade.core.metrics import Metrics
from saccade.core.options import (
    CacheOptions,
    EngineOptions,
    MediaOptions,
    ModelOptions,
    ParallelOptions,
    RoleOptions,
)
from saccade.engine.ranks import resolve_parallel
from saccade.engine.sizing import arena_bytes, resolve
from saccade.engine.startup_report import LoadFacts, describe
from saccade.families.registry import load_spec
from saccade.front.assemble import check_role
from saccade.media.media import Media
from saccade.media.sources import ImageSource
from saccade_bench.fixtures.harness import Harness, set_threads
from tests.families.forwarding import Session, load

NEW_TOKENS = 32
PROMPTS = {
    "text": "the quick brown fox jumps over the lazy dog; how many",
    "another": "There are two blue squares and one green star. ",
    "three turns": "user\nhow many?\nassistant\nThere are two.\nuser\nand here?\nassistant\none "
    "green star.\nuser\nred?",
    **{f"number {n}": f"are there {n} red circles? " * (n + 1) for n in range(5)},
}
FEW = ("another", "three turns", "number 1")


def cut_out(whole: Path, folder: Path) -> Path:
    """The language model of a checkpoint as a checkpoint of its own, as transformers saves it; the
    tensors of the tower stay in its file, which transformers passes over.
    """
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text((whole / name).read_text())
    config = json.loads((whole / "config.json").read_text())
    name = config["architectures"][0].replace("ForConditionalGeneration", "ForCausalLM")
    text = config["text_config"] | {"architectures": [name]}
    (folder / "config.json").write_text(json.dumps(text))
    tensors = {
        name.replace("model.language_model.", "model."): value
        for name, value in load_file(whole / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = cut_out(checkpoint(family), tmp_path_factory.mktemp(family) / "text")
        return made[family]

    return make


def theirs(folder: Path) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__.endswith("ForCausalLM")
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3_5", FEW),
        pytest.param("qwen3_5", tuple(PROMPTS), marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", tuple(PROMPTS), marks=pytest.mark.slow),
    ],
    ids=["few", "all", "experts"],
)
def test_answers_are_those_of_transformers(
    folder: Callable[[str], Path], family: str, names: tuple[str, ...]
) -> None:
    """All at once, and again: from the prefix cache or without it, in chunks, and preempted."""
    set_threads()
    where = folder(family)
    net, judge = load(where), theirs(where)
    tokenizer = Tokenizer.from_file(str(where / "tokenizer.json"))
    prompts = {name: tokenizer.encode(text).ids for name, text in PROMPTS.items() if name in names}
    expected = {
        name: judge.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)[0]
        for name, ids in prompts.items()
    }
    longest = max(map(len, prompts.values())) + NEW_TOKENS
    tight = {"page_size": 2, "kv_pages": 1 + longest // 2 + (longest // 2 if names != FEW else 8)}
    ways: list[dict[str, Any]] = [
        tight,
        {"chunk_tokens": 16, "page_size": 1, "kv_pages": 4096},
        {"chunk_tokens": 64, "prefix_cache": False},
        {},
    ]
    for way in ways[: 2 if names == FEW else 4]:
        harness = Harness(net, **way)
        for _ in range(2):
            asked = [
                harness.request(name, ids, max_tokens=NEW_TOKENS) for name, ids in prompts.items()
            ]
            for name, outcome in harness.run(asked).items():
                assert outcome.tokens == expected[name][len(prompts[name]) :].tolist(), name
        assert (harness.scheduler.counts.preemptions > 0) == (way is tight)
    session = Session(net, prompts["three turns"], [], page_size=16)
    logits = judge(torch.tensor([session.tokens])).logits[0]
    torch.testing.assert_close(session.prefill(7), logits, atol=2e-4, rtol=0.0)


def test_nothing_is_kept_for_images(folder: Callable[[str], Path]) -> None:
    spec = load_spec(folder("qwen3_5"))
    assert not spec.sees_images and spec.family == "qwen3_5"
    machine = Hardware("cuda", "H200", 139 << 30, 130 << 30, 64 << 30, arch=90)
    caches = CacheOptions(embedding_cache_device_mb=512)
    config = resolve(ModelOptions(), EngineOptions(), spec, "bfloat16", machine, caches=caches)
    assert config.embeddings == EmbeddingBudgets(0)
    assert config.encoder.graph_sizes == () and config.tower_budget == 0
    assert arena_bytes(MediaOptions(), spec) == mmap.PAGESIZE
    alone = resolve_parallel(ParallelOptions(), spec, "cuda")
    told = dict(describe(config, alone, spec, machine, LoadFacts((), "", 0)))
    assert told["vision tower"] == "none: this model takes text only"
    assert not told.keys() & {"embedding cache", "resized images", "vision graphs"}
    for role in ("encode", "language"):
        with pytest.raises(ConfigError, match=f"--role {role}: this model has no vision tower"):
            check_role(role, spec, AnswerOptions())
    with pytest.raises(ConfigError, match="--tune vit_graph_buckets=64: this model has no vision"):
        resolve(ModelOptions(), EngineOptions(vit_graph_buckets=(64,)), spec, "bfloat16", machine)


def test_an_image_is_refused_before_its_bytes_are_looked_at(
    folder: Callable[[str], Path],
) -> None:
    spec = load_spec(folder("qwen3_5"))

    async def ask() -> list[InvalidRequest]:
        media = Media(spec, MediaOptions(), Arena.create(mmap.PAGESIZE), Metrics(), RoleOptions())
        media.start()
        source = ImageSource("http://127.0.0.1:9/no.png", "messages[0].content[1]")
        refused = []
        for work in (media.open_all([source], ""), media.check(b"no image", "file")):
            with pytest.raises(InvalidRequest, match="this model has no vision") as caught:
                await work
            refused.append(caught.value)
        await media.close()
        return refused

    errors = asyncio.run(ask())
    assert [error.param for error in errors] == ["messages[0].content[1]", "file"]
    assert {error.code for error in errors} == {"no_vision"}


def test_every_token_is_text_to_it(folder: Callable[[str], Path]) -> None:
    spec = load_spec(folder("qwen3_5"))
    everything = tuple(range(spec.vocab_size))
    assert spec.expand_prompt(everything, ()) == (everything, ())
