"""Frameworks based on the vendors' SDKs, unchanged: LiteLLM, LangChain, instructor, pydantic-ai,
the Agents SDK and Vercel's AI SDK (through node).

Each function tries one feature and returns its observations. An exception is a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
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
    Look,
    Shape,
    Target,
    check_call,
)

NODE_SECONDS = 120
NOT_INSTALLED = 3  # exit status of ai_sdk.mjs

# ---- LiteLLM


def litellm_asked(target: Target, provider: str = "openai") -> dict[str, Any]:
    base = target.base if provider == "anthropic" else target.v1
    return {"model": f"{provider}/{target.model}", "api_base": base, "api_key": "none"}


def litellm_chat(target: Target) -> str:
    """Chat for three turns, sending LiteLLM's own message objects back."""
    import litellm

    messages: list[Any] = [ASK]
    for _ in range(3):
        answer = litellm.completion(
            messages=messages, max_tokens=MAX_TOKENS, **litellm_asked(target)
        )
        messages += [answer.choices[0].message, AGAIN]
    return "three turns"


def litellm_stream(target: Target) -> str:
    import litellm

    asked = {"stream_options": {"include_usage": True}, **litellm_asked(target)}
    chunks = list(litellm.completion(messages=[ASK], stream=True, max_tokens=MAX_TOKENS, **asked))
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.content and built.usage.completion_tokens > 0, built
    return "stream_chunk_builder"


def litellm_structured(target: Target) -> str:
    import litellm

    answer = litellm.completion(
        messages=[ASK],
        response_format=Shape,
        max_tokens=MAX_FORMED_TOKENS,
        **litellm_asked(target),
    )
    Shape.model_validate_json(answer.choices[0].message.content)
    return "response_format of a model class"


def litellm_tools(target: Target) -> str:
    """Require any tool and a named one, and send its result back."""
    import litellm

    asked = {"tools": [LOOK_TOOL], **litellm_asked(target)}
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        answer = litellm.completion(
            messages=[ASK], tool_choice=choice, max_tokens=MAX_FORMED_TOKENS, **asked
        )
        message = answer.choices[0].message
        (call,) = message.tool_calls
        check_call(call.function.name, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": [IMAGE_PART]}
    litellm.completion(messages=[ASK, message, result], max_tokens=MAX_TOKENS, **asked)
    return "required, named, result with a picture"


def litellm_responses(target: Target) -> str:
    import litellm

    asked = litellm_asked(target)
    parts = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": QUESTION}]
    given: Any = [{"role": "user", "content": parts}]
    first = litellm.responses(input=given, max_output_tokens=MAX_TOKENS, **asked)
    last = list(
        litellm.responses(
            input=AGAIN["content"],
            previous_response_id=first.id,
            stream=True,
            max_output_tokens=MAX_TOKENS,
            **asked,
        )
    )[-1]
    assert last.type in ("response.completed", "response.incomplete"), last.type
    return "two turns by id, streamed"


def litellm_messages(target: Target) -> str:
    """Use `anthropic/` models, whose chat messages LiteLLM sends to /v1/messages."""
    import litellm

    asked = litellm_asked(target, "anthropic")
    answer = litellm.completion(messages=[ASK], max_tokens=MAX_TOKENS, **asked)
    messages = [ASK, answer.choices[0].message, AGAIN]
    list(litellm.completion(messages=messages, max_tokens=MAX_TOKENS, stream=True, **asked))
    called = litellm.completion(
        messages=[ASK],
        tools=[LOOK_TOOL],
        tool_choice="required",
        max_tokens=MAX_FORMED_TOKENS,
        **asked,
    )
    (call,) = called.choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)
    return "completion(anthropic/...): two turns, streamed, a tool"


def litellm_overflow(target: Target) -> str:
    import litellm

    try:
        huge = [{"role": "user", "content": "word " * 1_000_000}]
        litellm.completion(messages=huge, **litellm_asked(target))
    except litellm.ContextWindowExceededError:
        return "ContextWindowExceededError"
    raise AssertionError("an overflow was not recognised")


# ---- LangChain


def langchain_openai(target: Target, max_tokens: int = MAX_TOKENS, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    kind: Any = ChatOpenAI
    return kind(
        model=target.model, base_url=target.v1, api_key="none", max_tokens=max_tokens, **more
    )


def langchain_claude(target: Target, max_tokens: int = MAX_TOKENS) -> Any:
    from langchain_anthropic import ChatAnthropic

    kind: Any = ChatAnthropic
    return kind(model=target.model, base_url=target.base, api_key="none", max_tokens=max_tokens)


def langchain_turns(chat: Any) -> None:
    """Send the picture in LangChain's own block, send the answer back, and stream."""
    from langchain_core.messages import HumanMessage

    block = {"type": "image", "base64": BASE64, "mime_type": "image/png"}
    first = HumanMessage(content=[block, {"type": "text", "text": QUESTION}])
    again = HumanMessage(content=AGAIN["content"])
    answer = chat.invoke([first])
    assert answer.usage_metadata["input_tokens"] > 0
    pieces = list(chat.stream([first, answer, again]))
    assert pieces[-1].usage_metadata or any(piece.usage_metadata for piece in pieces)


def langchain_forms(chat: Any, *methods: str) -> None:
    from langchain_core.messages import HumanMessage

    for method in methods:
        formed = chat.with_structured_output(Shape, method=method)
        assert isinstance(formed.invoke([HumanMessage(content=ASK["content"])]), Shape), method


def langchain_calls(chat: Any) -> None:
    """Require any tool and a named one, also as a stream, and send the result back."""
    from langchain_core.messages import HumanMessage, ToolMessage

    first = HumanMessage(content=ASK["content"])
    for choice in ("any", "look"):
        bound = chat.bind_tools([LOOK_TOOL], tool_choice=choice)
        answer = bound.invoke([first])
        (call,) = answer.tool_calls
        check_call(call["name"], call["args"])
        whole: Any = None
        for piece in bound.stream([first]):
            whole = piece if whole is None else whole + piece
        check_call(whole.tool_calls[0]["name"], whole.tool_calls[0]["args"])
    result = ToolMessage(content=[IMAGE_PART], tool_call_id=call["id"])
    chat.bind_tools([LOOK_TOOL]).invoke([first, answer, result])


def langchain_chat(target: Target) -> str:
    from langchain_core.messages import HumanMessage

    chat = langchain_openai(target)
    first = HumanMessage(content=ASK["content"])
    chat.invoke([first, chat.invoke([first]), HumanMessage(content=AGAIN["content"])])
    return "image_url, two turns"


def langchain_stream(target: Target) -> str:
    langchain_turns(langchain_openai(target, stream_usage=True))  # off for other base URLs
    return "an image block, usage"


def langchain_structured(target: Target) -> str:
    chat = langchain_openai(target, MAX_FORMED_TOKENS)
    langchain_forms(chat, "json_schema", "function_calling")
    return "json_schema, function_calling"


def langchain_tools(target: Target) -> str:
    langchain_calls(langchain_openai(target, MAX_FORMED_TOKENS))
    return "any, named, streamed, result with a picture"


def langchain_responses(target: Target) -> str:
    chat = langchain_openai(target, MAX_FORMED_TOKENS, use_responses_api=True)
    langchain_turns(chat)
    langchain_forms(chat, "json_schema", "function_calling")
    langchain_calls(chat)
    return "turns, forms, tools"


def langchain_claude_structured(target: Target) -> str:
    chat = langchain_claude(target, MAX_FORMED_TOKENS)
    langchain_forms(chat, "json_schema", "function_calling")
    return "json_schema, function_calling"


def langchain_claude_tools(target: Target) -> str:
    langchain_calls(langchain_claude(target, MAX_FORMED_TOKENS))
    return "any, named, streamed, result with a picture"


def langchain_claude_messages(target: Target) -> str:
    langchain_turns(langchain_claude(target))
    return "two turns, streamed"


# ---- instructor


def instructor_asked(target: Target) -> dict[str, Any]:
    return {
        "model": target.model,
        "messages": [ASK],
        "response_model": Shape,
        "max_retries": 0,
    }


def instructor_structured(target: Target) -> str:
    """Use the modes that enforce the schema. JSON and MD_JSON only ask the model for it."""
    import instructor
    import openai

    names = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA")
    for name in names:
        client: Any = instructor.from_openai(
            openai.OpenAI(base_url=target.v1, api_key="none"), mode=instructor.Mode[name]
        )
        made = client.create(max_tokens=MAX_FORMED_TOKENS, **instructor_asked(target))
        assert isinstance(made, Shape), name
    return ", ".join(names)


def instructor_stream(target: Target) -> str:
    import instructor
    import openai

    plain = openai.OpenAI(base_url=target.v1, api_key="none")
    client: Any = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    asked = instructor_asked(target) | {"max_tokens": MAX_FORMED_TOKENS}
    last = list(client.create_partial(**asked))[-1]
    Shape.model_validate(last.model_dump())
    return "create_partial"


def instructor_responses(target: Target) -> str:
    import instructor
    import openai

    plain = openai.OpenAI(base_url=target.v1, api_key="none")
    client: Any = instructor.from_openai(plain, mode=instructor.Mode.RESPONSES_TOOLS)
    content = [QUESTION, instructor.Image.from_base64(URL)]
    asked = instructor_asked(target) | {"messages": [{"role": "user", "content": content}]}
    made = client.create(max_output_tokens=MAX_FORMED_TOKENS, **asked)
    assert isinstance(made, Shape)
    return "RESPONSES_TOOLS"


def instructor_messages(target: Target) -> str:
    import anthropic
    import instructor

    plain = anthropic.Anthropic(base_url=target.base, api_key="none")
    client: Any = instructor.from_anthropic(plain, mode=instructor.Mode.ANTHROPIC_TOOLS)
    content = [QUESTION, instructor.Image.from_base64(URL)]
    asked = instructor_asked(target) | {"messages": [{"role": "user", "content": content}]}
    assert isinstance(client.create(max_tokens=MAX_FORMED_TOKENS, **asked), Shape)
    return "ANTHROPIC_TOOLS"


# ---- pydantic-ai


def pydantic_ai_model(target: Target, api: str = "chat") -> Any:
    if api == "messages":
        import anthropic
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.profiles import ModelProfile
        from pydantic_ai.providers.anthropic import AnthropicProvider

        # pydantic-ai 2.31 is written for anthropic 0.x. With 1.x, it passes sampling parameters
        # that `create` no longer accepts. With 2.x, it calls a type that has become a Union. Both
        # raise before anything is sent.
        claude = anthropic.AsyncAnthropic(base_url=target.base, api_key="none")
        provider = AnthropicProvider(anthropic_client=claude)
        # pydantic-ai assumes that unknown models do not support schemas.
        profile = ModelProfile(supports_json_schema_output=True)
        return AnthropicModel(target.model, provider=provider, profile=profile)
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=target.v1, api_key="none")
    kind = OpenAIResponsesModel if api == "responses" else OpenAIChatModel
    return kind(target.model, provider=provider)


def pydantic_ai_seen() -> list[Any]:
    from pydantic_ai import BinaryContent

    return [BinaryContent(data=PNG, media_type="image/png"), QUESTION]


def pydantic_ai_turns(model: Any) -> None:
    """Chat for two turns with the agent's own history, and stream the second."""
    import asyncio

    from pydantic_ai import Agent

    async def run() -> None:
        agent: Any = Agent(model, model_settings={"max_tokens": MAX_TOKENS})
        first = await agent.run(pydantic_ai_seen())
        history = first.all_messages()
        async with agent.run_stream(AGAIN["content"], message_history=history) as second:
            assert [piece async for piece in second.stream_text()]

    asyncio.run(run())  # the model keeps connections of this loop, so `run_sync` needs a new one


def pydantic_ai_forms(model: Any) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput

    for kind in (ToolOutput, NativeOutput):
        output: Any = kind(Shape)
        agent: Any = Agent(
            model, output_type=output, model_settings={"max_tokens": MAX_FORMED_TOKENS}
        )
        assert isinstance(agent.run_sync(pydantic_ai_seen()).output, Shape), kind


def pydantic_ai_calls(model: Any) -> None:
    """Require any tool and a named one, and send back a picture as the result."""
    from pydantic_ai import ModelRequest, ModelResponse, UserPromptPart, direct
    from pydantic_ai.messages import ToolCallPart, ToolReturnPart
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.tools import ToolDefinition

    tool = ToolDefinition(name="look", parameters_json_schema=Look.model_json_schema())
    offered = ModelRequestParameters(function_tools=[tool], allow_text_output=True)
    asked: Any = ModelRequest(parts=[UserPromptPart(content=pydantic_ai_seen())])
    for choice in ("required", ["look"]):
        settings: Any = {"max_tokens": MAX_FORMED_TOKENS, "tool_choice": choice}
        answer: ModelResponse = direct.model_request_sync(
            model, [asked], model_settings=settings, model_request_parameters=offered
        )
        (call,) = (part for part in answer.parts if isinstance(part, ToolCallPart))
        check_call(call.tool_name, call.args_as_dict())
    result = ToolReturnPart("look", content=pydantic_ai_seen()[0], tool_call_id=call.tool_call_id)
    direct.model_request_sync(
        model,
        [asked, answer, ModelRequest(parts=[result])],
        model_settings={"max_tokens": MAX_TOKENS},
        model_request_parameters=offered,
    )


def pydantic_ai_chat(target: Target) -> str:
    from pydantic_ai import Agent

    agent: Any = Agent(pydantic_ai_model(target), model_settings={"max_tokens": MAX_TOKENS})
    assert agent.run_sync(pydantic_ai_seen()).usage.input_tokens > 0
    return "BinaryContent, usage"


def pydantic_ai_stream(target: Target) -> str:
    pydantic_ai_turns(pydantic_ai_model(target))
    return "run_stream, history"


def pydantic_ai_structured(target: Target) -> str:
    pydantic_ai_forms(pydantic_ai_model(target))
    return "ToolOutput, NativeOutput"


def pydantic_ai_tools(target: Target) -> str:
    pydantic_ai_calls(pydantic_ai_model(target))
    return "required, named, result with a picture"


def pydantic_ai_responses(target: Target) -> str:
    pydantic_ai_turns(pydantic_ai_model(target, "responses"))
    model = pydantic_ai_model(target, "responses")
    pydantic_ai_forms(model)
    pydantic_ai_calls(model)
    return "turns, forms, tools"


def pydantic_ai_messages(target: Target) -> str:
    pydantic_ai_turns(pydantic_ai_model(target, "messages"))
    model = pydantic_ai_model(target, "messages")
    pydantic_ai_forms(model)
    pydantic_ai_calls(model)
    return "turns, forms, tools"


# ---- the Agents SDK


def agent_of(target: Target, api: str = "chat", **more: Any) -> Any:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=target.v1, api_key="none")
    kind: Any = (
        agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
    )
    settings = agents.ModelSettings(
        max_tokens=MAX_FORMED_TOKENS, tool_choice="required" if "tools" in more else None
    )
    model = kind(model=target.model, openai_client=client)
    return agents.Agent(name="eye", model=model, model_settings=settings, **more)


AGENTS_ASK: Any = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": URL, "detail": "auto"},
            {"type": "input_text", "text": QUESTION},
        ],
    }
]


def agents_turns(agent: Any) -> None:
    import asyncio

    from agents import Runner

    async def run() -> None:
        first = await Runner.run(agent, AGENTS_ASK)
        streamed = Runner.run_streamed(agent, [*first.to_input_list(), AGAIN])
        assert [event async for event in streamed.stream_events()]

    asyncio.run(run())


def agents_calls(target: Target, api: str) -> None:
    """Force the agent to call its tool. Then tool_choice is automatic again, and it finishes."""
    from agents import Runner, function_tool

    seen: list[str] = []

    def look(look: Look) -> str:
        """Look closer."""
        seen.append(look.part)
        return f"The {look.part} is red."

    agent = agent_of(target, api, tools=[function_tool(look)])
    assert Runner.run_sync(agent, AGENTS_ASK).final_output is not None
    assert seen


def agents_chat(target: Target) -> str:
    from agents import Runner

    Runner.run_sync(agent_of(target), AGENTS_ASK)
    return "input_image"


def agents_stream(target: Target) -> str:
    agents_turns(agent_of(target))
    return "run_streamed, to_input_list"


def agents_structured(target: Target) -> str:
    from agents import Runner

    made = Runner.run_sync(agent_of(target, output_type=Shape), AGENTS_ASK).final_output
    assert isinstance(made, Shape)
    return "output_type"


def agents_tools(target: Target) -> str:
    agents_calls(target, "chat")
    return "required, its result"


def agents_responses(target: Target) -> str:
    from agents import Runner

    agents_turns(agent_of(target, "responses"))
    made = Runner.run_sync(agent_of(target, "responses", output_type=Shape), AGENTS_ASK)
    assert isinstance(made.final_output, Shape)
    agents_calls(target, "responses")
    return "turns, output_type, tools"


# ---- Vercel's AI SDK


def ai_sdk(feature: str) -> Callable[[Target], str]:
    def run(target: Target) -> str:
        node, script = shutil.which("node"), Path(__file__).with_name("ai_sdk.mjs")
        if node is None:
            raise ImportError("node", name="node")
        done = subprocess.run(
            [node, str(script), feature, target.base, target.model, URL],
            capture_output=True,
            text=True,
            timeout=NODE_SECONDS,
            check=False,
            cwd=os.environ.get("AI_SDK", "."),
        )
        if done.returncode == NOT_INSTALLED:
            raise ImportError(done.stderr.strip(), name=done.stderr.strip().split()[-1])
        assert done.returncode == 0 and done.stdout.strip(), done.stderr[-1500:]
        return done.stdout.strip()

    return run
