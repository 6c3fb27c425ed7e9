"""A model without its own family in Saccade, served through transformers' modules, compared with
transformers' `generate` on the same checkpoint, alternately in one run.

    python -m saccade_bench.transformers_any [--rounds 3] [--threads 1] [--chat-rounds 8]

Creates a small random LLaVA-OneVision checkpoint, whose language model and vision encoder have the
layers and widths of the lab's small Qwen3-VL. An image of 640x480 is 10 tiles of 256 patches, or
about 2,000 tokens. Measures a new image and question, the same request again, the last round of a
chat with an image in each round, and eight concurrent questions about eight images (sequentially
for transformers, because its generate does not pad). Answers are greedy, of fixed length, in
float32. transformers' times include its processor, and Saccade's include HTTP and image decoding.
The output ends with a table and a line VERDICT.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from saccade_bench.fixtures.server import serving
from saccade_bench.image_files import image_part, save
from tests.fixtures.tiny import picture
from tests.fixtures.tiny_any import AnyReference, any_reference, make_any
from tests.fixtures.tiny_any_kinds import KINDS

LAYERS = 8
TEXT = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": LAYERS,
    "layer_types": ["full_attention"] * LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}
VISION = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "image_size": 224,
}
TILES = [[224 * rows, 224 * columns] for rows in range(1, 4) for columns in range(1, 4)]
NEW_TOKENS = 32
SIZE = (480, 640)
AT_ONCE = 8
OPTIONS = ("--dtype", "float32", "--served-model-name", "m", "--max-total-tokens", "32768")


@dataclass
class Sides:
    """Clients of both servers of the same checkpoint."""

    url: str
    reference: AnyReference
    http: httpx.Client

    def ask(self, messages: list[dict[str, Any]]) -> float:
        """Return the seconds that Saccade takes to answer."""
        begun = time.perf_counter()
        body = {
            "model": "m",
            "messages": messages,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        self.http.post(f"{self.url}/v1/chat/completions", json=body).raise_for_status()
        return time.perf_counter() - begun

    def generate(self, messages: list[dict[str, Any]], images: list[np.ndarray]) -> float:
        """Return the seconds that transformers' generate takes to answer."""
        begun = time.perf_counter()
        tokenizer = self.reference.processor.tokenizer
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        self.reference.generate(prompt, images, NEW_TOKENS)
        return time.perf_counter() - begun


def make_model(folder: Path) -> Path:
    make_any(folder, "llava_onevision", VISION, **TEXT)
    for name, fields in (
        ("config.json", {"image_grid_pinpoints": TILES}),
        ("processor_config.json", {"num_image_tokens": 256}),
    ):
        path = folder / name
        told = json.loads(path.read_text()) | fields
        if "image_processor" in told:
            told["image_processor"] |= {
                "size": {"height": 224, "width": 224},
                "image_grid_pinpoints": TILES,
            }
        path.write_text(json.dumps(told))
    return folder


def turn(image: np.ndarray) -> dict[str, Any]:
    parts = [
        image_part(save(image)),
        {"type": "text", "text": "how many red circles are there?"},
    ]
    return {"role": "user", "content": parts}


def measure(
    sides: Sides, number: int, rounds: int, times: dict[str, list[tuple[float, float]]]
) -> None:
    """Run one round of all cases. The chat has `rounds` turns."""
    images = [picture(*SIZE, seed=1000 * number + each) for each in range(AT_ONCE + rounds)]
    first = [turn(images[0])]
    for case in ("cold", "again"):
        times[case].append((sides.ask(first), sides.generate(first, images[:1])))
    chat: list[dict[str, Any]] = []
    for place in range(rounds):
        chat.append(turn(images[place]))
        ours = sides.ask(chat)
        if place == rounds - 1:
            times["last of chat"].append((ours, sides.generate(chat, images[:rounds])))
        chat.append({"role": "assistant", "content": "there are two."})
    shown = images[rounds:]
    begun = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda each: sides.ask([turn(each)]), shown))
    ours = time.perf_counter() - begun
    theirs = sum(sides.generate([turn(each)], [each]) for each in shown)
    times["eight at once"].append((ours, theirs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--chat-rounds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    times: dict[str, list[tuple[float, float]]] = {
        name: [] for name in ("cold", "again", "last of chat", "eight at once")
    }
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name) / "model")
        with (
            serving(folder, Path(name), *OPTIONS, threads=options.threads) as server,
            httpx.Client(timeout=300) as http,
        ):
            sides = Sides(server.url, any_reference(folder), http)
            chat = options.chat_rounds
            measure(sides, 0, chat, {name: [] for name in times})  # warms up both
            for number in range(1, options.rounds + 1):
                measure(sides, number, chat, times)
    print(f"{KINDS['llava_onevision'].model}, {options.threads} threads, medians in ms")
    ratios = {}
    for case, found in times.items():
        ours, theirs = (statistics.median(each) * 1e3 for each in zip(*found))
        ratios[case] = theirs / ours
        print(f"{case:>14}  saccade {ours:8.1f}  transformers {theirs:8.1f}  {ratios[case]:.2f} x")
    print("VERDICT", "as expected" if min(ratios.values()) > 1 else "slower than generate", ratios)


if __name__ == "__main__":
    main()
