"""News of an answer, as the request manager gives them to dialects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from saccade.core.family import Part
from saccade.core.types import (
    CacheReport,
    DraftCounts,
    Missed,
    PooledOutput,
    PromptScores,
    Tier,
    TokenLogprobs,
)
from saccade.text.answer.events import AnswerEvent

Finish = Literal["stop", "length"]
Level = Literal["kv", "embedding", "pixels", "encoder", "none"]


@dataclass(frozen=True, slots=True)
class FoundImage:
    """Where image `image` of a request was found, the reasons for misses above, and the cost.
    `pixels`: still in the arena, encoded again. `encoder`: the outcome of asking an encoder, if
    any. `tiles`: of an encoded image whose tiles have names, which of them were new; `parts`: what
    each shows of the image, if known.

    The milliseconds are 0 unless spent for this request. `decoded`, `shipped` and `encoded` are the
    `time.monotonic()` of the ends.
    """

    image: int
    level: Level
    missed_kv: Missed | None
    missed_embedding: Missed | None
    tier: Tier | None
    decode_ms: float = 0.0
    wait_ms: float = 0.0
    encode_ms: float = 0.0
    ship_ms: float = 0.0
    decoded: float = 0.0
    shipped: float = 0.0
    encoded: float = 0.0
    encoder: str = ""
    encoder_ms: float = 0.0
    tiles: tuple[bool, ...] = ()
    parts: tuple[Part, ...] = ()


class CachedTokens(NamedTuple):
    """Prompt tokens from the prefix cache. restored: those from other tiers than the device, by
    tier.
    """

    total: int = 0
    restored: tuple[tuple[Tier, int], ...] = ()


NONE_CACHED = CachedTokens()


@dataclass(frozen=True, slots=True)
class AheadReport:
    """What a request found ready, and why its prompt broke off from the one before."""

    prepared: int = 0  # prompt tokens computed for it ahead of time
    used: int = 0  # those that it begins with; the others were in vain
    changed: str = ""  # the first message unlike before, by the client's name for it, and how
    advice: str = ""  # what the client can do about it


NOTHING_AHEAD = AheadReport()


@dataclass(frozen=True, slots=True)
class AnswerUpdate:
    """New text and tokens of answer `choice` (0 to n - 1) since its last event. The last event has
    `finish`.

    `parts`: the reasoning, text and tool calls made certain by `text`, in order; `(Text(text),)`
    for an answer of text alone. Every part has content and is final. `num_tokens` counts all
    generated tokens, even without text. `stop`: the stop string that ended the answer. `cached`,
    `found` and `caching` (the request's cache wishes, and their outcome) stand in a choice's first
    event, and so does `admitted`: `time.monotonic()` when the engine began. `scores`: the prompt's,
    in the first event of the first answer, before any token. `embedding`: as in `Delta`, until
    `RequestManager.taken`. `pooled_output`, `draft_counts`: as in `Delta`. `ahead`: in the first
    event of a request whose session is followed.
    """

    # the next words
    choice: int
    text: str = ""
    num_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    # the end
    finish: Finish | None = None
    # the caches
    cached: CachedTokens = NONE_CACHED
    found: tuple[FoundImage, ...] = ()
    # the answer read, and its prompt
    parts: tuple[AnswerEvent, ...] = ()
    scores: PromptScores | None = None
    stop: str | None = None
    caching: CacheReport | None = None
    admitted: float = 0.0
    embedding: tuple[int, int] | None = None
    pooled_output: PooledOutput | None = None
    draft_counts: tuple[DraftCounts, ...] = ()
    ahead: AheadReport | None = None


@dataclass(frozen=True, slots=True)
class InFlight:
    """An answer in flight. `seconds`: since its request arrived. `generated`: tokens so far."""

    seconds: float
    prompt_tokens: int
    images: int
    generated: int
