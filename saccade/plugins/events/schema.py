"""The events in MessagePack format.

Batches and blocks have the format of vLLM (`vllm/distributed/kv_events.py`). They are arrays, which
all of its readers support, and hashes are integers, as by default in vLLM. Embeddings, which vLLM
does not publish, have similar events.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class BlockStored(Struct, array_like=True, tag=True):
    """Consecutive blocks of `block_size` tokens."""

    block_hashes: list[int]  # each covers all tokens and images up to it, the salt and adapter
    parent_block_hash: int | None  # the block before the first one; None at a prompt's start
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None  # the adapter's fingerprint
    # for each block: the adapter, (image, its first token relative to the block), and the salt if
    # it is a prompt's first block
    extra_keys: list[list[Any] | None] | None = None


class BlockRemoved(Struct, array_like=True, tag=True):
    """Blocks that are no longer in the prefix cache."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Struct, array_like=True, tag=True):
    """The server has started, with an empty prefix cache."""


class EmbeddingStored(Struct, array_like=True, tag=True):
    """Embeddings that are cached, or about to be encoded."""

    embeddings: list[tuple[str, str]]  # image and salt
    num_tokens: list[int]


class EmbeddingRemoved(Struct, array_like=True, tag=True):
    """Embeddings that are no longer in any tier."""

    embeddings: list[tuple[str, str]]


class AllEmbeddingsCleared(Struct, array_like=True, tag=True):
    """The server has started. Events for embeddings that were found on disk follow."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
EmbeddingEvent = EmbeddingStored | EmbeddingRemoved | AllEmbeddingsCleared
Event = KVEvent | EmbeddingEvent


class EventBatch(Struct, array_like=True):
    """The payload of a message."""

    ts: float  # seconds since the epoch
    events: list[Event]
    data_parallel_rank: int | None = None


def block_hash(name: bytes) -> int:
    """Return the last 64 bits of a page's hash as an integer, as vLLM does. Dynamo and Ray do not
    support hashes as bytes.
    """
    return int.from_bytes(name[-8:], "big")


def merged(events: list[Event]) -> list[Event]:
    """Merge each event into the previous one where it continues that. Modifies the events in the
    list, which the caller must own.
    """
    result: list[Event] = []
    for event in events:
        if not (result and _join(result[-1], event)):
            result.append(event)
    return result


def _join(last: Event, event: Event) -> bool:
    """Append `event` to `last` if it continues that. Returns whether it did."""
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
