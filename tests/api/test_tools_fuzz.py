"""Mutated outputs through the whole front: nothing crashes, nothing is lost, however it is cut."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from saccade.front.answer_update import AnswerUpdate
from saccade.front.conversation import Chat, Message
from saccade.front.members import read_tools
from saccade.front.prepared import PreparedRequest
from saccade.front.prompt_encoder import GenerationRequest
from saccade.text.answer.answer_format import FORMATS, AnswerFormat
from saccade.text.answer.events import AnswerEvent, CallBroken, Reasoned
from saccade.text.answer.reader import gather
from saccade.text.answer.reasoning import THINK
from saccade.text.grammar.tools import ToolSet
from saccade.text.prompt.template import ChatTemplate
from tests.helpers.served import TOKENIZER, Served, serving
from tests.text.templates import QWEN3_VL, THINKING
from tests.text.test_tool_calls import HERMES, TOOLS, XML, check_accounts, mutated

OFFER = ToolSet(
    read_tools(
        [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema in TOOLS.items()
        ]
    )
)
SAMPLES = {
    "hermes": f"{HERMES}\n{HERMES} so",
    "xml": f"{XML}\n{XML} so",
}
BESIDE = 50
"""Answers in flight at a time."""


@pytest.fixture(scope="module", params=["hermes", "xml"])
def fronts(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served]]:
    form: str = request.param
    source = QWEN3_VL if form == "hermes" else THINKING
    template = ChatTemplate({"default": source}, TOKENIZER.named_tokens)
    answer_format = AnswerFormat(FORMATS[form], THINK if form == "xml" else None)
    with serving(answer_format=answer_format, context=16384, template=template) as served:
        yield form, served


def tokens_of(choose: random.Random, text: str) -> list[int]:
    """Tokens of `text`, cut anywhere, so that it comes in other pieces each time."""
    cuts = sorted(choose.randrange(len(text) + 1) for _ in range(6))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [token for piece in pieces if piece for token in TOKENIZER.encode(piece)]


async def collect(served: Served, prepared: PreparedRequest) -> list[AnswerUpdate]:
    found = []
    async with aclosing(served.front.generate(prepared)) as events:
        async for event in events:
            found.append(event)
    return found


def answers(served: Served, texts: list[str], choose: random.Random) -> list[list[AnswerUpdate]]:
    """The events of each text, said by the engine."""
    said: dict[str, list[int]] = {}
    served.engine.reply = lambda request: said[request.id.rpartition("-")[0]]

    async def run() -> list[list[AnswerUpdate]]:
        chat = Chat((Message("user", "Hi"),), OFFER)
        first = await served.front.prepare(GenerationRequest(chat, {"max_tokens": 2000}))
        found: list[list[AnswerUpdate]] = []
        for at in range(0, len(texts), BESIDE):
            some = []
            for number, text in enumerate(texts[at : at + BESIDE]):
                name = f"r{at + number}"
                said[name] = tokens_of(choose, text)
                some.append(replace(first, request=replace(first.request, id=name)))
            found += await asyncio.gather(*(collect(served, each) for each in some))
            served.engine.received.clear()
        return found

    return asyncio.run_coroutine_threadsafe(run(), served.loop).result(1200)


@pytest.mark.more
@pytest.mark.parametrize("count", [60, pytest.param(5_000, marks=pytest.mark.slow)])
def test_mutated_outputs_lose_nothing(fronts: tuple[str, Served], count: int) -> None:
    form, served = fronts
    choose = random.Random(count)
    texts = [mutated(choose, SAMPLES[form]) for _ in range(count)]
    # A model that reasons: its prompt ends within <think>, which the answer closes first.
    before = "</think>" if form == "xml" else ""
    calls = 0
    for text, events in zip(
        texts, answers(served, [before + text for text in texts], choose), strict=True
    ):
        told = "".join(event.text for event in events)
        parts: list[AnswerEvent] = [part for event in events for part in event.parts]
        assert told == before + text and [e.finish for e in events if e.finish] == ["stop"]
        assert not any(isinstance(part, CallBroken | Reasoned) for part in parts)
        check_accounts(form, text.lstrip("\n") if before else text, parts)
        read = gather(parts)
        calls += len(read.calls)
        for call in read.calls:
            assert isinstance(json.loads(call.arguments), dict)
    assert calls > count / 2
    assert served.front.state == "ready"


@pytest.mark.first
def test_any_cut_of_the_stream_gives_the_same_calls(fronts: tuple[str, Served]) -> None:
    form, served = fronts
    choose = random.Random(1)
    text = f"Let me see.\n</think>\n\nSo:\n{SAMPLES[form]}"
    read = [
        gather([part for event in events for part in event.parts])
        for events in answers(served, [text] * 40, choose)
    ]
    told = {
        (each.text, each.reasoning, tuple((c.name, c.arguments) for c in each.calls))
        for each in read
    }
    assert len(told) == 1 and len(read[0].calls) == 2
    assert bool(read[0].reasoning) == (form == "xml")
    assert len({call.id for each in read for call in each.calls}) == 80
