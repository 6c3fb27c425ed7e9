"""Tokens a second with and without guesses, over HTTP: two servers of one checkpoint in turns.

    python -m saccade_bench.speculation [--preset qwen3-vl-2b] [--quantization int8] [--rounds 3]

The weights are random, so what an answer says means nothing; that it is the same answer with and
without guesses is checked. `again`: the same question about the same image once more (its answer is
known), drawn at temperature 1 with the same seed, so that it does not repeat itself, too. `new`:
text drawn at temperature 1, which nothing predicts. `json`: an answer in a schema whose keys the
grammar forces and whose values are drawn; forced tokens are computed together with and without
guesses, so that its gain is told beside `new`, without guesses. `eight`: eight of `new` at once.
--head: a
Qwen3.5 preset with its head that drafts, always right (weights of which it can foresee greedy
answers; `new` and `eight` are greedy then), or always wrong (random ones).
Ratios are of medians, in turns; above 1 guesses are faster. Answers that differ are printed whole,
with the first place that does, and the trace of the one with guesses; the command then fails.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import httpx
import torch
from PIL import Image

from saccade.core.types import GuessSource
from saccade.families.registry import load_spec
from saccade_bench.fixtures.certain_head import make_certain
from saccade_bench.fixtures.server import Server, serving
from saccade_bench.fixtures.tiny import picture
from saccade_bench.lab.checkpoint import make_checkpoint, write_weights

HEAD = ("mtp=on",)
LINE = {
    "type": "object",
    "properties": {
        "item": {"type": "string", "maxLength": 12},
        "qty": {"type": "integer", "minimum": 0, "maximum": 999},
        "unit": {"enum": ["piece", "box", "kg"]},
        "paid": {"type": "boolean"},
    },
    "required": ["item", "qty", "unit", "paid"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "no": {"type": "string", "maxLength": 12},
        "total": {"type": "integer", "minimum": 0, "maximum": 99_999},
        "lines": {"type": "array", "items": LINE, "minItems": 6, "maxItems": 6},
    },
    "required": ["no", "total", "lines"],
    "additionalProperties": False,
}
"""Of a receipt. The presets' vocabularies have a token for each character of its keys, a third of
what Qwen's has: so keys are short, where a receipt's would be words.
"""
IN_SCHEMA: dict[str, Any] = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "receipt", "schema": SCHEMA, "strict": True},
    },
    "ignore_eos": False,
}
LONGEST = 1024
"""Tokens of an answer in the schema, at most."""


def question(seed: int, text: str) -> list[dict[str, Any]]:
    file = io.BytesIO()
    Image.fromarray(picture(224, 224, seed=seed)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


@dataclass(frozen=True)
class Answer:
    """deltas: its text, as it came. seconds: from the first to the last."""

    deltas: tuple[str, ...]
    seconds: float
    trace: Any

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    @property
    def tokens(self) -> int:
        count: int = next(
            each["completion_tokens"] for each in self.trace if "prompt_tokens" in each
        )
        return count


def ask(server: Server, tokens: int, messages: list[dict[str, Any]], **sampling: Any) -> Answer:
    body = {"messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body |= {"saccade": {"trace": True}, "stream_options": {"include_usage": True}}
    deltas, first, last, trace = list[str](), 0.0, 0.0, list[Any]()
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body | sampling, timeout=600) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            trace += [event[name] for name in ("usage", "saccade") if event.get(name)]
            if event["choices"]:
                last = time.perf_counter()
                first = first or last
                deltas.append(event["choices"][0]["delta"].get("content") or "")
    return Answer(tuple(deltas), last - first, trace)


def compare(what: str, plain: Answer, guessed: Answer) -> bool:
    """True if equal; else says where they are not."""
    if plain.text == guessed.text:
        return True
    pairs = zip(plain.text, guessed.text)
    place = next((at for at, (a, b) in enumerate(pairs) if a != b), len(plain.text))
    print(f"DIFFERS {what}: the first {place} characters are equal")
    for name, each in (("without", plain), ("with", guessed)):
        print(f"  {name} {each.deltas}\n  {name} {each.trace}", flush=True)
    return False


def measure(servers: dict[str, Server], args: argparse.Namespace) -> dict[str, Any]:
    seconds: dict[str, dict[str, list[float]]] = {}
    answers = differ = 0
    text = {"temperature": float(args.head != "right")}

    def note(what: str, name: str, took: float) -> None:
        seconds.setdefault(what, {}).setdefault(name, []).append(took)

    for turn in range(args.rounds + 1):  # the first warms up
        texts: dict[str, list[Answer]] = {}
        for name, server in servers.items():
            about = question(turn, "What does it say?")
            drawn = {"temperature": 1.0, "seed": turn}
            # The first answer comes of a prompt computed whole, whose last bits differ in bfloat16.
            for _ in range(3):
                again = ask(server, args.tokens, about, **drawn)
            new = ask(server, args.tokens, question(turn, f"{turn}"), **drawn | text)
            schema = ask(server, LONGEST, question(turn, f"{turn}"), **drawn, **IN_SCHEMA)
            json.loads(schema.text)

            def one(seed: int, server: Server = server) -> Answer:
                each = question(0, f"{seed}")
                return ask(server, args.tokens, each, **text, seed=seed)

            start = time.perf_counter()
            with ThreadPoolExecutor(8) as pool:
                eight = list(pool.map(one, range(8)))
            if turn:
                note("again", name, again.seconds)
                note("new", name, new.seconds)
                note("json", name, schema.seconds / (schema.tokens - 1) * (args.tokens - 1))
                note("eight", name, time.perf_counter() - start)
            named = {"again": again, "new": new, "json": schema}
            for what, each in (
                named | {f"eight {i}": each for i, each in enumerate(eight)}
            ).items():
                texts.setdefault(f"{what} of turn {turn}", []).append(each)
        answers += len(texts)
        differ += sum(not compare(what, *found) for what, found in texts.items())
    if differ:
        raise SystemExit(f"guesses changed {differ} of {answers} answers")
    medians = {
        what: {name: statistics.median(each) for name, each in by.items()}
        for what, by in seconds.items()
    }
    return {
        "tokens per second": {
            what: {name: round((args.tokens - 1) / each, 2) for name, each in by.items()}
            for what, by in medians.items()
            if what != "eight"
        },
        "speed with guesses": {
            what: round(by["off"] / by["on"], 3) for what, by in medians.items()
        },
        "json beside new without guesses": {
            name: round(medians["new"]["off"] / each, 3) for name, each in medians["json"].items()
        },
        "equal answers": answers,
        "guesses": guesses_of(servers["on"]),
    }


def guesses_of(server: Server) -> dict[str, dict[str, float]]:
    """By source. Raises SystemExit where none was made: nothing was measured then."""
    found = {
        source: {
            "made": server.metric("saccade_guesses_total", source=source),
            "right": server.metric("saccade_right_guesses_total", source=source),
        }
        for source in get_args(GuessSource)
    }
    if not any(each["made"] for each in found.values()):
        raise SystemExit("the server has guessed nothing: see its start-up lines")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="qwen3-vl-2b")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--head", choices=["right", "wrong"])
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_checkpoint(args.preset, folder / "model")
        how = ["--quantization", args.quantization, "--dtype", "bfloat16"]
        how += ["--context-length", "4096"]
        if args.head == "right":
            write_weights(model, 0, torch.bfloat16, HEAD)
            make_certain(model)
        else:
            how += ["--tune", "load_format=dummy"]
        head = [f"--family-option={each}" for each in HEAD if args.head]
        # A model with a state per sequence is guessed for only where asked.
        states = load_spec(model).kv_spec().state_bytes("bfloat16")
        modes = {"off": "off", "on": "always" if states else "auto"}
        servers = {}
        for name, mode in modes.items():
            more = head if name == "on" else []
            flags = *how, *more, "--speculative", mode
            servers[name] = stack.enter_context(serving(model, folder, *flags))
        figures = {"load before": os.getloadavg()} | measure(servers, args)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
