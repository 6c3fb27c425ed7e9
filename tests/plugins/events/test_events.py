"""An index rebuilt from events alone equals the caches, over a real socket."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from saccade.cache.content import Content, Partition
from saccade.cache.embeddings import EmbeddingCache
from saccade.cache.pages import PagePool
from saccade.cache.prefix import Node, PrefixCache
from saccade.core.config import EmbeddingBudgets
from saccade.core.errors import ConfigError, StartupError
from saccade.core.options import CacheOptions, ServeOptions
from saccade.core.types import Image, ImageKey, Span
from saccade.plugins.encoder.options import RoleOptions
from saccade.plugins.events import publisher as publishing
from saccade.plugins.events.cache_events import BlockEvents, EmbeddingEvents
from saccade.plugins.events.options import EventOptions, is_enabled
from saccade.plugins.events.publisher import Endpoints, Publisher
from saccade.plugins.events.schema import (
    AllBlocksCleared,
    AllEmbeddingsCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    block_hash,
    merged,
)
from tests.plugins.events.subscriber import Block, subscribing

SIZE, PAGES = 4, 200
KEYS = [ImageKey(bytes([n] * 32), bytes(16), "ab" if n % 2 else "") for n in range(6)]
IMAGES = [Image(key, (1, 4, 4), 5, 16, (64, 64)) for key in KEYS]


@contextmanager
def published(cleared: Event, folder: Path, steps: int = 10_000) -> Iterator[Publisher]:
    endpoints = Endpoints(f"ipc://{folder}/events", f"ipc://{folder}/replays", buffer_steps=steps)
    publisher = Publisher(endpoints, cleared)
    try:
        yield publisher
    finally:
        publisher.close()


def stored_blocks(cache: PrefixCache) -> dict[int, Block]:
    """What the trie has, as events would tell it."""
    blocks: dict[int, Block] = {}
    todo = list(cache._roots.values())
    while todo:
        node = todo.pop()
        todo += node.children.values()
        if node.parent is not None:
            parent = block_hash(cache.name(node.parent)) if node.parent.depth else None
            extra = extra_of(node, node.partition)
            blocks[block_hash(cache.name(node))] = Block(parent, node.key[0], extra)
    return blocks


def extra_of(node: Node, partition: Partition) -> tuple[object, ...]:
    salt, adapter = partition
    images = [
        (image.digest.hex() + image.settings.hex(), position - row)
        for position, _, image, row, _ in node.key[1]
    ]
    first = (salt,) if salt and node.depth == 1 else ()
    return (*((adapter,) if adapter else ()), *images, *first)


class Traffic:
    """Sequences that hold, extend and leave paths of a prefix cache, at random."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.pool = PagePool(PAGES + 1, SIZE)
        self.cache = PrefixCache(self.pool)
        self.running: list[tuple[Content, Node, list[int]]] = []
        self.requests = 0

    def request(self) -> None:
        self.requests += 1
        content = self.content()
        path = self.cache.find(content)
        node = self.cache.hold(content, path)
        need = self.pool.pages_for(len(content.tokens)) - len(path)
        if self.pool.free < need:
            self.cache.evict(need - self.pool.free)
        pages = [step.page for step in path]
        if self.pool.free < need:
            self.cache.leave(node, content, pages, len(pages))
            return
        pages += self.pool.allocate(need)
        whole = len(content.tokens) // SIZE
        node = self.cache.extend(node, content, pages, self.draw.randint(len(path), whole))
        self.running.append((content, node, pages))

    def content(self) -> Content:
        image = self.draw.choice(IMAGES)
        tokens = [self.draw.choice((1, 2)) for _ in range(self.draw.randint(1, 20))]
        salt, adapter = self.draw.choice((("", ""), ("s", ""), ("", "a"), ("s", "a")))
        if self.draw.random() < 0.5:
            return Content(tokens, (), (), salt, adapter)
        start = self.draw.randint(0, len(tokens))
        tokens[start:start] = [9] * 5
        return Content(tokens, (Span(start, 5, 0),), (image,), salt, adapter)

    def step(self) -> None:
        kind = self.draw.random()
        if kind < 0.002:
            self.cache.flush()
        elif kind < 0.03:
            self.cache.evict(self.draw.randint(1, 20))
        elif self.running and (kind < 0.5 or len(self.running) > 8):
            content, node, pages = self.running.pop(self.draw.randrange(len(self.running)))
            self.cache.leave(node, content, pages, len(content.tokens) // SIZE)
        else:
            self.request()


@pytest.mark.parametrize("restarts", [2])
def test_an_index_of_events_equals_the_trie(tmp_path: Path, restarts: int) -> None:
    """Ten thousand requests, over servers that follow one another."""
    address = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays"
    with subscribing(*address) as subscriber:
        for run in range(restarts + 1):
            traffic = Traffic(run)
            with published(AllBlocksCleared(), tmp_path) as publisher:
                traffic.cache.listen(BlockEvents(publisher, "CPU"), b"model")
                while traffic.requests * (restarts + 1) < 10_000:
                    traffic.step()
                    subscriber.read()
                blocks = stored_blocks(traffic.cache)
                assert len(blocks) == traffic.cache.pages > 20
                subscriber.wait_for(lambda: publisher.published and not publisher._pending)
                subscriber.wait_for(lambda blocks=blocks: subscriber.index.blocks == blocks)
                assert subscriber.index.starts == run + 1
                assert publisher.dropped == 0 and traffic.cache.evictions > 100


def test_a_flush_removes_all_but_what_runs(tmp_path: Path) -> None:
    traffic = Traffic(1)
    with published(AllBlocksCleared(), tmp_path) as publisher:
        traffic.cache.listen(BlockEvents(publisher, "CPU"), b"")
        with subscribing(publisher.endpoint, str(publisher.replay_endpoint)) as subscriber:
            for _ in range(50):
                traffic.request()
            traffic.cache.flush()
            held = stored_blocks(traffic.cache)
            assert 0 < len(held) == traffic.cache.pages
            subscriber.wait_for(lambda: subscriber.index.blocks == held)


def test_an_index_of_embedding_events_equals_the_cache(tmp_path: Path) -> None:
    cache = EmbeddingCache(EmbeddingBudgets(device_bytes=40, host_bytes=40), bytes_per_token=4)
    draw = random.Random(3)
    with published(AllEmbeddingsCleared(), tmp_path) as publisher:
        cache.listen(EmbeddingEvents(publisher))
        for _ in range(1000):
            image = draw.choice(IMAGES)
            if cache.locate(image.key) is None:
                cache.admit(image.key, image.num_tokens)
                if draw.random() < 0.2:
                    cache.not_encoded(image.key)
            elif draw.random() < 0.1:
                cache.flush()
        known = {
            (key.identifier, key.salt): cache.num_tokens(key)
            for key in KEYS
            if cache.locate(key) is not None
        }
        assert 0 < len(known) < len(KEYS)
        with subscribing(publisher.endpoint, str(publisher.replay_endpoint)) as subscriber:
            subscriber.wait_for(lambda: subscriber.index.embeddings == known)
            assert subscriber.replayed > 0


def test_embeddings_on_disk_are_stored_at_the_start(tmp_path: Path) -> None:
    budgets = EmbeddingBudgets(1000, disk_bytes=1 << 20, folder=str(tmp_path))
    cache = EmbeddingCache(budgets, 4, [(KEYS[0], 5), (KEYS[1], 5)])
    with published(AllEmbeddingsCleared(), tmp_path) as publisher:
        cache.listen(EmbeddingEvents(publisher))
        with subscribing(publisher.endpoint, str(publisher.replay_endpoint)) as subscriber:
            subscriber.wait_for(lambda: len(subscriber.index.embeddings) == 2)
    assert subscriber.index.embeddings == {(key.identifier, key.salt): 5 for key in KEYS[:2]}


def test_what_exceeds_the_queue_leaves_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue that is full drops events, counts them, and never waits."""
    monkeypatch.setattr(publishing, "MAX_PENDING", 3)
    with published(AllBlocksCleared(), tmp_path) as publisher:
        with subscribing(publisher.endpoint, str(publisher.replay_endpoint)) as subscriber:
            subscriber.wait_for(lambda: subscriber.index.starts == 1)
            publisher._pending.extend(
                [BlockRemoved([], None)] * 3
            )  # which the thread has yet to see
            before = subscriber.next
            publisher.put(BlockRemoved([], None))
            assert publisher.dropped == 1
            os.eventfd_write(publisher._wake, 1)
            subscriber.wait_for(lambda: publisher.published == 4)
            subscriber.wait_for(lambda: subscriber.next > before)
            assert subscriber.next == before + 2  # a batch, and a number that nobody gets


def test_a_replay_has_what_the_buffer_keeps(tmp_path: Path) -> None:
    with published(AllBlocksCleared(), tmp_path, steps=2) as publisher:
        with subscribing(publisher.endpoint, str(publisher.replay_endpoint)) as subscriber:
            for count in range(1, 6):
                subscriber.wait_for(lambda count=count: publisher.published == count)
                publisher.put(BlockRemoved([], None))
            subscriber.wait_for(lambda: publisher.published == 6)
            assert len(publisher._buffer) == 2
            subscriber.next, subscriber.replayed = 0, 0
            subscriber.catch_up()
            assert subscriber.replayed == 2


@pytest.mark.parametrize("request_", [b"", b"\0", b"\0" * 9], ids=len)
def test_a_damaged_request_for_a_replay_is_ignored(tmp_path: Path, request_: bytes) -> None:
    with published(AllBlocksCleared(), tmp_path) as publisher:
        with subscribing(publisher.endpoint, str(publisher.replay_endpoint)) as subscriber:
            subscriber._replays.send_multipart((b"", request_))
            subscriber.catch_up()
            subscriber.wait_for(lambda: subscriber.index.starts == 1)


def test_events_are_written_as_vllm_writes_them() -> None:
    """Arrays, with the class's name first."""
    events: list[Event] = [
        BlockStored([1], None, [1, 2], 2, None, "GPU", None),
        BlockStored([2], 1, [3, 4], 2, None, "GPU", None, [[("0f", -1), "salt"]]),
        BlockRemoved([2], "GPU"),
        BlockRemoved([1], "GPU"),
        AllBlocksCleared(),
    ]
    batch = EventBatch(1.5, merged(events))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == [
        1.5,
        [
            [
                *("BlockStored", [1, 2], None, [1, 2, 3, 4], 2, None, "GPU", None),
                [None, [["0f", -1], "salt"]],
            ],
            ["BlockRemoved", [2, 1], "GPU"],
            ["AllBlocksCleared"],
        ],
        None,
    ]


def test_a_block_that_does_not_follow_is_an_event_of_its_own() -> None:
    first = BlockStored([1], None, [1], 1, None, "GPU", None, [["s"]])
    second = BlockStored([2], None, [2], 1, None, "GPU", None)
    third = BlockStored([3], 2, [3], 1, None, "GPU", None)
    joined = merged([first, second, third])
    runs = [event.block_hashes for event in joined if isinstance(event, BlockStored)]
    assert runs == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_events_endpoint": "5557"}, "--kv-events-endpoint '5557': give tcp://HOST:PORT"),
        ({"embedding_events_endpoint": "http://a:1"}, "--embedding-events-endpoint"),
        ({"kv_events_replay_endpoint": "tcp://*:1"}, "--kv-events-endpoint publishes"),
        ({"events_buffer_steps": 0}, "events_buffer_steps"),
    ],
)
def test_an_unusable_option_is_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EventOptions(**options)  # type: ignore[arg-type]


def test_events_need_a_cache() -> None:
    asked = (EventOptions(kv_events_endpoint="tcp://*:5557"),)
    assert not is_enabled(ServeOptions())
    assert is_enabled(ServeOptions(extras=asked))
    with pytest.raises(ConfigError, match="disable_radix_cache"):
        is_enabled(ServeOptions(caches=CacheOptions(disable_radix_cache=True), extras=asked))
    with pytest.raises(ConfigError, match="--embedding-events-endpoint"):
        is_enabled(ServeOptions(extras=(*asked, RoleOptions(role="encode"))))


def test_an_endpoint_in_use_is_named(tmp_path: Path) -> None:
    context = zmq.Context()
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    endpoints = Endpoints(f"ipc://{tmp_path}/events", f"tcp://127.0.0.1:{port}")
    with pytest.raises(StartupError, match=f"tcp://127.0.0.1:{port}: Address already in use"):
        Publisher(endpoints, AllBlocksCleared())
    context.destroy(linger=0)
