"""Conversations that a client asks the server to shorten: Anthropic's clear_tool_uses_20250919, and
truncation "auto" of the Responses API, by the SDKs as they are.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from saccade.core.types import Request
from saccade.plugins.agents.history_edits import CLEARED
from tests.helpers.images import data_url, png
from tests.helpers.served import TOKENIZER, Served, serving

MOST: Any = {"model": "demo", "max_tokens": 50, "betas": ["context-management-2025-06-27"]}
SHOT = {
    "type": "base64",
    "media_type": "image/png",
    "data": base64.b64encode(png(size=(192, 192))).decode(),
}
CONTEXT = 1024


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(context=CONTEXT) as served:
        yield served


def used(id: str, name: str = "screen", *, shot: bool = True) -> list[dict[str, Any]]:
    """A tool use, and its result."""
    result = {"type": "image", "source": SHOT} if shot else {"type": "text", "text": f"saw {id}"}
    call = {"type": "tool_use", "id": id, "name": name, "input": {"at": id}}
    told = {"type": "tool_result", "tool_use_id": id, "content": [result]}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [told]}]


def history(*uses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Begin."}, *(each for use in uses for each in use)]


def edit(**fields: Any) -> dict[str, Any]:
    trigger = {"type": "tool_uses", "value": 3}
    return {"edits": [{"type": "clear_tool_uses_20250919", "trigger": trigger, **fields}]}


def last(served: Served) -> Request:
    return served.submitted[-1]


def seen(served: Served) -> str:
    return TOKENIZER.decode(last(served).tokens)


FIVE = history(*(used(f"t{i}") for i in range(5)))


def test_old_tool_results_are_cleared_and_the_answer_says_so(claude: Any, served: Served) -> None:
    plain = claude.beta.messages.create(**MOST, messages=FIVE)
    assert len(last(served).images) == 5 and plain.context_management is None
    before = len(last(served).tokens)
    message = claude.beta.messages.create(**MOST, messages=FIVE, context_management=edit())
    assert len(last(served).images) == 3, "the newest three stay"
    assert seen(served).count(CLEARED) == 2
    (applied,) = message.context_management.applied_edits
    assert applied.type == "clear_tool_uses_20250919" and applied.cleared_tool_uses == 2
    assert applied.cleared_input_tokens == before - len(last(served).tokens)


def test_a_stream_says_so_at_its_end(claude: Any) -> None:
    with claude.beta.messages.stream(
        **MOST, messages=FIVE, context_management=edit(keep={"type": "tool_uses", "value": 1})
    ) as stream:
        message = stream.get_final_message()
    assert message.context_management.applied_edits[0].cleared_tool_uses == 4


@pytest.mark.parametrize(
    ("fields", "images"),
    [
        ({"trigger": {"type": "tool_uses", "value": 5}}, 5),
        ({"trigger": {"type": "input_tokens", "value": 10}}, 3),
        ({"trigger": {"type": "input_tokens", "value": 100_000}}, 5),
        ({"keep": {"type": "tool_uses", "value": 0}}, 0),
        ({"clear_at_least": {"type": "input_tokens", "value": 100_000}}, 5),
        ({"clear_at_least": {"type": "input_tokens", "value": 1}}, 3),
        ({"exclude_tools": ["screen"]}, 5),
        ({"exclude_tools": ["another"]}, 3),
    ],
)
def test_what_is_cleared_follows_from_the_fields(
    claude: Any, served: Served, fields: dict[str, Any], images: int
) -> None:
    message = claude.beta.messages.create(**MOST, messages=FIVE, context_management=edit(**fields))
    assert len(last(served).images) == images
    applied = message.context_management.applied_edits
    assert [each.cleared_tool_uses for each in applied] == ([5 - images] if images < 5 else [])


def test_tokens_are_counted_before_and_after(claude: Any) -> None:
    given = {**MOST, "messages": FIVE}
    del given["max_tokens"]
    whole = claude.beta.messages.count_tokens(**given)
    told = claude.beta.messages.count_tokens(**given, context_management=edit())
    assert told.context_management.original_input_tokens == whole.input_tokens
    assert told.input_tokens < whole.input_tokens


@pytest.mark.parametrize(
    ("edits", "place"),
    [
        ([{"type": "compact_20260112"}], "context_management.edits[0]"),
        (2 * edit()["edits"], "context_management.edits"),
        (edit(keep={"type": "input_tokens", "value": 1})["edits"], "context_management.edits[0]"),
        (edit(trigger={"type": "tool_uses", "value": -1})["edits"], "context_management.edits[0]"),
        (edit(more=1)["edits"], "context_management.edits[0]"),
    ],
)
def test_an_edit_that_is_not_honoured_is_refused_by_name(
    claude: Any, edits: list[Any], place: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.beta.messages.create(**MOST, messages=FIVE, context_management={"edits": edits})
    assert place in refused.value.body["error"]["message"]  # type: ignore[index]


# ---- truncation


def turns(count: int, words: int = 20) -> list[dict[str, Any]]:
    """A conversation, some of whose questions show an image."""
    found: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}]
    for number in range(count):
        asked: list[Any] = [{"type": "input_text", "text": f"Question {number}. " + "so " * words}]
        if number % 3 == 0:
            asked.append({"type": "input_image", "image_url": data_url(png(size=(32, 32)))})
        found.append({"role": "user", "content": asked})
        if number < count - 1:
            found.append({"role": "assistant", "content": f"Answer {number}."})
    return found


def test_the_oldest_messages_go_until_the_rest_fits(served: Served) -> None:
    count = 40
    create = served.openai.responses.create
    with pytest.raises(openai.BadRequestError):
        create(model="demo", input=turns(count))
    made = create(model="demo", input=turns(count), truncation="auto", max_output_tokens=16)
    assert made.truncation == "auto" and made.output_text == "Hello!"
    text = seen(served)
    assert len(last(served).tokens) + 16 <= CONTEXT
    assert len(last(served).tokens) > CONTEXT // 4, "no more goes than must"
    assert "Be kind." in text and f"Question {count - 1}." in text and "Question 0." not in text


def test_what_fits_is_left_as_it_is(served: Served) -> None:
    served.openai.responses.create(model="demo", input=turns(3, 5), truncation="auto")
    auto = last(served).tokens
    served.openai.responses.create(model="demo", input=turns(3, 5))
    assert auto == last(served).tokens


def test_a_cut_stays_for_a_while_as_the_conversation_grows(served: Served) -> None:
    firsts = []
    for count in range(30, 42):
        served.openai.responses.create(
            model="demo", input=turns(count), truncation="auto", max_output_tokens=16
        )
        firsts.append(seen(served).partition("Question ")[2][:3])
    assert len({*firsts}) < len(firsts) / 2, firsts


def test_a_question_with_an_image_that_alone_fits_is_answered(served: Served) -> None:
    """Every answer before it goes."""
    long, shown = turns(4, 300)[1:3], turns(1, 300)[1]
    create = served.openai.responses.create
    made = create(model="demo", input=[*long, shown], truncation="auto", max_output_tokens=16)
    assert made.output_text == "Hello!" and len(last(served).images) == 1
    assert "Answer" not in seen(served)


def test_one_message_beyond_the_context_is_refused(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        served.openai.responses.create(model="demo", input=turns(3, CONTEXT), truncation="auto")
    assert "context" in refused.value.message
