"""Converts changes of the caches to events, and passes them to publishers."""

from __future__ import annotations

from typing import Any

from msgspec import convert

from saccade.cache.content import PageKey, Partition
from saccade.core.config import EngineConfig
from saccade.core.metrics import Metrics
from saccade.core.types import ImageKey
from saccade.plugins.events.options import EventOptions
from saccade.plugins.events.publisher import Endpoints, Publisher
from saccade.plugins.events.schema import (
    AllBlocksCleared,
    AllEmbeddingsCleared,
    BlockRemoved,
    BlockStored,
    EmbeddingRemoved,
    EmbeddingStored,
    block_hash,
)
from saccade.sched.protocol import Scheduler
from saccade.sched.scheduler import GenerationScheduler


class CacheEvents:
    """Publishes changes of the scheduler's caches. Implements `EnginePart`."""

    def __init__(self, options: dict[str, Any], config: EngineConfig, scheduler: Scheduler) -> None:
        """Start publishing. Raises StartupError if an endpoint cannot be opened."""
        asked = convert(options, EventOptions)
        self._publishers: dict[str, Publisher] = {}
        if asked.kv_events_endpoint is not None:
            assert isinstance(scheduler, GenerationScheduler) and scheduler.prefix is not None
            endpoints = Endpoints(
                asked.kv_events_endpoint,
                asked.kv_events_replay_endpoint,
                asked.kv_events_topic,
                asked.events_buffer_steps,
            )
            self._publishers["kv"] = blocks = Publisher(endpoints, AllBlocksCleared())
            medium = "GPU" if config.device == "cuda" else "CPU"
            scheduler.prefix.listen(BlockEvents(blocks, medium), config.kv.pages.identity)
        if asked.embedding_events_endpoint is not None:
            endpoints = Endpoints(
                asked.embedding_events_endpoint,
                asked.embedding_events_replay_endpoint,
                buffer_steps=asked.events_buffer_steps,
            )
            images = Publisher(endpoints, AllEmbeddingsCleared())
            self._publishers["embeddings"] = images
            scheduler.embeddings.listen(EmbeddingEvents(images))
        self.decided = tuple(
            (f"events, {cache}", " and replays at ".join(filter(None, addresses)))
            for cache, publisher in self._publishers.items()
            if (addresses := (publisher.endpoint, publisher.replay_endpoint))
        )

    def measure(self, metrics: Metrics) -> None:
        """Update the metrics."""
        for cache, publisher in self._publishers.items():
            metrics.set("saccade_cache_events_total", publisher.accepted, cache=cache)
            metrics.set("saccade_cache_events_dropped_total", publisher.dropped, cache=cache)

    def close(self) -> None:
        """Publish the remaining events, and close the sockets."""
        for publisher in self._publishers.values():
            publisher.close()


class BlockEvents:
    """Publishes KV pages as blocks. Implements `PageListener`.

    medium: where the pages are stored.
    """

    def __init__(self, publisher: Publisher, medium: str) -> None:
        self._publisher = publisher
        self._medium = medium

    def page_stored(
        self, name: bytes, parent: bytes | None, key: PageKey, partition: Partition
    ) -> None:
        """Publish a stored page."""
        tokens, shown = key
        salt, adapter = partition
        extra: list[Any] = [adapter] if adapter else []
        extra += [(image.identifier, start - row) for start, _, image, row, _ in shown]
        extra += [salt] if salt and parent is None else []
        self._publisher.put(
            BlockStored(
                [block_hash(name)],
                None if parent is None else block_hash(parent),
                list(tokens),
                len(tokens),
                None,
                self._medium,
                adapter or None,
                [extra] if extra else None,
            )
        )

    def page_removed(self, name: bytes) -> None:
        """Publish a removed page."""
        self._publisher.put(BlockRemoved([block_hash(name)], self._medium))


class EmbeddingEvents:
    """Publishes embeddings. Implements `EmbeddingListener`."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def embedding_stored(self, key: ImageKey, num_tokens: int) -> None:
        """Publish a stored embedding."""
        self._publisher.put(EmbeddingStored([(key.identifier, key.salt)], [num_tokens]))

    def embedding_removed(self, key: ImageKey) -> None:
        """Publish a removed embedding."""
        self._publisher.put(EmbeddingRemoved([(key.identifier, key.salt)]))
