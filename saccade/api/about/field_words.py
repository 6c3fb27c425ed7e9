"""A sentence for each field in `/openapi.json`, for people who read it and for generated clients.

Owns the sentences: `COMMON` by a field's name, and `OWN` where one schema means something else by
it than others. Types and bounds are the schemas' own. Knows nothing of how the document is made.
"""

from __future__ import annotations

from typing import Any

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
    "input": "A text, or the items of a conversation, oldest first.",
    "instructions": "A system prompt, placed before the input.",
    "system": "The system prompt.",
    "prompt": "One prompt or several, each as text or as token ids.",
    "previous_response_id": "A stored response that the input continues.",
    "lora_name": "The adapter's name. Requests choose it in the field model.",
    "lora_path": "The server's folder with adapter_config.json and adapter_model.safetensors.",
    "model_path": "The server's folder with the checkpoint.",
    "load_format": "auto or safetensors. The server reads only safetensors.",
    "abort_all_requests": "If true, running requests end with an error. Else they finish first.",
    "keep_pause": "New requests wait after the change until a client resumes the server.",
    "tags": "Which memory to act on: weights, kv_cache. Default: all.",
    "lora_int_id": "Accepted from vLLM's clients and ignored.",
    "parent": "For an adapter, the model that it adds to.",
    "model": "One of the names that GET /v1/models lists.",
    "add_generation_prompt": "If false, the prompt ends after the last message.",
    "continue_final_message": "The answer continues the last message instead of starting a new "
    "one.",
    "add_special_tokens": "Add the tokens that the tokenizer puts around a text. Default: false "
    "for chats.",
    "chat_template_kwargs": "Variables for the model's chat template.",
    "images_kwargs": "The same options for images alone.",
    "shortest_edge": "min_pixels, under the name that Qwen's processors use.",
    "longest_edge": "max_pixels, under the name that Qwen's processors use.",
    "mm_processor_kwargs": "Pixel limits for images that set none of their own.",
    "min_pixels": "Minimum pixels after resizing.",
    "max_pixels": "Maximum pixels after resizing.",
    "echo": "The answer begins with the prompt.",
    "metadata": "The client's notes. The server ignores them.",
    "user": "The end user. The server ignores it.",
    "user_id": "The end user. The server ignores it.",
    "safety_identifier": "The end user. The server ignores it.",
    "service_tier": "priority, fast and ultrafast run before your other requests. flex runs after "
    "them. Other clients keep their turns.",
    "priority": "Among your waiting requests, lower numbers run first.",
    "allowed_token_ids": "The answer uses only these tokens.",
    "bad_words": "Words that are blocked at the beginning of the answer and after a space.",
    "no_repeat_ngram_size": "Length of n-grams that may appear only once. The prompt counts too.",
    "ngram_size": "Length of n-grams that may appear only once in the answer's last window_size "
    "tokens.",
    "window_size": "How many last tokens of the answer ngram_size checks. Default: 100.",
    "whitelist_token_ids": "Tokens that may complete a repeated n-gram.",
    "vllm_xargs": "The same repetition limits, under the names that DeepSeek-OCR's users know.",
    "thinking_token_budget": "Maximum reasoning tokens. After them, the answer proper begins.",
    "include_stop_str_in_output": "The text ends with the stop string or token that ended it.",
    "skip_special_tokens": "If false, the text shows special tokens by name.",
    "spaces_between_special_tokens": "Accepted. The server adds no spaces between tokens.",
    "truncate_prompt_tokens": "The server reads only this many of the prompt's last tokens. -1 "
    "keeps as many as fit. An image is never cut.",
    # ---- messages and their parts
    "text": "The text.",
    "content": "A text, or a list of texts and images in the order that the model sees.",
    "image": "A URL of the image, as in image_url.",
    "image_url": "The image: " + _URL[0].lower() + _URL[1:],
    "url": _URL,
    "image_file": "The uploaded or inline image.",
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
    "tool_call_id": "The call that this message answers.",
    "reasoning_content": "The model's reasoning before its answer.",
    "source": "Where the content comes from.",
    "transformations": "How the server treats an image that is too large.",
    "oversized_image": "downsize. The server always downsizes images that are too large for the "
    "model.",
    "data": "The content in base64.",
    "base64": "The content in base64, under LangChain's name.",
    "source_type": "LangChain's source type: url, base64, text or id. With id, the field id names "
    "a file.",
    "media_type": "The content's type. For an image, its bytes decide.",
    "title": "A title, placed before the document's text.",
    "context": "Context for the document, placed before its text.",
    "citations": "Must be disabled, because answers never cite their sources.",
    "signature": "Another server's proof. This server ignores it.",
    "tool_use_id": "The call that this block answers.",
    "is_error": "The tool failed. The model reads this before the content.",
    "summary": "Summaries of the reasoning, used if content is missing.",
    "annotations": "Accepted and ignored.",
    "call_id": "Links a function's output to its call.",
    # ---- how tokens are drawn, and when the answer ends
    "temperature": f"Below {LEAST_TEMPERATURE:g}, the server takes the likeliest token. {_WITHOUT}",
    "top_p": "Sample only from the likeliest tokens that together have this probability.",
    "top_k": "Sample only from this many of the likeliest tokens. 0 and -1 remove the limit.",
    "min_p": "Minimum probability for sampling, as a share of the likeliest token's.",
    "repetition_penalty": "Values above 1 make tokens of the prompt and the answer less likely.",
    "presence_penalty": "Subtracted from the logit of each token already in the answer.",
    "frequency_penalty": "Subtracted from a token's logit for each time it is in the answer.",
    "seed": "Seeds every random draw. The same seed and request give the same answer.",
    "logit_bias": f"Values by token id, from -{MAX_BIAS} to {MAX_BIAS}. Each is added to the "
    "token's logit.",
    "max_tokens": "Maximum tokens of an answer. With -1, only the context limits it. With 0, the "
    "server computes and caches the prompt without an answer.",
    "max_completion_tokens": "max_tokens under its newer name. With -1, only the context limits "
    "the answer.",
    "max_output_tokens": "Maximum tokens of the answer.",
    "min_tokens": "Minimum tokens before an end token or a stop string may end the answer.",
    "stop": _STOPS,
    "stop_sequences": _STOPS,
    "stop_token_ids": "Tokens that end the answer.",
    "prediction": "Text that the answer will mostly repeat. It saves time and keeps the answer the "
    "same.",
    "ignore_eos": "The answer continues after the model's end token.",
    "n": "Number of answers to each prompt. The server computes the prompt once.",
    # ---- what the answer must be
    "response_format": "The answer's form: text, json_object, or json_schema and its schema.",
    "structured_outputs": "The answer's form in vLLM's terms: json, regex, choice, grammar or "
    "json_object.",
    "guided_json": "The answer is JSON that follows this schema.",
    "guided_json_object": "If true, the answer is any JSON object.",
    "guided_regex": "The answer matches this regular expression.",
    "guided_choice": "The answer is one of these texts.",
    "guided_grammar": "The answer follows this Lark grammar.",
    "guided_whitespace_pattern": "A regular expression for white space within guided_json.",
    "output_config": "The answer's form.",
    "output_format": "The answer's form. output_config under its older name.",
    "schema": "The JSON schema that the answer follows.",
    "verbosity": f"A hint to the template about the answer's length. {_PASSED_OVER}",
    # ---- tools
    "tools": "Functions that the model may call. Your program runs them.",
    "tool_choice": "Whether the model may call a tool, must call one, or must call one listed "
    "here.",
    "parallel_tool_calls": "If false, an answer has at most one call.",
    "disable_parallel_tool_use": "If true, an answer has at most one call.",
    "max_tool_calls": "Accepted and returned. It limits tools that a server runs, and this server "
    "runs none.",
    "function": "The function and its arguments.",
    "arguments": "The function's arguments, as JSON text.",
    "input_schema": "The JSON schema for the tool's input.",
    "description": "Tells the model what this is and when to use it.",
    "strict": "If true, a grammar makes the output follow the schema.",
    "eager_input_streaming": "Accepted and ignored.",
    "input_examples": "Accepted and hidden from the model.",
    "allowed_callers": "Must be direct. The model itself calls the tool.",
    "defer_loading": "Must be false. The model sees every tool.",
    # ---- reasoning
    "reasoning_effort": f"How much the model reasons. none turns reasoning off. {_PASSED_OVER}",
    "effort": f"A hint to the template about how much the model reasons. {_PASSED_OVER}",
    "enable_thinking": f"The model reasons before it answers. {_PASSED_OVER}",
    "enabled": f"The model reasons before it answers. {_PASSED_OVER}",
    "thinking": f"Whether the model reasons before it answers. {_PASSED_OVER}",
    "reasoning": f"How much the model reasons, in OpenRouter's terms. {_PASSED_OVER}",
    "include_reasoning": "If false, the answer hides the reasoning.",
    "separate_reasoning": "If false, the text includes the reasoning as the model writes it.",
    "context_management": "How to shorten the conversation.",
    "budget_tokens": "A hint that this server ignores.",
    "display": "omitted: the answer signs its reasoning and hides it.",
    "edits": "Ways to shorten the conversation.",
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
    "include_usage": "The stream ends with a chunk that reports usage.",
    "continuous_usage_stats": "With include_usage, every chunk reports usage so far.",
    "include_obfuscation": _REFUSED,
    "store": "If false, the server discards the response. By default it keeps responses in memory "
    "for previous_response_id.",
    "include": "What to add to the answer. Among the accepted names, only logprobs adds anything.",
    "saccade": "Fields that only this server has.",
    "trace": "Report where the server found each image, why not sooner, and at what cost.",
    "thread": "Refused. Send all messages, because the server keeps no conversation.",
    "return_token_strs": "Return the text of each token, too.",
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
    "mode": "implicit keeps the whole prompt. explicit keeps what precedes breakpoints.",
    "comparison_response_id": "Requests diagnostics. The server compares the most similar earlier "
    "prompt.",
    "cache_miss_reason": "Null if the cache held everything that earlier prompts contain.",
    "diagnostics": "Why the cache held less of the prompt than it could, if the request asks.",
    "previous_message_id": "Accepted. The server compares the most similar earlier prompt.",
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
    "completion_tokens": "Tokens in all answers.",
    "completion_tokens_details": "How many completion tokens were draft tokens. Absent without "
    "drafts.",
    "accepted_prediction_tokens": "Draft tokens that the model accepted. Drafts save time and "
    "never change an answer.",
    "rejected_prediction_tokens": "Draft tokens that the model rejected. Other counts leave them "
    "out.",
    "total_tokens": "Tokens in the prompt and all answers.",
    "prompt_tokens_details": "The prompt's tokens, split by cost.",
    "cached_tokens": "Tokens that came from the prefix cache.",
    "cached_tokens_by_tier": "Where the cached tokens were: device, host, disk. Absent if all "
    "were on the device.",
    "prepared_tokens": "Cached tokens that were computed before the request came, because the "
    "server knew how the client trims. Absent if 0.",
    "prepared_in_vain_tokens": "Tokens that were computed before the request came, and were not "
    "used. Absent if 0.",
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
    "cache_missed_tokens": "Prompt tokens from that place on.",
    "logprobs": "Log-probabilities of the answer's tokens, if the request asks for them.",
    "top_logprobs": "How many of the likeliest tokens to list for each token. Requires logprobs.",
    "prompt_logprobs": "Score the prompt's tokens and list this many of the likeliest for each.",
    "token_logprobs": "The log-probability of each token.",
    "text_offset": "Where each token begins in the text, in characters.",
    "logprob": "The natural logarithm of the token's probability.",
    "rank": "1 for the likeliest token at this place.",
    "decoded_token": "The token as text.",
    "tokens": "Token ids.",
    "token_strs": "The text of each token, if the request asks for it.",
    "count": "Tokens in the prompt.",
    "unproven": "True if no test compares this architecture's answers with transformers' own.",
    "max_model_len": "Maximum tokens for a prompt and its answer together.",
    "images": "The images and their costs.",
    "place": "The part of the request, such as messages[0].content[1].",
    "digest": "blake3 of the image's bytes, in hexadecimal.",
    "bytes": "The encoded image's size in bytes.",
    "size": "The image's own size, upright.",
    "resized": "The size that the model sees.",
    "width": "Width in pixels.",
    "height": "Height in pixels.",
    "owned_by": "Always saccade.",
    "error": "What went wrong.",
    # ---- videos
    "video": "The frames in order, as URLs or ids of uploaded files.",
    "video_url": "The video, as a URL or an object with one.",
    "video_data": "The video in base64.",
    "frames": "The frames, in order.",
    "fps": "Frames to take per second. Default: the model's own rate.",
    "num_frames": "Total frames to take. Use either this or fps.",
    "max_frames": "Maximum frames to take.",
    "total_pixels": "Maximum pixels in all frames together, after resizing.",
    "source_fps": "Frames per second in the source video.",
    "frames_indices": "Each frame's number in its source video, from 0.",
    "total_num_frames": "Total frames in the source video.",
    "duration": "The source video's length in seconds.",
    "do_sample_frames": "If false, the server takes all frames as they come.",
    "media_io_kwargs": "How to read videos, in vLLM's terms.",
    "video_tokens": "Tokens that stand for videos. Absent without videos.",
    "code": "A short name of the error for programs, if it has one.",
    "param": "The field at fault, if any.",
    "request_id": "The request's name in the server's log.",
    # ---- batches
    "input_file_id": "An uploaded file with purpose batch and one request per line.",
    "endpoint": "The path that receives every line.",
    "completion_window": "24h. Lines still open by then stay unanswered.",
    "output_expires_after": "How long result files stay. Default: until you delete them.",
    "anchor": "When the seconds start. They start when the file is created.",
    "output_file_id": "The file with answers, in the input's order.",
    "error_file_id": "The file with errors, in the input's order.",
    "request_counts": "Line counts by outcome.",
    "total": "All lines.",
    "completed": "Lines that have an answer.",
    "failed": "Lines that have an error.",
    "errors": "Why the batch failed as a whole.",
    "line": "The line in the input file, from 1.",
    "expires_at": "When it ends, in seconds since 1970.",
    **{
        f"{name}_at": f"When it was {name.replace('_', ' ')}, in seconds since 1970."
        for name in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelled")
    },
    "cancelling_at": "When cancellation was requested, in seconds since 1970.",
    "first_id": "The id of the first entry.",
    "last_id": "The id of the last entry, for `after`.",
    "has_more": "More entries follow the last one.",
    # ---- what is read of prompts
    "dimensions": "Keep only this many first values, rescaled to length 1.",
    "output_dimension": "Keep only this many first values, rescaled to length 1.",
    "encoding_format": "float returns numbers. base64 returns little-endian float32.",
    "embedding_types": "One or both formats for the embeddings.",
    "input_type": "search_query has its own instruction. Other values are ignored.",
    "instruction": "The input's purpose, or the question for documents. Default: the model's own.",
    "texts": "The texts to embed.",
    "inputs": "Texts and images that share one embedding.",
    "embedding": "The values, or float32 in base64.",
    "embeddings": "The embeddings by format, one for each input.",
    "response_type": "Always embeddings_by_type.",
    "meta": "Counts for Cohere's clients.",
    "query": "What documents should answer: a text, or an object with text or content.",
    "queries": "text_1 under another name.",
    "documents": "What to rank: texts, or objects with text or content.",
    "document": "The document as you sent it.",
    "text_1": "The query, or one query for each document.",
    "text_2": "The documents.",
    "data_1": "text_1 under another name.",
    "data_2": "text_2 under another name.",
    "top_n": "Return only this many of the best documents.",
    "return_documents": "Return each document with its score.",
    "results": "The documents, best first.",
    "relevance_score": "How well the document answers the query, from 0 to 1.",
    "questions": "The questions. Each is a predicate, a choice or a score.",
    "levels": "The score's levels, lowest first.",
    "label": "The level's name.",
    "choice": "The likeliest value.",
    "confidence": "The likeliest value's probability.",
    "probability": "How likely this answer is among the possible answers.",
    "probabilities": "How likely each answer is.",
    "score": "The score.",
    "value": "The value.",
    "input_tokens_details": "The input's tokens, split by cost.",
    "output_tokens_details": "The answers' tokens, split by kind.",
    "reasoning_tokens": "Always 0.",
    # ---- the server
    "version": "Saccade's version.",
    "uptime": "Seconds since the server started.",
    "reason": "What still keeps the server from being ready.",
    "context_length": "Maximum tokens for a prompt and its answer together.",
    "kv_tokens": "Tokens that the KV cache holds.",
    "seconds": "Seconds since the request arrived.",
    "generated": "Tokens generated so far.",
    "takes": "What requests may hold besides text. frames means a list of video frames.",
    "answers": "The running answers, longest first.",
    "purpose": "vision for images, or another purpose from OpenAI's API.",
}

OWN: dict[tuple[str, str], str] = {
    ("Tokens", "tokens"): "Token ids to turn into text.",
    ("TokenText", "prompt"): "The text of the tokens.",
    ("CompletionLogprobs", "tokens"): "The text of each token.",
    ("CompletionLogprobs", "top_logprobs"): "The likeliest tokens at each place, by text.",
    ("ImageCost", "tokens"): "Tokens that stand for the image.",
    ("ImageCost", "format"): "The image's type, according to its bytes.",
    ("ChatLogprobs", "content"): "One entry per token: text, bytes and the likeliest others.",
    ("ChatLogprobs", "refusal"): "Always null. This server's answers are never refusals.",
    ("AnswerMessage", "refusal"): "Always null. This server's answers are never refusals.",
    ("AnswerMessage", "content"): "The answer's text. Null if the answer has only calls.",
    ("AnswerMessage", "reasoning"): "reasoning_content under its newer name.",
    ("ChatAnswer", "logprobs"): "Return the log-probability of each token in the answer.",
    ("TextPrompt", "logprobs"): "Return each token's log-probability and list this many of the "
    "likeliest tokens.",
    ("TextChoice", "text"): "The answer's text.",
    ("TextChoice", "prompt_logprobs"): "Each prompt token and the likeliest tokens at its place, "
    "by token id. The first is null.",
    ("ChatCompletion", "prompt_logprobs"): "Each prompt token and the likeliest tokens at its "
    "place, by token id. The first is null.",
    ("ChatMessage", "name"): "The speaker, if several share a role. Templates may show it.",
    ("ToolChoice", "name"): "The tool that the model must call. Only type tool takes it.",
    ("TextFormat", "name"): "A name for the schema.",
    ("FunctionCall", "arguments"): "The function's arguments, as JSON text or as an object.",
    ("ToolUseBlock", "input"): "The tool's arguments.",
    ("ToolResultBlock", "content"): "The tool's answer: a text, or texts and images.",
    ("ResultItem", "output"): "The function's answer: a text, or texts and images.",
    ("PartsSource", "content"): "A text, or texts and images.",
    ("ReasoningItem", "content"): "The model's reasoning.",
    ("ReasoningConfig", "summary"): "Accepted. The answer shows the full reasoning instead.",
    ("Message", "content"): "The answer as blocks: thinking, text and calls.",
    ("PlainSource", "data"): "The text.",
    ("RedactedBlock", "data"): "Data that only its maker can read. The prompt leaves it out.",
    ("ModelList", "data"): "The models.",
    ("ThinkingBlock", "thinking"): "The model's reasoning.",
    ("Citations", "enabled"): "Must be false, because answers never cite their sources.",
    ("ResponseForm", "text"): "The answer's form and length.",
    ("ResponseForm", "reasoning"): f"How much the model reasons. {_PASSED_OVER}",
    ("ResponseText", "format"): "The answer's form: text, any JSON, or JSON with a schema.",
    ("OutputConfig", "format"): "The answer's form: JSON with a schema.",
    (
        "Drawing",
        "max_tokens",
    ): "Maximum tokens of the answer. With 0, the server computes and caches the prompt "
    "without an answer.",
    ("Drawing", "top_k"): "Sample only from this many of the likeliest tokens. 0 removes the "
    "limit.",
    ("Sender", "diagnostics"): "Ask why the cache held less of the prompt than it could.",
    ("PromptCacheBreakpoint", "mode"): "Always explicit, because the mark itself asks.",
    ("OutputConfig", "effort"): "Accepted and ignored.",
    ("PromptCacheOptions", "ttl"): "How long breakpoints without their own ttl last, from 1s to "
    "24h, such as 5m.",
    ("PromptCacheOptions", "prewarm"): "The server computes and caches the prompt without an "
    "answer.",
    ("ChatMessage", "reasoning"): "reasoning_content under another name, if it is a text.",
    ("ImageLimits", "size"): "min_pixels and max_pixels, under the names of Qwen's processors.",
    ("ImageBounds", "size"): "min_pixels and max_pixels, under the names of Qwen's processors.",
    ("ChatMessage", "images"): "Images before the content. Each is a URL, base64, or an image_url "
    "part.",
    ("ImageObjectPart", "id"): "A file's id, with source_type id. Otherwise it is ignored.",
    ("FilePart", "id"): "A file's id, with source_type id. Otherwise it is ignored.",
    ("Underway", "images"): "Images in the prompt.",
    ("ServerState", "status"): "starting, ready, stalled, stopping or failed.",
    ("Response", "status"): "in_progress, completed, incomplete, cancelled or failed.",
    ("ThinkingSwitch", "type"): "disabled turns reasoning off. All other values turn it on.",
    ("Thinking", "type"): "disabled turns reasoning off. All other values turn it on.",
    (
        "ToolChoice",
        "type",
    ): "auto: may call. any: must call one. tool: must call this one. none: may not call.",
    (
        "TextFormat",
        "type",
    ): "text: any text. json_object: any JSON object. json_schema: JSON that follows a schema.",
    ("MissReason", "type"): "Why the cache missed. An earlier prompt continued differently, an "
    "image changed size, or the cached data has gone.",
    ("MissReason", "place"): "The part of the request where the difference begins.",
    ("ErrorBody", "type"): "The error's kind, such as invalid_request_error or server_error.",
    ("MessageErrorBody", "type"): "The error's kind, under Anthropic's names.",
    ("ErrorBody", "message"): "What is wrong, the limit, and what to do.",
    ("MessageErrorBody", "message"): "What is wrong, the limit, and what to do.",
    ("ReferenceItem", "id"): "The item's id.",
    ("MediaReading", "video"): "How to read videos.",
    ("SaccadeOptions", "documents"): "How the model sees a PDF's pages: text, images, or both.",
    ("DocumentOptions", "documents"): "How the model sees a PDF's pages: text, images, or both.",
    ("FileUpload", "file"): "The file's bytes.",
    ("FileUpload", "warm"): "How you will ask about the image, as JSON. Use the same "
    "`min_pixels`, `max_pixels`, `detail` and `cache_salt` as in your question. `prefix` holds the "
    "messages before the image. The server encodes and prefills it in idle time.",
    ("ExpiresAfter", "seconds"): "The time in seconds.",
    ("BatchPage", "data"): "The batches.",
    ("BatchErrors", "data"): "The input file's errors.",
    ("BatchError", "message"): "What is wrong.",
    ("Batch", "status"): "validating, in_progress, finalizing, completed, failed, expired, "
    "cancelling or cancelled.",
    ("EmbeddingInput", "input"): "A text, tokens, or a list of texts or token lists.",
    ("EmbeddingInput", "messages"): "One chat or several. A system message is the instruction.",
    ("CohereInputs", "images"): "The images to embed, as data: URLs.",
    ("EmbeddingList", "data"): "The embeddings, in the inputs' order.",
    ("ScoreList", "data"): "The scores, in the documents' order.",
    ("ScoredContent", "content"): "A text, or texts and images.",
    ("CohereInput", "content"): "Texts and images.",
    ("DecisionInput", "input"): "What to judge: a text, or items as in /v1/responses.",
    ("Decision", "answers"): "The answers, in the questions' order.",
    ("PredicateQuestion", "instructions"): "A statement, as a text or as parts with text and JSON.",
    ("ChoiceQuestion", "instructions"): "The question, as a text or as parts with text and JSON.",
    ("ScoreQuestion", "instructions"): "What to rate, as a text or as parts with text and JSON.",
    ("ChoiceQuestion", "choices"): "The values to choose from.",
    ("QuestionJSON", "data"): "JSON that the model sees as text.",
    ("LevelProbability", "value"): "The level's place. The first is 1.",
    ("ScoreAnswer", "score"): "The mean of the levels' places, weighted by their probabilities.",
}


def add_words(components: dict[str, Any]) -> None:
    """Give each undescribed field its own description. Schemas share the objects that fields are
    written in, so each gets a new one.
    """
    for schema, shape in components.items():
        fields = shape.get("properties", {})
        for name, field in fields.items():
            if "description" not in field:
                words = OWN.get((schema, name)) or COMMON[name]
                fields[name] = {**field, "description": words}
