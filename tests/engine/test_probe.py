from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path

import pytest

from saccade.cache.embeddings import EmbeddingCache
from saccade.core.config import EmbeddingBudgets, embedding_file_bytes
from saccade.core.store import file_name
from saccade.core.types import Image, ImageKey, Request, SamplingParams
from saccade.engine import store_lookup as probe
from saccade.engine.store_lookup import Sight, StoreProbe

TOKENS, ROW = 4, 1024
FILE = embedding_file_bytes(TOKENS * ROW)
IMAGES = [
    Image(ImageKey(bytes([number] * 32), bytes(16), ""), (1, 4, 4), TOKENS, 16, (64, 64))
    for number in range(6)
]


def request(id: str) -> Request:
    return Request(id, (1,), (), (), SamplingParams(), "", 0.0)


def within(work: Coroutine[None, None, None]) -> None:
    async def run() -> None:
        async with asyncio.timeout(10):
            await work

    asyncio.run(run())


async def taken(store: StoreProbe, news: asyncio.Event) -> list[tuple[Request, Sight]]:
    while not (found := store.take_ready()):
        news.clear()
        await news.wait()
    return found


def test_it_tells_what_is_there(tmp_path: Path) -> None:
    (tmp_path / file_name(IMAGES[1].key)).touch()
    (tmp_path / file_name(IMAGES[2].key)).mkdir()

    async def work() -> None:
        news = asyncio.Event()
        store = StoreProbe(str(tmp_path), news.set)
        assert store.begin_probe(request("a"), IMAGES[:3])
        ((told, sight),) = await taken(store, news)
        assert told.id == "a" and store.take_ready() == []
        assert [there for _, there in sight] == [False, True, False]

    within(work())


def test_a_folder_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(probe, "_is_file", lambda _: hangs.wait(10))
    monkeypatch.setattr(probe, "PATIENCE", 0.02)

    async def work() -> None:
        news = asyncio.Event()
        store = StoreProbe(str(tmp_path), news.set)
        assert store.begin_probe(request("a"), IMAGES[:1]) and store.begin_probe(
            request("b"), IMAGES[:1]
        )
        assert [(each.id, sight) for each, sight in await taken(store, news)] == [
            ("a", ()),
            ("b", ()),
        ]
        assert not store.begin_probe(request("c"), IMAGES[:1]), "it is left alone for a while"
        hangs.set()

    within(work())


def test_who_leaves_is_forgotten_and_who_is_left_at_the_end_is_told(tmp_path: Path) -> None:
    async def work() -> None:
        store = StoreProbe(str(tmp_path), lambda: None)
        for id in ("a", "b"):
            store.begin_probe(request(id), IMAGES[:1])
        assert store.drop("a") and not store.drop("a")
        assert [(each.id, each.error) for each in store.fail_all("the end")] == [("b", "the end")]
        assert not store.waiting and store.take_ready() == []

    within(work())


def cache() -> EmbeddingCache:
    """Knows of three files at most."""
    return EmbeddingCache(EmbeddingBudgets(1 << 20, 0, 3 * FILE, "x", shared=True), ROW)


def test_what_was_seen_is_fetched_and_what_was_seen_to_be_gone_is_not() -> None:
    embeddings = cache()
    one, *others = IMAGES
    embeddings.seen_in_store(one, True)
    assert embeddings.on_disk(one.key)
    embeddings.seen_in_store(one, False)
    assert embeddings.locate(one.key) is None
    embeddings.seen_in_store(one, True)
    embeddings.fetch(one.key)
    embeddings.seen_in_store(one, False)
    embeddings.fetched(one.key, whole=False)
    assert embeddings.locate(one.key) is None
    for image in others:
        embeddings.seen_in_store(image, True)
    assert len(embeddings.tiers["disk"]) == 3


def test_files_that_are_forgotten_are_not_removed_for_they_are_everybodys() -> None:
    embeddings = cache()
    for image in IMAGES:
        embeddings.admit(image.key, image.num_tokens)
        assert embeddings.save(image.key) == ([], True)
    assert embeddings.save(IMAGES[-1].key) == ([], False), "it is there"
    removed = [move for move in embeddings.flush() if move.source == "disk"]
    assert len(removed) == 3, "but who flushes wants it gone"
