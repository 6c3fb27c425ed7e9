"""The vendors' own SDKs, unchanged: openai and anthropic.

Each function tries one feature and returns its observations. An exception is a failure.
"""

from __future__ import annotations

import io
import json
from typing import Any

from asked import (
    AGAIN,
    ASK,
    BASE64,
    IMAGE_PART,
    LOOK_TOOL,
    MAX_FORMED_TOKENS,
    MAX_TOKENS,
    PNG,
    QUESTION,
    URL,
    WAIT_TOOL,
    Shape,
    Target,
    check_call,
)


def openai_client(target: Target) -> Any:
    import openai

    return openai.OpenAI(base_url=target.v1, api_key="none")


def openai_chat(target: Target) -> str:
    """Chat for three turns, sending the SDK's own answer objects back."""
    client, messages = openai_client(target), [ASK]
    for _ in range(3):
        answer = client.chat.completions.create(
            model=target.model, messages=messages, max_tokens=MAX_TOKENS
        )
        messages += [answer.choices[0].message, AGAIN]
    return "three turns"


def openai_stream(target: Target) -> str:
    """Use `stream=True` with usage, and `chat.completions.stream()`, and send its message back."""
    from openai import LengthFinishReasonError

    client = openai_client(target)
    asked = {"model": target.model, "max_tokens": MAX_TOKENS}
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(messages=[ASK], stream=True, stream_options=options, **asked)
    )
    assert chunks[-1].usage.completion_tokens > 0
    with client.chat.completions.stream(messages=[ASK], **asked) as stream:
        try:
            message = stream.get_final_completion().choices[0].message
        except LengthFinishReasonError as error:  # raised by the SDK if max_tokens was reached
            message = error.completion.choices[0].message
    client.chat.completions.create(messages=[ASK, message, AGAIN], **asked)
    return "usage, stream()"


def openai_structured(target: Target) -> str:
    """Use `parse`, also as a stream."""
    client = openai_client(target)
    asked = {"model": target.model, "messages": [ASK], "max_tokens": MAX_FORMED_TOKENS}
    answer = client.chat.completions.parse(response_format=Shape, **asked)
    assert isinstance(answer.choices[0].message.parsed, Shape)
    with client.chat.completions.stream(response_format=Shape, **asked) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Shape)
    return "parse, stream"


def openai_tools(target: Target) -> str:
    """Require any tool and a named one, also as a stream, and send back a picture as the result."""
    client = openai_client(target)
    asked = {
        "model": target.model,
        "tools": [LOOK_TOOL, WAIT_TOOL],
        "max_tokens": MAX_FORMED_TOKENS,
    }
    ask = client.chat.completions.create
    assert ask(messages=[ASK], tool_choice="required", **asked).choices[0].message.tool_calls
    named = {"type": "function", "function": {"name": "look"}}
    message = ask(messages=[ASK], tool_choice=named, **asked).choices[0].message
    (call,) = message.tool_calls
    check_call(call.function.name, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": [IMAGE_PART]}
    ask(messages=[ASK, message, result], tool_choice="none", **asked | {"max_tokens": MAX_TOKENS})
    pieces = [
        piece
        for chunk in ask(messages=[ASK], tool_choice=named, stream=True, **asked)
        for choice in chunk.choices
        for piece in choice.delta.tool_calls or ()
    ]
    assert pieces[0].function.name == "look" and pieces[0].id
    check_call("look", "".join(piece.function.arguments or "" for piece in pieces))
    return "required, named, streamed, result with a picture"


def openai_responses(target: Target) -> str:
    """Use a picture, two turns by id, a stream, `retrieve`, `parse` and a tool."""
    client, model = openai_client(target), target.model
    parts = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": QUESTION}]
    asked: Any = [{"role": "user", "content": parts}]
    first = client.responses.create(model=model, input=asked, max_output_tokens=MAX_TOKENS)
    with client.responses.stream(
        model=model,
        input=AGAIN["content"],
        previous_response_id=first.id,
        max_output_tokens=MAX_TOKENS,
    ) as stream:
        last = list(stream)[-1]
    assert last.type in ("response.completed", "response.incomplete"), last.type
    kept = client.responses.retrieve(last.response.id)
    # The stream helper's items have different classes, which never equal the retrieved ones.
    assert kept.output_text == last.response.output_text
    assert [item.id for item in kept.output] == [item.id for item in last.response.output]
    formed = {"model": model, "input": asked, "max_output_tokens": MAX_FORMED_TOKENS}
    parsed = client.responses.parse(text_format=Shape, **formed)
    assert isinstance(parsed.output_parsed, Shape)
    tool = {"type": "function", "strict": True, **LOOK_TOOL["function"]}
    called = client.responses.create(tools=[tool], tool_choice="required", **formed)
    (call,) = (item for item in called.output if item.type == "function_call")
    check_call(call.name, call.arguments)
    client.responses.delete(last.response.id)
    return "two turns by id, streamed, retrieved, parse, a tool"


def openai_files(target: Target) -> str:
    """Upload a picture, and refer to it by its id."""
    client = openai_client(target)
    kept = client.files.create(file=("red.png", io.BytesIO(PNG)), purpose="vision")
    parts = [{"type": "file", "file": {"file_id": kept.id}}, {"type": "text", "text": QUESTION}]
    client.chat.completions.create(
        model=target.model,
        messages=[{"role": "user", "content": parts}],
        max_tokens=MAX_TOKENS,
    )
    assert client.files.content(kept.id).read() == PNG
    assert client.files.delete(kept.id).deleted
    return "upload, ask by id, read back, delete"


# ---- anthropic

SEEN: Any = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": BASE64},
}
ASK_CLAUDE: Any = {"role": "user", "content": [SEEN, {"type": "text", "text": QUESTION}]}
LOOK_CLAUDE = {
    "name": "look",
    "description": LOOK_TOOL["function"]["description"],
    "input_schema": LOOK_TOOL["function"]["parameters"],
}


def anthropic_client(target: Target) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=target.base, api_key="none")


def anthropic_messages(target: Target) -> str:
    """Chat for three turns, sending the answers' own blocks back, and count tokens beforehand."""
    client, messages = anthropic_client(target), [ASK_CLAUDE]
    for _ in range(3):
        count = client.messages.count_tokens(model=target.model, messages=messages).input_tokens
        answer = client.messages.create(
            model=target.model, messages=messages, max_tokens=MAX_TOKENS
        )
        used = answer.usage
        assert count == sum(
            (
                used.input_tokens,
                used.cache_read_input_tokens or 0,
                used.cache_creation_input_tokens or 0,
            )
        )
        messages += [{"role": "assistant", "content": answer.content}, AGAIN]
    return "three turns, count_tokens"


def anthropic_stream(target: Target) -> str:
    client = anthropic_client(target)
    with client.messages.stream(
        model=target.model, messages=[ASK_CLAUDE], max_tokens=MAX_TOKENS
    ) as stream:
        text = "".join(stream.text_stream)
        assert text == "".join(block.text for block in stream.get_final_message().content)
    return "stream()"


def anthropic_structured(target: Target) -> str:
    answer = anthropic_client(target).messages.parse(
        model=target.model,
        messages=[ASK_CLAUDE],
        max_tokens=MAX_FORMED_TOKENS,
        output_format=Shape,
    )
    assert isinstance(answer.parsed_output, Shape)
    return "parse"


def anthropic_tools(target: Target) -> str:
    """Require any tool and a named one, also as a stream, and send back a picture as the result."""
    client = anthropic_client(target)
    asked = {"model": target.model, "tools": [LOOK_CLAUDE], "max_tokens": MAX_FORMED_TOKENS}
    ask = client.messages.create
    answer = ask(messages=[ASK_CLAUDE], tool_choice={"type": "any"}, **asked)
    named = {"type": "tool", "name": "look"}
    with client.messages.stream(messages=[ASK_CLAUDE], tool_choice=named, **asked) as stream:
        pieces = [e.partial_json for e in stream if e.type == "input_json"]
        final = stream.get_final_message()
    check_call("look", json.loads("".join(pieces)))
    for each in (answer, final):
        (call,) = (block for block in each.content if block.type == "tool_use")
        check_call(call.name, call.input)
        assert each.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [SEEN]}
    turns = [
        ASK_CLAUDE,
        {"role": "assistant", "content": final.content},
        {"role": "user", "content": [result]},
    ]
    ask(messages=turns, **asked | {"max_tokens": MAX_TOKENS})
    return "any, named, streamed, result with a picture"


def anthropic_files(target: Target) -> str:
    client = anthropic_client(target)
    kept = client.beta.files.upload(file=("red.png", io.BytesIO(PNG), "image/png"))
    source = {"type": "file", "file_id": kept.id}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    client.beta.messages.create(
        model=target.model,
        messages=[{"role": "user", "content": content}],
        max_tokens=MAX_TOKENS,
        betas=["files-api-2025-04-14"],
    )
    client.beta.files.delete(kept.id)
    return "beta.files: upload, ask by id, delete"
