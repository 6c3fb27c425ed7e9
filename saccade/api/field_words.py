"""Descriptions of fields in `/openapi.json`.

The description of a field is the string below it in its class. `COMMON` has descriptions of field
names that several classes share. A `Description` has those that only one API needs. Types and
bounds come from the schemas.
"""

from __future__ import annotations

from saccade.core.types import (
    MAX_BIAS,
    MAX_BREAKPOINTS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MIN_TEMPERATURE,
)
from saccade.media.content import LOW_DETAIL_PIXELS

_REFUSED = "True is rejected. False is ignored."
TEMPLATE_HINT = "Ignored if the chat template does not support it. The trace reports this."
_MARK = f"Keep the prompt up to here in the caches. At most {MAX_BREAKPOINTS} marks count."
STOPS = (
    f"Stop strings. The answer ends before them. At most {MAX_STOPS} texts with at most "
    f"{MAX_STOP_CHARACTERS} characters each are allowed."
)
_WITHOUT = "Default: the value in the checkpoint's generation_config.json, else OpenAI's default."
ADDRESS = (
    "An http(s): URL, a data: URL, plain base64, or a file: URL below the server's allowed folder."
)

COMMON: dict[str, str] = {
    # ---- requests
    "messages": "The conversation, oldest message first.",
    "role": "Who speaks.",
    "name": "The name of the tool or function.",
    "model": "One of the names that GET /v1/models lists.",
    "chat_template_kwargs": "Variables for the model's chat template.",
    "mm_processor_kwargs": "Pixel limits for images that set none of their own.",
    "min_pixels": "Minimum pixels after resizing.",
    "max_pixels": "Maximum pixels after resizing.",
    "region": "The part to show: [x0, y0, x1, y1] in the upright image's own pixels, "
    "from its left and top. Of a PDF's page, in points.",
    "page": "The page of the PDF to show, counted from 1. Default: all pages.",
    "digest": "The hash of bytes that you have sent: blake3- or sha256- and 64 hexadecimal digits.",
    "metadata": "The client's notes. The server ignores them.",
    "service_tier": "priority, fast and ultrafast run before your other requests. flex runs after "
    "them. This does not affect other clients.",
    "no_repeat_ngram_size": "Length of n-grams that may appear only once. The prompt counts too.",
    # ---- messages and their parts
    "text": "The text.",
    "content": "A text, or a list of texts and images in the order that the model sees.",
    "image_url": "The image: " + ADDRESS[0].lower() + ADDRESS[1:],
    "url": ADDRESS,
    "file": "The uploaded or inline image.",
    "file_id": "The id that POST /v1/files returned for an image.",
    "file_data": "The image as a data: URL or base64.",
    "filename": "A name for people. The server ignores it.",
    "detail": f"low allows at most {LOW_DETAIL_PIXELS} pixels, unless max_pixels is set. Other "
    "values allow the model's maximum.",
    "uuid": "Your name for the image. While the image is cached, you may send the name alone.",
    "format": "The image type that the client assumes. The image's bytes decide.",
    "refusal": "The refusal in an earlier answer. This model reads it as text.",
    "tool_calls": "Tool calls, in order.",
    "reasoning_content": "The model's reasoning before its answer.",
    "source": "Where the content comes from.",
    "data": "The content in base64.",
    "media_type": "The content's type. For an image, its bytes decide.",
    # ---- sampling, and the end of the answer
    "temperature": f"Below {MIN_TEMPERATURE:g}, the server uses greedy sampling. {_WITHOUT}",
    "top_p": "Sample only from the likeliest tokens that together have this probability.",
    "logit_bias": f"Values by token id, from -{MAX_BIAS} to {MAX_BIAS}. Each is added to the "
    "token's logit.",
    "min_tokens": "Minimum tokens before an end token or a stop string may end the answer.",
    "stop": STOPS,
    "stop_token_ids": "Tokens that end the answer.",
    "ignore_eos": "The answer continues after the model's end token.",
    # ---- structured output
    "schema": "The JSON schema that the answer follows.",
    "verbosity": f"A hint to the template about the answer's length. {TEMPLATE_HINT}",
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
    "reasoning_effort": f"How much the model reasons. none turns reasoning off. {TEMPLATE_HINT}",
    "effort": f"A hint to the template about how much the model reasons. {TEMPLATE_HINT}",
    "enable_thinking": f"The model reasons before it answers. {TEMPLATE_HINT}",
    "enabled": f"The model reasons before it answers. {TEMPLATE_HINT}",
    "thinking": f"Whether the model reasons before it answers. {TEMPLATE_HINT}",
    "reasoning": f"How much the model reasons, in OpenRouter's terms. {TEMPLATE_HINT}",
    # ---- streaming
    "stream": "Stream the answer as server-sent events.",
    "stream_options": "Options for a stream. Requires stream.",
    "include_obfuscation": _REFUSED,
    "saccade": "Fields that only this server has.",
    # ---- caches
    "cache_salt": "Requests share cached prompts and images only if their salt is the same.",
    "cache_control": f"{_MARK} Anthropic's name for it. It lasts 5 minutes unless ttl is set.",
    "prompt_cache_breakpoint": f"{_MARK} OpenAI's name for it. It lasts 30 minutes unless ttl is "
    "set.",
    "prompt_cache_key": "A key for prompts with a common prefix. Only diagnostics use it, to "
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
    "index": "The index of this entry, from 0.",
    "message": "The model's answer.",
    "finish_reason": "stop: the answer ended. length: it reached its limit. tool_calls: it calls "
    "tools.",
    "usage": "The request's tokens.",
    "prompt_tokens": "Tokens in the prompt, including its images.",
    "total_tokens": "Tokens in the prompt and all answers.",
    "prompt_tokens_details": "The prompt's tokens, split by cost.",
    "cached_tokens": "Tokens that came from the prefix cache.",
    "cache_write_tokens": "Tokens that were computed and pinned by a cache breakpoint.",
    "image_tokens": "Image tokens.",
    "input_tokens": "Tokens in the prompt.",
    "output_tokens": "Tokens in the answer.",
    "logprobs": "Log-probabilities of the answer's tokens, if the request asks for them.",
    "top_logprobs": "How many of the likeliest tokens to list for each token. Requires logprobs.",
    "prompt_logprobs": "Score the prompt's tokens and list this many of the likeliest for each.",
    "max_model_len": "Maximum tokens for a prompt and its answer together.",
    "error": "What went wrong.",
    # ---- videos
    "video_url": "The video, as a URL or an object with one.",
    "fps": "Frames to take per second. Default: the model's own rate.",
    "num_frames": "Total frames to take, or -1 for all. Use either this or fps.",
    "max_frames": "Maximum frames to take.",
    "total_pixels": "Maximum pixels in all frames together, after resizing.",
    "frames_indices": "The index of each frame in its source video, from 0.",
    "media_io_kwargs": "How to read videos, in vLLM's terms.",
    "code": "A short name of the error for programs, if it has one.",
    "param": "The field that caused the error, if any.",
    # ---- shared by several APIs
    "value": "The value.",
}
