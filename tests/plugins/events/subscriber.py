"""A reader of cache events as a router has one: an index rebuilt from messages alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from saccade.plugins.events.schema import (
    AllBlocksCleared,
    AllEmbeddingsCleared,
    BlockRemoved,
    BlockStored,
    EmbeddingRemoved,
    EmbeddingStored,
    EventBatch,
)

END = (1 << 64) - 1
SECONDS = 60


@dataclass(frozen=True)
class Block:
    parent: int | None
    tokens: tuple[int, ...]
    extra: tuple[Any, ...]


@dataclass
class Index:
    """What the server has, as far as its events tell."""

    blocks: dict[int, Block] = field(default_factory=dict)
    embeddings: dict[tuple[str, str], int] = field(default_factory=dict)
    starts: int = 0
    changes: int = 0

    def apply(self, event: object) -> None:
        match event:
            case BlockStored() | BlockRemoved():
                self.changes += len(event.block_hashes)
            case EmbeddingStored() | EmbeddingRemoved():
                self.changes += len(event.embeddings)
            case _:
                self.starts, self.changes = self.starts + 1, 1
        match event:
            case BlockStored():
                self._store(event)
            case BlockRemoved():
                for name in event.block_hashes:
                    del self.blocks[name]
            case AllBlocksCleared():
                self.blocks.clear()
            case EmbeddingStored():
                self.embeddings.update(zip(event.embeddings, event.num_tokens, strict=True))
            case EmbeddingRemoved():
                for key in event.embeddings:
                    del self.embeddings[key]
            case AllEmbeddingsCleared():
                self.embeddings.clear()

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert parent is None or parent in self.blocks
        assert len(event.token_ids) == size * len(event.block_hashes)
        for index, name in enumerate(event.block_hashes):
            assert name not in self.blocks
            tokens = tuple(event.token_ids[index * size : (index + 1) * size])
            extra = event.extra_keys[index] if event.extra_keys else None
            keys = (tuple(key) if isinstance(key, list) else key for key in extra or ())
            self.blocks[name] = Block(parent, tokens, tuple(keys))
            parent = name


class Subscriber:
    """Applies what is published to an index, and asks for what it has missed."""

    def __init__(self, events: str, replays: str) -> None:
        self.index = Index()
        self.replayed = 0
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.set_hwm(0)
        self._events.setsockopt(zmq.SUBSCRIBE, b"")
        self._events.connect(events)
        self._replays = self._context.socket(zmq.DEALER)
        self._replays.connect(replays)
        self.next = 0
        self._decoder = msgspec.msgpack.Decoder(EventBatch)

    def read(self) -> None:
        """Apply what has arrived."""
        while self._events.poll(0):
            _, number, payload = self._events.recv_multipart()
            sequence = int.from_bytes(number, "big")
            if sequence != self.next:
                self.catch_up()
            if sequence >= self.next:
                self._apply(sequence, payload)

    def catch_up(self) -> None:
        """Apply what was published since, by a replay."""
        self._replays.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            assert self._replays.poll(SECONDS * 1000), "the replay has no end"
            _, number, payload = self._replays.recv_multipart()
            if (sequence := int.from_bytes(number, "big")) == END:
                return
            self.replayed += 1
            self._apply(sequence, payload)

    def _apply(self, sequence: int, payload: bytes) -> None:
        for event in self._decoder.decode(payload).events:
            self.index.apply(event)
        self.next = sequence + 1

    def wait_for(self, reached: Any) -> None:
        """Read until `reached()`."""
        deadline = time.monotonic() + SECONDS
        while not reached():
            assert time.monotonic() < deadline, "events are missing"
            self._events.poll(20)
            self.read()
            self.catch_up()

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def subscribing(events: str, replays: str) -> Iterator[Subscriber]:
    subscriber = Subscriber(events, replays)
    try:
        yield subscriber
    finally:
        subscriber.close()
