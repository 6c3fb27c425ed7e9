"""GET /openapi.json: the API as described by its own schemas, in a form that generators of clients
take: operations have names, groups and summaries, lists have items, values stay apart as names.

Owns the document alone: every dialect's fields are its own (its `fields.py`), messages are
`front/content.py`'s. Knows nothing of requests.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec

from saccade import __version__
from saccade.api.about import page
from saccade.api.about.examples import BODIES as EXAMPLES
from saccade.api.about.field_words import add_words, classes_in
from saccade.api.batches.fields import TOLD, BatchJob, BatchPage, BatchRequest
from saccade.api.body_schema import BodySchema
from saccade.api.chat import fields as chat_fields
from saccade.api.chat import write as answers
from saccade.api.decisions import fields as decision_fields
from saccade.api.decisions import write as decisions
from saccade.api.messages import fields as messages_fields
from saccade.api.messages import toolsets
from saccade.api.operations import (
    LoadAdapter,
    MemoryTags,
    UnloadAdapter,
    UpdateFromDisk,
    UpdateWeights,
)
from saccade.api.responses import fields as responses_fields
from saccade.api.responses import items as responses_items
from saccade.api.scores import fields as score_fields
from saccade.api.scores import write as scores
from saccade.core.decoders import json_decoder
from saccade.core.types import SAMPLING_BOUNDS
from saccade.edge.refusal import ErrorResponse, speaks_anthropic
from saccade.front.content import ChatMessage
from saccade.front.unread_fields import IgnoredFields, SpokenAnswer, UnsupportedFields

_ABOUT = (
    "A server for models that read text, images, PDFs and videos. It speaks the APIs of OpenAI and "
    "Anthropic, and it keeps the work on an image: sent again, an image costs a hash."
)
_REF = "#/components/schemas/{name}"
_BODIES: dict[str, tuple[str, BodySchema[Any] | None, str]] = {
    "/v1/chat/completions": ("ChatCompletionRequest", chat_fields.CHAT, "ChatCompletion"),
    "/v1/completions": ("CompletionRequest", chat_fields.COMPLETION, "TextCompletion"),
    "/v1/responses": ("ResponsesRequest", responses_fields.RESPONSES, "Response"),
    "/v1/responses/input_tokens": ("ResponsesRequest", responses_fields.RESPONSES, "InputTokens"),
    "/v1/messages": ("MessagesRequest", messages_fields.MESSAGES, "Message"),
    "/v1/messages/count_tokens": (
        "CountTokensRequest",
        messages_fields.COUNT_TOKENS,
        "MessageTokens",
    ),
    "/v1/embeddings": ("EmbeddingsRequest", score_fields.EMBEDDINGS, "EmbeddingList"),
    "/v2/embed": ("EmbedRequest", score_fields.EMBED, "CohereEmbeddings"),
    "/v1/rerank": ("RerankRequest", score_fields.RERANK, "RankList"),
    "/v1/score": ("ScoreRequest", score_fields.SCORE, "ScoreList"),
    "/v1/decisions": ("DecisionsRequest", decision_fields.DECISIONS, "Decision"),
    "/tokenize": ("TokenizeRequest", None, "TokenCount"),
    "/detokenize": ("DetokenizeRequest", chat_fields.DETOKENIZE, "TokenText"),
}
_STREAMS = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"))
"""Operations that answer by a stream where the body asks for it."""
_SUMMARIES = {
    ("/v1/chat/completions", "post"): "Answer a chat with images, as OpenAI's API has it",
    ("/v1/completions", "post"): "Go on with a text or with tokens",
    ("/v1/responses", "post"): "Answer a chat that the server may keep, as OpenAI's Responses API",
    ("/v1/responses/input_tokens", "post"): "Count the tokens of a response's input",
    ("/v1/messages", "post"): "Answer a chat with images, as Anthropic's API has it",
    ("/v1/messages/count_tokens", "post"): "Count the tokens of a message",
    ("/v1/embeddings", "post"): "Embed texts and images, as OpenAI's API and vLLM's have it",
    ("/v2/embed", "post"): "Embed texts and images, as Cohere's API has it",
    ("/v1/rerank", "post"): "Rank documents by how well they answer a query. /rerank and "
    "/v2/rerank are the same",
    ("/v1/score", "post"): "Score how well documents answer queries. /score is the same",
    ("/v1/decisions", "post"): "Probabilities of answers to many questions about one input, as "
    "OpenAI's API has it",
    ("/tokenize", "post"): "Count the tokens of a text or a chat, and of each image",
    ("/detokenize", "post"): "Turn tokens into text",
    ("/v1/batches", "post"): "Answer a file of requests while nobody else waits",
    ("/v1/load_lora_adapter", "post"): "Load an adapter, as vLLM has it; models list it",
    ("/update_weights", "post"): "Go on with another checkpoint of the same shape, while paused",
    (
        "/update_weights_from_disk",
        "post",
    ): "Pause, take another checkpoint and resume, as SGLang has it",
    ("/release_memory_occupation", "post"): "Give memory back once all is answered, as SGLang has "
    "it: weights and kv_cache, or those of `tags`",
    ("/resume_memory_occupation", "post"): "Take memory again and go on, as SGLang has it",
    ("/v1/unload_lora_adapter", "post"): "Take an adapter away; requests with it end in peace",
    ("/v1/files", "post"): "Upload an image once, to name it by its id in many messages",
}
_COMMANDS: dict[str, str] = {
    "/flush_cache": "Forget the KV prefix cache, embeddings and kept pixels that are not in use",
    "/reset_prefix_cache": "Forget the KV prefix cache that is not in use",
    "/pause": "Let new requests wait; ?mode= abort, wait for or keep those in flight",
    "/pause_generation": "Pause, by SGLang's name",
    "/resume": "Go on after a pause",
    "/continue_generation": "Resume, by SGLang's name",
    "/sleep": "Give memory back, as vLLM has it: ?level= 1 (KV, embeddings; on a GPU weights, too) "
    "or 2 (all); ?mode= abort or wait for those in flight; new requests wait",
    "/wake_up": "Take memory again, and go on; ?tags= weights, kv_cache: only these",
}
_GETS: dict[str, tuple[str, str]] = {
    "/v1/responses/{id}": ("A response that is running or kept", "Response"),
    "/v1/responses/{id}/input_items": ("List the input items of a response", ""),
    "/v1/models": ("List the model and its adapters", "ModelList"),
    "/v1/models/{name}": ("One model", "Model"),
    "/is_paused": ("Say whether the server is paused", ""),
    "/is_sleeping": ("Say whether the server has given memory back", ""),
    "/health": ("Say whether the server can answer", ""),
    "/metrics": ("Counters, as Prometheus reads them", ""),
    "/version": ("Saccade's version", ""),
    "/saccade/state": ("The server, and the answers that are on their way", "ServerState"),
    "/docs": ("This description, to be read", ""),
    "/v1/files": ("The uploaded files", ""),
    "/v1/files/{id}": ("One uploaded file", ""),
    "/v1/files/{id}/content": ("Return the bytes of a file", ""),
    "/v1/batches": ("The batches, newest first", "BatchPage"),
    "/v1/batches/{id}": ("One batch, and how far it is", "Batch"),
}


@cache
def describe() -> dict[str, Any]:
    """Build the document, in OpenAPI 3.1."""
    forms = [form for _, form, _ in _BODIES.values() if form is not None]
    groups = {group for form in (*forms, *_TOKENIZE) for group in form.groups}
    documented = [answers.ChatChoice, answers.TextChoice, answers.Usage, answers.CacheDiagnostics]
    counts = [answers.TokenCount, answers.TokenText]
    lists: list[type[Any]] = [answers.ModelList, ErrorResponse, page.ServerState, *_READ]
    below = [
        ChatMessage,
        messages_fields.InputMessage,
        messages_fields.ToolDefinition,
        toolsets.ComputerDefinition,
        toolsets.ToolsetDefinition,
    ]
    types: list[type[Any]] = [
        *sorted(groups, key=str),
        *documented,
        *counts,
        *lists,
        *below,
        *_ITEMS,
        *_BATCHES,
    ]
    types += sorted({kind for _, kind in _CHANGES}, key=str)
    types += [UnsupportedFields, IgnoredFields]
    for kind in types:
        json_decoder(kind)  # its fields are looked up, before msgspec does it beside other threads
    _, components = msgspec.json.schema_components(types, ref_template=_REF, schema_hook=_raw)
    _leave_out_unread(components)
    for (group, field), names in _BELOW.items():
        kinds = [{"$ref": _REF.format(name=name)} for name in names]
        items = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        _item(components[group]["properties"][field])["items"] = items
    components |= _anthropics()
    _describe_items(components)
    components["ChatCompletion"] = _completion("ChatChoice")
    entries = components["TextChoice"]["properties"]["prompt_logprobs"]
    components["ChatCompletion"]["properties"]["prompt_logprobs"] = entries
    components["TextCompletion"] = _completion("TextChoice")
    components["FileUpload"] = _upload_form()
    _describe_batches(components)
    for name, (low, high) in _bounds().items():
        for group in ("Sampling", "Ending", "ResponseEnding", "TextPrompt"):
            for option in _options(components[group], name):
                option.update(minimum=low, maximum=high)
    add_words(components, {**classes_in(types), "Batch": BatchJob})
    paths: dict[str, Any] = {}
    for path, (name, form, answer) in _BODIES.items():
        read = [form] if form else list(_TOKENIZE)
        components |= {each.kind.__name__: _merged(each, components) for each in read}
        if form is None:
            kinds = [{"$ref": _REF.format(name=each.kind.__name__)} for each in read]
            components[name] = {"anyOf": kinds}
        paths[path] = {"post": _operation(path, name, answer)}
    for path, (summary, answer_name) in _GETS.items():
        paths.setdefault(path, {})["get"] = _get(summary, answer_name)
    paths |= {path: {"post": _get(summary, "")} for path, summary in _COMMANDS.items()}
    paths["/v1/files"]["post"] = _upload()
    one = "/v1/responses/{id}"
    paths[one]["delete"] = _get("Delete a response", "")
    cancel = f"{one}/cancel"
    paths[cancel] = {"post": _get("Stop a response that is being streamed", "Response")}
    paths["/v1/files/{id}"]["delete"] = _get("Delete a file", "")
    paths["/v1/batches"]["post"] = _operation("/v1/batches", "BatchRequest", "Batch")
    paths["/v1/batches/{id}/cancel"] = {"post": _get("Begin no other line of a batch", "Batch")}
    paths |= {path: {"post": _operation(path, kind.__name__, "")} for path, kind in _CHANGES}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Saccade", "version": __version__, "description": _ABOUT},
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "servers": [{"url": "/", "description": "The server that this document is of"}],
    }
    finish(document, _SUMMARIES)
    return document


_CHANGES: tuple[tuple[str, type[Any]], ...] = (
    ("/update_weights", UpdateWeights),
    ("/update_weights_from_disk", UpdateFromDisk),
    ("/release_memory_occupation", MemoryTags),
    ("/resume_memory_occupation", MemoryTags),
    ("/v1/load_lora_adapter", LoadAdapter),
    ("/v1/unload_lora_adapter", UnloadAdapter),
)
_BATCHES = (BatchRequest, BatchJob, BatchPage)
_ITEMS: tuple[type[Any], ...] = (
    responses_items.MessageItem,
    responses_items.CallItem,
    responses_items.ResultItem,
    responses_items.ComputerCallItem,
    responses_items.ComputerResultItem,
    responses_items.ReasoningItem,
    responses_items.ReferenceItem,
)
_READ: tuple[type[Any], ...] = (
    scores.EmbeddingList,
    scores.EmbeddingEntry,
    scores.CohereEmbeddings,
    scores.RankList,
    scores.ScoreList,
    score_fields.ScoredContent,
    score_fields.CohereInput,
    decisions.Decision,
    decision_fields.PredicateQuestion,
    decision_fields.ChoiceQuestion,
    decision_fields.ScoreQuestion,
)
_TOKENIZE: tuple[BodySchema[Any], ...] = (chat_fields.TOKENIZE_CHAT, chat_fields.TOKENIZE_TEXT)


def _leave_out_unread(components: dict[str, Any]) -> None:
    """Leave out the fields that must stay empty, and those that are ignored."""
    unread = [components.pop(kind.__name__) for kind in (UnsupportedFields, IgnoredFields)]
    del components[SpokenAnswer.__name__]
    for shape in components.values():
        fields = shape.get("properties", {})
        for name in list(fields):
            if any(fields[name] == each["properties"].get(name) for each in unread):
                del fields[name]


def _raw(kind: type[Any]) -> dict[str, Any]:
    """Describe JSON that is read or written separately."""
    if kind is msgspec.Raw:
        return {}
    raise NotImplementedError


def _bounds() -> dict[str, tuple[float, float]]:
    bounds = {name: (least, most) for name, (_, least, most) in SAMPLING_BOUNDS.items()}
    return {**bounds, "max_tokens": (chat_fields.NO_LIMIT, bounds["max_tokens"][1])}


def _options(group: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a field's schemas for numbers."""
    field = group["properties"].get(name, {})
    options: list[dict[str, Any]] = field.get("anyOf", [field])
    return [option for option in options if option.get("type") in ("integer", "number")]


_BELOW = {
    ("Conversation", "messages"): ("ChatMessage",),
    ("Inquiry", "messages"): ("InputMessage",),
    ("Inquiry", "tools"): ("ToolDefinition", "ComputerDefinition", "ToolsetDefinition"),
}
"""Lists whose items are read apart: what an item is."""


def _item(field: dict[str, Any]) -> dict[str, Any]:
    """Return a field's schema for a list."""
    lists = [each for each in field.get("anyOf", [field]) if each.get("type") == "array"]
    found: dict[str, Any] = lists[0]
    return found


def _anthropics() -> dict[str, Any]:
    """Describe the answers of /v1/messages. A stream's events add up to a message."""
    number, text = {"type": "integer"}, {"type": "string"}
    tokens = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    message = {
        **dict.fromkeys(("id", "type", "role", "model"), text),
        "content": {"type": "array", "items": {"$ref": _REF.format(name="MessageBlock")}},
        "stop_reason": text,
        "stop_sequence": {"type": ["string", "null"]},
        "usage": {"$ref": _REF.format(name="MessageUsage")},
    }
    error = {"type": text, "error": {"$ref": _REF.format(name="MessageErrorBody")}}
    usage = _object(dict.fromkeys((*tokens, "output_tokens"), number))
    by_tier = {"type": "object", "additionalProperties": number}
    usage["properties"]["cache_read_input_tokens_by_tier"] = by_tier
    for name in ("prepared_input_tokens", "prepared_in_vain_input_tokens"):
        usage["properties"][name] = number
    return {
        "Message": _object(message),
        "MessageBlock": _object({"type": text}),
        "MessageUsage": usage,
        "MessageTokens": _object({"input_tokens": number}),
        "MessageError": _object({**error, "request_id": {"type": ["string", "null"]}}),
        "MessageErrorBody": _object({"type": text, "message": text}),
    }


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _describe_batches(components: dict[str, Any]) -> None:
    """Describe a batch as `BatchJob.body` returns it."""
    components["Batch"] = batch = components.pop("BatchJob")
    del batch["properties"]["moments"]
    moment = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    batch["properties"] |= {f"{status}_at": dict(moment) for status in TOLD}
    components["BatchPage"]["properties"]["data"]["items"] = {"$ref": _REF.format(name="Batch")}


def _describe_items(components: dict[str, Any]) -> None:
    item = {"anyOf": [{"$ref": _REF.format(name=kind.__name__)} for kind in _ITEMS]}
    for option in components["ResponseInput"]["properties"]["input"]["anyOf"]:
        if option.get("type") == "array":
            option["items"] = item
    components["InputTokens"] = {
        "type": "object",
        "properties": {"object": {"type": "string"}, "input_tokens": {"type": "integer"}},
    }
    texts = ("id", "object", "status", "model")
    components["Response"] = {
        "type": "object",
        "properties": {
            **{name: {"type": "string"} for name in texts},
            "created_at": {"type": "integer"},
            "output": {"type": "array", "items": item},
            "usage": {"type": "object"},
        },
        "required": [*texts, "created_at", "output"],
    }


def _completion(choice: str) -> dict[str, Any]:
    """Describe an answer. A stream's events are chunks of it."""
    return {
        "type": "object",
        "properties": {
            **{name: {"type": "string"} for name in ("id", "object", "model")},
            "created": {"type": "integer"},
            "choices": {"type": "array", "items": {"$ref": _REF.format(name=choice)}},
            "usage": {"$ref": _REF.format(name="Usage")},
            "diagnostics": {"$ref": _REF.format(name="CacheDiagnostics")},
        },
        "required": ["id", "object", "created", "model", "choices"],
    }


def _merged(form: BodySchema[Any], components: dict[str, Any]) -> dict[str, Any]:
    found = [components[group.__name__] for group in form.groups]
    return {
        "type": "object",
        "title": form.kind.__name__,
        "description": (form.kind.__doc__ or "").strip(),
        "properties": {key: value for group in found for key, value in group["properties"].items()},
        "required": [key for group in found for key in group.get("required", [])],
    }


def _answers(answer: str, error: str = "ErrorResponse") -> dict[str, Any]:
    schema = {"schema": {"$ref": _REF.format(name=answer)}} if answer else {}
    refusal = {"application/json": {"schema": {"$ref": _REF.format(name=error)}}}
    media = {"application/json": schema} if answer else {}
    return {
        "200": {"description": "Done.", **({"content": media} if media else {})},
        "default": {"description": "Refused: the error says why.", "content": refusal},
    }


def _operation(path: str, body: str, answer: str) -> dict[str, Any]:
    media = {"schema": {"$ref": _REF.format(name=body)}, "example": EXAMPLES[path]}
    error = "MessageError" if speaks_anthropic(path) else "ErrorResponse"
    answers = _answers(answer, error)
    return {
        "requestBody": {"required": True, "content": {"application/json": media}},
        "responses": streams(answers) if path in _STREAMS else answers,
    }


def _get(summary: str, answer: str) -> dict[str, Any]:
    return {"summary": summary, "responses": _answers(answer)}


def _upload_form() -> dict[str, Any]:
    file, text = {"type": "string", "format": "binary"}, {"type": "string"}
    return {
        "type": "object",
        "properties": {"file": file, "purpose": text, "warm": text},
        "required": ["file"],
    }


def _upload() -> dict[str, Any]:
    schema = {"schema": {"$ref": _REF.format(name="FileUpload")}}
    return {
        "requestBody": {"required": True, "content": {"multipart/form-data": schema}},
        "responses": _answers(""),
    }


_METHODS = ("get", "post", "delete")
_EVENTS = "Server-sent events, where the request says stream: each is `data:` and a JSON text."


def finish(document: dict[str, Any], summaries: dict[tuple[str, str], str]) -> None:
    """Complete the document in place. `summaries`: by path and method, where missing."""
    for path, methods in document["paths"].items():
        for method in _METHODS:
            if (operation := methods.get(method)) is not None:
                _name(path, method, operation, summaries)
    _complete(document["components"])


def _name(path: str, method: str, operation: dict[str, Any], summaries: Any) -> None:
    words = re.sub(r"\{(\w+)\}", r"by_\1", path).strip("/").removeprefix("v1/")
    operation["operationId"] = f"{method}_{re.sub(r'[^a-z0-9]+', '_', words.lower())}"
    operation["tags"] = [_tag(path)]
    operation.setdefault("summary", summaries.get((path, method), ""))
    names = re.findall(r"\{(\w+)\}", path)
    operation["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]


def _tag(path: str) -> str:
    """Return an operation's group: the part after /v1, or else the server itself."""
    parts = path.strip("/").split("/")
    return parts[1] if parts[0] == "v1" else "server"


def _complete(value: Any) -> None:
    """Give lists their items. Where two values are one name to a generator, keep the first."""
    if isinstance(value, list):
        for each in value:
            _complete(each)
    if not isinstance(value, dict):
        return
    if value.get("type") == "array":
        value.setdefault("items", {})
    if isinstance(value.get("enum"), list):
        names = {re.sub(r"\W", "_", str(each)).lower(): each for each in reversed(value["enum"])}
        value["enum"] = list(reversed(names.values()))
        if all(isinstance(each, bool) for each in value["enum"]):
            value["type"] = "boolean"
            value["const"] = value.pop("enum")[0]
    for each in value.values():
        _complete(each)


def streams(answers: dict[str, Any]) -> dict[str, Any]:
    """Add a stream to an operation's `answers`."""
    answers["200"]["content"]["text/event-stream"] = {
        "schema": {"type": "string", "description": _EVENTS}
    }
    return answers
