"""A model without a family of its own, served by transformers' own modules, beside transformers'
`generate` on the same checkpoint, in one run and in turns.

    python -m saccade_bench.transformers_any [--rounds 3] [--threads 1] [--own]
        [--chat-rounds 8]

Makes a small random LLaVA-OneVision checkpoint, whose language model and tower have the layers
and widths of the lab's small Qwen3-VL; an image of 640x480 is 10 tiles of 256 patches, and about
2,000 tokens. `--own`: the same of a family of our own, SmolVLM, of the same layers, widths and
tiles, all of whose 2,560 patches are tokens; how far ahead it is, a model by transformers' modules
should be, too. Measured: an image and a question, new; the same again; the last round of a chat
with an image in each round; eight questions at once about eight images (transformers: one after
another, as its generate pads nothing). Greedy answers of fixed length, in float32; transformers'
times hold its processor's, Saccade's HTTP and decoding. Ends with a table and a line VERDICT.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
import torch
import transformers
from PIL import Image

from saccade_bench.fixtures.references import Reference
from saccade_bench.fixtures.server import serving
from saccade_bench.fixtures.tiny import make_checkpoint, picture, reference
from saccade_bench.fixtures.tiny_any import AnyReference, any_reference, make_any
from saccade_bench.fixtures.tiny_any_kinds import KINDS

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
    """Both servers of the same checkpoint."""

    url: str
    reference: Peer
    http: httpx.Client

    def ask(self, messages: list[dict[str, Any]]) -> float:
        """Seconds of an answer of Saccade's."""
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
        """The same of transformers' generate."""
        begun = time.perf_counter()
        self.reference.answer(messages, images)
        return time.perf_counter() - begun


class Peer(Protocol):
    """transformers on a checkpoint, from a chat and its images to an answer."""

    def answer(self, messages: list[dict[str, Any]], images: list[np.ndarray]) -> None: ...


@dataclass
class AnyPeer:
    reference: AnyReference

    def answer(self, messages: list[dict[str, Any]], images: list[np.ndarray]) -> None:
        tokenizer = self.reference.processor.tokenizer
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        self.reference.generate(prompt, images, NEW_TOKENS)


@dataclass
class OwnPeer:
    reference: Reference
    tokenizer: Any

    @classmethod
    def read(cls, folder: Path) -> OwnPeer:
        made = reference(folder)
        made.model.generation_config.eos_token_id = None
        made.model.generation_config.pad_token_id = 0
        return cls(made, transformers.AutoTokenizer.from_pretrained(folder))

    def answer(self, messages: list[dict[str, Any]], images: list[np.ndarray]) -> None:
        for message in messages:  # its template knows parts alone
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
        chat = json.loads(json.dumps(messages).replace('"image_url"', '"image"'))
        prompt = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=False
        )
        pixels = [self.reference.resize(each) for each in images]
        tokens = self.tokenizer.encode(self.reference.expand(prompt, pixels))
        self.reference.generate(tokens, pixels, NEW_TOKENS)


def make_own(folder: Path) -> Path:
    text = {key: value for key, value in TEXT.items() if key != "layer_types"}
    tower = VISION | {"patch_size": 14, "scale_factor": 1}
    make_checkpoint(folder, "smolvlm", text=text, vision=tower)
    path = folder / "preprocessor_config.json"
    sizes = {"size": {"longest_edge": 672}, "max_image_size": {"longest_edge": 224}}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    return folder


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
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "how many red circles are there?"},
    ]
    return {"role": "user", "content": parts}


def measure(
    sides: Sides, number: int, rounds: int, times: dict[str, list[tuple[float, float]]]
) -> None:
    """One round of all cases, of which the chat has `rounds`."""
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
    parser.add_argument("--own", action="store_true", help="a family of our own")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    times: dict[str, list[tuple[float, float]]] = {
        name: [] for name in ("cold", "again", "last of chat", "eight at once")
    }
    with tempfile.TemporaryDirectory() as name:
        folder = (make_own if options.own else make_model)(Path(name) / "model")
        with (
            serving(folder, Path(name), *OPTIONS, threads=options.threads) as server,
            httpx.Client(timeout=300) as http,
        ):
            peer: Peer = OwnPeer.read(folder) if options.own else AnyPeer(any_reference(folder))
            sides = Sides(server.url, peer, http)
            chat = options.chat_rounds
            measure(sides, 0, chat, {name: [] for name in times})  # both are warm then
            for number in range(1, options.rounds + 1):
                measure(sides, number, chat, times)
    served = "SmolVLM, of our own" if options.own else KINDS["llava_onevision"].model
    print(f"{served}, {options.threads} threads, medians in ms")
    ratios = {}
    for case, found in times.items():
        ours, theirs = (statistics.median(each) * 1e3 for each in zip(*found))
        ratios[case] = theirs / ours
        print(f"{case:>14}  saccade {ours:8.1f}  transformers {theirs:8.1f}  {ratios[case]:.2f} x")
    print("VERDICT", "as expected" if min(ratios.values()) > 1 else "slower than generate", ratios)


if __name__ == "__main__":
    main()
