"""The updates of an answer that the request manager sends to API handlers."""

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
    """In which cache an image of a request was found, and what it cost.

    Times in milliseconds are 0 unless the work was done for this request.
    """

    image: int  # index in the request
    # pixels: already decoded, but encoded again; encoder: embedded by an encoder server
    level: Level
    missed_kv: Missed | None  # why its KV was not used
    missed_embedding: Missed | None  # why its embedding was not used
    tier: Tier | None  # tier of the embedding, if that was found
    decode_ms: float = 0.0
    wait_ms: float = 0.0
    encode_ms: float = 0.0
    ship_ms: float = 0.0
    decoded: float = 0.0  # `time.monotonic()` at the end of decoding
    shipped: float = 0.0  # `time.monotonic()` when the pixels were in shared memory
    encoded: float = 0.0  # `time.monotonic()` at the end of encoding
    encoder: str = ""  # the result of requesting the embedding from an encoder server, if any
    encoder_ms: float = 0.0
    # for each tile of an encoded image, whether it was new; empty if tiles have no hashes
    tiles: tuple[bool, ...] = ()
    parts: tuple[Part, ...] = ()  # for each tile, the part of the image that it shows, if known


class CachedTokens(NamedTuple):
    """How many prompt tokens were found in the prefix cache, in total and by tier."""

    total: int = 0
    restored: tuple[tuple[Tier, int], ...] = ()  # cached tokens not on the device, by tier


NONE_CACHED = CachedTokens()


@dataclass(frozen=True, slots=True)
class AheadReport:
    """Reports which tokens were prefilled before a request of a session arrived, and where its
    prompt differs from that of the previous request.
    """

    prepared: int = 0  # prompt tokens that were computed before the request arrived
    used: int = 0  # how many of these are the start of the prompt
    changed: str = ""  # the first message that differs from the previous prompt, and how
    advice: str = ""  # advice for the client on how to avoid the difference


NOTHING_AHEAD = AheadReport()


@dataclass(frozen=True, slots=True)
class AnswerUpdate:
    """The text and tokens of one answer since its previous update.

    The last update of an answer has `finish` set.
    """

    choice: int  # index of the answer, from 0 to n - 1
    text: str = ""
    num_tokens: int = 0  # all generated tokens, including those without text
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    # in an answer's first update
    cached: CachedTokens = NONE_CACHED
    found: tuple[FoundImage, ...] = ()
    # reasoning, text and tool calls that are now certain, in order; `(Text(text),)` for an answer
    # of only text
    parts: tuple[AnswerEvent, ...] = ()
    # the prompt's, in updates of the first answer before any token
    scores: PromptScores | None = None
    stop: str | None = None  # the stop string that ended the answer
    # in the first update: the request's cache settings and their results, if any
    caching: CacheReport | None = None
    # in the first update: `time.monotonic()` when the engine started the request
    admitted: float = 0.0
    # as in `Delta`; valid until `RequestManager.taken` is called
    embedding: tuple[int, int] | None = None
    pooled_output: PooledOutput | None = None  # as in `Delta`
    draft_counts: tuple[DraftCounts, ...] = ()  # as in `Delta`
    ahead: AheadReport | None = None  # in the first update of a request in a session


@dataclass(frozen=True, slots=True)
class InFlight:
    """The progress of an answer that is being generated."""

    seconds: float  # since the request arrived
    prompt_tokens: int
    images: int
    generated: int  # answer tokens so far
