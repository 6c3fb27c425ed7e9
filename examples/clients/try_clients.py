"""Existing clients, unchanged, against a running server: what works.

    saccade serve demo &
    pip install openai litellm langchain-openai guidellm 'lm-eval[api]'
    python examples/clients/try_clients.py http://127.0.0.1:8000 [FOLDER OF A TOKENIZER]

Each client that is installed is tried; a client that is not is said to be missing. The last line
counts. The folder may be the whole checkpoint: then lm-eval's log-likelihoods are compared with
those of transformers (exact where the server runs with --dtype float32). Knows nothing of Saccade:
any OpenAI-compatible server will do.
"""

from __future__ import annotations

import base64
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 300


def png(width: int = 64, height: int = 64) -> bytes:
    """A red square."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = (b"\0" + b"\xff\0\0" * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


URL = "data:image/png;base64," + base64.b64encode(png()).decode()
LOOK = {
    "role": "user",
    "content": [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "text", "text": "What colour is it?"},
    ],
}
AGAIN = {"role": "user", "content": "Are you sure?"}


def openai_three_turns(base: str, model: str) -> str:
    """The SDK's own answers go back as they came, three times."""
    import openai

    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none")
    messages: list[Any] = [LOOK]
    for _ in range(3):
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=24)
        messages += [answer.choices[0].message, AGAIN]
    return f"{len(messages) // 2} turns"


def openai_stream_helper(base: str, model: str) -> str:
    """`client.chat.completions.stream()`, its final message sent back."""
    import openai

    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none")
    with client.chat.completions.stream(model=model, messages=[LOOK], max_tokens=24) as stream:  # type: ignore[list-item]
        message = stream.get_final_completion().choices[0].message
    messages: list[Any] = [LOOK, message, AGAIN]
    client.chat.completions.create(model=model, messages=messages, max_tokens=24)
    return "sent back"


def openai_responses(base: str, model: str) -> str:
    """`client.responses`: a picture, two turns by id, streamed, retrieved."""
    import openai

    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none")
    parts = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "What?"}]
    asked: list[Any] = [{"role": "user", "content": parts}]
    first = client.responses.create(model=model, input=asked, max_output_tokens=24)
    with client.responses.stream(
        model=model, input="Are you sure?", previous_response_id=first.id, max_output_tokens=24
    ) as stream:
        last = list(stream)[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert client.responses.retrieve(last.response.id).output == last.response.output
    return "two turns"


def litellm_three_turns(base: str, model: str) -> str:
    """LiteLLM's message objects go back as they came; an overflow is its own exception."""
    import litellm

    where = {"model": f"openai/{model}", "api_base": f"{base}/v1", "api_key": "none"}
    messages: list[Any] = [LOOK]
    for _ in range(3):
        answer = litellm.completion(messages=messages, max_tokens=24, **where)
        messages += [answer.choices[0].message, AGAIN]
    try:
        huge = [{"role": "user", "content": "word " * 1_000_000}]
        litellm.completion(messages=huge, **where)
    except litellm.ContextWindowExceededError:
        return "3 turns; context overflow recognised"
    raise AssertionError("an overflow was not recognised")


def langchain(base: str, model: str) -> str:
    """Invoke, stream and a second turn through langchain-openai."""
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=f"{base}/v1", api_key="none", max_tokens=24)  # type: ignore[call-arg,arg-type]
    first = HumanMessage(content=LOOK["content"])  # type: ignore[arg-type]
    answer = chat.invoke([first])
    pieces = [chunk.content for chunk in chat.stream([first])]
    assert "".join(map(str, pieces)) == answer.content
    chat.invoke([first, answer, HumanMessage(content="Are you sure?")])
    return "invoke, stream, second turn"


def guidellm(base: str, model: str) -> str:
    """Four requests of synthetic text; all must succeed."""

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.json"
        command = [
            *(sys.executable, "-m", "guidellm", "run", "--disable-console"),
            *(
                "--backend",
                f"kind=openai_http,target={base},model={model}",
                "--profile",
                "kind=synchronous",
            ),
            *("--constraint", "kind=max_requests,count=4"),
            *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
            *("--output", f"kind=json,path={output}"),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
        assert output.is_file(), (done.stderr or done.stdout)[-1500:]
        counted = re.findall(
            r"completed .*successful=(\d+) errored=(\d+)", done.stdout + done.stderr
        )
        assert counted == [("4", "0")], counted
    return "4 of 4 requests"


LM_EVAL_TASK = """
task: quick_sums
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
metadata: {version: 1}
"""
LM_EVAL_DOCUMENTS: list[dict[str, Any]] = [
    {"question": f"There are {a} red circles and {b} blue squares. How many shapes? Answer:",
     "choices": [f" {a + b}", f" {a + b + 1} shapes", " none at all", " red"], "answer": 0}
    for a, b in ((1, 2), (3, 4), (2, 2), (5, 1), (4, 4), (1, 1))
]  # fmt: skip


def lm_eval(base: str, model: str) -> str:
    """A multiple choice task of its own, by log-likelihoods of an echo (`local-completions`)."""
    import lm_eval as _  # type: ignore[import-not-found]  # noqa: F401

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "questions.jsonl"
        data.write_text("\n".join(map(json.dumps, LM_EVAL_DOCUMENTS)))
        (folder / "quick_sums.yaml").write_text(LM_EVAL_TASK.replace("DATA", str(data)))
        settings = {
            "model": model,
            "base_url": f"{base}/v1/completions",
            "tokenizer": TOKENIZER,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 2,
        }
        command = [
            *(sys.executable, "-m", "lm_eval", "--model", "local-completions"),
            *("--model_args", ",".join(f"{key}={value}" for key, value in settings.items())),
            *("--tasks", "quick_sums", "--include_path", name, "--batch_size", "4"),
            *("--output_path", str(folder / "out"), "--log_samples"),
        ]
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
            env={**os.environ, **offline},
        )
        files = list(folder.glob("out/**/samples_*.jsonl"))
        assert files, (done.stderr or done.stdout)[-1500:]
        samples = [json.loads(line) for line in files[0].read_text().splitlines()]
    found = [
        (*(arguments["arg_0"], arguments["arg_1"]), *(float(answer[0][0]), answer[0][1] == "True"))
        for sample in samples
        for arguments, answer in zip(sample["arguments"].values(), sample["resps"])
    ]
    assert len(found) == sum(len(each["choices"]) for each in LM_EVAL_DOCUMENTS)
    return f"{len(found)} log-likelihoods; {compared(found)}"


def compared(found: list[tuple[str, str, float, bool]]) -> str:
    """(context, continuation, log-likelihood, whether it is the greedy one), beside those of
    transformers.
    """
    if not (Path(TOKENIZER) / "config.json").is_file():
        return "not compared: no checkpoint was given"
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    kind: Any = AutoModelForImageTextToText
    network = kind.from_pretrained(TOKENIZER, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(TOKENIZER)
    largest, greedy = 0.0, 0
    for context, continuation, score, is_greedy in found:
        before = len(tokenizer.encode(context))
        tokens = torch.tensor([tokenizer.encode(context + continuation)])
        with torch.inference_mode():
            rows = torch.log_softmax(network(tokens).logits[0, before - 1 : -1], dim=-1)
        answer = tokens[0, before:]
        expected = float(rows.gather(1, answer.unsqueeze(1)).sum())
        largest = max(largest, abs(score - expected))
        greedy += is_greedy == bool((rows.argmax(dim=-1) == answer).all())
    assert largest < 0.05 * abs(found[0][2]) + 0.05, f"off by {largest}"
    return f"off from transformers by {largest:.1g} at most, {greedy} of {len(found)} greedy alike"


CLIENTS: dict[str, Callable[[str, str], str]] = {
    "openai, three turns": openai_three_turns,
    "openai, stream() sent back": openai_stream_helper,
    "openai, responses": openai_responses,
    "litellm": litellm_three_turns,
    "langchain-openai": langchain,
    "guidellm": guidellm,
    "lm-eval": lm_eval,
}

TOKENIZER = ""
"""A folder or name that guidellm and lm-eval load a tokenizer from."""


def main() -> int:
    """The number of clients that failed."""
    base = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with urllib.request.urlopen(f"{base}/v1/models", timeout=10) as response:
        model = json.load(response)["data"][0]["id"]
    failed = 0
    for name, run in CLIENTS.items():
        try:
            outcome = f"works: {run(base, model)}"
        except ImportError as error:
            outcome = f"not tried: {error.name} is not installed"
        except Exception as error:
            failed += 1
            outcome = f"FAILS: {type(error).__name__}: {str(error)[:1500]}"
        print(f"{name:28} {outcome}", flush=True)
    print(f"{failed} of {len(CLIENTS)} failed")
    return failed


if __name__ == "__main__":
    TOKENIZER = sys.argv[2] if len(sys.argv) > 2 else "gpt2"
    sys.exit(main())
