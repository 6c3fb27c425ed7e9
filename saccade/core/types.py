"""The types of requests and responses: image keys, spans, sampling parameters, deltas.

Every package uses these types. All are frozen dataclasses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Any, Literal

from saccade.core.errors import InvalidRequest
from saccade.core.token_rules import NO_RULES, TokenRules

Grid = tuple[int, ...]
"""The dimensions of an image in units that its model family defines. The family computes tokens,
positions and cost from them. For Qwen-VL they are the temporal patches (1 for an image or for a
pair of video frames), then the patches along the height and width, before merging.
"""
Size = tuple[int, int]
"""(height, width) in pixels."""

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class ImageKey:
    """Identifies an image: equal keys mean equal encoded bytes, preprocessing settings and salt."""

    digest: bytes  # 32 bytes, blake3 of the encoded bytes
    # 16 bytes, a fingerprint of everything that determines the pixels the vision encoder receives
    # (`FamilySpec.settings`)
    settings: bytes
    # The request's `cache_salt`, hashed by the front end; it separates tenants. If the request's
    # adapter changes the vision encoder, the adapter's fingerprint is appended.
    salt: str = ""

    def __str__(self) -> str:
        return self.digest.hex()[:12]

    @property
    def identifier(self) -> str:
        """The key without its salt, in hexadecimal, equivalent to vLLM's `mm_hash`."""
        return self.digest.hex() + self.settings.hex()

    def __hash__(self) -> int:
        return hash(self.digest)  # bytes objects cache their hash


@dataclass(frozen=True, slots=True)
class Image:
    """One image as the engine knows it: its key and sizes, without its pixels."""

    key: ImageKey
    grid: Grid
    num_tokens: int  # rows in the embedding, which are also its prompt tokens
    num_patches: int  # patches that the vision encoder computes
    canvas: Size  # of the preprocessed image


@dataclass(frozen=True, slots=True)
class Tower:
    """Identifies the vision encoder of a server, and describes its output: rows of `width` values
    in `dtype`.
    """

    # hexadecimal, equal on two servers if their vision encoders are bit-identical; "" if it was
    # not requested
    fingerprint: str = ""
    dtype: str = ""
    width: int = 0

    def nbytes(self, num_tokens: int) -> int:
        """Return the size of an embedding with `num_tokens` rows, in bytes."""
        return num_tokens * self.width * (4 if self.dtype == "float32" else 2)


@dataclass(frozen=True, slots=True)
class Span:
    """Prompt tokens `[start, start + length)`, whose inputs are rows `[offset, offset + length)` of
    the embedding of image `images[image]`.
    """

    start: int
    length: int
    image: int
    offset: int = 0
    # For a frame in a video whose frames share one range of positions: its temporal distance from
    # the first frame. Spans of such a video are contiguous. None if the image has a separate range
    # of positions. Families that only need to distinguish frames from images use 0.
    time: int | None = None

    @property
    def end(self) -> int:
        return self.start + self.length


NUMBER, LARGEST = int | float, 2**63 - 1
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 1024
MAX_BIAS = 100
MAX_BIASED_TOKENS = 1024

MIN_TEMPERATURE = 1e-6
"""Lower temperatures select greedy sampling, because dividing float32 logits by them could
overflow.
"""
MIN_REPETITION_PENALTY = 1e-6
"""A smaller penalty could round to 0 in the logits' dtype, and 0 times a banned token's -inf is
NaN.
"""

SAMPLING_BOUNDS: dict[str, tuple[type | UnionType, float, float]] = {
    "max_tokens": (int, 1, LARGEST),
    "min_tokens": (int, 0, LARGEST),
    "temperature": (NUMBER, 0, 2),
    "top_p": (NUMBER, 0, 1),
    "top_k": (int, -1, LARGEST),
    "min_p": (NUMBER, 0, 1),
    "repetition_penalty": (NUMBER, 0, 10),
    "presence_penalty": (NUMBER, -2, 2),
    "frequency_penalty": (NUMBER, -2, 2),
    "seed": (int, -(2**63), LARGEST),
    "logprobs": (int | None, 0, MAX_LOGPROBS),
}
"""Maps a field to (type, minimum, maximum)."""
STORED_SAMPLING = {
    "max_tokens": ("max_new_tokens", ""),
    "min_tokens": ("min_new_tokens", ""),
    "temperature": ("temperature", "temp"),
    "top_p": ("top_p", "top_p"),
    "top_k": ("top_k", "top_k"),
    "min_p": ("min_p", "min_p"),
    "repetition_penalty": ("repetition_penalty", ""),
}
"""Fields for which a checkpoint may have a default: their names in generation_config.json and, if
any, in GGUF.
"""
ONE_TOKEN = {"max_tokens": 1, "min_tokens": 0}
"""Overrides of sampling fields that limit a response to one token."""


def _value_text(value: object) -> str:
    """Return `value` as text for an error message. Python refuses to convert integers with too many
    digits.
    """
    return "a larger one" if isinstance(value, int) and abs(value) >= 2**64 else repr(value)[:100]


@dataclass(frozen=True, slots=True, eq=False)
class FieldNames:
    """The names that one API uses for chat completion fields that error messages mention.

    A field that is not in `renamed` has the same name as in chat completions.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> str:
        return self.renamed.get(name, name)


CHAT_NAMES = FieldNames()


def check_sampling(given: Mapping[str, Any], names: FieldNames = CHAT_NAMES) -> None:
    """Check the values of `SamplingParams` fields that a request sets.

    Raises InvalidRequest that names the field. names: the client's names of fields.
    """
    for name, (kind, least, most) in SAMPLING_BOUNDS.items():
        if name not in given:
            continue
        value, field = given[name], names[name]
        is_kind = isinstance(value, kind) and not isinstance(value, bool)
        if not is_kind or (value is not None and not least <= value <= most):
            what = (
                "a whole number"
                if kind is int
                else "a number"
                if kind is NUMBER
                else "None or a whole number"
            )
            allowed = f"of at least {least}" if most == LARGEST else f"from {least} to {most}"
            raise InvalidRequest(
                f"{field}: expected {what} {allowed}, got {_value_text(value)}", field
            )
    penalty, field = given.get("repetition_penalty", 1.0), names["repetition_penalty"]
    if penalty < MIN_REPETITION_PENALTY:
        raise InvalidRequest(
            f"{field}: expected a number above 0 (1 means no penalty; the minimum is "
            f"{MIN_REPETITION_PENALTY}), got {_value_text(penalty)}",
            field,
        )
    _check_lists(given, names)


def _check_lists(given: Mapping[str, Any], names: FieldNames) -> None:
    """Check the lengths of lists. They are limited because every response to a request has a copy
    of them.
    """
    for name, most in (("logit_bias", MAX_BIASED_TOKENS), ("stop_token_ids", MAX_STOP_TOKENS)):
        field, count = names[name], len(given.get(name, ()))
        if count > most:
            raise InvalidRequest(f"{field}: expected at most {most} tokens, got {count}", field)
    field = names["logit_bias"]
    if not all(-MAX_BIAS <= bias <= MAX_BIAS for _, bias in given.get("logit_bias", ())):
        raise InvalidRequest(f"{field}: expected biases from {-MAX_BIAS} to {MAX_BIAS}", field)
    stop, field = given.get("stop", ()), names["stop"]
    # A single string would be accepted as a sequence of its letters.
    known = all(isinstance(each, str) and each for each in stop)
    if isinstance(stop, str) or len(stop) > MAX_STOPS or not known:
        raise InvalidRequest(f"{field}: expected at most {MAX_STOPS} non-empty stop strings", field)
    if (longest := max(map(len, stop), default=0)) > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"{field}: expected stop strings of at most {MAX_STOP_CHARACTERS} characters, got "
            f"{longest} characters",
            field,
        )


NO_PENALTIES = 1.0, 0.0, 0.0
"""The value of `SamplingParams.penalties` with which logits are unchanged."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of a response are sampled. Raises InvalidRequest if a value is out of bounds.

    The n-th token of a response depends only on its logits and on (`seed`, n), not on the rest of
    the batch. The front-end process handles `stop` strings, because the engine has only tokens. The
    engine handles all other fields.
    """

    # length
    max_tokens: int = 256
    min_tokens: int = 0
    # distribution
    temperature: float = 0.0  # below 1e-6: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: unlimited
    min_p: float = 0.0
    # penalties
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # seed and bias
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    # stop conditions
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    # log-probabilities: the number of alternatives to return with each token; None: disabled
    logprobs: int | None = None

    @property
    def columns(self) -> tuple[float, int, float, float]:
        """The temperature, top_k, top_p and min_p, in the order that `kernels.reference.sample`
        expects.
        """
        return self.temperature, self.top_k, self.top_p, self.min_p

    @property
    def penalties(self) -> tuple[float, float, float]:
        """The repetition, presence and frequency penalties."""
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty

    @property
    def edits(self) -> bool:
        """True if penalties, biases or `min_tokens` change the logits before sampling."""
        return self.penalties != NO_PENALTIES or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def is_greedy(self) -> bool:
        """True if sampling always chooses the likeliest token."""
        return self.temperature == 0.0

    @property
    def listed_tokens(self) -> dict[str, tuple[int, ...]]:
        """The token ids that the client listed, by field."""
        biased = tuple(token for token, _ in self.logit_bias)
        return {"logit_bias": biased, "stop_token_ids": self.stop_token_ids}

    @property
    def limits(self) -> dict[str, int | float]:
        """The parameters that are recorded in OpenTelemetry traces."""
        names = ("max_tokens", "temperature", "top_p", "top_k")
        penalties = ("frequency_penalty", "presence_penalty")
        return {name: getattr(self, name) for name in (*names, *penalties)}

    def tokens_due(self, count: int) -> int:
        """Return how many tokens must still be generated to reach `min_tokens`, after `count`
        tokens.
        """
        return max(0, self.min_tokens - count)

    def __post_init__(self) -> None:
        check_sampling({name: getattr(self, name) for name in self.__slots__})
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)


def fill_sampling(
    given: Mapping[str, Any], defaults: SamplingParams, left: int, seed: int
) -> SamplingParams:
    """Return the sampling parameters for a request: its own fields, completed with the defaults.

    left: the maximum number of tokens in the response.
    seed: used if the request has none.

    Raises InvalidRequest that names the field.
    """
    usual = max(defaults.max_tokens, given.get("min_tokens", 0))
    filled = {"max_tokens": usual, "seed": seed, **given}
    filled["max_tokens"] = most = min(filled["max_tokens"], left)
    filled.setdefault("min_tokens", min(defaults.min_tokens, most))
    filled["seed"] %= 2**63
    filled["top_k"] = max(0, filled.get("top_k", defaults.top_k))
    if filled.get("top_p", defaults.top_p) == 0.0:
        # top_p = 0 still allows the likeliest token.
        filled |= {"top_p": 1.0, "top_k": 1}
    sampling = replace(defaults, **filled)
    if sampling.min_tokens > most:
        raise InvalidRequest(
            f"min_tokens={sampling.min_tokens} exceeds the maximum length of the answer, {most}",
            "min_tokens",
        )
    return sampling


def forbid_token(given: Mapping[str, Any], token: int) -> dict[str, Any]:
    """Return the fields with a bias that forbids `token`. It replaces any other bias for that
    token.
    """
    others = (each for each in given.get("logit_bias", ()) if each[0] != token)
    return {**given, "logit_bias": (*others, (token, -MAX_BIAS))}


MAX_BREAKPOINTS = 4
"""Maximum number of cache breakpoints in a request."""

MAX_TTL = 24 * 3600
"""Maximum lifetime of a cache breakpoint, in seconds."""


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """A loaded LoRA adapter, or the base model."""

    number: int = 0  # unique while the server runs; 0: the base model
    fingerprint: str = ""  # fingerprint of its files
    tower: bool = False  # True if it changes the vision encoder
    name: str = ""  # the name that clients use

    def salted(self, salt: str) -> str:
        """Return the salt for image keys. It contains the adapter's fingerprint if the adapter
        changes the vision encoder.
        """
        return f"{salt}+{self.fingerprint}" if self.tower else salt


NO_ADAPTER = AdapterRef()


@dataclass(frozen=True, slots=True)
class Caching:
    """The cache options of a request, and other values that determine how its prompt is cached."""

    # (tokens, seconds), sorted by tokens. Once the first `tokens` of the prompt are computed, their
    # full KV pages, and the embeddings of the images in them, are cached for `seconds`.
    breakpoints: tuple[tuple[int, int], ...] = ()
    # report why the prefix cache had less than an earlier prompt from this client should have left
    diagnose: bool = False
    family: str = ""  # the client's name for a group of prompts with a common prefix
    # the adapter whose weights compute the KV; adapters do not share cached KV
    adapter: AdapterRef = NO_ADAPTER
    # A background request. It runs only if there are no others, and its cache entries are evicted
    # first unless another request uses them.
    idle: bool = False
    # tokens that the client expects in the response, used as draft tokens
    prediction: tuple[int, ...] = ()
    # the text of PDF pages that the request shows only as images, used as draft tokens
    page_text: tuple[int, ...] = ()
    # length of the prefix that later prompts are expected to share with this one; 0: unknown
    branch: int = 0

    @property
    def is_reported(self) -> bool:
        """True if the response reports newly cached tokens, or why a prefix was not found."""
        return bool(self.breakpoints) or self.diagnose


@dataclass(frozen=True, slots=True)
class PromptReading:
    """A request for values computed from the prompt instead of generated tokens.

    These are the logits of `labels` for each of the `last` prompt tokens. If `labels` is empty,
    they are the hidden states after the final norm, or the vectors of a model that has one per
    token (`core.family.LateInteraction`).
    """

    labels: tuple[int, ...] = ()
    last: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    """One response to generate. One HTTP request may lead to several of these."""

    # the prompt
    id: str
    tokens: tuple[int, ...]  # token ids, including each image's placeholder tokens
    spans: tuple[Span, ...]  # ordered by `start` and disjoint; several may refer to one image
    images: tuple[Image, ...]
    # the response
    sampling: SamplingParams
    # the client
    cache_salt: str = ""
    arrival: float = 0.0  # `time.monotonic()`, in seconds
    client: str = ""  # the unit of fair scheduling: an API key's name, a salt or an address
    group: str = ""  # shared by the responses to one HTTP request; "": a separate group
    # other options
    grammar: str = ""  # serialized (`text.grammar.Grammar.text`); "": any text
    caching: Caching = Caching()
    # alternatives to return with each prompt token's log-probability; None: no prompt scores
    prompt_logprobs: int | None = None
    reading: PromptReading | None = None  # if set, no tokens are generated
    rules: TokenRules = NO_RULES
    priority: int = 0  # among one client's requests, lower values are served first
    streamed: bool = True  # False if the client does not stream, so that updates may be batched

    @property
    def adapter(self) -> AdapterRef:
        """The LoRA adapter that the request uses, or `NO_ADAPTER`."""
        return self.caching.adapter

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens to generate. It is 0 if only the prompt is read."""
        return self.sampling.max_tokens if self.reading is None else 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities of a sampled token and of the likeliest alternatives.

    They are natural logarithms of the model's distribution, before penalties.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of C prompt tokens from index `start` on, each given the tokens before it.

    `start` is at least 1, because the first token has no context. The values are packed into bytes
    because prompts may be long.
    """

    start: int
    # int32 and float32 [C, 1 + K], row-major: the token itself, then the K likeliest tokens in
    # descending order
    ids: bytes
    logprobs: bytes
    ranks: bytes  # int32 [C]: 1 if the token is the likeliest one, 2 for the second, and so on

    @property
    def count(self) -> int:
        return len(self.ranks) // 4

    def rows(
        self, first: int = 0, last: int | None = None
    ) -> Iterator[tuple[list[int], list[float], int]]:
        """Yield (ids, logprobs, rank) of each token, or only of the tokens with indices [first,
        last).
        """
        begin, end, _ = slice(first, last).indices(self.count)
        width = len(self.ids) // len(self.ranks) if self.ranks else 1
        ids, ranks = memoryview(self.ids).cast("i"), memoryview(self.ranks).cast("i")
        logprobs: memoryview[float] = memoryview(self.logprobs).cast("f")
        for at in range(begin, end):
            mine = slice(at * width, (at + 1) * width)
            yield list(ids[mine]), list(logprobs[mine]), ranks[at]


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """The values that a `PromptReading` requested, for C tokens from index `start` on: float32 [C,
    width].
    """

    start: int
    width: int
    values: bytes


Missed = Literal[
    "never seen",
    "evicted",
    "other settings",
    "no full page",
    "other prompt",
    "other prompt or evicted",
    "prefix cache off",
]
"""Why an image was not found in a cache.

never seen: not sent under this cache salt. Images under other salts are never revealed.
no full page: the KV page with its last tokens is not cached, because it was not full or because
different tokens followed the image.
other prompt: different content preceded the image.
other prompt or evicted: one of the two. After the first eviction they cannot be distinguished.
prefix cache off: disabled for the server, or for this request because its prompt is scored.
"""


Tier = Literal["device", "host", "disk"]
"""Cache tiers for embeddings and KV, the fastest first."""


@dataclass(frozen=True, slots=True)
class ImageOutcome:
    """In which cache one image of a prompt was found, if any."""

    image: int
    # kv: all its tokens were in the cached prefix. embedding: its embedding was cached.
    # pixels: it was encoded from pixels still in the arena. encoder: another server supplied the
    # embedding. none: it was decoded and encoded.
    level: Literal["kv", "embedding", "pixels", "encoder", "none"]
    # the reasons for the misses before `level`; None from the level of the hit on
    missed_kv: Missed | None = None
    missed_embedding: Missed | None = None
    tier: Tier | None = None  # where the embedding was found
    # for an encoded image with cacheable tiles: whether each was new, in the vision encoder's order
    tiles: tuple[bool, ...] = ()


CacheMissReason = Literal[
    "prompt_changed",
    "other_settings",
    "evicted",
    "read_too_slow",
    "expired",
    "flushed",
    "never_seen",
    "too_short",
    "cache_off",
]
"""Why the prefix cache held less of a prompt than expected.

prompt_changed: an earlier prompt of this client has different tokens from some point on.
other_settings: the first difference is an image with the same bytes at another size (`detail`,
`min_pixels`, `max_pixels`).
evicted: it was cached, but was evicted to free space.
read_too_slow: it is in host memory or on disk, but computing it was faster, or the read was late or
found damaged data.
expired: it was cached by a breakpoint that has expired, and was evicted since.
flushed: an operator flushed the cache.
never_seen: no earlier prompt that is remembered, from this client and salt, has the same beginning.
too_short: it does not fill one KV page.
cache_off: the server does not cache prompts.
"""


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """Why prompt tokens were computed, although an earlier prompt started in a similar way."""

    reason: CacheMissReason
    token: int  # the first token that differs from the earlier prompt, or was evicted
    tokens: int  # prompt tokens from `token` on
    # the client's name for the part of the prompt with that token; filled in by the front end
    place: str = ""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The prompt tokens that a request's cache breakpoints stored, and the cache diagnosis that it
    requested.
    """

    # (seconds, tokens), sorted by seconds: how many prompt tokens this request computed and cached
    # for that long. Tokens that were already cached are not counted.
    written: tuple[tuple[int, int], ...] = ()
    missed: CacheMiss | None = None  # None if the hit was complete or no diagnosis was requested


DraftSource = Literal["text", "image", "prediction", "page", "head"]
"""The source of a draft token: the sequence's own tokens, an earlier response about an image, the
client's predicted output, the text of a PDF page, or the model's MTP head.
"""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """How many draft tokens from one source were accepted and rejected in a response."""

    source: DraftSource
    right: int  # accepted
    wrong: int  # rejected


@dataclass(frozen=True, slots=True)
class Delta:
    """The output of one request since the previous delta.

    The last delta has `finish` set. `cached_tokens`, `restored`, `images`, `caching` and `admitted`
    are set in the first delta with a token or a finish reason.
    """

    # the next tokens
    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    # the end
    finish: FinishReason | None = None
    error: str | None = None  # set if and only if `finish` is "error"
    # the caches
    cached_tokens: int = 0  # prompt tokens from the prefix cache
    images: tuple[ImageOutcome, ...] = ()
    # set with `error` if the request was invalid, or "internal_error" if only this request failed
    code: str | None = None
    caching: CacheReport | None = None  # None for requests without cache options
    # the prompt
    scores: PromptScores | None = None  # scores after those of the previous delta, before any token
    admitted: float = 0.0  # `time.monotonic()` when it first got a slot; 0.0 if it never did
    # (offset, bytes) in the arena, for a request for an embedding only; the embedding stays there
    # until the request is aborted
    embedding: tuple[int, int] | None = None
    pooled_output: PooledOutput | None = None  # after the previous one; the last has `finish`
    restored: tuple[tuple[Tier, int], ...] = ()  # `cached_tokens` that another tier had
    draft_counts: tuple[DraftCounts, ...] = ()  # totals so far, by source
