"""A measured run as a trace: the output of `saccade bench serve --save-text`, with the model's own
template and tokenizer.

Owns the way from a result file back to the server's tokens. The answers' tokens are unknown: the
file has their text. So an answer counts as its text's own tokens if they are as many as were
generated; if the text gives fewer, the rest counts as the hidden end token, and then anything; if
it gives more, the model wrote its text in another way, and none of it counts as found again. The
replay is exact for answers ended by the model (`--disable-ignore-eos`); an answer made to go on has
tokens in between without text. Images' names are the file's digests. Knows nothing of servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from saccade.core.errors import ConfigError
from saccade.core.family import FamilySpec
from saccade.core.model_folder import resolve_model
from saccade.core.types import ImageKey, Span
from saccade.families.registry import load_spec
from saccade.text.prompt.template import ChatTemplate, Tokenizer
from saccade_bench.lab.costs import Machine
from saccade_bench.lab.outcome import Outcome, Served
from saccade_bench.lab.trace import (
    STRIDE,
    MeasuredTrace,
    RequestTrace,
    Shown,
    TracedCall,
    TracedPiece,
    show,
)
from saccade_bench.load.journal import Saved, read_runs

Json = dict[str, Any]

UNKNOWN = -STRIDE
"""Token ids that no tokenizer has, downwards from here."""


class Replay:
    """The last whole run of a result file; implements `saccade_bench.lab.trace.Trace`.

    Chats that failed are left out.
    """

    def __init__(self, path: Path, model: str, machine: Machine) -> None:
        """Raises ConfigError for a file that lacks necessary fields."""
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
        # A limit decides when a chat begins, and so does the simulation; else the run's own times
        # do.
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
    """The messages of a round whose images are not kept, as `bench serve` sends them."""
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


# ---- a simulated run beside the measured one


@dataclass(frozen=True, slots=True)
class RoundCheck:
    """One round of all chats.

    Cached tokens are sums, None where the server does not tell; TTFT in ms, means.
    """

    round: int
    calls: int
    cached_measured: int | None
    cached: int
    ttft_measured: float
    ttft: float

    @property
    def ttft_error(self) -> float:
        return self.ttft / self.ttft_measured - 1


@dataclass(frozen=True, slots=True)
class Check:
    """`wrong` of the `compared` calls have another number of cached tokens than was measured.
    `encoded`: pictures, measured and simulated, if the run has a trace.
    """

    compared: int
    wrong: int
    rounds: tuple[RoundCheck, ...]
    encoded: tuple[int, int] | None

    @property
    def exact(self) -> bool:
        return self.wrong == 0

    @property
    def ttft_error(self) -> float:
        """Of the mean over all calls."""
        measured = sum(line.ttft_measured * line.calls for line in self.rounds)
        return sum(line.ttft * line.calls for line in self.rounds) / measured - 1

    @property
    def rounds_error(self) -> float:
        return sum(abs(line.ttft_error) for line in self.rounds) / len(self.rounds)


def compare(trace: RequestTrace, outcome: Outcome) -> Check:
    """The comparison of `outcome` with a measured trace."""
    pairs = [
        (served, measured)
        for served in outcome.served
        if (measured := trace.call(served.session, served.round).measured)
    ]
    told = [(served, measured) for served, measured in pairs if measured.cached_tokens is not None]
    numbers = sorted({served.round for served, _ in pairs})
    encoded = [measured.encoded for _, measured in pairs if measured.encoded is not None]
    return Check(
        compared=len(told),
        wrong=sum(served.cached_tokens != measured.cached_tokens for served, measured in told),
        rounds=tuple(
            _round(number, [pair for pair in pairs if pair[0].round == number])
            for number in numbers
        ),
        encoded=(sum(encoded), outcome.counts.images_encoded) if encoded else None,
    )


def _round(number: int, pairs: list[tuple[Served, MeasuredTrace]]) -> RoundCheck:
    cached = [measured.cached_tokens for _, measured in pairs if measured.cached_tokens is not None]
    return RoundCheck(
        round=number + 1,
        calls=len(pairs),
        cached_measured=sum(cached) if len(cached) == len(pairs) else None,
        cached=sum(served.cached_tokens for served, _ in pairs),
        ttft_measured=sum(measured.ttft for _, measured in pairs) / len(pairs),
        ttft=sum(served.ttft for served, _ in pairs) / len(pairs),
    )
