"""What bounds the scheduler, and what it counts. Owns no decision."""

from __future__ import annotations

from dataclasses import dataclass

GROWTH = 8
"""Answer tokens for which every sequence is given room when a new one is admitted, so that none is
preempted at once.
"""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_running: sequences at a time. chunk_tokens: tokens per step, decode rows included (which
    are never held back).

    context_length: prompt and answer. encode_patches: per step; one picture always may. look_ahead:
    pictures asked for before their turn.
    arena_patches: what there is room for on the way from the front.
    worthwhile: tokens. A new sequence whose pictures are not all there takes a slot only if it can
    compute this many at once; and it waits for a running one that is just computing this many
    tokens of the same prompt, to share them.
    """

    max_running: int
    chunk_tokens: int
    context_length: int
    encode_patches: int
    look_ahead: int = 32
    worthwhile: int = 256
    arena_patches: int = 1 << 30


@dataclass(slots=True)
class Counts:
    """What has happened so far; all of them only grow."""

    requests: int = 0
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    images_encoded: int = 0
    patches_encoded: int = 0
    images_embedding: int = 0
    images_kv: int = 0


def too_long(length: int, token_limit: int, context_length: int) -> str:
    """The error of a prompt of `length` tokens where a sequence may have `token_limit`."""
    what = "the context length" if token_limit == context_length else "the KV cache"
    return (
        f"the prompt has {length} tokens; {what} holds {token_limit}, of which one is for the "
        "answer: shorten the prompt"
    )
