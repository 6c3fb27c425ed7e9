"""Decode tokens/s and TTFT of Saccade over HTTP, compared with transformers' `generate` on the same
checkpoint in the same run.

    python -m saccade_bench.generate [--shape demo] [--dtype float32] [--threads 2] [--rounds 5]
        [--quantization int8]

Creates a small random checkpoint (of Qwen3-VL, or with `--shape smolvlm`, `gemma3` or `gemma4` of
these families), asks both about one image, alternately, with greedy answers of fixed length, and
prints medians and ratios. Saccade's prefix cache is off, so that every round includes a full
prefill and decode. A new image in each round makes its embedding cache miss. transformers receives
inputs that are already resized and tokenized, so that its times only include the model.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from saccade_bench.fixtures.server import serving
from saccade_bench.image_files import image_part, save
from tests.fixtures.tiny import make_checkpoint, picture, reference

TEXT = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
VISION = {
    "depth": 6,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_heads": 4,
    "out_hidden_size": 256,
    "deepstack_visual_indexes": [1, 3],
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 5e6,
    "mrope_section": [12, 10, 10],
    "mrope_interleaved": True,
}


@dataclass(frozen=True)
class Shape:
    """Fields of a random checkpoint's configuration and image processor, by family."""

    text: dict[str, Any]
    vision: dict[str, Any]
    family: str = "qwen3_vl"
    processor: dict[str, Any] | None = None
    fields: dict[str, Any] | None = None
    question: str = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    """Prompt format, with `{}` for the image placeholder and the text."""

    def make(self, folder: Path) -> Path:
        """Write the checkpoint to `folder`."""
        rope = {"rope_parameters": ROPE} if self.family == "qwen3_vl" else {}
        make_checkpoint(folder, self.family, text=self.text | rope, vision=self.vision)
        for name, fields in (
            ("preprocessor_config.json", self.processor),
            ("config.json", self.fields),
        ):
            place = folder / name
            place.write_text(json.dumps(json.loads(place.read_text()) | (fields or {})))
        return folder


SHAPES = {
    "small": Shape(TEXT, VISION),
    "demo": Shape(
        TEXT | {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 4},
        VISION
        | {
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 384,
            "out_hidden_size": 192,
            "deepstack_visual_indexes": [1, 2],
        },
    ),
    "smolvlm": Shape(
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        },
        "smolvlm",
        {"size": {"longest_edge": 1024}, "max_image_size": {"longest_edge": 512}},
        question="<|im_start|>User:{}<end_of_utterance>\nAssistant:",
    ),
    "gemma3": Shape(
        {
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
        {
            "hidden_size": 1152,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "intermediate_size": 4304,
            "image_size": 896,
        },
        "gemma3",
        {"size": {"height": 896, "width": 896}, "image_seq_length": 256},
        {"mm_tokens_per_image": 256},
        question="<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
    ),
    "gemma4": Shape(
        {
            "hidden_size": 640,
            "hidden_size_per_layer_input": 256,
            "intermediate_size": 2048,
            "num_hidden_layers": 20,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 4,
            "num_kv_shared_layers": 10,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "global_head_dim": 512,
            "attention_k_eq_v": False,
            "use_bidirectional_attention": None,
            "sliding_window": 512,
        },
        {
            "hidden_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "head_dim": 64,
            "intermediate_size": 3072,
            "position_embedding_size": 1024,
        },
        "gemma4",
        {"max_soft_tokens": 280},
        question="<bos><|turn>user\n{}<turn|>\n<|turn>model\n",
    ),
}
"""Layers and widths of the random checkpoints. "demo" has the dimensions of the demo model,
"smolvlm" of SmolVLM-256M, and "gemma3" of Gemma 3 270M's language model and four layers of its
vision encoder. "gemma4" has 20 of the 35 layers of Gemma 4 E2B and four of its vision encoder. All
have the tiny checkpoints' vocabulary.
"""
PROMPT = "how many red circles are there? " * 8


@dataclass(frozen=True)
class Timing:
    """Time to first token in seconds, and tokens per second after it."""

    ttft: float
    rate: float


class Ticks:
    """A streamer for `generate` that records when tokens arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Required of a streamer. No token is buffered, so there is nothing to flush."""


def time_transformers(judge: Any, tokens: list[int], pixels: np.ndarray, count: int) -> Timing:
    ticks = Ticks()
    judge.model.model.rope_deltas = None
    start = time.perf_counter()
    with torch.inference_mode():
        judge.model.generate(
            **judge.inputs(tokens, [pixels]),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            streamer=ticks,
        )
    times = ticks.times[1:]  # the first `put` is the prompt
    return Timing(times[0] - start, (len(times) - 1) / (times[-1] - times[0]))


def time_saccade(client: httpx.Client, pixels: tuple[np.ndarray, np.ndarray], count: int) -> Timing:
    """Measure two requests with new images, for one token and for `count` tokens.

    The times of streamed events are not used, because they are delayed while a character is
    incomplete.
    """
    first = time_answer(client, pixels[0], 1)
    return Timing(first, (count - 1) / (time_answer(client, pixels[1], count) - first))


def time_answer(client: httpx.Client, pixels: np.ndarray, count: int) -> float:
    """Return the seconds until a streamed answer of `count` tokens has ended."""
    content = [image_part(save(pixels)), {"type": "text", "text": PROMPT}]
    body = {
        "model": "small",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": count,
        "ignore_eos": True,
        "temperature": 0,
    }
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    start = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        usage = [event["usage"] for event in events(response) if event.get("usage")]
    seconds = time.perf_counter() - start
    assert usage[-1]["completion_tokens"] == count
    return seconds


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def run(folder: Path, args: argparse.Namespace) -> dict[str, list[Timing]]:
    judge = reference(folder, getattr(torch, args.dtype))
    judge.model.generation_config.eos_token_id = None
    judge.model.generation_config.pad_token_id = 0
    torch.set_num_threads(args.threads)
    options = (
        *("--dtype", args.dtype, "--quantization", args.quantization),
        *("--served-model-name", "small", "--tune", "disable_radix_cache=true"),
    )
    found: dict[str, list[Timing]] = {"saccade": [], "transformers": []}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = SHAPES[args.shape].question.format(judge.placeholder.strip() + PROMPT)
    with (
        serving(folder, folder, *options, threads=args.threads) as server,
        httpx.Client(base_url=server.url, timeout=600) as client,
    ):
        for index in track(range(args.rounds + 1), description="rounds"):
            shown = [picture(args.size, args.size, seed=2 * index + i) for i in range(2)]
            pixels = judge.resize(shown[0])
            tokens = tokenizer.encode(judge.expand(prompt, [pixels])).ids
            pair = (
                time_saccade(client, (shown[0], shown[1]), args.tokens),
                time_transformers(judge, tokens, pixels, args.tokens),
            )
            if index:  # the first round warms up
                found["saccade"].append(pair[0])
                found["transformers"].append(pair[1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--quantization",
        default="auto",
        choices=("auto", "int8", "int4"),
        help="int8, int4: Saccade's matrices in so many bits; transformers' stay as they are",
    )
    shapes = "layers and widths of the checkpoint"
    parser.add_argument("--shape", default="small", choices=tuple(SHAPES), help=shapes)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads, for both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="answer length")
    parser.add_argument("--size", type=int, default=256, help="picture side in pixels")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = run(SHAPES[args.shape].make(Path(name)), args)
    ttft = {
        name: statistics.median(each.ttft for each in timings) for name, timings in found.items()
    }
    rate = {
        name: statistics.median(each.rate for each in timings) for name, timings in found.items()
    }
    title = f"{args.shape}, {args.dtype}, {args.threads} threads, medians of {args.rounds} rounds"
    table = Table("", "TTFT ms", "decode tokens/s", title=title)
    for name in found:
        table.add_row(name, f"{1000 * ttft[name]:.1f}", f"{rate[name]:.0f}")
    ratios = ttft["transformers"] / ttft["saccade"], rate["saccade"] / rate["transformers"]
    table.add_row("ratio (more is better for Saccade)", f"{ratios[0]:.2f}", f"{ratios[1]:.2f}")
    Console().print(table)
    if args.json:
        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        figures = {name: [asdict(each) for each in timings] for name, timings in found.items()}
        settings = {key: str(value) for key, value in vars(args).items()}
        args.json.write_text(
            json.dumps(
                {
                    "settings": settings,
                    "versions": versions,
                    "machine": platform.processor(),
                    **figures,
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
