"""The language model alone, Saccade beside llama.cpp, on the same random weights of Qwen3-VL-2B's
shapes cut to a few layers: tokens per second of decode and prefill, in turns in one process.

    python -m saccade_bench.peers.language_model NODE [--layers 8] [--threads 1] [--rounds 15]
        [--work FOLDER] [--json FILE]

NODE is the folder where `npm install --ignore-scripts node-llama-cpp` was run; the package `gguf`
must be importable. First both say what they make of the same tokens, so that it is the same model
that is compared; then every round runs each kind of weights once, one after the other. Each step is
the whole language model (layers, last norm, head, logits in float32) with no scheduler and no HTTP
around it. CPU time is the process's, which what else the machine does disturbs less than the clock;
the machine's load is written down beside it.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from safetensors.torch import save_file

from saccade.families.qwen_vl.spec import QwenVLSpec
from saccade.families.registry import family_model, load_spec
from saccade.kernels.matrix import DenseMatrix
from saccade.kernels.ops import pick_ops
from saccade.nn.decoder import attention_decoder
from saccade.nn.low_rank import Adapters
from saccade.nn.protocol import Batch
from saccade.nn.weights import Part
from saccade.parallel import WHOLE
from saccade.runtime.attention import attention_for
from saccade.runtime.memory import allocate_caches, keys_and_values
from saccade.runtime.weights.checkpoint_weights import CheckpointWeights
from saccade.runtime.weights.quant_policy import LoadTally, Made, QuantPolicy
from saccade_bench.lab.checkpoint import make_checkpoint
from saccade_bench.peers.gguf import write_gguf
from saccade_bench.peers.llama_cpp import FTYPES, Llama, LlamaCpp

PAGE = 16
OURS: dict[str, Made | None] = {"bfloat16": None, "int8": "int8", "int4": "int4"}
"""Saccade's kinds, and what matrices are made at load."""
AGREE_TOKENS = 32
"""Tokens of the prompt that both go on from, and tokens that they add."""


class Kept:
    """Random weights, kept by name; implements `nn.weights.Weights`."""

    def __init__(self) -> None:
        self.dtype, self.device = torch.bfloat16, torch.device("cpu")
        self.ops = pick_ops(self.device, self.dtype)
        self.adapters = Adapters()
        self.tensors: dict[str, torch.Tensor] = {}
        self._random = torch.Generator().manual_seed(0)

    def load(self, *parts: Part) -> torch.Tensor:
        for part in parts:
            noise = torch.randn(part.shape, generator=self._random)
            if len(part.shape) == 1:
                noise = noise * 0.1 + (0.0 if part.name.endswith("bias") else 1.0)
            else:
                noise /= math.sqrt(part.shape[1])
            self.tensors[part.name] = noise.to(self.dtype)
        return torch.cat([self.tensors[part.name] for part in parts])

    def load_experts(self, _parts: Sequence[Part], _turned: bool, /) -> None:
        return None

    def load_matrix(self, *parts: Part) -> DenseMatrix:
        return DenseMatrix(self.load(*parts))

    def has(self, name: str) -> bool:
        return name in self.tensors

    def found(self, _name: str, _values: torch.Tensor, /) -> None: ...

    def fits(self, _part: Part, /) -> bool:
        return True

    def matrix(self, weight: torch.Tensor, _name: str, /) -> DenseMatrix:
        return DenseMatrix(weight)


def make_text_checkpoint(preset: str, layers: int, folder: Path) -> Path:
    """A checkpoint of a preset's configuration, cut to `layers`, with a language model only."""
    make_checkpoint(preset, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config))
    weights = Kept()
    attention_decoder(weights, cast(QwenVLSpec, load_spec(folder)).text, WHOLE)
    tensors = {
        name if name.startswith("lm_head.") else f"model.{name}": tensor
        for name, tensor in weights.tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Runs(Protocol):
    """A language model with contexts of a few rows, all equally long."""

    def forget(self, start: int = 0) -> None: ...

    def run(
        self, rows: Sequence[Sequence[int]], start: int, *, every: bool = False
    ) -> np.ndarray | torch.Tensor: ...


class Saccade:
    """Saccade's language model over a KV cache of its own."""

    def __init__(
        self,
        folder: Path,
        *,
        rows: int,
        context: int,
        dtype: torch.dtype,
        made: Made | None = None,
    ) -> None:
        spec = cast(QwenVLSpec, load_spec(folder))
        tally = LoadTally()
        policy = QuantPolicy(family_model(spec).projection, made=made, native=False, tally=tally)
        with CheckpointWeights(
            folder,
            family_model(spec).canonical_name,
            dtype,
            torch.device("cpu"),
            policy=policy,
        ) as weights:
            self._model = attention_decoder(weights, spec.text, WHOLE)
        self._width = spec.embedding_width
        self._pages = context // PAGE
        pages, device = 1 + rows * self._pages, torch.device("cpu")
        cache = keys_and_values(allocate_caches(spec.kv_spec(), pages, PAGE, dtype, device))
        for keys, values in cache.values():
            keys.zero_()
            values.zero_()
        self._attention = attention_for(cache, PAGE)
        self._table = torch.arange(1, 1 + rows * self._pages, dtype=torch.int32)
        self._table = self._table.view(rows, self._pages)
        self.memory = tally.line(torch.bfloat16)

    def forget(self, start: int = 0) -> None:
        """Do nothing: a batch contains the length of each row."""

    def run(
        self, rows: Sequence[Sequence[int]], start: int, *, every: bool = False
    ) -> torch.Tensor:
        """As `Llama.run`."""
        count, length = len(rows), len(rows[0])
        positions = torch.arange(start, start + length)
        places = torch.cat(
            [
                self._table[r, positions // PAGE].long() * PAGE + positions % PAGE
                for r in range(count)
            ]
        )
        batch = Batch(
            tokens=torch.tensor([token for row in rows for token in row]),
            positions=positions.repeat(count).expand(3, -1),
            out_slots=places,
            slots=torch.arange(count),
            page_table=self._table,
            q_starts=torch.arange(count + 1, dtype=torch.int32) * length,
            kv_lengths=torch.full((count,), start + length, dtype=torch.int32),
            singles=count if length == 1 else 0,
            splice_rows=torch.empty(0, dtype=torch.int64),
            embeddings=torch.empty(0, self._width),
            sample_rows=torch.arange(count),
        )
        self._attention.plan(batch)
        states = self._model(batch, self._attention)
        return self._model.logits(states if every else states[length - 1 :: length])


def greedy(model: Runs, prompt: Sequence[int], count: int) -> list[int]:
    model.forget()
    tokens = list(prompt)
    said = int(np.asarray(model.run([tokens], 0)).argmax())
    answer = [said]
    for position in range(len(prompt), len(prompt) + count - 1):
        said = int(np.asarray(model.run([[said]], position)).argmax())
        answer.append(said)
    model.forget()
    return answer


def logits_of(model: Runs, tokens: Sequence[int]) -> np.ndarray:
    model.forget()
    logits = np.array(model.run([tokens], 0, every=True))
    model.forget()
    return logits


def compare(logits: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """The distance of logits [N, vocab] from float32's."""
    error = np.linalg.norm(logits - exact, axis=1) / np.linalg.norm(exact, axis=1)
    same = logits.argmax(1) == exact.argmax(1)
    return {"relative_error": round(float(error.mean()), 6), "same_argmax": float(same.mean())}


class Contest:
    """Kinds of weights, each run once a round on the same tokens."""

    def __init__(self, models: dict[str, Runs], rounds: int, context: int) -> None:
        self._models, self._rounds, self._context = models, rounds, context

    def decode(self, rows: int) -> dict[str, Any]:
        """One token of each of `rows` sequences after `context` tokens."""
        start = self._context
        for model in self._models.values():
            model.forget()
            model.run([[*range(r, r + start)] for r in range(rows)], 0)

        def step(model: Runs) -> None:
            model.run([[7 + r] for r in range(rows)], start)

        return self._turns(step, lambda model: model.forget(start), self._rounds, rows)

    def prefill(self, count: int) -> dict[str, Any]:
        def step(model: Runs) -> None:
            model.run([range(count)], 0)

        rounds = max(3, self._rounds // 3)
        return self._turns(step, lambda model: model.forget(), rounds, count)

    def _turns(
        self,
        step: Callable[[Runs], None],
        restore: Callable[[Runs], None],
        rounds: int,
        tokens: int,
    ) -> dict[str, Any]:
        times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in self._models}
        for index in range(rounds + 1):
            for kind, model in self._models.items():
                restore(model)
                start = time.process_time(), time.perf_counter()
                step(model)
                took = time.process_time() - start[0], time.perf_counter() - start[1]
                if index:  # the first round warms up
                    times[kind].append(took)
        return {kind: summary(each, tokens) for kind, each in times.items()}


def summary(times: list[tuple[float, float]], tokens: int) -> dict[str, float]:
    """Seconds of CPU and clock to tokens per second of each."""
    figures: dict[str, float] = {}
    for axis, name in enumerate(("cpu", "wall")):
        each = [one[axis] for one in times]
        figures[f"{name}_ms"] = round(1000 * statistics.median(each), 2)
        figures[f"least_{name}_ms"] = round(1000 * min(each), 2)
        figures[f"tokens_per_{name}_s"] = round(tokens / statistics.median(each), 1)
        figures[f"most_tokens_per_{name}_s"] = round(tokens / min(each), 1)
    return figures


def agreement(folder: Path, files: dict[str, Path], llama: LlamaCpp, vocab: int) -> dict[str, Any]:
    """Each kind's results on the same tokens, beside Saccade in float32."""
    prompt = np.random.default_rng(0).integers(0, vocab, AGREE_TOKENS).tolist()
    room: Any = {"rows": 1, "context": 256}
    judge = Saccade(folder, dtype=torch.float32, **room)
    answer = greedy(judge, prompt, AGREE_TOKENS)
    tokens = [*prompt, *answer]
    exact = logits_of(judge, tokens)
    del judge
    gc.collect()
    found: dict[str, Any] = {}
    for kind, path in files.items():
        with Llama(llama, path, vocab=vocab, threads=2, **room) as model:
            said = greedy(model, prompt, AGREE_TOKENS)
            same = sum(a == b for a, b in zip(said, answer))
            found[f"llama.cpp {kind}"] = compare(logits_of(model, tokens), exact) | {
                "same_greedy_tokens": same
            }
    for kind, made in OURS.items():
        own = Saccade(folder, dtype=torch.bfloat16, made=made, **room)
        said = greedy(own, prompt, AGREE_TOKENS)
        found[f"saccade {kind}"] = compare(logits_of(own, tokens), exact) | {
            "same_greedy_tokens": sum(a == b for a, b in zip(said, answer))
        }
    return found | {"tokens": AGREE_TOKENS}


def make_files(llama: LlamaCpp, folder: Path, work: Path) -> dict[str, Path]:
    """GGUF files of a checkpoint; existing files are reused."""
    files = {kind: work / f"{kind}.gguf" for kind in ("float32", "bfloat16", *FTYPES)}
    for kind, path in files.items():
        if path.exists():
            continue
        if kind in FTYPES:
            llama.quantise(files["float32"], path, kind, threads=2)
        else:
            write_gguf(folder, path, cast(Any, kind))
    return files


@torch.inference_mode()
def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    torch.set_num_threads(2)
    llama = LlamaCpp(args.node)
    folder = work / "model"
    if not folder.exists():
        make_text_checkpoint(args.preset, args.layers, folder)
    files = make_files(llama, folder, work)
    vocab = cast(QwenVLSpec, load_spec(folder)).text.vocab_size
    figures: dict[str, Any] = {
        "llama.cpp": f"{llama.version}, {llama.kernels()}",
        "file MiB": {kind: round(path.stat().st_size / 2**20) for kind, path in files.items()},
        "load before": os.getloadavg(),
    }
    if args.agreement:
        figures["agreement"] = agreement(folder, files, llama, vocab)
    torch.set_num_threads(args.threads)
    context = 256 * -(-(max(args.context, args.prefill) + 16) // 256)
    room: Any = {"rows": max(args.rows), "context": context}
    models: dict[str, Any] = {
        f"saccade {kind}": Saccade(folder, dtype=torch.bfloat16, made=made, **room)
        for kind, made in OURS.items()
    }
    figures["memory"] = {kind: models[f"saccade {kind}"].memory for kind in OURS}
    for kind in args.kinds:
        models[f"llama.cpp {kind}"] = Llama(
            llama, files[kind], vocab=vocab, threads=args.threads, **room
        )
    contest = Contest(models, args.rounds, args.context)
    for rows in args.rows:
        figures[f"decode, {rows} rows"] = contest.decode(rows)
    figures[f"prefill, {args.prefill} tokens"] = contest.prefill(args.prefill)
    return figures | {"load after": os.getloadavg()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("node", type=Path, help="where npm installed node-llama-cpp")
    parser.add_argument("--preset", default="qwen3-vl-2b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kinds", nargs="+", default=["bfloat16", *FTYPES], help="llama.cpp's")
    parser.add_argument("--agreement", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--work", type=Path, help="where checkpoint and files are kept")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        figures = measure(args, args.work or Path(name))
    unsaid = ("json", "work", "node")
    report = {
        "settings": {key: str(value) for key, value in vars(args).items() if key not in unsaid},
        "torch": torch.__version__,
        "python": platform.python_version(),
        **figures,
    }
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
