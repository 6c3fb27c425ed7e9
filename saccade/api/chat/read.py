"""Converts OpenAI's request bodies to `GenerationRequest`s: chats, text completions, and prompts to
tokenize.

`fields.py` has the schemas of the bodies. This module has the checks that a schema cannot express.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from saccade.api.body_schema import open_object
from saccade.api.chat.fields import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    MAX_CHOICES,
    NO_LIMIT,
    TOKENIZE_CHAT,
    TOKENIZE_TEXT,
    ChatAnswer,
    ChatCompletionRequest,
    CompletionRequest,
    Conversation,
    Counting,
    Ending,
    Reply,
    Structure,
    TextPrompt,
    Tokens,
    ToolUse,
    check_stream,
    count_likeliest,
)
from saccade.api.restraint import Restraint
from saccade.core.errors import InvalidRequest
from saccade.core.types import ONE_TOKEN
from saccade.front.breakpoints import NO_CACHE_REQUEST, read_tool_marks
from saccade.front.content import check_lengths, message_from_json
from saccade.front.conversation import Chat
from saccade.front.fields import too_long
from saccade.front.prompt_encoder import GenerationRequest

if TYPE_CHECKING:
    from saccade.front.answer_rules import AnswerRules
    from saccade.text.grammar.constraint import OutputConstraint


def read_chat(body: bytearray, context_length: int) -> tuple[GenerationRequest, Reply, ChatAnswer]:
    """Parse the body of POST /v1/chat/completions. Raises InvalidRequest that names the field."""
    request = CHAT.read(body, context_length)
    return chat_request(request, context_length), request.reply, request.answer


def read_completion(
    body: bytearray, context_length: int
) -> tuple[list[GenerationRequest], Reply, TextPrompt]:
    """Parse the body of POST /v1/completions, and return one request per prompt. Raises
    InvalidRequest that names the field.
    """
    request = COMPLETION.read(body, context_length)
    return completion_requests(request, context_length), request.reply, request.text


def read_tokenize(
    body: bytearray, context_length: int
) -> tuple[GenerationRequest, Reply, Counting]:
    """Parse the body of POST /tokenize, which is a chat if it has messages, otherwise a text.

    Raises InvalidRequest that names the field, or if there are several prompts.
    """
    if "messages" in open_object(body):
        chat = TOKENIZE_CHAT.read(body, context_length)
        request = chat_request(chat.request, context_length)
        return request, chat.request.reply, chat.counting
    text = TOKENIZE_TEXT.read(body, context_length)
    requests = completion_requests(text.request, context_length)
    if len(requests) > 1:
        raise InvalidRequest(
            f"prompt: this endpoint accepts one prompt, got {len(requests)}", "prompt"
        )
    return requests[0], text.request.reply, text.counting


def read_detokenize(body: bytearray, context_length: int) -> Tokens:
    """Parse the body of POST /detokenize. Raises InvalidRequest if it is malformed or has too many
    tokens.
    """
    tokens = DETOKENIZE.read(body, context_length).tokens
    if len(tokens.tokens) > context_length:
        raise too_long("tokens", f"{len(tokens.tokens)} tokens", context_length)
    return tokens


def chat_request(request: ChatCompletionRequest, context_length: int) -> GenerationRequest:
    """Convert a parsed chat to a request. Raises InvalidRequest for errors that the schema cannot
    express.
    """
    conversation, answer = request.conversation, request.answer
    check_stream(request.reply)
    sampling = sampling_fields(request.sampling, request.ending)
    sampling |= _completion_tokens(answer.max_completion_tokens, request.ending)
    likeliest = count_likeliest(answer, bool(answer.logprobs), "logprobs=true")
    if answer.logprobs:
        sampling["logprobs"] = likeliest
    cache = NO_CACHE_REQUEST if request.caching is None else request.caching.cache_request
    _check_shown(request.reply, answer.prompt_logprobs is not None, False)
    silent = silence(sampling, cache.prewarm or sampling.get("max_tokens") == 0)
    chat = _read_conversation(conversation, request.reply, context_length)
    thinking = request.thinking
    rules = read_rules(request.restraint, None if thinking is None else thinking.budget)
    if thinking is not None:
        if thinking.reasoning is not None and thinking.reasoning.exclude:
            answer.include_reasoning = False
        chat = replace(
            chat, effort=thinking.effort, thinks=thinking.thinks, verbosity=thinking.verbosity
        )
    if request.tool_use is not None:
        chat = _with_tools(chat, request.tool_use)
    reply = request.reply
    return GenerationRequest(
        prompt=chat,
        sampling=sampling,
        n=reply.n or 1,
        cache_salt=reply.salt,
        silent=silent,
        prompt_logprobs=answer.prompt_logprobs,
        separate_reasoning=answer.separate_reasoning is not False,
        cache=cache,
        constraint=None if request.structure is None else _read_form(request.structure),
        rules=rules,
        prediction="" if answer.prediction is None else answer.prediction.text,
    )


def _read_conversation(conversation: Conversation, reply: Reply, context_length: int) -> Chat:
    continues = bool(conversation.continue_final_message)
    if continues and conversation.add_generation_prompt:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message are mutually exclusive: set only one",
            "continue_final_message",
        )
    check_lengths(conversation.messages, context_length, "messages")
    defaults = conversation.defaults(reply.saccade)
    return Chat(
        messages=tuple(
            [
                message_from_json(message, f"messages[{i}]", defaults)
                for i, message in enumerate(conversation.messages)
            ]
        ),
        add_generation_prompt=not continues and conversation.add_generation_prompt is not False,
        continue_final_message=continues,
        variables=conversation.variables,
    )


def _with_tools(chat: Chat, tool_use: ToolUse) -> Chat:
    from saccade.front.members import read_choice, read_tools
    from saccade.text.grammar.tools import ToolSet

    marks = read_tool_marks(tool_use.tools)
    tools = read_tools(tool_use.tools)
    rules = ToolSet(tools, read_choice(tool_use.tool_choice), tool_use.parallel)
    return replace(chat, tools=rules, tool_marks=marks)


def _read_form(structure: Structure) -> OutputConstraint | None:
    from saccade.front.members import read_form

    return read_form(msgspec.structs.asdict(structure))


def _completion_tokens(given: int | None, ending: Ending) -> dict[str, int]:
    if given is None or given == NO_LIMIT:
        return {}
    if ending.max_tokens not in (None, given):
        raise InvalidRequest(
            "max_tokens and max_completion_tokens have different values: send one",
            "max_completion_tokens",
        )
    return {"max_tokens": given}


def completion_requests(request: CompletionRequest, context_length: int) -> list[GenerationRequest]:
    """Convert a parsed text completion to requests, one per prompt. Raises InvalidRequest."""
    reply = request.reply
    check_stream(reply)
    sampling = sampling_fields(request.sampling, request.ending)
    sampling.setdefault("max_tokens", 16)  # OpenAI's default here
    if request.text.logprobs is not None:
        sampling["logprobs"] = request.text.logprobs
    text, echo = request.text, bool(request.text.echo)
    tops = (text.prompt_logprobs, text.logprobs if echo else None)
    top = max((each for each in tops if each is not None), default=None)
    cache = NO_CACHE_REQUEST if request.caching is None else request.caching.cache_request
    _check_shown(reply, top is not None, echo)
    first = GenerationRequest(
        prompt="",
        sampling=sampling,
        n=reply.n or 1,
        cache_salt=reply.salt,
        silent=silence(sampling, cache.prewarm or sampling["max_tokens"] == 0),
        prompt_logprobs=top,
        cache=cache,
        constraint=None if request.structure is None else _read_form(request.structure),
        rules=read_rules(request.restraint),
    )
    return [
        replace(first, prompt=prompt)
        for prompt in _prompts(request.text.prompt, first.n, context_length)
    ]


def _check_shown(reply: Reply, scored: bool, echo: bool) -> None:
    """Raise InvalidRequest for prompt log-probabilities in a stream. Chunks have no field for
    them.
    """
    if scored and reply.stream:
        raise InvalidRequest(
            "log-probabilities of the prompt are not available in a stream: omit stream",
            "echo" if echo else "prompt_logprobs",
            "unsupported_parameter",
        )


def silence(sampling: dict[str, Any], silent: bool) -> bool:
    """If `silent`, limit `sampling` to one token, because the client wants the prompt computed but
    no answer.

    The engine still samples this token, but the client does not receive it. Returns `silent`.
    """
    if silent:
        sampling.update(ONE_TOKEN)
    return silent


def _prompts(
    prompt: str | list[str | int | list[int]], n: int, context_length: int
) -> list[str | tuple[int, ...]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt: the list must have at least one entry", "prompt")
    if isinstance(prompt[0], int):
        return [_tokens(prompt, context_length)]
    if len(prompt) * n > MAX_CHOICES:
        raise InvalidRequest(
            f"prompt: {len(prompt)} prompts times n={n} exceed the limit of {MAX_CHOICES} answers",
            "prompt",
        )
    return [
        each
        if isinstance(each, str)
        else _tokens(each if isinstance(each, list) else prompt, context_length)
        for each in prompt
    ]


def _tokens(prompt: Sequence[object], context_length: int) -> tuple[int, ...]:
    if len(prompt) > context_length:
        raise too_long("prompt", f"{len(prompt)} tokens", context_length)
    tokens = tuple(each for each in prompt if isinstance(each, int))
    if len(tokens) != len(prompt):
        raise InvalidRequest(
            "prompt: a list must contain either token ids or strings, not both", "prompt"
        )
    return tokens


def _frozen(value: object) -> object:
    if isinstance(value, dict):
        return tuple(sorted(value.items()))
    return tuple(value) if isinstance(value, list) else value


def read_rules(restraint: Restraint | None, budget: int | None = None) -> AnswerRules | None:
    """Return a request's rules for answers, or None if it has none.

    budget: the maximum number of reasoning tokens, if a field outside of `restraint` sets it.

    Raises InvalidRequest that names the field.
    """
    if restraint is None and budget is None:
        return None
    return (restraint or Restraint()).rules(budget)


def sampling_fields(*groups: Struct) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that these groups set, with tuples instead of lists."""
    given: dict[str, Any] = {
        name: _frozen(value)
        for group in groups
        for name, value in msgspec.structs.asdict(group).items()
        if value is not None
    }
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    if not any(given.get("stop", ("",))):  # some web forms send an empty string
        given.pop("stop", None)
    if given.get("max_tokens") == NO_LIMIT:
        del given["max_tokens"]
    return given
