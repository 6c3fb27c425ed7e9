"""Cache breakpoints: up to where, and for how long, a client wants its prompt to be kept in the
caches.

    {"cache_control": {"type": "ephemeral", "ttl": "5m"}}               Anthropic's; 5 minutes
    {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}     OpenAI's; 30 minutes

Both are allowed on a part, on a message (meaning after its last part) and on a tool (meaning after
all tools and the system messages). Their ttl is between a second and a day. A cache hit restarts
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

from saccade.core.errors import InvalidRequest
from saccade.core.types import MAX_BREAKPOINTS, MAX_TTL
from saccade.front.fields import Reader
from saccade.front.unread_fields import AnyFields, IgnoredFields, UnsupportedFields

Lifetime = str
"""A number of seconds, minutes or hours, such as "30s", "5m" or "12h". `seconds_of` parses it."""
_MAX_NUMBER = 5
_UNIT = {"s": 1, "m": 60, "h": 3600}
_EPHEMERAL, _EXPLICIT = 300, 1800
"""Default lifetimes of Anthropic's and of OpenAI's breakpoints, in seconds."""


class CacheControl(AnyFields):
    """Anthropic's cache breakpoint: cache the prompt up to here."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Lifetime | None = None


class PromptCacheBreakpoint(AnyFields):
    """OpenAI's cache breakpoint: cache the prompt up to here.

    `ttl` defaults to the ttl in `prompt_cache_options`, or to 30m.
    """

    mode: Literal["explicit"] = "explicit"
    """Always explicit."""
    ttl: Lifetime | None = None


class PromptCacheOptions(Struct, forbid_unknown_fields=True):
    """What to keep in the caches if the prompt has no breakpoints, and for how long."""

    mode: Literal["implicit", "explicit"] = "implicit"
    """implicit keeps the whole prompt. explicit keeps the prompt up to each breakpoint."""
    ttl: Lifetime | None = None
    """How long breakpoints without their own ttl last, from 1s to 24h, such as 5m."""
    comparison_response_id: str | None = None
    """Requests diagnostics. The server compares the most similar earlier prompt."""
    prewarm: bool = False
    """The server computes and caches the prompt without an answer."""


class Marked(UnsupportedFields, kw_only=True):
    """A message or a text, which may have a breakpoint."""

    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class MarkedMedia(IgnoredFields, kw_only=True):
    """An image, a video or a file, which may have a breakpoint."""

    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


_NAMES = {"cache_control", "prompt_cache_breakpoint"}
_MARKED: Reader[Marked] = Reader(Marked)


@dataclass(frozen=True, slots=True)
class Mark:
    """One breakpoint: after a part, after a message, or after the tools."""

    place: str  # path in the client's request
    seconds: int | None  # None: as in `prompt_cache_options`, or 30 minutes
    strict: bool  # it is Anthropic's, of which more than four are an error
    message: int | None = None
    part: int | None = None


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """The cache settings of a request that apply to its entire prompt."""

    seconds: int = 0  # how long to keep the whole prompt; 0: not at all
    default: int = _EXPLICIT  # seconds for breakpoints without a time
    place: str = ""  # the field with the setting for the whole prompt
    strict: bool = False
    diagnose: bool = False  # explain why the cache held less than it could
    family: str = ""  # the client's name for prompts with a common prefix
    prewarm: bool = False  # only compute and cache the prompt


NO_CACHE_REQUEST = CacheRequest()


def seconds_of(ttl: str, place: str) -> int:
    """Convert a duration such as 5m to seconds.

    place: the path of the object that contains it. Raises InvalidRequest if the duration is
    malformed or longer than a day.
    """
    number, unit = ttl[:-1], ttl[-1:]
    is_time = len(number) <= _MAX_NUMBER and number.isdecimal() and unit in _UNIT
    seconds = int(number) * _UNIT[unit] if is_time else 0
    if not 1 <= seconds <= MAX_TTL:
        raise InvalidRequest(
            f'{place}.ttl: expected a time from "1s" to "24h", such as "5m" or "1h", got '
            f"{ttl[:20]!r}",
            f"{place}.ttl",
        )
    return seconds


def read_mark(marked: Marked | MarkedMedia, place: str, part: int | None = None) -> Mark:
    """Convert the breakpoint of a part or message to a `Mark`. Raises InvalidRequest if its ttl is
    malformed or longer than a day.
    """
    control, point = marked.cache_control, marked.prompt_cache_breakpoint
    if control is not None:
        return control_mark(control, f"{place}.cache_control", part)
    assert point is not None
    where = f"{place}.prompt_cache_breakpoint"
    own = seconds_of(point.ttl, where) if point.ttl is not None else None
    return Mark(where, own, False, None, part)


def control_mark(control: CacheControl, place: str, part: int | None = None) -> Mark:
    """Convert Anthropic's breakpoint at `place` to a `Mark`. Raises InvalidRequest if its ttl is
    malformed or longer than a day.
    """
    seconds = seconds_of(control.ttl, place) if control.ttl is not None else _EPHEMERAL
    return Mark(place, seconds, True, None, part)


def read_tool_marks(tools: Sequence[Any] | None) -> tuple[Mark, ...]:
    """Return the breakpoints on the tools of a request. Raises InvalidRequest if one is
    malformed.
    """
    given = ((f"tools[{index}]", tool) for index, tool in enumerate(tools or ()))
    marks = (loose_mark(tool, place) for place, tool in given if isinstance(tool, Mapping))
    return tuple(mark for mark in marks if mark is not None)


def loose_mark(holder: Mapping[str, Any], place: str, part: int | None = None) -> Mark | None:
    """Return the breakpoint in an object that has no schema, such as a tool, or None if it has
    none.

    Raises InvalidRequest if it is malformed.
    """
    given = {name: holder[name] for name in _NAMES & holder.keys() if holder[name] is not None}
    return read_mark(_MARKED.value(given, place), place, part) if given else None


def read_cache_request(
    control: CacheControl | None,
    options: PromptCacheOptions | None,
    retention: str | None,
    diagnose: bool,
    family: str,
) -> CacheRequest:
    """Convert the cache fields of a request. Raises InvalidRequest if a ttl is malformed or longer
    than a day.

    retention: `prompt_cache_retention`.
    diagnose: explain why the prefix cache held less than it could.
    family: `prompt_cache_key`.
    """
    default, seconds, place = _EXPLICIT, 0, ""
    if retention is not None:
        seconds = MAX_TTL if retention == "24h" else _EPHEMERAL
        place = "prompt_cache_retention"
    if options is not None:
        place = "prompt_cache_options"
        default = seconds_of(options.ttl, place) if options.ttl is not None else _EXPLICIT
        seconds = default if options.mode == "implicit" else 0
        diagnose = diagnose or options.comparison_response_id is not None
    if control is not None:
        place = "cache_control"
        seconds = seconds_of(control.ttl, place) if control.ttl is not None else _EPHEMERAL
    prewarm = options is not None and options.prewarm
    return CacheRequest(seconds, default, place, control is not None, diagnose, family, prewarm)


def choose(marks: Iterable[Mark], cache_request: CacheRequest) -> Sequence[Mark]:
    """Return the last four breakpoints in order, including one at the end of the prompt if the
    request sets it.

    Raises InvalidRequest for more than four of Anthropic's breakpoints, as Anthropic's API does.
    OpenAI's accumulate while a conversation grows, so only the last ones are used.
    """
    every = list(marks)
    if cache_request.seconds and not any(mark.place == cache_request.place for mark in every):
        every.append(Mark(cache_request.place, cache_request.seconds, cache_request.strict))
    strict = [mark for mark in every if mark.strict]
    if len(strict) > MAX_BREAKPOINTS:
        raise InvalidRequest(
            f"{strict[MAX_BREAKPOINTS].place}: a request may have at most {MAX_BREAKPOINTS} "
            f"cache_control breakpoints, got {len(strict)}",
            strict[MAX_BREAKPOINTS].place,
        )
    return every[-MAX_BREAKPOINTS:]
