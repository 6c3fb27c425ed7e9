"""The bounds of the scheduler, and its counters. Owns no decision."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from saccade.core.plan import PageTier

GROWTH_TOKENS = 8
"""Answer tokens for which every sequence is given room when a new one is admitted, so that none is
preempted at once.
"""


NO_MEMORY_IMAGE = (
    "out of device memory while encoding an image: send a smaller one, or start the server "
    "with a lower --mem-fraction-static or --tune max_encode_patches=N"
)
NOT_ENCODED = "the vision encoder failed on an image of this request: {why}"
NO_MEMORY_STEP = (
    "out of device memory in a step: try again, or start the server with a lower "
    "--mem-fraction-static or --chunked-prefill-size"
)

NOT_FINITE = (
    "the model computed NaN or infinity in this request: a weight or an image embedding is "
    "damaged, or --dtype has too small a range for the model"
)


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Bounds on draft tokens."""

    tokens: int = 0  # most draft tokens per sequence and step, 0 to disable
    # lines of the workers' state memory for the states between draft tokens, or None for a model
    # without states
    states: range | None = None
    head: bool = False  # the model has an MTP head


NO_DRAFTS = DraftLimits()


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The scheduler's bounds.

    max_running: sequences at a time. chunk_tokens: tokens per step, decode rows included (which
    always go ahead). context_length: prompt and answer.

    encode_patches: patches in images whose encoding may begin in a step. One image always may.

    chunk_aware: False has all images of a prompt encoded before its next chunk, for benchmarks.

    look_ahead: images that may be on their way before their turn. arena_bytes: the pixel arena.

    early_tokens: a new sequence with missing images takes a slot only if it can compute this many
    tokens at once. It also waits for a running sequence that is just computing this many tokens of
    the same prompt, to share them.

    given_bytes: bytes per token in an embedding given by another server instead of pixels, or 0
    without such a server.

    tower_budget: patch-blocks (patches x blocks of the vision encoder) that a step may spend on
    images, or 0 for no bound. tower_shares: prompts compete for the tower's time, as decoding rows
    do. tower_blocks: blocks in the vision encoder.

    snapshot_tokens: tokens between two snapshots of a long prompt, for models with per-sequence
    states.

    whole_image_tokens: tokens of the largest image, where chunks must end between images, or 0 if
    chunks end anywhere.

    batch_invariant: one-token rows are batch-invariant, so each token of an answer has a row of its
    own.

    plan_steps: most steps in a plan of rows that only decode.
    """

    # a step
    max_running: int  # sequences at a time
    chunk_tokens: int  # tokens per step, decode rows included (which always go ahead)
    context_length: int  # prompt and answer
    # patches in images whose encoding may begin in a step. One image always may.
    encode_patches: int
    # images before their turn
    look_ahead: int = 32  # images that may be on their way before their turn
    # a new sequence with missing images takes a slot only if it can compute this many tokens at
    # once. It also waits for a running sequence that is just computing this many tokens of the same
    # prompt, to share them.
    early_tokens: int = 256
    arena_bytes: int = 1 << 40
    chunk_aware: bool = True
    # the tower's time
    # patch-blocks (patches x blocks of the vision encoder) that a step may spend on images, or 0
    # for no bound
    tower_budget: int = 0
    tower_shares: bool = True  # prompts compete for the tower's time, as decoding rows do
    tower_blocks: int = 1  # blocks in the vision encoder
    # what few models have
    # tokens between two snapshots of a long prompt, for models with per-sequence states
    snapshot_tokens: int = 1024
    # bytes per token in an embedding given by another server instead of pixels, or 0 without such a
    # server
    given_bytes: int = 0
    drafts: DraftLimits = NO_DRAFTS
    # tokens of the largest image, where chunks must end between images, or 0 if chunks end anywhere
    whole_image_tokens: int = 0
    # one-token rows are batch-invariant, so each token of an answer has a row of its own
    batch_invariant: bool = False
    plan_steps: int = 1  # most steps in a plan of rows that only decode

    @property
    def longest_chunk(self) -> int:
        """The most prompt tokens in a step. An image that must stay whole always fits."""
        return max(self.chunk_tokens, self.whole_image_tokens)


@dataclass(slots=True)
class Counts:
    """Counters, which only grow.

    `images_pixels`: images encoded again from pixels still in the arena. `images_given`: images
    encoded by another server. `restored_tokens`: cached tokens back from other tiers, by tier.
    `images_same`: images that turned out to have another's pixels. `tiles_new`, `tiles_seen`: tiles
    run through the tower, and those whose rows were there.
    """

    # requests
    requests: int = 0
    steps: int = 0
    preemptions: int = 0
    # tokens
    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: Counter[PageTier] = field(default_factory=Counter)
    generated_tokens: int = 0
    # images
    images_encoded: int = 0
    patches_encoded: int = 0
    images_pixels: int = 0
    images_given: int = 0
    images_embedding: int = 0
    images_kv: int = 0
    images_same: int = 0
    tiles_new: int = 0
    tiles_seen: int = 0


def image_failure(why: str) -> tuple[str, str | None]:
    """Return the error and the code of requests whose image failed, as `StepResult.failed`."""
    if not why:
        return NO_MEMORY_IMAGE, None
    return NOT_ENCODED.format(why=why), "internal_error"
