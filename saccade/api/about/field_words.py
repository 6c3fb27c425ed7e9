"""The sentences of fields in `/openapi.json`, for people who read it and for generated clients.

A field's sentence stands below it in its class. Owns those of names that several classes have, in
`COMMON`, and of schemas that no class describes, in `OWN`. Types and bounds are the schemas' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import inspect

from saccade.core.field_docs import field_docs
from saccade.core.types import (
    LEAST_TEMPERATURE,
    MAX_BIAS,
    MAX_BREAKPOINTS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
)
from saccade.media.content import LOW_DETAIL_PIXELS

_REFUSED = "True is refused. False is ignored."
_PASSED_OVER = "Ignored if the chat template does not support it. The trace reports this."
_MARK = f"Keep the prompt up to here in the caches. At most {MAX_BREAKPOINTS} marks count."
_STOPS = (
    f"Texts that end the answer and stay hidden. At most {MAX_STOPS} texts with at most "
    f"{MAX_STOP_CHARACTERS} characters each are allowed."
)
_WITHOUT = "Default: the value in the checkpoint's generation_config.json, else OpenAI's default."
_URL = (
    "An http(s): URL, a data: URL, plain base64, or a file: URL below the server's allowed folder."
)

COMMON: dict[str, str] = {
    # ---- what is asked
    "messages": "The conversation, oldest message first.",
    "role": "Who speaks.",
    "name": "The name of the tool or function.",
    "lora_name": "The adapter's name. Requests choose it in the field model.",
    "model_path": "The server's folder with the checkpoint.",
    "model": "One of the names that GET /v1/models lists.",
    "chat_template_kwargs": "Variables for the model's chat template.",
    "mm_processor_kwargs": "Pixel limits for images that set none of their own.",
    "min_pixels": "Minimum pixels after resizing.",
    "max_pixels": "Maximum pixels after resizing.",
    "region": "The part to show: [x0, y0, x1, y1] in the upright image's own pixels, "
    "from its left and top. Of a PDF's page, in points.",
    "page": "The PDF's page to show, counted from 1, in place of all.",
    "digest": "The name of bytes that you have sent: blake3- or sha256- and 64 hexadecimal digits.",
    "metadata": "The client's notes. The server ignores them.",
    "service_tier": "priority, fast and ultrafast run before your other requests. flex runs after "
    "them. Other clients keep their turns.",
    "no_repeat_ngram_size": "Length of n-grams that may appear only once. The prompt counts too.",
    # ---- messages and their parts
    "text": "The text.",
    "content": "A text, or a list of texts and images in the order that the model sees.",
    "image_url": "The image: " + _URL[0].lower() + _URL[1:],
    "url": _URL,
    "file": "The uploaded or inline image.",
    "file_id": "The id that POST /v1/files returned for an image.",
    "file_data": "The image as a data: URL or base64.",
    "file_url": _URL,
    "filename": "A name for people. The server ignores it.",
    "detail": f"low allows at most {LOW_DETAIL_PIXELS} pixels, unless max_pixels is set. Other "
    "values allow the model's maximum.",
    "uuid": "Your name for the image. While the image is cached, you may send the name alone.",
    "format": "The image type that the client assumes. The image's bytes decide.",
    "refusal": "The text with which an earlier answer refused. This model reads it as text.",
    "tool_calls": "Tool calls, in order.",
    "reasoning_content": "The model's reasoning before its answer.",
    "source": "Where the content comes from.",
    "data": "The content in base64.",
    "media_type": "The content's type. For an image, its bytes decide.",
    "call_id": "Links a function's output to its call.",
    # ---- how tokens are drawn, and when the answer ends
    "temperature": f"Below {LEAST_TEMPERATURE:g}, the server takes the likeliest token. {_WITHOUT}",
    "top_p": "Sample only from the likeliest tokens that together have this probability.",
    "logit_bias": f"Values by token id, from -{MAX_BIAS} to {MAX_BIAS}. Each is added to the "
    "token's logit.",
    "min_tokens": "Minimum tokens before an end token or a stop string may end the answer.",
    "stop": _STOPS,
    "stop_sequences": _STOPS,
    "stop_token_ids": "Tokens that end the answer.",
    "ignore_eos": "The answer continues after the model's end token.",
    # ---- what the answer must be
    "schema": "The JSON schema that the answer follows.",
    "verbosity": f"A hint to the template about the answer's length. {_PASSED_OVER}",
    # ---- tools
    "tools": "Functions that the model may call. Your program runs them.",
    "tool_choice": "Whether the model may call a tool, must call one, or must call one listed "
    "here.",
    "parallel_tool_calls": "If false, an answer has at most one call.",
    "function": "The function and its arguments.",
    "arguments": "The function's arguments, as JSON text.",
    "description": "Tells the model what this is and when to use it.",
    "strict": "If true, a grammar makes the output follow the schema.",
    # ---- reasoning
    "reasoning_effort": f"How much the model reasons. none turns reasoning off. {_PASSED_OVER}",
    "effort": f"A hint to the template about how much the model reasons. {_PASSED_OVER}",
    "enable_thinking": f"The model reasons before it answers. {_PASSED_OVER}",
    "enabled": f"The model reasons before it answers. {_PASSED_OVER}",
    "thinking": f"Whether the model reasons before it answers. {_PASSED_OVER}",
    "reasoning": f"How much the model reasons, in OpenRouter's terms. {_PASSED_OVER}",
    "trigger": "Tokens of the prompt, or tool uses, beyond which the edit takes effect.",
    "keep": "How many of the newest tool uses stay.",
    "clear_at_least": "Prompt tokens that the edit must save to take effect.",
    "exclude_tools": "Tools whose results stay.",
    "clear_tool_inputs": "Whether the calls' arguments go too: of all tools, or of those listed.",
    "truncation": "auto: the oldest messages go until the prompt fits the context. disabled: a "
    "prompt that is too long is refused.",
    # ---- how the answer comes
    "stream": "The answer arrives piece by piece, as server-sent events.",
    "stream_options": "Options for a stream. They require stream.",
    "include_obfuscation": _REFUSED,
    "saccade": "Fields that only this server has.",
    # ---- caches
    "cache_salt": "Requests share cached prompts and images only if their salt is the same.",
    "cache_control": f"{_MARK} Anthropic's name for it. It lasts 5 minutes unless ttl is set.",
    "prompt_cache_breakpoint": f"{_MARK} OpenAI's name for it. It lasts 30 minutes unless ttl is "
    "set.",
    "prompt_cache_key": "A name for prompts that share a beginning. Only diagnostics use it, to "
    "find prompts to compare.",
    "prompt_cache_retention": "How long to keep the whole prompt. in_memory means 5 minutes and "
    "24h a day.",
    "prompt_cache_options": "Whether to keep the whole prompt or the part before breakpoints, and "
    "how long.",
    "prompt_cache_diagnostics": "The answer explains why the cache held less of the prompt than "
    "it could.",
    "ttl": "How long to keep it, from 1s to 24h, such as 30s, 5m or 1h. A hit restarts the time.",
    "diagnostics": "Why the cache held less of the prompt than it could, if the request asks.",
    # ---- answers
    "id": "The id of this object.",
    "object": "The kind of this object.",
    "type": "The kind of this object.",
    "created": "Creation time, in seconds since 1970.",
    "created_at": "Creation time, in seconds since 1970.",
    "choices": "The answers, n for each prompt.",
    "index": "The number of this entry, from 0.",
    "message": "The model's answer.",
    "finish_reason": "stop: the answer ended. length: it reached its limit. tool_calls: it calls "
    "tools.",
    "stop_reason": "Why the answer ended.",
    "stop_sequence": "The stop sequence that ended the answer, if any.",
    "output": "The model's answer as items: reasoning, text and calls.",
    "status": "The current state.",
    "usage": "The request's tokens.",
    "prompt_tokens": "Tokens in the prompt, including its images.",
    "total_tokens": "Tokens in the prompt and all answers.",
    "prompt_tokens_details": "The prompt's tokens, split by cost.",
    "cached_tokens": "Tokens that came from the prefix cache.",
    "cache_write_tokens": "Tokens that were computed and that a breakpoint now keeps.",
    "image_tokens": "Tokens that stand for images.",
    "input_tokens": "Tokens in the prompt.",
    "output_tokens": "Tokens in the answer.",
    "cache_creation_input_tokens": "Tokens that were computed and that a mark now keeps.",
    "cache_read_input_tokens": "Tokens that came from the prefix cache.",
    "cache_read_input_tokens_by_tier": "Where the cached tokens were: device, host, disk. Absent "
    "if all were on the device.",
    "prepared_input_tokens": "Tokens of those from the cache that were computed before the request "
    "came. Absent if 0.",
    "prepared_in_vain_input_tokens": "Tokens that were computed before the request came, and were "
    "not used. Absent if 0.",
    "logprobs": "Log-probabilities of the answer's tokens, if the request asks for them.",
    "top_logprobs": "How many of the likeliest tokens to list for each token. Requires logprobs.",
    "prompt_logprobs": "Score the prompt's tokens and list this many of the likeliest for each.",
    "max_model_len": "Maximum tokens for a prompt and its answer together.",
    "error": "What went wrong.",
    # ---- videos
    "video_url": "The video, as a URL or an object with one.",
    "fps": "Frames to take per second. Default: the model's own rate.",
    "num_frames": "Total frames to take. Use either this or fps.",
    "max_frames": "Maximum frames to take.",
    "total_pixels": "Maximum pixels in all frames together, after resizing.",
    "frames_indices": "Each frame's number in its source video, from 0.",
    "media_io_kwargs": "How to read videos, in vLLM's terms.",
    "code": "A short name of the error for programs, if it has one.",
    "param": "The field at fault, if any.",
    "request_id": "The request's name in the server's log.",
    # ---- batches
    "expires_at": "When it ends, in seconds since 1970.",
    **{
        f"{name}_at": f"When it was {name.replace('_', ' ')}, in seconds since 1970."
        for name in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelled")
    },
    "cancelling_at": "When cancellation was requested, in seconds since 1970.",
    # ---- what is read of prompts
    "texts": "The texts to embed.",
    "meta": "Counts for Cohere's clients.",
    "documents": "What to rank: texts, or objects with text or content.",
    "label": "The level's name.",
    "confidence": "The likeliest value's probability.",
    "probability": "How likely this answer is among the possible answers.",
    "probabilities": "How likely each answer is.",
    "value": "The value.",
    # ---- the server
    "purpose": "vision for images, or another purpose from OpenAI's API.",
}

OWN: dict[tuple[str, str], str] = {
    ("ChatCompletion", "prompt_logprobs"): "Each prompt token and the likeliest tokens at its "
    "place, by token id. The first is null.",
    ("Message", "content"): "The answer as blocks: thinking, text and calls.",
    ("ResponseForm", "reasoning"): f"How much the model reasons. {_PASSED_OVER}",
    ("Response", "status"): "in_progress, completed, incomplete, cancelled or failed.",
    ("MessageErrorBody", "type"): "The error's kind, under Anthropic's names.",
    ("MessageErrorBody", "message"): "What is wrong, the limit, and what to do.",
    ("FileUpload", "file"): "The file's bytes.",
    ("FileUpload", "warm"): "How you will ask about the image, as JSON. Use the same "
    "`min_pixels`, `max_pixels`, `detail` and `cache_salt` as in your question. `prefix` holds the "
    "messages before the image. The server encodes and prefills it in idle time.",
}


def add_words(components: dict[str, Any], kinds: dict[str, type]) -> None:
    """Describe each field, by the words below it in its class, or by those of its name.

    `kinds`: the classes of schemas, by the schemas' names. Schemas share the objects that fields
    are written in, so each gets a new one.
    """
    for schema, shape in components.items():
        fields = shape.get("properties", {})
        below = field_docs(kinds[schema]) if schema in kinds else {}
        for name, field in fields.items():
            if "description" not in field:
                words = OWN.get((schema, name)) or below.get(name) or COMMON[name]
                fields[name] = {**field, "description": words}


def classes_in(types: Sequence[type]) -> dict[str, type]:
    """Return the classes that `types` are made of, by name."""
    found: dict[str, type] = {}
    ahead = [*inspect.multi_type_info(types)]
    while ahead:
        match ahead.pop():
            case inspect.StructType(cls=kind, fields=fields) if kind.__name__ not in found:
                found[kind.__name__] = kind
                ahead += [field.type for field in fields]
            case inspect.UnionType(types=inner) | inspect.TupleType(item_types=inner):
                ahead += inner
            case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
                ahead.append(item)
            case inspect.DictType(value_type=item) | inspect.Metadata(type=item):
                ahead.append(item)
    return found
