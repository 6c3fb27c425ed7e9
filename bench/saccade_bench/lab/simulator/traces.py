"""The simulated requests: chats of calls, each with a list of pieces (texts and images) and the
length of its answer. They are generated from a seed, or replayed from a measured run.

A measured run is the output of `saccade bench serve --save-text`, and is tokenized with the model's
own template and tokenizer. It has the text of answers, but not their tokens. An answer's tokens are
therefore reconstructed from its text. If these are fewer than were generated, the end token and
unknown tokens are appended. If they are more, the model tokenized the text differently, and none of
the answer is considered cached. The replay is exact for answers that the model ended
(`--disable-ignore-eos`): forced continuations have tokens without text. Image keys are made of the
digests in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from saccade.core.errors import ConfigError
from saccade.core.family import FamilySpec
from saccade.core.model_folder import resolve_model
from saccade.core.types import Image, ImageKey, Span
from saccade.families.registry import load_spec
from saccade.text.prompt.template import ChatTemplate, Tokenizer
from saccade_bench.lab.options import TraceOptions
from saccade_bench.lab.simulator.costs import Machine
from saccade_bench.load.images import parse_resolution
from saccade_bench.load.journal import Saved, read_runs

HEADER_TOKENS = 12
"""Tokens of a chat template before the first image, the same in every request."""
TURN_TOKENS = 8
"""Tokens of a chat template between two messages."""
STRIDE = 1 << 24
"""Synthetic token ids are a piece's number times this, plus the position in the piece."""


Json = dict[str, Any]

UNKNOWN = -STRIDE
"""Token ids from here downwards are not used by any tokenizer."""


@dataclass(frozen=True, slots=True)
class Shown:
    """An image. `pixels` is the size of its file's image, `resized` that for the vision encoder."""

    image: Image
    pixels: int
    resized: int


@dataclass(frozen=True, slots=True)
class TracedPiece:
    """A text or an image, with its length in tokens.

    Texts with equal numbers are equal. `tokens` are the real token ids, if known.
    """

    number: int
    length: int
    shown: Shown | None = None
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One request. `measured` has a real server's measurements in a replay."""

    pieces: tuple[TracedPiece, ...]
    answer: TracedPiece
    tenant: str = ""
    measured: MeasuredTrace | None = None

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return sum(piece.length for piece in self.pieces)

    @property
    def pictures(self) -> list[Shown]:
        return [piece.shown for piece in self.pieces if piece.shown is not None]


@dataclass(frozen=True, slots=True)
class MeasuredTrace:
    """The measurements of one request.

    `tpot` is None for answers of one token. `encoded` and `decoded` are None without a trace.
    """

    ttft: float
    tpot: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    encoded: int | None = None
    decoded: int | None = None


class RequestTrace(Protocol):
    """Chats to simulate, numbered in order of their start.

    `limit` is the maximum number of concurrent chats, if any.
    """

    name: str
    requests: int
    sessions: int
    limit: int | None

    def start(self, session: int) -> float:
        """Return when the chat starts, in ms."""
        ...

    def rounds(self, session: int) -> int: ...

    def pause(self, session: int, round: int) -> float:
        """Return the pause between the previous answer and call `round`, in ms."""
        ...

    def call(self, session: int, round: int) -> TracedCall: ...


def tokens_of(call: TracedCall) -> tuple[tuple[int, ...], tuple[Span, ...], tuple[Image, ...]]:
    """Return a prompt as token ids, spans and images, as the engine receives it."""
    tokens: list[int] = []
    spans: list[Span] = []
    images: list[Image] = []
    for piece in call.pieces:
        if piece.shown is not None:
            spans.append(Span(len(tokens), piece.length, len(images)))
            images.append(piece.shown.image)
            tokens.extend(repeat(1, piece.length))
        else:
            tokens.extend(text_tokens(piece))
    return tuple(tokens), tuple(spans), tuple(images)


def text_tokens(piece: TracedPiece) -> Sequence[int]:
    first = (piece.number + 1) * STRIDE
    return range(first, first + piece.length) if piece.tokens is None else piece.tokens


class Synthetic:
    """A random trace. Implements `RequestTrace`.

    Pieces with even numbers are images, those with odd numbers are texts.
    """

    def __init__(self, options: TraceOptions, machine: Machine) -> None:
        self.limit: int | None = None
        self._options = options
        self._machine = machine
        self._per_chat = 1 if options.trace == "zipf" else options.rounds
        self.name = f"{options.trace}, seed {options.seed}"
        self.sessions = max(1, round(options.num_prompts / self._per_chat))
        self.requests = self.sessions * self._per_chat
        dice = np.random.Generator(np.random.PCG64(options.seed))
        gaps = (
            dice.exponential(self._per_chat / options.rate, self.sessions)
            if options.rate != float("inf")
            else np.zeros(self.sessions)
        )
        self._starts = np.cumsum(gaps) * 1e3
        self._pauses = dice.exponential(options.think_time, (self.sessions, self._per_chat)) * 1e3
        self._tenants = dice.integers(options.tenants, size=self.sessions)
        self._picks = self._draw_pictures(dice)
        sizes = parse_resolution(options.image_resolution)
        self._widths = dice.integers(sizes.low[0], sizes.high[0] + 1, options.pictures)
        self._heights = dice.integers(sizes.low[1], sizes.high[1] + 1, options.pictures)
        self._known: dict[int, TracedPiece] = {}
        self._header = TracedPiece(1, HEADER_TOKENS)

    def _draw_pictures(
        self, dice: np.random.Generator
    ) -> np.ndarray[tuple[int, int, int], np.dtype[np.int64]]:
        """Return the image index at [session, round, i]. Indices below `pictures` are popular
        images, higher ones are new images.
        """
        options = self._options
        shape = self.sessions, self._per_chat, options.image_count
        again = dice.random(shape) < options.repeat_ratio
        new = options.pictures + np.arange(np.prod(shape, dtype=np.int64)).reshape(shape)
        if options.trace == "agent":
            again[:, 0] = False  # each trail starts with a new screen
            last = np.maximum.accumulate(np.where(again, 0, new), axis=1)
            return np.where(again, last, new)
        weights = np.arange(1, options.pictures + 1, dtype=np.float64) ** -options.zipf
        upto = np.cumsum(weights) / weights.sum()
        popular = np.minimum(np.searchsorted(upto, dice.random(shape)), options.pictures - 1)
        return np.where(again, popular, new)

    def start(self, session: int) -> float:
        return float(self._starts[session])

    def rounds(self, session: int) -> int:
        assert 0 <= session < self.sessions
        return self._per_chat

    def pause(self, session: int, round: int) -> float:
        return float(self._pauses[session, round])

    def call(self, session: int, round: int) -> TracedCall:
        options, tenant = self._options, int(self._tenants[session])
        kept = options.keep_images if options.trace == "agent" else 0
        pieces = [self._header]
        for number in range(round + 1):
            hidden = kept and number <= round - kept
            text = 4 * (session * self._per_chat + number)
            if not hidden:
                pieces += [
                    self._picture(int(pick), tenant) for pick in self._picks[session, number]
                ]
            # Without its images, a question is a different text, which includes "[picture]".
            pieces.append(TracedPiece(text + (5 if hidden else 3), options.input_len + TURN_TOKENS))
            if number < round:
                pieces.append(self._answer(session, number))
        return TracedCall(
            tuple(pieces),
            self._answer(session, round),
            f"tenant {tenant}" if options.tenants > 1 else "",
        )

    def _answer(self, session: int, round: int) -> TracedPiece:
        return TracedPiece(
            4 * (session * self._per_chat + round) + 4 * self.requests + 3, self._options.output_len
        )

    def _picture(self, pick: int, tenant: int) -> TracedPiece:
        options = self._options
        number = pick * options.tenants + tenant
        if found := self._known.get(number):
            return found
        place = pick % options.pictures
        width, height = int(self._widths[place]), int(self._heights[place])
        key = ImageKey(
            number.to_bytes(32, "big"), bytes(16), f"tenant {tenant}" if options.tenants > 1 else ""
        )
        shown = show(key, height, width, self._machine)
        piece = TracedPiece(2 * number, shown.image.num_tokens, shown)
        if pick < options.pictures:
            self._known[number] = piece
        return piece


def show(key: ImageKey, height: int, width: int, machine: Machine) -> Shown:
    """Return an image of this size."""
    rules = machine.rules
    rows, columns = machine.size(height, width)
    grid = 1, rows // rules.patch, columns // rules.patch
    patches = grid[1] * grid[2]
    image = Image(key, grid, patches // rules.merge**2, patches, (rows, columns))
    return Shown(image, height * width, rows * columns)


# ---- a measured run


class Replay:
    """The last complete run of a result file, without failed chats. Implements `RequestTrace`."""

    def __init__(self, path: Path, model: str, machine: Machine) -> None:
        """Raises ConfigError if the file lacks required fields."""
        self._run = read_runs(path)[-1]
        folder = resolve_model(model)
        self.spec: FamilySpec = load_spec(folder)
        self._tokenizer = Tokenizer.load(folder)
        self._template = ChatTemplate.load(folder, self._tokenizer, None, self.spec.templates)
        self._machine = machine
        self._chats = _whole_chats(self._run, path)
        options = self._run.options
        self.name = f"{path.name}, {self._run.label}"
        self.sessions = len(self._chats)
        self.requests = sum(map(len, self._chats))
        self.limit: int | None = options.get("max_concurrency")
        # With a concurrency limit, the simulation decides when a chat starts. Otherwise, chats
        # start at their measured times.
        self._starts = [
            0.0 if self.limit else chat[0]["sent"] - self._chats[0][0]["sent"]
            for chat in self._chats
        ]
        self._keep = (
            int(options.get("keep_images") or 0) if options.get("dataset_name") == "agent" else 0
        )
        self._salts = [chat[0].get("tenant") or "" for chat in self._chats]

    def start(self, session: int) -> float:
        return float(self._starts[session])

    def rounds(self, session: int) -> int:
        return len(self._chats[session])

    def pause(self, session: int, round: int) -> float:
        before, line = self._chats[session][round - 1 : round + 1]
        return max(0.0, float(line["sent"]) - float(before["sent"]) - float(before["e2e"]))

    def call(self, session: int, round: int) -> TracedCall:
        chat = self._chats[session]
        pieces = self._pieces(self._messages(chat, round), self._salts[session])
        line = chat[round]
        length = sum(piece.length for piece in pieces)
        if line["prompt_tokens"] not in (None, length):
            raise ConfigError(
                f"{self.name}: round {round + 1} of chat {line['session']} had "
                f"{line['prompt_tokens']} prompt tokens, by this model's "
                f"template and tokenizer {length}: name the model that was served with --model"
            )
        return TracedCall(pieces, self._answer(line), self._salts[session], _measured(line))

    def _messages(self, chat: Sequence[Json], round: int) -> list[Json]:
        messages: list[Json] = []
        for number, line in enumerate(chat[: round + 1]):
            messages += (
                _without_pictures(line["messages"])
                if self._keep and number <= round - self._keep
                else line["messages"]
            )
            if number < round:
                messages.append({"role": "assistant", "content": line["text"]})
        return messages

    def _pieces(self, messages: Sequence[Json], salt: str) -> tuple[TracedPiece, ...]:
        parts = [
            part
            for message in messages
            if isinstance(message["content"], list)
            for part in message["content"]
        ]
        pictures = [self._shown(part, salt) for part in parts if part["type"] == "image"]
        text = self._template.render(messages)
        tokens, spans = self.spec.expand_prompt(
            self._tokenizer.encode(text), [shown.image for shown in pictures]
        )
        pieces: list[TracedPiece] = []
        for left, span in pairwise((Span(0, 0, 0), *spans, Span(len(tokens), 0, 0))):
            if span.start > left.end:
                between = tokens[left.end : span.start]
                pieces.append(TracedPiece(0, len(between), tokens=between))
            if span.length:
                pieces.append(TracedPiece(0, span.length, pictures[span.image]))
        return tuple(pieces)

    def _shown(self, part: Json, salt: str) -> Shown:
        recipe = self.spec.recipe(part["height"], part["width"], self.spec.pixel_bounds)
        settings = self.spec.settings(recipe)
        return show(
            ImageKey(bytes.fromhex(part["digest"]), settings, salt),
            part["height"],
            part["width"],
            self._machine,
        )

    def _answer(self, line: Json) -> TracedPiece:
        count = max(1, int(line["output_tokens"] or 1))
        told = self._tokenizer.encode(line["text"])
        if len(told) > count:
            told = []
        elif len(told) < count:
            told.append(self.spec.eos_token_ids[0])
        filler = range(UNKNOWN, UNKNOWN - count, -1)
        return TracedPiece(0, count, tokens=(*told, *filler)[:count])


def _whole_chats(run: Saved, path: Path) -> list[list[Json]]:
    chats: dict[int, list[Json]] = {}
    failed = {line["session"] for line in run.requests if line["failure"] is not None}
    for line in run.requests:
        if line["session"] not in failed:
            chats.setdefault(line["session"], []).append(line)
    if not chats:
        raise ConfigError(f"{path}: every chat of the run has failed")
    if any("messages" not in line for chat in chats.values() for line in chat):
        raise ConfigError(
            f"{path}: it does not say what was asked; run `saccade bench serve` with --save-text"
        )
    ordered = [sorted(chat, key=lambda line: int(line["round"])) for chat in chats.values()]
    return sorted(ordered, key=lambda chat: float(chat[0]["sent"]))


def _without_pictures(messages: Sequence[Json]) -> list[Json]:
    """Return a round's messages with placeholders for images, as `bench serve` sends them."""
    found = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = "\n".join(
                "[picture]" if part["type"] == "image" else part["text"] for part in content
            )
        found.append(message | {"content": content})
    return found


def _measured(line: Json) -> MeasuredTrace:
    encoded = decoded = None
    if "saccade" in line:
        images = line["saccade"]["images"]
        encoded = sum(image["found"] in ("none", "pixels") for image in images)
        decoded = sum(image["ms"]["decode"] > 0 for image in images)
    return MeasuredTrace(
        line["ttft"], line["tpot"], line["prompt_tokens"], line["cached_tokens"], encoded, decoded
    )
