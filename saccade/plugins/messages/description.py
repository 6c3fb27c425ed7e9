"""Describes the Messages API in `/openapi.json`."""

from __future__ import annotations

from saccade.api.description import ApiOperation, Components, Description, record, reference
from saccade.api.field_words import STOPS
from saccade.api.operations import PIXELS, QUESTION
from saccade.plugins.messages import fields, toolsets

_IMAGE = {"type": "base64", "media_type": "image/png", "data": PIXELS}
_MESSAGES = [
    {
        "role": "user",
        "content": [{"type": "image", "source": _IMAGE}, {"type": "text", "text": QUESTION}],
    }
]
_EXAMPLE = {"model": "", "messages": _MESSAGES}


def _complete(components: Components) -> None:
    """Add the schemas of answers. A stream's events add up to a message."""
    number, text = {"type": "integer"}, {"type": "string"}
    tokens = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    message = {
        **dict.fromkeys(("id", "type", "role", "model"), text),
        "content": {"type": "array", "items": reference("MessageBlock")},
        "stop_reason": text,
        "stop_sequence": {"type": ["string", "null"]},
        "usage": reference("MessageUsage"),
    }
    error = {"type": text, "error": reference("MessageErrorBody")}
    usage = record(dict.fromkeys((*tokens, "output_tokens"), number))
    by_tier = {"type": "object", "additionalProperties": number}
    usage["properties"]["cache_read_input_tokens_by_tier"] = by_tier
    for name in ("prepared_input_tokens", "prepared_in_vain_input_tokens"):
        usage["properties"][name] = number
    components |= {
        "Message": record(message),
        "MessageBlock": record({"type": text}),
        "MessageUsage": usage,
        "MessageTokens": record({"input_tokens": number}),
        "MessageError": record({**error, "request_id": {"type": ["string", "null"]}}),
        "MessageErrorBody": record({"type": text, "message": text}),
    }


OPERATIONS = Description(
    (
        ApiOperation(
            "post",
            "/v1/messages",
            "Answer a chat with images, as in Anthropic's API",
            "MessagesRequest",
            "Message",
            {**_EXAMPLE, "max_tokens": 32},
            streams=True,
            error="MessageError",
        ),
        ApiOperation(
            "post",
            "/v1/messages/count_tokens",
            "Count the tokens of a message",
            "CountTokensRequest",
            "MessageTokens",
            _EXAMPLE,
            error="MessageError",
        ),
    ),
    bodies={
        "MessagesRequest": (fields.MESSAGES,),
        "CountTokensRequest": (fields.COUNT_TOKENS,),
    },
    types=(
        fields.InputMessage,
        fields.ToolDefinition,
        toolsets.ComputerDefinition,
        toolsets.ToolsetDefinition,
    ),
    items={
        ("Inquiry", "messages"): (fields.InputMessage,),
        ("Inquiry", "tools"): (
            fields.ToolDefinition,
            toolsets.ComputerDefinition,
            toolsets.ToolsetDefinition,
        ),
    },
    complete=_complete,
    words={
        "stop_sequences": STOPS,
        "trigger": "Tokens of the prompt, or tool uses, beyond which the edit takes effect.",
        "keep": "Number of the newest tool uses to keep.",
        "clear_at_least": "Prompt tokens that the edit must save to take effect.",
        "exclude_tools": "Tools whose results are kept.",
        "clear_tool_inputs": "Whether the arguments of calls are cleared too: of all tools, or of "
        "those listed.",
        "stop_reason": "Why the answer ended.",
        "stop_sequence": "The stop sequence that ended the answer, if any.",
        "cache_creation_input_tokens": "Tokens that were computed and pinned by a cache "
        "breakpoint.",
        "cache_read_input_tokens": "Tokens that came from the prefix cache.",
        "cache_read_input_tokens_by_tier": "Where the cached tokens were: device, host, disk. "
        "Absent if all were on the device.",
        "prepared_input_tokens": "Cached tokens that were prefilled before the request arrived. "
        "Absent if 0.",
        "prepared_in_vain_input_tokens": "Tokens that were prefilled before the request arrived "
        "and not used. Absent if 0.",
        "request_id": "The request's name in the server's log.",
    },
    own_words={
        ("Message", "content"): "The answer as blocks: thinking, text and calls.",
        ("MessageErrorBody", "type"): "The error's kind, under Anthropic's names.",
        ("MessageErrorBody", "message"): "What is wrong, the limit, and what to do.",
    },
)
