"""The events as MessagePack writes them.

Batches and blocks are vLLM's (`vllm/distributed/kv_events.py`), as arrays, which all its readers
understand. Embeddings, which vLLM does not publish, have events of the same format.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class BlockStored(Struct, array_like=True, tag=True):
    """Blocks that follow one another, each `block_size` tokens."""

    block_hashes: list[bytes]  # each covers all tokens and images before it, salt and adapter
    parent_block_hash: bytes | None  # of the first block; None: it begins a prompt
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None  # the adapter's fingerprint
    # For each block: the adapter, (image, its first token counted from the block's), and in a
    # prompt's first block the salt
    extra_keys: list[list[Any] | None] | None = None


class BlockRemoved(Struct, array_like=True, tag=True):
    """Blocks that the prefix cache no longer has."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(Struct, array_like=True, tag=True):
    """The server has just started, with an empty prefix cache."""


class EmbeddingStored(Struct, array_like=True, tag=True):
    """Embeddings that are cached, or being encoded."""

    embeddings: list[tuple[str, str]]  # image and salt
    num_tokens: list[int]


class EmbeddingRemoved(Struct, array_like=True, tag=True):
    """Embeddings that no tier has any more."""

    embeddings: list[tuple[str, str]]


class AllEmbeddingsCleared(Struct, array_like=True, tag=True):
    """The server has just started. Embeddings that it found on disk follow."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
EmbeddingEvent = EmbeddingStored | EmbeddingRemoved | AllEmbeddingsCleared
Event = KVEvent | EmbeddingEvent


class EventBatch(Struct, array_like=True):
    """The payload of a message."""

    ts: float  # seconds since the epoch
    events: list[Event]
    data_parallel_rank: int | None = None


def merged(events: list[Event]) -> list[Event]:
    """Join events that continue the one before. Changes `events`, whose owner is the caller."""
    result: list[Event] = []
    for event in events:
        if not (result and _join(result[-1], event)):
            result.append(event)
    return result


def _join(last: Event, event: Event) -> bool:
    """Append `event` to `last` if they can be merged. Returns True if so."""
    match last, event:
        case BlockStored(), BlockStored():
            if event.parent_block_hash != last.block_hashes[-1]:
                return False
            last.block_hashes += event.block_hashes
            last.token_ids += event.token_ids
            if last.extra_keys or event.extra_keys:
                first = len(last.block_hashes) - len(event.block_hashes)
                before = last.extra_keys or [None] * first
                last.extra_keys = before + (event.extra_keys or [None] * len(event.block_hashes))
        case BlockRemoved(), BlockRemoved():
            last.block_hashes += event.block_hashes
        case EmbeddingStored(), EmbeddingStored():
            last.embeddings += event.embeddings
            last.num_tokens += event.num_tokens
        case EmbeddingRemoved(), EmbeddingRemoved():
            last.embeddings += event.embeddings
        case _:
            return False
    return True
