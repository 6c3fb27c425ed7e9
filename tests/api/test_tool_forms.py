"""Calls as GLM, Mistral, Llama 3 and Gemma 4 write them, through the unchanged openai SDK: at once
and as a stream, by themselves and held by a grammar.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from saccade.text.answer.answer_format import FORMATS, AnswerFormat
from tests.api.test_tools import ask, calls_of, streamed
from tests.helpers.served import Served, serving

ARGUMENTS = {"where": 'ä "b"', "count": 3}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
WRITTEN: dict[str, str] = {
    "glm": '<tool_call>look\n<arg_key>where</arg_key>\n<arg_value>ä "b"</arg_value>\n'
    "<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>stop\n</tool_call>",
    "mistral": f'[TOOL_CALLS][{{"name": "look", "arguments": {JSON}}}, '
    '{"name": "stop", "arguments": {}}]',
    "gemma": '<|tool_call>call:look{count:3,where:<|"|>ä "b"<|"|>}<tool_call|>'
    "<|tool_call>call:stop{}<tool_call|>",
    "llama3": f'{{"name": "look", "parameters": {JSON}}}; {{"name": "stop", "parameters": {{}}}}',
}


@pytest.fixture(scope="module", params=WRITTEN)
def form(request: pytest.FixtureRequest) -> str:
    form: str = request.param
    return form


@pytest.fixture(scope="module")
def module_server(form: str) -> Iterator[Served]:
    with serving(answer_format=AnswerFormat(FORMATS[form]), context=8192) as served:
        yield served


@pytest.mark.first
@pytest.mark.parametrize("way", [ask, streamed])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_of_each_form_are_told_apart(
    served: Served, form: str, way: Any, choice: str
) -> None:
    served.says(WRITTEN[form])
    answer = way(served, tool_choice=choice).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    found = [(name, json.loads(text)) for name, text in calls_of(answer.message)]
    assert found == [("look", ARGUMENTS), ("stop", {})]


@pytest.mark.parametrize("way", [ask, streamed])
def test_what_is_no_call_of_this_form_is_text(served: Served, form: str, way: Any) -> None:
    text = "So: " + next(text for other, text in WRITTEN.items() if other != form)
    served.says(text)
    answer = way(served).choices[0]
    assert (answer.message.content, answer.message.tool_calls or []) == (text, [])
