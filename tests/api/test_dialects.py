"""Three dialects meet in one type: a refusal names the client's own field, and an image is read
once.
"""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from saccade.api.body_schema import BodySchema
from saccade.api.chat.fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE_CHAT, TOKENIZE_TEXT
from saccade.api.chat.read import read_chat
from saccade.core.errors import InvalidRequest
from saccade.front.content import MAX_CALLS, MAX_NAME
from saccade.front.conversation import Chat, MessageText
from saccade.front.prompt_encoder import GenerationRequest
from saccade.front.unread_fields import IGNORED, NEUTRAL, IgnoredFields, UnsupportedFields
from saccade.media.sources.source import Base64, FileId, ImageSource
from saccade.plugins.batches.fields import BATCH
from saccade.plugins.decisions.fields import DECISIONS
from saccade.plugins.messages.fields import COUNT_TOKENS, MESSAGES
from saccade.plugins.messages.read import read_message
from saccade.plugins.responses.fields import RESPONSES
from saccade.plugins.responses.read import read_responses, response_request
from saccade.plugins.scores.fields import EMBED, EMBEDDINGS, RERANK, SCORE
from saccade.text.grammar.tools import MAX_DESCRIPTION_CHARACTERS, MAX_TOOLS

CONTEXT = 4096
Read = Callable[[bytearray], GenerationRequest]


def read_response(body: bytearray) -> GenerationRequest:
    inquiry = read_responses(body, CONTEXT)
    return response_request(inquiry.request, [], inquiry.items)


READ: dict[str, Read] = {
    "chat": lambda body: read_chat(body, CONTEXT)[0],
    "messages": lambda body: read_message(body, CONTEXT).requests[0],
    "responses": read_response,
}
HI = [{"role": "user", "content": "Hi"}]
BODY: dict[str, dict[str, Any]] = {
    "chat": {"messages": HI},
    "messages": {"messages": HI, "model": "m", "max_tokens": 5},
    "responses": {"input": HI},
}


def tool(dialect: str, **fields: Any) -> dict[str, Any]:
    """A tool as the dialect writes it."""
    fields = {"name": "look", **fields}
    if dialect == "messages":
        return {"input_schema": {"type": "object"}, **fields}
    return {"type": "function"} | ({"function": fields} if dialect == "chat" else fields)


def calls(dialect: str, number: int, name: str = "look") -> dict[str, Any]:
    """A conversation in which the model made so many calls."""
    if dialect == "messages":
        used = {"type": "tool_use", "id": "c", "name": name, "input": {}}
        return {"messages": [*HI, {"role": "assistant", "content": [used] * number}]}
    if dialect == "responses":
        called = {"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"}
        return {"input": [*HI, *[called] * number]}
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}
    return {"messages": [*HI, {"role": "assistant", "tool_calls": [call] * number}]}


LONG = "x" * (MAX_NAME + 1)
MANY = MAX_CALLS + 1
WORDY = "x" * (MAX_DESCRIPTION_CHARACTERS + 1)
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"stop": ["x"] * 17}, "stop"),
    ("messages", {"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ("responses", {"stop": ["x"] * 17}, "stop"),
    ("chat", {"stop": ["x" * 300]}, "stop"),
    ("messages", {"stop_sequences": ["x" * 300]}, "stop_sequences"),
    ("chat", {"temperature": 3}, "temperature"),
    ("messages", {"temperature": 3}, "temperature"),
    ("responses", {"temperature": 3}, "temperature"),
    ("chat", {"messages": HI * (CONTEXT + 1)}, "messages"),
    ("messages", {"messages": HI * (CONTEXT + 1)}, "messages"),
    ("responses", {"input": HI * (CONTEXT + 1)}, "input"),
    *((d, {"tools": [tool(d)] * (MAX_TOOLS + 1)}, "tools") for d in READ),
    ("chat", {"tools": [tool("chat")] * 2}, "tools[1].function.name"),
    ("messages", {"tools": [tool("messages")] * 2}, "tools[1].name"),
    ("responses", {"tools": [tool("responses")] * 2}, "tools[1].name"),
    ("chat", {"tools": [tool("chat", description=WORDY)]}, "tools[0].function.description"),
    ("messages", {"tools": [tool("messages", description=WORDY)]}, "tools[0].description"),
    ("responses", {"tools": [tool("responses", description=WORDY)]}, "tools[0].description"),
    (
        "chat",
        {"tools": [tool("chat", parameters={"type": "array"})]},
        "tools[0].function.parameters.type",
    ),
    (
        "messages",
        {"tools": [tool("messages", input_schema={"type": "array"})]},
        "tools[0].input_schema.type",
    ),
    (
        "responses",
        {"tools": [tool("responses", parameters={"type": "array"})]},
        "tools[0].parameters.type",
    ),
    ("chat", calls("chat", MANY), "messages[1].tool_calls"),
    ("messages", calls("messages", MANY), "messages[1].content"),
    ("responses", calls("responses", MANY), f"input[{MANY}]"),
    ("chat", calls("chat", 1, LONG), "messages[1].tool_calls[0].function.name"),
    ("messages", calls("messages", 1, LONG), "messages[1].content[0].name"),
    ("responses", calls("responses", 1, LONG), "input[1].name"),
    (
        "messages",
        {"cache_control": {"type": "ephemeral", "ttl": "9d"}},
        "cache_control.ttl",
    ),
    (
        "messages",
        {"messages": HI, "system": [{"type": "text", "text": "s", "cache_control": {"ttl": "x"}}]},
        "system[0].cache_control.ttl",
    ),
    (
        "responses",
        {"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}},
        "text.format.name",
    ),
    ("responses", {"tool_choice": "must"}, "tool_choice"),
    (
        "responses",
        {"tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}},
        "tool_choice.mode",
    ),
]


@pytest.mark.parametrize(("dialect", "fields", "param"), CASES)
def test_a_refusal_names_the_clients_own_field(
    dialect: str, fields: dict[str, Any], param: str
) -> None:
    body = bytearray(json.dumps({**BODY[dialect], **fields}).encode())
    with pytest.raises(InvalidRequest) as refused:
        READ[dialect](body)
    assert refused.value.param == param, refused.value.message
    assert "messages[" not in refused.value.message or dialect != "responses"


def test_a_field_that_is_renamed_leaves_the_words_around_it() -> None:
    body = {**BODY["messages"], "stop_sequences": ["x"] * 17}
    with pytest.raises(InvalidRequest) as refused:
        READ["messages"](bytearray(json.dumps(body).encode()))
    told = "stop_sequences: expected at most 16 non-empty stop strings"
    assert refused.value.message == told


# ---- what would change what the model sees

WORDS = UnsupportedFields.__struct_fields__
NAMED = ("image", "images", "attachments", "experimental_attachments", "files", "parts", "video")
SIZES = ("resized_height", "image_max_pixels", "size", "detail", "nframes", "total_pixels", "fps")
CONTENT = {"chat": "messages", "messages": "messages", "responses": "input"}
TEXTS = {"chat": "text", "messages": "text", "responses": "input_text"}
IMAGES: dict[str, dict[str, Any]] = {
    "chat": {"type": "image_url", "image_url": {"url": "https://a.b/c.png"}},
    "messages": {"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}},
    "responses": {"type": "input_image", "image_url": "https://a.b/c.png"},
}


def said(dialect: str, part: dict[str, Any], **fields: Any) -> GenerationRequest:
    message = {"role": "user", "content": [part], **fields}
    body = {**BODY[dialect], CONTENT[dialect]: [message]}
    return READ[dialect](bytearray(json.dumps(body).encode()))


@pytest.mark.parametrize("dialect", READ)
@pytest.mark.parametrize("value", [224, 0.5, True, "x", ["x"], {"x": 1}], ids=repr)
def test_what_carries_or_sizes_images_and_is_not_read_is_refused_by_name(
    dialect: str, value: Any
) -> None:
    assert {*NAMED, *SIZES} <= {*WORDS}
    text = {"type": TEXTS[dialect], "text": "Hi"}
    for word in WORDS:
        if word == "region" and not isinstance(value, list):
            continue  # no corners: a note of the client's, as a cloud's region is
        message = f"{CONTENT[dialect]}[0]"
        if (dialect, word, value) != ("chat", "images", ["x"]):  # ollama's: read
            with pytest.raises(InvalidRequest) as refused:
                said(dialect, text, **{word: value})
            assert (refused.value.param or "").startswith(f"{message}.{word}"), word
        with pytest.raises(InvalidRequest) as refused:
            said(dialect, {**text, word: value})
        assert (refused.value.param or "").startswith(f"{message}.content[0].{word}"), word


@pytest.mark.parametrize("dialect", READ)
@pytest.mark.parametrize("word", ["resized_height", "image_max_pixels", "size", "fps", "nframes"])
def test_a_size_beside_an_image_that_is_not_read_is_refused_by_name(
    dialect: str, word: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        said(dialect, {**IMAGES[dialect], word: 224})
    assert refused.value.param == f"{CONTENT[dialect]}[0].content[0].{word}"
    assert refused.value.code == "unknown_parameter"


@pytest.mark.parametrize("dialect", READ)
@pytest.mark.parametrize("nothing", [None, "", [], {}], ids=repr)
def test_words_that_say_nothing_change_nothing(dialect: str, nothing: Any) -> None:
    text = {"type": TEXTS[dialect], "text": "Hi"}
    words = dict.fromkeys((word for word in WORDS if word != "audio"), nothing)
    assert said(dialect, {**text, **words}, **words).prompt == said(dialect, text).prompt


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_allowed_values_are_listed_once(dialect: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        said(dialect, {"type": "input_image", "image_url": "https://a.b/c.png", "detail": "full"})
    assert refused.value.message.count('"low"') == 1, refused.value.message


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_a_missing_image_names_every_field_that_would_do(dialect: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        said(dialect, {"type": "input_image"})
    where = f"{CONTENT[dialect]}[0].content[0].file_id"
    assert refused.value.message == f"{where}: this parameter or image_url is required"
    assert refused.value.code == "missing_required_parameter"


WEAK: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"messages": [{"role": "narrator", "content": "x"}]}, "invalid_value"),
    ("chat", {"messages": []}, "invalid_value"),
    ("chat", {"n": 0}, "invalid_value"),
    ("chat", {"temperature": "hot"}, "invalid_value"),
    ("chat", {"stream_options": {"include_usage": True}}, "invalid_value"),
    ("chat", {"stream": True, "stream_options": {"x": 1}}, "unknown_parameter"),
    ("chat", {"messages": [{"role": "user"}]}, "missing_required_parameter"),
    ("messages", {"messages": [{"role": "user"}]}, "missing_required_parameter"),
    ("messages", {"max_tokens": "x"}, "invalid_value"),
    ("messages", {"tool_choice": {"type": "tool"}}, "invalid_value"),
    ("responses", {"top_logprobs": 3}, "invalid_value"),
    ("responses", {"input": 5}, "invalid_value"),
    ("responses", {"reasoning": 5}, "invalid_value"),
]


@pytest.mark.parametrize(("dialect", "fields", "code"), WEAK)
def test_every_refusal_has_a_code(dialect: str, fields: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        READ[dialect](bytearray(json.dumps({**BODY[dialect], **fields}).encode()))
    assert refused.value.code == code, refused.value.message


EXTRAS = {
    "name": None,
    "index": 0,
    "format": "png",
    "annotations": [{"x": 1}],
    "extras": {"y": 2},
    "provider_specific_fields": {"image": "x"},
    "metadata": {"images": ["x"]},
    "title": "t",
    "audio": {"id": "audio_1"},
    "providerOptions": {"a": 1},
    "timestamp": 1.5,
    "tags": ["x"],
}


@pytest.mark.parametrize("dialect", READ)
def test_other_keys_of_messages_and_texts_stay_accepted(dialect: str) -> None:
    text = {"type": TEXTS[dialect], "text": "Hi"}
    assert said(dialect, {**text, **EXTRAS}, **EXTRAS).prompt == said(dialect, text).prompt


# ---- names that are not read: one rule in every dialect

QUESTION = {"type": "predicate", "instructions": "So?"}
SCHEMAS: dict[str, tuple[BodySchema[Any], dict[str, Any]]] = {
    "chat": (CHAT, {"messages": HI}),
    "completion": (COMPLETION, {"prompt": "x"}),
    "tokenized chat": (TOKENIZE_CHAT, {"messages": HI}),
    "tokenized text": (TOKENIZE_TEXT, {"prompt": "x"}),
    "detokenized": (DETOKENIZE, {"tokens": [1]}),
    "responses": (RESPONSES, {"input": "x"}),
    "messages": (MESSAGES, BODY["messages"]),
    "counted": (COUNT_TOKENS, {"messages": HI, "model": "m"}),
    "embeddings": (EMBEDDINGS, {"input": "x"}),
    "embed": (EMBED, {"texts": ["x"]}),
    "rerank": (RERANK, {"query": "x", "documents": ["y"]}),
    "score": (SCORE, {"text_1": "x", "text_2": "y"}),
    "decisions": (DECISIONS, {"input": "x", "questions": [QUESTION]}),
    "batch": (BATCH, {"input_file_id": "file-1", "endpoint": "/v1/responses"}),
}
ODD: list[Any] = [7.25, "zzz", True, [1], {"a": 1}]


def body_of(dialect: str, **fields: Any) -> Any:
    schema, body = SCHEMAS[dialect]
    return schema.read(bytearray(json.dumps({**body, **fields}).encode()), CONTEXT)


def own_fields(dialect: str) -> set[str]:
    groups = SCHEMAS[dialect][0].groups
    return {field.encode_name for group in groups for field in msgspec.structs.fields(group)}


@pytest.mark.parametrize("dialect", SCHEMAS)
def test_a_name_that_cannot_change_an_answer_is_ignored(dialect: str) -> None:
    plain = body_of(dialect)
    names = IGNORED - own_fields(dialect)
    assert names >= {"client_metadata", "provider", "session_id", "cache_prompt", "anthropic_beta"}
    for name in names:
        for value in ODD:
            assert body_of(dialect, **{name: value}) == plain, name


@pytest.mark.parametrize("dialect", SCHEMAS)
def test_a_neutral_value_changes_nothing_and_others_are_refused_by_name(dialect: str) -> None:
    plain, schema = body_of(dialect), SCHEMAS[dialect][0]
    neutral = {name: each for name, each in schema.neutral.items() if name in NEUTRAL}
    for name in neutral.keys() - own_fields(dialect):
        harmless: list[Any] = [None, *neutral[name]]
        for value in harmless:
            assert body_of(dialect, **{name: value}) == plain, (name, value)
        for value in ODD:
            if value in neutral[name] or name in schema.ignored:
                continue
            with pytest.raises(InvalidRequest) as refused:
                body_of(dialect, **{name: value})
            assert refused.value.param == name and refused.value.message.startswith(f"{name}: ")
            assert refused.value.code in ("unsupported_parameter", "invalid_value"), name


@pytest.mark.parametrize("dialect", SCHEMAS)
def test_a_name_that_no_server_has_may_only_say_nothing(dialect: str) -> None:
    plain = body_of(dialect)
    nothing: list[Any] = [None, False, "", [], {}]
    for value in nothing:
        assert body_of(dialect, frobnicate=value) == plain
    for value in (0, 1, *ODD):
        with pytest.raises(InvalidRequest) as refused:
            body_of(dialect, frobnicate=value)
        assert (refused.value.param, refused.value.code) == ("frobnicate", "unknown_parameter")
    slip = max(own_fields(dialect), key=len)
    with pytest.raises(InvalidRequest) as refused:
        body_of(dialect, **{slip[:-1]: 7.25})
    assert refused.value.message.endswith(f"did you mean {slip}?")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("repeat_penalty", "use repetition_penalty"),
        ("extra_body", "send its fields in the body itself"),
        ("n_predict", "use max_tokens"),
    ],
)
def test_another_servers_word_is_refused_with_ours(name: str, advice: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        body_of("chat", **{name: {"top_k": 3}})
    assert refused.value.message == f"{name}: this parameter is not supported: {advice}"


# ---- and in parts of messages

NOTES = {name: {"any": ["value"]} for name in IgnoredFields.__struct_fields__}
CHANGING = re.findall(
    r"\w+",
    """
    maxPixels max_dimension maxDimension scale resize rotate rotation bbox roi mediaResolution
    media_resolution max_tiles max_soft_tokens mm_processor_kwargs images_kwargs quality dpi
    zoom crop_box tile_size patch_size num_frames_max imageDetail image_detail providerOptions
    provider_options experimental_providerMetadata providerMetadata extras thumbnail background
    resized_height size start_time end_time video_metadata content_hash_of
    """,
)
VIDEOS: dict[str, dict[str, Any]] = {
    "chat": {"type": "video_url", "video_url": {"url": "https://a.b/c.mp4"}},
    "messages": {"type": "video", "source": {"type": "url", "url": "https://a.b/c.mp4"}},
    "responses": {"type": "input_video", "video_url": "https://a.b/c.mp4"},
}
FILES: dict[str, dict[str, Any]] = {
    "chat": {"type": "file", "file": {"file_id": "file-1"}},
    "messages": {"type": "document", "source": {"type": "url", "url": "https://a.b/c.pdf"}},
    "responses": {"type": "input_file", "file_id": "file-1"},
}
PARTS = [(d, kind[d]) for kind in (IMAGES, VIDEOS, FILES) for d in READ]


def inner_of(part: dict[str, Any]) -> str | None:
    """The key of the object within a part that has its address."""
    return next((key for key, value in part.items() if isinstance(value, dict)), None)


def places(part: dict[str, Any], fields: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The part with fields of its own, and with fields within, each with their path."""
    inner = inner_of(part)
    found = [("", {**part, **fields})]
    return found if inner is None else [*found, (inner, {**part, inner: {**part[inner], **fields}})]


@pytest.mark.parametrize(("dialect", "part"), PARTS, ids=str)
def test_notes_of_a_part_are_ignored_and_other_names_are_refused(
    dialect: str, part: dict[str, Any]
) -> None:
    plain = said(dialect, part).prompt
    read = {"cache_control", "prompt_cache_breakpoint", "citations", "uuid", "title", "format"}
    read |= {"filename", "media_type", "source_type", "id"}
    for _, noted in places(part, {n: v for n, v in NOTES.items() if n not in read}):
        assert said(dialect, noted).prompt == plain
    for _, noted in places(part, {"citations": {"enabled": False}}):
        assert said(dialect, noted).prompt == plain
    for name in CHANGING:
        for _, nothing in places(part, {name: []}):
            assert said(dialect, nothing).prompt == plain, name
        for inner, changed in places(part, {name: {"x": 64}}):
            with pytest.raises(InvalidRequest) as refused:
                said(dialect, changed)
            param = refused.value.param or ""
            assert param.startswith(f"{CONTENT[dialect]}[0].content[0].{inner}"), param
            assert param.endswith(name) and refused.value.code == "unknown_parameter", param


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptV"
URL = "https://a.b/c.png"
HELD = Base64(PNG)
SHAPES: list[tuple[dict[str, Any], object]] = [
    ({"type": "image", "source_type": "base64", "data": PNG, "mime_type": "image/png"}, HELD),
    ({"type": "image", "source_type": "url", "url": URL}, URL),
    ({"type": "image", "source_type": "id", "id": "file-1"}, FileId("file-1")),
    ({"type": "image", "base64": PNG, "mime_type": "image/png", "id": "block-1"}, HELD),
    ({"type": "image", "base64": f"data:image/png;base64,{PNG}"}, f"data:image/png;base64,{PNG}"),
    ({"type": "image", "url": URL}, URL),
    ({"type": "image", "file_id": "file-1"}, FileId("file-1")),
    ({"type": "image", "data": PNG, "mimeType": "image/png"}, HELD),
    ({"type": "image", "source": {"type": "url", "url": URL}}, URL),
    ({"type": "image", "source": {"type": "file", "file_id": "file-1"}}, FileId("file-1")),
    (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
        HELD,
    ),
    ({"type": "image", "image": URL}, URL),
]


@pytest.mark.parametrize(
    ("part", "expected"), SHAPES, ids=lambda each: json.dumps(each, default=str)[:50]
)
def test_other_libraries_shapes_of_an_image_are_honoured_in_chats(
    part: dict[str, Any], expected: object
) -> None:
    chat = said("chat", {**part, "max_pixels": 4096}).prompt
    assert isinstance(chat, Chat)
    (source,) = chat.sources
    assert isinstance(source, ImageSource) and source.url == expected
    assert source.param == "messages[0].content[0]" and source.budget.max_pixels == 4096


@pytest.mark.parametrize("begin", ["", "sha256:", "sha256-"])
def test_sglangs_content_hash_names_an_image_or_goes_with_its_url(begin: str) -> None:
    digest, hash_ = f"sha256-{'ab' * 32}", f"{begin}{'AB' * 32}"
    named = said("chat", {"type": "image_url", "image_url": {"content_hash": hash_}}).prompt
    assert named == said("chat", {"type": "image_url", "image_url": {"digest": digest}}).prompt
    both = said("chat", {"type": "image_url", "image_url": {"url": URL, "content_hash": hash_}})
    assert both.prompt == said("chat", {"type": "image_url", "image_url": {"url": URL}}).prompt
    with pytest.raises(InvalidRequest) as refused:
        said("chat", {"type": "image_url", "image_url": {"content_hash": "ab"}})
    assert refused.value.param == "messages[0].content[0].image_url.content_hash"


@pytest.mark.parametrize("place", ["image", "document", "tool_result"])
def test_an_image_block_has_bounds_of_its_own(place: str) -> None:
    block: dict[str, Any] = {"type": "image", "source": {"type": "url", "url": URL}}
    block |= {"min_pixels": 1024, "max_pixels": 4096}
    if place == "document":
        block = {"type": "document", "source": {"type": "content", "content": [block]}}
    asked: list[dict[str, Any]] = [{"role": "user", "content": [block]}]
    if place == "tool_result":
        call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
        answer = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
        asked = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [answer]},
        ]
    body = {**BODY["messages"], "messages": asked}
    found = READ["messages"](bytearray(json.dumps(body).encode())).prompt
    assert isinstance(found, Chat)
    (source,) = found.sources
    assert isinstance(source, ImageSource)
    assert (source.budget.min_pixels, source.budget.max_pixels) == (1024, 4096)


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image"}, "messages[0].content[0].image"),
        ({"type": "image", "url": URL, "base64": PNG}, "messages[0].content[0]"),
        ({"type": "image", "image": URL, "source": {"type": "url", "url": URL}}, None),
        ({"type": "image", "source": {"type": "url"}}, "messages[0].content[0].source.url"),
        ({"type": "file"}, "messages[0].content[0].file"),
    ],
)
def test_an_image_in_no_shape_or_in_two_is_refused(part: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        said("chat", part)
    assert refused.value.param == (param or "messages[0].content[0]")


def test_ollamas_images_stand_before_the_text() -> None:
    message = {"role": "user", "content": "What is it?", "images": [PNG, URL, IMAGES["chat"]]}
    body = {"messages": [message], "mm_processor_kwargs": {"max_pixels": 4096}}
    chat = READ["chat"](bytearray(json.dumps(body).encode())).prompt
    assert isinstance(chat, Chat)
    *images, text = chat.messages[0].parts
    assert text == MessageText("What is it?", "messages[0].content")
    sources = [image for image in images if isinstance(image, ImageSource)]
    assert [source.url for source in sources] == [f"data:;base64,{PNG}", URL, URL]
    assert [source.param for source in sources] == [f"messages[0].images[{i}]" for i in range(3)]
    assert {source.budget.max_pixels for source in sources} == {4096}


def test_a_mark_behind_ollamas_images_stays_on_its_part() -> None:
    marked = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    chat = said("chat", marked, images=[URL, URL]).prompt
    assert isinstance(chat, Chat)
    (mark,) = chat.marks
    assert mark.part == 2 and chat.place_of(0, mark.part) == "messages[0].content[0]"


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant"}, ""),
        ({"role": "assistant", "content": None, "refusal": "I cannot."}, "I cannot."),
        ({"role": "assistant", "content": "So.", "refusal": None}, "So."),
        ({"role": "tool", "tool_call_id": "c", "content": None}, ""),
    ],
)
def test_a_turn_without_content_is_an_empty_one(message: dict[str, Any], content: str) -> None:
    body = bytearray(json.dumps({"messages": [*HI, message, *HI]}).encode())
    chat = READ["chat"](body).prompt
    assert isinstance(chat, Chat) and chat.messages[1].content == content


IMAGE = "iVBORw0KGgo" + "A" * (8 << 20) + "="


def with_image(dialect: str) -> bytearray:
    url = f"data:image/png;base64,{IMAGE}"
    part = {
        "chat": {"type": "image_url", "image_url": {"url": url}},
        "messages": {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": IMAGE},
        },
        "responses": {"type": "input_image", "image_url": url},
    }[dialect]
    name = "input" if dialect == "responses" else "messages"
    message = {"role": "user", "content": [part]}
    return bytearray(json.dumps({**BODY[dialect], name: [message]}).encode())


def peak(dialect: str) -> int:
    """Bytes held at most while an image of 8 MB is read, beside the body."""
    body = with_image(dialect)
    tracemalloc.start()
    try:
        ask = READ[dialect](body)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        del ask


@pytest.mark.parametrize("dialect", ["messages", "responses"])
def test_an_image_is_held_once_in_every_dialect(dialect: str) -> None:
    assert peak(dialect) < 1.3 * peak("chat")


@pytest.mark.parametrize("dialect", READ)
def test_no_body_is_written_as_json_again(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: Any, **__: Any) -> bytes:
        raise AssertionError("a body is written again")

    monkeypatch.setattr(msgspec.json, "encode", encode)
    READ[dialect](with_image(dialect))
