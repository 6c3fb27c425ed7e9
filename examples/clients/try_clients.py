"""Try the features of existing, unchanged clients with a running server.

    saccade serve demo &
    pip install openai anthropic litellm langchain-openai langchain-anthropic instructor \
        'pydantic-ai-slim[openai,anthropic]' openai-agents guidellm 'lm-eval[api]' \
        cohere llama-index-embeddings-openai-like haystack-ai
    npm install ai @ai-sdk/openai-compatible @ai-sdk/openai @ai-sdk/anthropic zod
    python examples/clients/try_clients.py [--only WORD] [--tokenizer FOLDER]

All features of each installed client are tried, one after another. Other clients are reported as
not installed. The output ends with a table. Forced calls and schemas work with any model, even a
random one (`saccade make-checkpoint --preset tiny-qwen3-vl --out DIR`). Optional tool calls depend
on the model and are not tried. If `--tokenizer` (for guidellm and lm-eval) is a complete
checkpoint, lm-eval's log-likelihoods are compared with transformers' (exact if the server runs with
--dtype float32). Any OpenAI-compatible server can be tested.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import evaluators
import frameworks
import sdks
import searches
from asked import Target

Trial = Callable[[Target], str]

CLIENTS: dict[str, dict[str, Trial]] = {
    "openai": {
        "chat": sdks.openai_chat,
        "stream": sdks.openai_stream,
        "structured": sdks.openai_structured,
        "tools": sdks.openai_tools,
        "responses": sdks.openai_responses,
        "files": sdks.openai_files,
        "documents": searches.openai_documents,
        "embeddings": searches.openai_embeddings,
        "decisions": searches.openai_decisions,
    },
    "anthropic": {
        "stream": sdks.anthropic_stream,
        "structured": sdks.anthropic_structured,
        "tools": sdks.anthropic_tools,
        "messages": sdks.anthropic_messages,
        "files": sdks.anthropic_files,
        "documents": searches.anthropic_documents,
    },
    "cohere": {"embeddings": searches.cohere_embeddings, "ranks": searches.cohere_ranks},
    "llama-index-core": {"embeddings": searches.llama_index_embeddings},
    "haystack-ai": {"embeddings": searches.haystack_embeddings},
    "litellm": {
        "chat": frameworks.litellm_chat,
        "stream": frameworks.litellm_stream,
        "structured": frameworks.litellm_structured,
        "tools": frameworks.litellm_tools,
        "responses": frameworks.litellm_responses,
        "messages": frameworks.litellm_messages,
        "overflow": frameworks.litellm_overflow,
    },
    "langchain-openai": {
        "chat": frameworks.langchain_chat,
        "stream": frameworks.langchain_stream,
        "structured": frameworks.langchain_structured,
        "tools": frameworks.langchain_tools,
        "responses": frameworks.langchain_responses,
        "documents": searches.langchain_documents,
        "embeddings": searches.langchain_embeddings,
    },
    "langchain-anthropic": {
        "structured": frameworks.langchain_claude_structured,
        "tools": frameworks.langchain_claude_tools,
        "messages": frameworks.langchain_claude_messages,
    },
    "instructor": {
        "structured": frameworks.instructor_structured,
        "stream": frameworks.instructor_stream,
        "responses": frameworks.instructor_responses,
        "messages": frameworks.instructor_messages,
    },
    "pydantic-ai-slim": {
        "chat": frameworks.pydantic_ai_chat,
        "stream": frameworks.pydantic_ai_stream,
        "structured": frameworks.pydantic_ai_structured,
        "tools": frameworks.pydantic_ai_tools,
        "responses": frameworks.pydantic_ai_responses,
        "messages": frameworks.pydantic_ai_messages,
    },
    "openai-agents": {
        "chat": frameworks.agents_chat,
        "stream": frameworks.agents_stream,
        "structured": frameworks.agents_structured,
        "tools": frameworks.agents_tools,
        "responses": frameworks.agents_responses,
    },
    "ai (npm)": {
        feature: frameworks.ai_sdk(feature)
        for feature in ("chat", "stream", "structured", "tools", "responses", "messages")
    },
    "guidellm": {"measure": evaluators.guidellm},
    "lm-eval": {"measure": evaluators.lm_eval},
}
FEATURES = (
    *("chat", "stream", "structured", "tools", "responses", "messages"),
    *("files", "documents", "embeddings", "ranks", "decisions", "overflow", "measure"),
)


def installed(client: str) -> str:
    """Return the version of a Python client, or "" if it is not a Python package."""
    try:
        return version(client)
    except PackageNotFoundError:
        return ""


def attempt(trial: Trial, target: Target, verbose: bool) -> tuple[str, str]:
    """Return (the table's cell, a message)."""
    try:
        return "works", trial(target)
    except ImportError as error:
        return "not tried", f"{error.name or error} is not installed"
    except Exception as error:
        if verbose:
            traceback.print_exc()
        return "FAILS", f"{type(error).__name__}: {str(error)[:1500]}"


def main() -> int:
    """Try all features, and return how many failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server's URL")
    parser.add_argument("--only", default="", help="clients and features with this in their name")
    parser.add_argument("--tokenizer", default="gpt2", help="a folder or name, for the evaluators")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks of failures")
    given = parser.parse_args()
    base = given.base_url.rstrip("/").removesuffix("/v1")
    try:
        with urllib.request.urlopen(f"{base}/v1/models", timeout=10) as response:
            model = json.load(response)["data"][0]["id"]
    except urllib.error.URLError as error:
        raise SystemExit(f"nobody answers at {base}/v1/models ({error.reason})") from None
    target = Target(base, model, given.tokenizer)
    found: dict[tuple[str, str], str] = {}
    for client, trials in CLIENTS.items():
        for feature, trial in trials.items():
            if given.only in f"{client} {feature}":
                word, said = attempt(trial, target, given.verbose)
                found[client, feature] = word
                print(f"{client:20} {feature:10} {word}: {said}", flush=True)
    columns = [feature for feature in FEATURES if any(each == feature for _, each in found)]
    print("\n| client | version |", " | ".join(columns), "|")
    print("|---|---|" + "---|" * len(columns))
    for client in dict.fromkeys(client for client, _ in found):
        words = " | ".join(found.get((client, feature), "") for feature in columns)
        print(f"| {client} | {installed(client)} | {words} |")
    failed = sum(word == "FAILS" for word in found.values())
    print(f"\n{failed} of {len(found)} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
