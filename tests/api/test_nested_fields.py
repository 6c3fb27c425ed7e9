"""Objects within bodies follow the rule of bodies: what cannot change an answer is accepted.

All else is honoured, or refused by its whole path. No object is left out of the rule.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

import saccade
from saccade.api.body_schema import BodySchema
from saccade.api.chat.read import read_chat
from saccade.core.errors import InvalidRequest
from saccade.front.fields import Reader
from saccade.front.members import read_form, read_tools
from saccade.front.prompt_encoder import GenerationRequest
from saccade.front.unread_fields import AnyFields, IgnoredFields, UnsupportedFields
from saccade.plugins.messages.fields import ToolKind
from saccade.plugins.messages.read import read_message
from saccade.plugins.responses.items import _Kind
from saccade.plugins.responses.read import read_responses, response_request
from tests.helpers.served import Served

SOURCE = Path(saccade.__file__).parent
NOTHING: tuple[Any, ...] = (None, False, "", [], {})
PEEKS = {ToolKind, _Kind}
"""Read for a type alone, before the object itself is."""

_SGLANGS = {"is_async", "recapture_cuda_graph", "token_step", "torch_empty_cache", "weight_version"}
FREE = {
    "BrowserState": {"state_changes"},  # the model reads all of it
    "ChatMessage": {"reasoning", "refusal"},  # of earlier answers
    "ClearThinking": {"keep"},
    "ComputerCallItem": {"action", "actions"},  # plugins/responses/computer.py
    "ComputerDefinition": {"input_examples"},  # no model is shown them
    "Conversation": {"chat_template_kwargs"},  # the template's
    "FileContent": {"prompt_cache_breakpoint"},  # front/breakpoints.py
    "FramesSource": {"frames"},  # front/video_parts.py
    "FunctionCall": {"arguments"},  # the client's own
    "ImageContent": {"prompt_cache_breakpoint"},  # front/breakpoints.py
    "ImageObjectPart": {"image"},  # front/image_parts.py
    "Inquiry": {"thread"},  # refused
    "CachedCaching": {"prompt_cache_diagnostics"},
    "OutputFormat": {"schema"},  # text/grammar/schema.py
    "PromptCaching": {"prompt_cache_diagnostics"},
    "PromptFields": {"chat_template_kwargs"},  # the template's
    "QuestionJSON": {"data"},  # the client's own
    "ResponseForm": {"tools", "tool_choice"},  # front/members.py
    "OutputTextContent": {"annotations"},  # of earlier answers
    "Structure": {
        *("guided_choice", "guided_grammar", "guided_json", "guided_json_object"),
        *("guided_regex", "guided_whitespace_pattern"),
        *("response_format", "structured_outputs"),  # front/members.py
    },
    "TextContent": {"prompt_cache_breakpoint"},  # front/breakpoints.py
    "TextFormat": {"schema"},  # text/grammar/schema.py
    "ToolDefinition": {"input_schema", "input_examples"},  # text/grammar/tools.py
    "ToolUse": {"tools", "tool_choice"},  # front/members.py
    "ToolUseBlock": {"input"},  # the client's own
    "UpdateFromDisk": {*_SGLANGS},
    "VideoContent": {"prompt_cache_breakpoint"},  # front/breakpoints.py
    "VideoPart": {"video"},  # front/video_parts.py
}
"""Fields whose objects have names that no class lists, by class, and who reads them."""


def found_in_modules() -> Iterator[Reader[Any] | BodySchema[Any]]:
    """All that bodies, and values in them, are read by."""
    for path in sorted(SOURCE.rglob("*.py")):
        if re.search(r"\b(?:Reader|BodySchema)(?:\[.*\])?\(", path.read_text()):
            parts = path.relative_to(SOURCE.parent).with_suffix("").parts
            for value in vars(importlib.import_module(".".join(parts))).values():
                for each in value.values() if isinstance(value, dict) else (value,):
                    if isinstance(each, Reader | BodySchema):
                        yield each


def classes(kind: inspect.Type) -> Iterator[type[msgspec.Struct]]:
    """The classes that a value's objects are read as."""
    ahead, met = [kind], set[type]()
    while ahead:
        match ahead.pop():
            case inspect.StructType(cls=cls, fields=fields) if cls not in met:
                met.add(cls)
                yield cls
                ahead += [field.type for field in fields]
            case inspect.UnionType(types=inner):
                ahead += inner
            case inspect.ListType(item_type=item) | inspect.DictType(value_type=item):
                ahead.append(item)
            case inspect.Metadata(type=item):
                ahead.append(item)


FOUND = [*found_in_modules()]
BODIES = [each for each in FOUND if isinstance(each, BodySchema)]
READERS = [each for each in FOUND if isinstance(each, Reader)]
READERS += [field.reader for body in BODIES for field in body._fields.values()]
CLASSES = sorted(
    {cls for reader in READERS for cls in classes(inspect.type_info(reader._kind))},
    key=lambda cls: f"{cls.__name__} {cls.__module__}",
)
RULED = [cls for cls in CLASSES if cls.__struct_config__.forbid_unknown_fields]


def named(cls: type[msgspec.Struct], **fields: Any) -> bytes:
    """JSON of an object with a class's tag and no fields but these."""
    config = cls.__struct_config__
    tag = {} if config.tag is None else {str(config.tag_field): config.tag}
    return msgspec.json.encode({**tag, **fields})


def refused(cls: type[msgspec.Struct], **fields: Any) -> InvalidRequest | None:
    try:
        Reader(cls).json(named(cls, **fields), "at")
    except InvalidRequest as error:
        return error
    return None


def test_the_classes_of_every_api_are_found() -> None:
    names = {cls.__name__ for cls in CLASSES}
    assert {"StreamOptions", "ChatReasoning", "TextFormat", "OutputConfig"} <= names
    assert {"ToolDefinition", "CohereImage", "ExpiresAfter", "UpdateFromDisk", "Level"} <= names
    assert len(CLASSES) > 90


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_object_says_what_becomes_of_unknown_names(cls: type[msgspec.Struct]) -> None:
    open_to_any = issubclass(cls, AnyFields | UnsupportedFields) or cls in PEEKS
    assert (cls in RULED) != open_to_any, (
        f"{cls.__name__}: derive it from AnyFields or UnsupportedFields (front/unread_fields.py), "
        "or give it forbid_unknown_fields=True"
    )


@pytest.mark.parametrize("cls", RULED, ids=lambda cls: cls.__name__)
def test_unknown_names_are_refused_unless_they_change_nothing(cls: type[msgspec.Struct]) -> None:
    error = refused(cls, frobnicate=1)
    assert error is not None and (error.param, error.code) == ("at.frobnicate", "unknown_parameter")
    assert str(error).startswith("at.frobnicate: ")
    for nothing in NOTHING:
        error = refused(cls, frobnicate=nothing)
        assert error is None or error.code != "unknown_parameter"
    error = refused(cls, trace_id="x", client_metadata={"a": 1}, mirostat=0)
    assert error is None or error.code != "unknown_parameter"


def is_free(kind: inspect.Type) -> bool:
    match kind:
        case inspect.AnyType():
            return True
        case inspect.UnionType(types=inner):
            return any(map(is_free, inner))
        case inspect.ListType(item_type=item, max_length=most):
            return most != 0 and is_free(item)
        case inspect.DictType(value_type=item, max_length=most):
            return most != 0 and is_free(item)
    return False


def test_fields_of_any_form_are_listed_with_their_readers() -> None:
    found: dict[str, set[str]] = {}
    for cls in {*CLASSES, *(group for body in BODIES for group in body.groups)}:
        unread = {
            (field.name, field.type)
            for base in (UnsupportedFields, IgnoredFields)
            if issubclass(cls, base)
            for field in msgspec.structs.fields(base)
        }
        for field in msgspec.structs.fields(cls):
            free = is_free(inspect.type_info(field.type))
            if free and (field.name, field.type) not in unread:
                found.setdefault(cls.__name__, set()).add(field.encode_name)
    assert found == FREE


# ---- over HTTP, by the whole path

HI = [{"role": "user", "content": "Hi"}]
BODY: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
    "/tokenize": {"messages": HI},
}
CHAT, TEXT, RESPONSES, MESSAGES, TOKENIZE = BODY
LOOK: dict[str, Any] = {"name": "look", "parameters": {"type": "object"}}
FUNCTION = {"type": "function", "function": LOOK}
NAMED = {"type": "function", "function": {"name": "look"}}
OFFERED = {"tools": [FUNCTION]}
FLAT = {"type": "function", **LOOK}
THEIRS = {"name": "look", "input_schema": {"type": "object"}}
SCHEMA = {"name": "x", "schema": {"type": "object"}}
ODD = {"frobnicate": 1}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}


def spoken(**fields: Any) -> dict[str, Any]:
    """A conversation with an earlier answer that has these fields."""
    return {"messages": [*HI, {"role": "assistant", "content": "x", **fields}, *HI]}


CHANGED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"reasoning": ODD}, "reasoning.frobnicate"),
    (CHAT, {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    (CHAT, {"reasoning": {"context": "all_turns"}}, "reasoning.context"),
    (CHAT, {"thinking": {"type": "enabled", "keep": "all"}}, "thinking.keep"),
    (
        CHAT,
        {"thinking": {"type": "enabled", "clear_thinking": False}},
        "thinking.clear_thinking",
    ),
    (CHAT, {"stream": True, "stream_options": ODD}, "stream_options.frobnicate"),
    (CHAT, {"response_format": {"type": "json_object", **ODD}}, "response_format.frobnicate"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {**SCHEMA, **ODD}}},
        "response_format.json_schema.frobnicate",
    ),
    (CHAT, {"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    (
        CHAT,
        {"response_format": {"type": "json_object", "json_schema": SCHEMA}},
        "response_format.json_schema",
    ),
    (CHAT, {"structured_outputs": {"regex": "a", **ODD}}, "structured_outputs.frobnicate"),
    (CHAT, {"tools": [{**FUNCTION, **ODD}]}, "tools[0].frobnicate"),
    (CHAT, {"tools": [{**FUNCTION, "function": {**LOOK, **ODD}}]}, "tools[0].function.frobnicate"),
    (CHAT, {**OFFERED, "tool_choice": {**NAMED, **ODD}}, "tool_choice.frobnicate"),
    (
        CHAT,
        {**OFFERED, "tool_choice": {"type": "function", "function": {"name": "look", **ODD}}},
        "tool_choice.function.frobnicate",
    ),
    (
        CHAT,
        {
            **OFFERED,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{**NAMED, **ODD}]},
            },
        },
        "tool_choice.allowed_tools.tools[0].frobnicate",
    ),
    (CHAT, spoken(function_call={"name": "f", "arguments": "{}"}), "messages[1].function_call"),
    (CHAT, spoken(prefix=True), "messages[1].prefix"),
    (CHAT, spoken(partial=True), "messages[1].partial"),
    (CHAT, spoken(tools=[FUNCTION]), "messages[1].tools"),
    (TEXT, {"response_format": {"type": "json_object", **ODD}}, "response_format.frobnicate"),
    (TEXT, {"structured_outputs": {"regex": "a", **ODD}}, "structured_outputs.frobnicate"),
    (TOKENIZE, {"tools": [{**FUNCTION, **ODD}]}, "tools[0].frobnicate"),
    (RESPONSES, {"reasoning": ODD}, "reasoning.frobnicate"),
    (RESPONSES, {"reasoning": {"exclude": True}}, "reasoning.exclude"),
    (RESPONSES, {"text": ODD}, "text.frobnicate"),
    (RESPONSES, {"text": {"format": {**FORMAT, "name": "x", **ODD}}}, "text.format.frobnicate"),
    (RESPONSES, {"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
    (RESPONSES, {"stream": True, "stream_options": ODD}, "stream_options.frobnicate"),
    (RESPONSES, {"tools": [{**FLAT, **ODD}]}, "tools[0].frobnicate"),
    (
        RESPONSES,
        {"tools": [FLAT], "tool_choice": {"type": "function", "name": "look", **ODD}},
        "tool_choice.frobnicate",
    ),
    (
        RESPONSES,
        {"tools": [FLAT], "tool_choice": {"type": "allowed_tools", "tools": [], **ODD}},
        "tool_choice.frobnicate",
    ),
    (MESSAGES, {"thinking": {"type": "enabled", **ODD}}, "thinking.frobnicate"),
    (MESSAGES, {"output_config": ODD}, "output_config.frobnicate"),
    (MESSAGES, {"output_config": {"format": {**FORMAT, **ODD}}}, "output_config.format.frobnicate"),
    (MESSAGES, {"tools": [{**THEIRS, **ODD}]}, "tools[0].frobnicate"),
    (
        MESSAGES,
        {"tools": [THEIRS], "tool_choice": {"type": "auto", **ODD}},
        "tool_choice.frobnicate",
    ),
    (MESSAGES, {"context_management": ODD}, "context_management.frobnicate"),
    (
        MESSAGES,
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", **ODD}]}},
        "context_management.edits[0].frobnicate",
    ),
]
UNCHANGED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"reasoning": {"effort": "none", "summary": "auto", "generate_summary": "concise"}}),
    (CHAT, {"reasoning": {"context": "auto", "mode": "standard", "exclude": False, "x": None}}),
    (CHAT, {"thinking": {"type": "disabled", "clear_thinking": True, "keep": None}}),
    (CHAT, {"stream": False, "response_format": {"type": "text", "json_schema": None, "x": []}}),
    (
        CHAT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {**SCHEMA, "strict": None, "description": None, "x": ""},
            }
        },
    ),
    (CHAT, {"structured_outputs": {"json": {}, "structural_tag": None, "x": False}}),
    (
        CHAT,
        {
            "tools": [
                {
                    **FUNCTION,
                    "function": {**LOOK, "return": {"type": "string"}, "strict": None},
                    "id": "t",
                    "metadata": {"a": 1},
                    "cache_control": {"type": "ephemeral", "scope": "global"},
                }
            ],
            "tool_choice": "auto",
        },
    ),
    (CHAT, {**OFFERED, "tool_choice": {**NAMED, "x": None}, "max_tokens": 3}),
    (CHAT, spoken(function_call=None, prefix=False, tools=[], annotations=[{"a": 1}], parsed=3)),
    (CHAT, spoken(audio={"id": "a", "transcript": "x"}, refusal=None, name="me")),
    (RESPONSES, {"reasoning": {"effort": "none", "context": "auto", "generate_summary": "auto"}}),
    (RESPONSES, {"text": {"format": {"type": "text", "schema": None, "x": {}}, "x": False}}),
    (RESPONSES, {"tools": [{**FLAT, "output_schema": {}, "x": ""}], "tool_choice": "none"}),
    (MESSAGES, {"metadata": {"user_id": "u", "more": 1}, "thinking": {"type": "disabled"}}),
    (MESSAGES, {"cache_control": {"type": "ephemeral", "scope": "global"}}),
]


def post(served: Served, path: str, fields: dict[str, Any]) -> Any:
    return served.http.post(path, json={"model": "demo", **BODY[path], **fields})


@pytest.mark.parametrize("case", CHANGED, ids=lambda case: f"{case[0]} {case[2]}")
def test_what_would_change_the_answer_is_refused_by_its_whole_path(
    caller: Served, case: tuple[str, dict[str, Any], str]
) -> None:
    path, fields, param = case
    answer = post(caller, path, fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if path == MESSAGES:
        assert error["type"] == "invalid_request_error"
    else:
        assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize("case", UNCHANGED, ids=lambda case: f"{case[0]} {next(iter(case[1]))}")
def test_what_changes_nothing_is_accepted(caller: Served, case: tuple[str, dict[str, Any]]) -> None:
    path, fields = case
    answer = post(caller, path, fields)
    assert answer.status_code == 200, answer.text


def test_advice_says_what_to_do_instead(caller: Served) -> None:
    for fields, advice in (
        (spoken(prefix=True), "use continue_final_message"),
        (spoken(function_call={"name": "f"}), "use tool_calls"),
        ({"thinking": {"type": "auto", "clear_thinking": False}}, "chat_template_kwargs"),
    ):
        assert advice in post(caller, CHAT, fields).json()["error"]["message"]


# ---- tools of other kinds

OTHER_TOOLS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"type": "custom", "custom": {"name": "x"}}),
    (CHAT, {"type": "web_search", "web_search": {"enable": True}}),
    (CHAT, {"type": "builtin_function", "function": {"name": "$web_search"}}),
    (CHAT, {"type": "openrouter:web_search", "parameters": {"max_results": 3}}),
    (TOKENIZE, {"type": "mcp", "server_label": "x"}),
    (MESSAGES, {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}),
    (MESSAGES, {"type": "bash_20250124", "name": "bash"}),
]


@pytest.mark.parametrize("case", OTHER_TOOLS, ids=lambda case: f"{case[0]} {case[1]['type']}")
def test_a_tool_that_is_no_function_is_refused_by_its_type(
    caller: Served, case: tuple[str, dict[str, Any]]
) -> None:
    path, tool = case
    own = THEIRS if path == MESSAGES else FUNCTION
    error = post(caller, path, {"tools": [own, tool]}).json()["error"]
    assert error["message"].startswith("tools[1].type: ") and tool["type"] in error["message"]
    if path != MESSAGES:
        assert (error["param"], error["code"]) == ("tools[1].type", "unsupported_parameter")


@pytest.mark.parametrize("tool", [{"google_search": {}}, {"googleSearch": {}}, {}, "look"])
def test_a_tool_without_a_type_is_refused_where_it_stands(caller: Served, tool: Any) -> None:
    error = post(caller, CHAT, {"tools": [FUNCTION, tool]}).json()["error"]
    assert error["param"] == "tools[1]" and '"function"' in error["message"]


# ---- what is honoured


def test_a_limit_on_reasoning_is_one_limit_in_every_api() -> None:
    budgets = {
        (CHAT, "reasoning"): {"max_tokens": 7},
        (CHAT, "thinking"): {"type": "enabled", "budget_tokens": 7},
        (CHAT, "thinking_token_budget"): 7,
        (RESPONSES, "reasoning"): {"max_tokens": 7},
        (MESSAGES, "thinking"): {"type": "enabled", "budget_tokens": 7},
    }
    for (path, name), value in budgets.items():
        rules = read(path, {name: value}).rules
        assert rules is not None and rules.thinking_token_budget == 7, (path, name)
    off = {"type": "disabled", "budget_tokens": 7}
    assert read(MESSAGES, {"thinking": off}).rules is None
    both = {"reasoning": {"max_tokens": 7}, "thinking_token_budget": 5}
    rules = read(CHAT, both).rules
    assert rules is not None and rules.thinking_token_budget == 5


def test_reasoning_is_switched_off_in_every_api() -> None:
    for path in (CHAT, RESPONSES):
        assert read(path, {"reasoning": {"enabled": False}}).chat.thinks is False
        assert read(path, {"reasoning": {"effort": "low"}}).chat.thinks is None


def test_a_schema_beside_json_object_is_kept_to(caller: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = read_form({"response_format": {"type": "json_object", "schema": schema}})
    assert form is not None and (form.kind, form.value) == ("json", schema)
    wrong = {"response_format": {"type": "json_object", "schema": {"type": 3}}}
    error = post(caller, CHAT, wrong).json()["error"]
    assert error["param"].startswith("response_format.schema")


def test_python_follows_the_rule_too() -> None:
    for wrong in ({"type": "text", **ODD}, {"type": "json_schema", "json_schema": SCHEMA | ODD}):
        with pytest.raises(InvalidRequest, match="frobnicate: this parameter is not supported"):
            read_form({"response_format": wrong})
    with pytest.raises(InvalidRequest, match=r"^tools\[0\]\.type: 'custom' is a tool"):
        read_tools([{"type": "custom", "custom": {"name": "x"}}])


def read(path: str, fields: dict[str, Any]) -> GenerationRequest:
    body = bytearray(msgspec.json.encode({"model": "demo", **BODY[path], **fields}))
    if path == CHAT:
        return read_chat(body, 512)[0]
    if path == MESSAGES:
        return read_message(body, 512).requests[0]
    inquiry = read_responses(body, 512)
    return response_request(inquiry.request, [], inquiry.items)
