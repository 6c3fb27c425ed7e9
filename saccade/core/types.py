"""A request: images by key, tokens, spans, sampling, and the parts of its answer.

Owns the value types shared by every room. All are frozen: built whole and never changed afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Any, Literal

from saccade.core.errors import InvalidRequest
from saccade.core.token_rules import NO_RULES, TokenRules

Grid = tuple[int, ...]
"""Numbers of one image that only its model's family reads; for Qwen-VL its frames (a still image is
one, a pair of a video two) and its patches along (height, width), before merging. What an image's
tokens, positions and cost follow from.
"""
Size = tuple[int, int]
"""(height, width) in pixels."""

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class ImageKey:
    """The name of an image: equal keys mean equal encoded bytes, processing settings and salt."""

    digest: bytes  # 32 bytes, blake3 of the encoded bytes
    # 16 bytes, fingerprint of everything that decides the pixels the encoder sees
    # (`FamilySpec.settings`)
    settings: bytes
    # the request's `cache_salt`, hashed by the front; it separates tenants. It is followed by the
    # fingerprint of the request's adapter, if that changes the vision encoder.
    salt: str = ""

    def __str__(self) -> str:
        return self.digest.hex()[:12]

    @property
    def identifier(self) -> str:
        """The key without its salt, in hexadecimal digits, as vLLM's `mm_hash`."""
        return self.digest.hex() + self.settings.hex()

    def __hash__(self) -> int:
        return hash(self.digest)  # which bytes remember


@dataclass(frozen=True, slots=True)
class Image:
    """One image as the engine knows it.

    Holds a key, the family's grid, the number of tokens, the patches for the vision encoder, and
    its canvas size.
    """

    key: ImageKey
    grid: Grid
    num_tokens: int
    num_patches: int
    canvas: Size


@dataclass(frozen=True, slots=True)
class Tower:
    """What a server's vision tower puts out: rows of `width` values in `dtype`.

    `fingerprint` (hexadecimal) is equal on two servers if their towers are the same, bit for bit;
    "" unless it was asked for.
    """

    fingerprint: str = ""
    dtype: str = ""
    width: int = 0

    def nbytes(self, num_tokens: int) -> int:
        """Return an embedding's bytes."""
        return num_tokens * self.width * (4 if self.dtype == "float32" else 2)


@dataclass(frozen=True, slots=True)
class Span:
    """Prompt tokens `[start, start + length)` come from the embedding of `images[image]`.

    They are its rows `[offset, offset + length)`.

    time: for an image in a video whose images share one stretch of positions, its distance from the
    first of them. None: it has a stretch of its own. Spans in one such video touch. It is 0 where a
    family needs to distinguish video frames from images.
    """

    start: int
    length: int
    image: int
    offset: int = 0
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
"""What is less is greedy: float32 logits divided by it need not be finite."""
MIN_REPETITION_PENALTY = 1e-6
"""What is less could be 0 where logits are computed, and 0 times a banned token's is no number."""

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
"""Field: what it is, the least and the most it may be."""
STORED_SAMPLING = {
    "max_tokens": ("max_new_tokens", ""),
    "min_tokens": ("min_new_tokens", ""),
    "temperature": ("temperature", "temp"),
    "top_p": ("top_p", "top_p"),
    "top_k": ("top_k", "top_k"),
    "min_p": ("min_p", "min_p"),
    "repetition_penalty": ("repetition_penalty", ""),
}
"""Fields that a checkpoint may set: their names in generation_config.json and, if any, in GGUF."""
ONE_TOKEN = {"max_tokens": 1, "min_tokens": 0}
"""Fields of an answer that ends at once."""


def _shown(value: object) -> str:
    """Return a value's text for an error. An integer with thousands of digits lacks one."""
    return "a larger one" if isinstance(value, int) and abs(value) >= 2**64 else repr(value)[:100]


@dataclass(frozen=True, slots=True, eq=False)
class FieldNames:
    """A dialect's names for chat completion fields that later checks may refuse.

    A field outside `renamed` has the same name in both.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> str:
        return self.renamed.get(name, name)


CHAT_NAMES = FieldNames()


def check_sampling(given: Mapping[str, Any], names: FieldNames = CHAT_NAMES) -> None:
    """Check some fields' values for `SamplingParams`.

    Raises InvalidRequest that names the field as the client does.
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
            raise InvalidRequest(f"{field}: expected {what} {allowed}, got {_shown(value)}", field)
    penalty, field = given.get("repetition_penalty", 1.0), names["repetition_penalty"]
    if penalty < MIN_REPETITION_PENALTY:
        raise InvalidRequest(
            f"{field}: expected a number above 0 (1 means no penalty; the minimum is "
            f"{MIN_REPETITION_PENALTY}), got {_shown(penalty)}",
            field,
        )
    _check_lists(given, names)


def _check_lists(given: Mapping[str, Any], names: FieldNames) -> None:
    """Bound the lengths of lists, which each of a request's answers carries."""
    for name, most in (("logit_bias", MAX_BIASED_TOKENS), ("stop_token_ids", MAX_STOP_TOKENS)):
        field, count = names[name], len(given.get(name, ()))
        if count > most:
            raise InvalidRequest(f"{field}: expected at most {most} tokens, got {count}", field)
    field = names["logit_bias"]
    if not all(-MAX_BIAS <= bias <= MAX_BIAS for _, bias in given.get("logit_bias", ())):
        raise InvalidRequest(f"{field}: expected biases from {-MAX_BIAS} to {MAX_BIAS}", field)
    stop, field = given.get("stop", ()), names["stop"]
    # A single string would pass for a tuple of its letters.
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
"""`SamplingParams.penalties` that change nothing."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How answer tokens are sampled. Raises InvalidRequest, naming the field, for HTTP and Python
    alike.

    temperature 0, as all below 1e-6, is greedy. top_k 0 or -1 means unlimited. `logprobs` is the
    number of alternatives to report beside the sampled token, None to leave log-probabilities out.
    The front watches `stop` strings (the engine sees tokens only), the engine all other fields.
    `seed` alone decides the random draws. A request's n-th token depends on (seed, n) and its
    logits, and is independent of the rest of the batch.
    """

    # length
    max_tokens: int = 256
    min_tokens: int = 0
    # the draw
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    # penalties
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # chance and bias
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    # the end
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    # the report
    logprobs: int | None = None

    @property
    def columns(self) -> tuple[float, int, float, float]:
        """Return what the draw depends on, as `kernels.reference.sample` orders it."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Return the repetition, presence and frequency penalties."""
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty

    @property
    def edits(self) -> bool:
        """Return True if penalties, biases, or bans on an end change the logits before the draw."""
        return self.penalties != NO_PENALTIES or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def is_greedy(self) -> bool:
        """Return True for greedy sampling."""
        return self.temperature == 0.0

    @property
    def listed_tokens(self) -> dict[str, tuple[int, ...]]:
        """Return the tokens that fields list, by field."""
        biased = tuple(token for token, _ in self.logit_bias)
        return {"logit_bias": biased, "stop_token_ids": self.stop_token_ids}

    @property
    def limits(self) -> dict[str, int | float]:
        """Return the parameters that a trace shows."""
        names = ("max_tokens", "temperature", "top_p", "top_k")
        penalties = ("frequency_penalty", "presence_penalty")
        return {name: getattr(self, name) for name in (*names, *penalties)}

    def tokens_due(self, count: int) -> int:
        """Return how many more tokens an answer of `count` must have before it may end."""
        return max(0, self.min_tokens - count)

    def __post_init__(self) -> None:
        check_sampling({name: getattr(self, name) for name in self.__slots__})
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)


def fill_sampling(
    given: Mapping[str, Any], defaults: SamplingParams, left: int, seed: int
) -> SamplingParams:
    """Fill in what a request leaves open. left: the most tokens of its answer. seed: unless given.

    Raises InvalidRequest that names the field.
    """
    usual = max(defaults.max_tokens, given.get("min_tokens", 0))
    filled = {"max_tokens": usual, "seed": seed, **given}
    filled["max_tokens"] = most = min(filled["max_tokens"], left)
    filled.setdefault("min_tokens", min(defaults.min_tokens, most))
    filled["seed"] %= 2**63
    filled["top_k"] = max(0, filled.get("top_k", defaults.top_k))
    if filled.get("top_p", defaults.top_p) == 0.0:
        # top_p = 0 still keeps the likeliest token.
        filled |= {"top_p": 1.0, "top_k": 1}
    sampling = replace(defaults, **filled)
    if sampling.min_tokens > most:
        raise InvalidRequest(
            f"min_tokens={sampling.min_tokens} exceeds the maximum length of the answer, {most}",
            "min_tokens",
        )
    return sampling


def forbid_token(given: Mapping[str, Any], token: int) -> dict[str, Any]:
    """Return the given fields with a bias against a token, instead of its own."""
    others = (each for each in given.get("logit_bias", ()) if each[0] != token)
    return {**given, "logit_bias": (*others, (token, -MAX_BIAS))}


MAX_BREAKPOINTS = 4
"""Places of a prompt up to which one request may ask for it to be kept."""

MAX_TTL = 24 * 3600
"""Seconds."""


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """A loaded LoRA adapter: its number, unique in a server's run, and its files' fingerprint.

    0 is the base model. tower: it changes the vision encoder. name: as clients call it.
    """

    number: int = 0
    fingerprint: str = ""
    tower: bool = False
    name: str = ""

    def salted(self, salt: str) -> str:
        """Return the salt for a request's images: the fingerprint joins it if the tower differs."""
        return f"{salt}+{self.fingerprint}" if self.tower else salt


NO_ADAPTER = AdapterRef()


@dataclass(frozen=True, slots=True)
class Caching:
    """A request's place in the caches, and its wishes for them."""

    # (tokens, seconds), sorted by tokens. Once this many prompt tokens are computed, keep their
    # whole KV pages, and the embeddings of the images before them, for this long.
    breakpoints: tuple[tuple[int, int], ...] = ()
    # explain why the prefix cache had less than an earlier prompt from this client would have left
    diagnose: bool = False
    family: str = ""  # the client's name for prompts with a common beginning
    # what computes the KV beside the model; KV from different ones is apart
    adapter: AdapterRef = NO_ADAPTER
    # a background request: it runs only while there are no others, and what it
    # adds to the caches is evicted first until another request uses it.
    idle: bool = False
    # tokens that the client expects in the answer, a source of draft tokens
    prediction: tuple[int, ...] = ()
    branch: int = 0  # prompt tokens that a later prompt will have in common with this one, if known

    @property
    def is_reported(self) -> bool:
        """Return True if the answer reports what was kept, or why a prefix was missed."""
        return bool(self.breakpoints) or self.diagnose


@dataclass(frozen=True, slots=True)
class PromptReading:
    """What a request reads from its prompt, instead of an answer. All sampling is skipped.

    Each of the `last` tokens gives the logits of `labels`. If `labels` is empty, it gives the state
    after the last layer and its norm.
    """

    labels: tuple[int, ...] = ()
    last: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to generate. `tokens` are token ids only, image placeholders included.

    Hashes and sentinels stay out of `tokens`. `spans` are ordered by `start` and disjoint; several
    may name one image. `arrival` is `time.monotonic()` seconds. `client`: the sharer of turns (an
    API key's name, a salt or an address). `group`: common to the answers to one HTTP request; "": a
    group of its own. `grammar`: the answer's form (`text.grammar.Grammar.text`); "": any text.
    `prompt_logprobs`: alternatives to report beside each prompt token and its log-probability;
    None: prompt scores are off. `reading`: the request ends with its prompt, without an answer.
    `priority`: among one client's requests, those with a lesser number are served first.
    `streamed`: the client reads the answer token by token; otherwise updates may be batched.
    """

    # the prompt
    id: str
    tokens: tuple[int, ...]
    spans: tuple[Span, ...]
    images: tuple[Image, ...]
    # the answer
    sampling: SamplingParams
    # the client
    cache_salt: str = ""
    arrival: float = 0.0
    client: str = ""
    group: str = ""
    # what else is asked of prompt and answer
    grammar: str = ""
    caching: Caching = Caching()
    prompt_logprobs: int | None = None
    reading: PromptReading | None = None
    rules: TokenRules = NO_RULES
    priority: int = 0
    streamed: bool = True

    @property
    def adapter(self) -> AdapterRef:
        """Return the request's LoRA adapter."""
        return self.caching.adapter

    @property
    def most_tokens(self) -> int:
        """Return the answer's maximum tokens."""
        return self.sampling.max_tokens if self.reading is None else 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability for the chosen token and for the best others.

    Natural logarithms, from the model's own distribution before penalties.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The model's scores for C prompt tokens from `start` on, each given the tokens before.

    `start` is 1 or more, as the first token lacks context. Packed, for a prompt may be long.
    """

    start: int
    # ids, logprobs: int32 and float32 [C, 1 + K], row by row: the token itself, then the K best,
    # best first
    ids: bytes
    logprobs: bytes
    ranks: bytes  # int32 [C], 1 unless another token is likelier

    @property
    def count(self) -> int:
        return len(self.ranks) // 4

    def rows(
        self, first: int = 0, last: int | None = None
    ) -> Iterator[tuple[list[int], list[float], int]]:
        """Yield (ids, logprobs, rank) for each token, or for tokens [first, last), in order."""
        begin, end, _ = slice(first, last).indices(self.count)
        width = len(self.ids) // len(self.ranks) if self.ranks else 1
        ids, ranks = memoryview(self.ids).cast("i"), memoryview(self.ranks).cast("i")
        logprobs: memoryview[float] = memoryview(self.logprobs).cast("f")
        for at in range(begin, end):
            mine = slice(at * width, (at + 1) * width)
            yield list(ids[mine]), list(logprobs[mine]), ranks[at]


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """The values of a `PromptReading` for C tokens from index `start` on: float32 [C, width]."""

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
"""The reason for which an image was not found at a level.

never seen: not under this salt. What was sent under another is another's, and never said.
no full page: the page with its last tokens is not cached, for it was not full, or went on
differently.
other prompt: something else stood before it. From the first eviction on nobody can tell: it may
have gone since.
prefix cache off: for all, or for a request whose prompt is scored.
"""


Tier = Literal["device", "host", "disk"]
"""The tiers of embeddings."""


@dataclass(frozen=True, slots=True)
class ImageOutcome:
    """One image's source.

    `kv`: its tokens lay wholly in the cached prefix. `embedding`: its embedding was cached.
    `pixels`: encoded from pixels still in the arena. `encoder`: another server gave its embedding.
    `none`: decoded and encoded.

    `missed_kv`, `missed_embedding`: the reason for a miss; None at the hit's level and below.
    `tier`: the embedding's tier. `tiles`: of an encoded image whose tiles have names, which of them
    were new, in the tower's order.
    """

    image: int
    level: Literal["kv", "embedding", "pixels", "encoder", "none"]
    missed_kv: Missed | None = None
    missed_embedding: Missed | None = None
    tier: Tier | None = None
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
"""Why the prefix cache had less of a prompt than it might.

prompt_changed: an earlier prompt of this client goes on differently from a place on.
other_settings: the first difference is an image of the same bytes at another size (`detail`,
`min_pixels`, `max_pixels`).
evicted: it was there, and made room for others. read_too_slow: it lies in host memory or on disk,
but computing it was quicker, or it came late or damaged. expired: it was kept by a breakpoint whose
time is over, and made room since. flushed: somebody flushed the cache.
never_seen: no earlier prompt of this client, under this salt, that is remembered begins like it.
too_short: it fills no page. cache_off: the server keeps no prompts.
"""


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """Why prompt tokens were computed despite a similar earlier prompt."""

    reason: CacheMissReason
    token: int  # the first token that differs from the earlier prompt, or was evicted
    tokens: int  # prompt tokens from there on
    # the client's name for the part with the first of these tokens; filled in by the front
    place: str = ""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What became of a request's breakpoints and of its question about the cache."""

    # (seconds, tokens) by seconds, for prompt tokens computed by this request and now kept this
    # long; tokens kept before are left out
    written: tuple[tuple[int, int], ...] = ()
    missed: CacheMiss | None = None  # None if the hit was complete, or unless the client asked


DraftSource = Literal["text", "image", "prediction", "head"]
"""Where a draft token was found: in the sequence's own tokens, in an earlier answer about an image,
in the client's prediction of the answer, or by the model's MTP head.
"""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """One source's draft tokens in an answer: accepted (`right`) and rejected ones (`wrong`)."""

    source: DraftSource
    right: int
    wrong: int


@dataclass(frozen=True, slots=True)
class Delta:
    """News for one request: tokens generated since the last delta. The last delta has `finish` set.

    `cached_tokens` (prompt tokens from the prefix cache; `restored`: those among them that came
    from outside the device, by tier), `images` and `caching` (None for requests without cache
    options) are in the first delta with a token or a finish. `error` is set if and only if `finish
    == "error"`; `code` with it if the request itself is at fault, and "internal_error" if its end
    concerns this request alone. `scores` continue the last ones, and come before any token.
    `admitted`: `time.monotonic()` when the request got its first slot, beside `images`; 0.0 if it
    is still without one. `embedding`: offset and bytes in the arena, for a request for this alone;
    the embedding stays until the request is aborted. `pooled_output`: continues the last one; the
    last one comes with the finish. `draft_counts`: totals so far, by source.
    """

    # the next tokens
    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    # the end
    finish: FinishReason | None = None
    error: str | None = None
    # the caches
    cached_tokens: int = 0
    images: tuple[ImageOutcome, ...] = ()
    code: str | None = None
    caching: CacheReport | None = None
    # the prompt
    scores: PromptScores | None = None
    admitted: float = 0.0
    embedding: tuple[int, int] | None = None
    pooled_output: PooledOutput | None = None
    restored: tuple[tuple[Tier, int], ...] = ()
    draft_counts: tuple[DraftCounts, ...] = ()
