"""Limits that the scheduler respects, and counters that it updates."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from saccade.core.plan import PageTier

GROWTH_TOKENS = 8
"""When a sequence is admitted, there must be free pages for this many more tokens of every
sequence, so that none is preempted at once.
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
    """Limits on speculative decoding. With 0 tokens it is disabled."""

    tokens: int = 0  # maximum draft tokens per sequence and step, 0 to disable
    # slots of the workers' state memory for the states between draft tokens, or None if the model
    # has no recurrent states
    states: range | None = None
    head: bool = False  # the model has an MTP head


NO_DRAFTS = DraftLimits()


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits that the scheduler respects. They do not change after start-up."""

    # ---- a step
    max_running: int  # running sequences
    chunk_tokens: int  # tokens per step. Decode rows count, but are planned even beyond the limit.
    context_length: int  # prompt and generated tokens
    # patches of the images whose encoding may start in a step. One image may exceed it.
    encode_patches: int
    # ---- prefetching of images
    look_ahead: int = 32  # images that may be decoded or read from disk before they are needed
    # A new sequence with missing images is admitted only if it can compute this many tokens at
    # once. It also waits if a running sequence is computing the next tokens of the same prompt, at
    # least this many, to share them.
    early_tokens: int = 256
    arena_bytes: int = 1 << 40  # size of the pixel arena
    # False: encode all images of a prompt before its next chunk, for benchmarks
    chunk_aware: bool = True
    # ---- the vision encoder
    # patch-blocks (patches x blocks of the vision encoder) that a step may spend on images, or 0
    # for no limit
    tower_budget: int = 0
    # also limit it in steps that only prefill, as prompts and the encoder share the same cores
    tower_shares: bool = True
    tower_blocks: int = 1  # blocks in the vision encoder
    # ---- some models or servers only
    # tokens between two snapshots of a long prompt, for models with per-sequence states
    snapshot_tokens: int = 1024
    # bytes per token of embeddings from a separate encoder server, or 0 if there is none
    given_bytes: int = 0
    drafts: DraftLimits = NO_DRAFTS
    # tokens of the largest image if a chunk must not end within an image, or 0 if it may
    whole_image_tokens: int = 0
    # One-token rows are batch-invariant, so each generated token is computed in a separate row.
    batch_invariant: bool = False
    plan_steps: int = 1  # maximum steps in a plan whose rows all decode

    @property
    def longest_chunk(self) -> int:
        """The maximum number of prompt tokens in a step.

        If images must not be split, the largest one fits.
        """
        return max(self.chunk_tokens, self.whole_image_tokens)


@dataclass(slots=True)
class Counts:
    """Counters of events since start-up. They never decrease."""

    # requests
    requests: int = 0
    steps: int = 0
    preemptions: int = 0
    # tokens
    prompt_tokens: int = 0
    cached_tokens: int = 0
    # cached tokens that were loaded from a tier other than the device
    restored_tokens: Counter[PageTier] = field(default_factory=Counter)
    generated_tokens: int = 0
    # images
    images_encoded: int = 0
    patches_encoded: int = 0
    images_pixels: int = 0  # encoded again, from pixels that were still in the arena
    images_given: int = 0  # encoded by another server
    images_embedding: int = 0  # the embedding was cached
    images_kv: int = 0  # the KV was cached
    images_same: int = 0  # aliases: the pixels were those of another image
    tiles_new: int = 0  # tiles that the vision encoder encoded
    tiles_seen: int = 0  # tiles whose embedding rows were copied


def image_failure(why: str) -> tuple[str, str | None]:
    """Return (error, code) for requests whose image failed.

    why: the reason in `StepResult.failed`, or "" if memory was too small.
    """
    if not why:
        return NO_MEMORY_IMAGE, None
    return NOT_ENCODED.format(why=why), "internal_error"
