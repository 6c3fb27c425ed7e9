"""Train the demo model from random weights: `python -m saccade.demo.train --out DIR`. Seeded; needs the dev extra.

Owns: the stages, the losses, the checkpoints. Does not know: how pictures and questions are drawn, or how the model is served.

Stages (see `STAGES`):
    see      the vision tower alone, with a dense head that says what stands in each merged token's cell
    answer   the whole model on conversations, easy to hard; loss on answers only; the dense loss fades
    polish   the same at full difficulty, to a learning rate of zero
Every stage ends in a checkpoint `DIR/<stage>.pt`; a run continues after the last one it finds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from saccade.demo.architecture import WIDTH, build_model, write_settings, write_weights
from saccade.demo.batches import CHARACTERS, COLOUR_NAMES, Batch, CellLabels, Mix, draw_batch, draw_pictures
from saccade.demo.draw import SHAPES
from saccade.demo.net import Model, encode_pictures, logits, read_tokens
from saccade.demo.optimiser import Optimiser
from saccade.demo.tasks import Level


@dataclass(frozen=True)
class Stage:
    """One stage of training. `rates` and `dense` are (at the start, at the end), linear in between."""

    name: str
    steps: int
    batches: int  # micro-batches per step
    patches: int  # about so many patches per micro-batch
    rows: int  # at most so many conversations per micro-batch
    rates: tuple[float, float]
    dense: tuple[float, float]  # weight of the dense loss
    ramp: float  # share of the stage until full difficulty; 0 starts there
    pictures: tuple[float, ...] = (1.0,)  # weights of conversations with 1, 2, 3, 4 pictures
    pages: int = 0  # patches of pictures for the dense loss alone, beside each micro-batch of conversations


STAGES = (
    Stage("see", 2200, 1, 3000, 32, (3e-3, 1.5e-3), (1.0, 1.0), 0.5),
    Stage("answer", 2400, 2, 3600, 28, (2.5e-3, 1.5e-3), (0.3, 0.1), 0.5, (5, 3, 1.5, 1), 600),
    Stage("polish", 1400, 2, 3600, 28, (1.5e-3, 0.0), (0.1, 0.05), 0.0, (5, 3, 1.5, 1), 600),
)


class DenseHead(nn.Module):
    """Says, from a merged token alone, which characters and things stand in its cell. Used in training only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sizes = (8 * (1 + len(CHARACTERS)), 4 * (1 + len(SHAPES)), 4 * (1 + len(COLOUR_NAMES)), 4 * 2)
        self.linear = nn.Linear(width, sum(self.sizes))

    def forward(self, cells: Tensor, labels: CellLabels) -> Tensor:
        """Mean cross-entropy where something stands plus a third of that where nothing does: cells [N, cells, D] -> scalar.

        The two means are apart because all but a hundredth of the character slots are empty: in one mean they drown the rest.
        """
        parts = self.linear(cells.flatten(0, 1)).split(self.sizes, dim=-1)
        total = cells.new_zeros((), dtype=torch.float32)
        for part, label in zip(parts, (labels.characters, labels.shapes, labels.colours, labels.centres), strict=True):
            target = label.flatten()
            loss = F.cross_entropy(part.float().reshape(len(target), -1), target, reduction="none")
            full = target > 0
            total = total + (loss * full).sum() / (full.sum() + 1) + (loss * ~full).sum() / (~full).sum() / 3
        return total


class Drawn(Dataset[Any]):
    """The micro-batches of a stage by their index; the same whatever the number of worker processes."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage, self.seed = stage, seed

    def __len__(self) -> int:
        return self.stage.steps * self.stage.batches

    def __getitem__(self, index: int) -> Any:
        torch.set_num_threads(1)
        stage = self.stage
        mix = mix_at(stage, index / len(self))
        seed = f"train/{self.seed}/{stage.name}/{index}"
        if stage.name == "see":
            return draw_pictures(seed, mix)
        return draw_batch(seed, mix), draw_pictures(f"{seed}/page", page_mix(stage))


def mix_at(stage: Stage, progress: float) -> Mix:
    """The difficulty at a point of a stage; `progress` in [0, 1)."""
    hard = 1.0 if stage.ramp == 0 else min(1.0, progress / stage.ramp)

    def between(easy: float, full: float) -> int:
        return round(easy + (full - easy) * hard)

    level = Level(between(2, 6), between(3, 7), between(1, 3), between(3, 6), between(2, 4), 0.5 if stage.name == "see" else 0.25)
    if stage.name == "see":
        level = Level(random_words=0.6, text=between(24, 240))
    return Mix(level, between(128, 288) if stage.name == "see" else between(160, 320), stage.patches, stage.rows, stage.pictures)


def page_mix(stage: Stage) -> Mix:
    """The pictures for the dense loss alone, beside the conversations."""
    return Mix(Level(random_words=0.6), 256, stage.pages, stage.rows, (1.0,))


class Trainer:
    """The model with its dense head and optimiser, and what is counted between two lines of the log."""

    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.seed = out, seed
        self.model: Model = build_model(seed).bfloat16()
        self.head = DenseHead(WIDTH).bfloat16()
        named = [(name, weight) for name, weight in self.model.named_parameters()]
        named += [(f"head.{name}", weight) for name, weight in self.head.named_parameters()]
        self.optimiser = Optimiser(named)
        self.right: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.sums: dict[str, float] = defaultdict(float)

    def run(self, stage: Stage, log_every: int = 50) -> None:
        """Run one stage and save its checkpoint."""
        loader = DataLoader(Drawn(stage, self.seed), batch_size=None, num_workers=1, prefetch_factor=8)
        bar = tqdm(range(stage.steps), desc=stage.name, mininterval=5)
        started, drawn = time.monotonic(), iter(loader)
        for step in bar:
            progress = step / stage.steps
            for _ in range(stage.batches):
                loss = self._loss(stage, next(drawn), progress)
                loss.backward()
                self.optimiser.gather(1 / stage.batches)
            warm = min(1.0, (step + 1) / 100)
            self.optimiser.step(warm * (stage.rates[0] + (stage.rates[1] - stage.rates[0]) * progress))
            if (step + 1) % log_every == 0:
                line = self._report(stage, step + 1, time.monotonic() - started, log_every * stage.batches)
                bar.set_postfix_str(line)
            if (step + 1) % 500 == 0 or step + 1 == stage.steps:
                self.save(stage.name if step + 1 == stage.steps else f"{stage.name}-part")

    def _loss(self, stage: Stage, drawn: Any, progress: float) -> Tensor:
        weight = stage.dense[0] + (stage.dense[1] - stage.dense[0]) * progress
        if stage.name == "see":
            return self._see(drawn)
        batch: Batch = drawn[0]
        seen = self._see(drawn[1])
        encoded = [encode_pictures(self.model, pixels) for pixels in batch.pixels]
        dense = torch.stack([self.head(cells, labels) for (cells, _), labels in zip(encoded, batch.labels, strict=True)]).mean()
        embeddings = torch.cat([cells.flatten(0, 1) for cells, _ in encoded])
        deepstack = [torch.cat([deep[i].flatten(0, 1) for _, deep in encoded]) for i in range(len(encoded[0][1]))]
        hidden = read_tokens(self.model, batch.tokens, batch.positions, batch.picture_rows, embeddings, deepstack)
        scores = logits(self.model, hidden[batch.answer_rows])
        loss = F.cross_entropy(scores, batch.answers)
        self.sums["answer"] += float(loss.detach())
        self._count(batch, scores.argmax(-1) == batch.answers)
        return loss + weight * (dense + seen)

    def _see(self, drawn: tuple[Tensor, CellLabels]) -> Tensor:
        """The dense loss of single pictures."""
        pixels, labels = drawn
        cells, _ = encode_pictures(self.model, pixels)
        dense: Tensor = self.head(cells, labels)
        self._count_characters(cells.detach(), labels)
        self.sums["dense"] += float(dense.detach())
        return dense

    @torch.no_grad()
    def _count_characters(self, cells: Tensor, labels: CellLabels) -> None:
        scores = self.head.linear(cells)[..., : self.head.sizes[0]].unflatten(-1, (8, -1))
        full = labels.characters > 0
        self.right["characters"][0] += int((scores.argmax(-1) == labels.characters)[full].sum())
        self.right["characters"][1] += int(full.sum())

    def _count(self, batch: Batch, hit: Tensor) -> None:
        """Count whole answers whose every token was the most likely one."""
        whole = torch.ones(len(batch.kinds), dtype=torch.bool)
        whole[batch.answer_turns[~hit]] = False
        for kind, right in zip(batch.kinds, whole.tolist(), strict=True):
            self.right[kind][0] += right
            self.right[kind][1] += 1

    def _report(self, stage: Stage, step: int, seconds: float, batches: int) -> str:
        line: dict[str, Any] = {"stage": stage.name, "step": step, "minutes": round(seconds / 60, 2)}
        line |= {name: round(value / batches, 4) for name, value in self.sums.items()}
        line |= {kind: round(100 * right / max(1, count), 1) for kind, (right, count) in sorted(self.right.items())}
        with (self.out / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.sums.clear()
        self.right.clear()
        return " ".join(f"{name} {value}" for name, value in line.items() if name not in ("stage", "step", "minutes"))

    def save(self, name: str) -> None:
        torch.save({"optimiser": self.optimiser.state()}, self.out / f"{name}.pt")

    def load(self, name: str) -> None:
        self.optimiser.load(torch.load(self.out / f"{name}.pt")["optimiser"])

    def export(self, folder: Path) -> None:
        """Write the model folder (all but the card)."""
        write_settings(folder)
        write_weights(self.model, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, the log and the finished model folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of matrix products; drawing takes another half core")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    trainer = Trainer(args.out, args.seed)
    done = [stage for stage in STAGES if (args.out / f"{stage.name}.pt").is_file()]
    if done:
        trainer.load(done[-1].name)
    for stage in STAGES[len(done) :]:
        trainer.run(stage)
    trainer.export(args.out / "model")


if __name__ == "__main__":
    main()
