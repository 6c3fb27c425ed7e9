"""Train the demo model from random weights: `python -m train.train --out DIR`. Seeded; needs the
dev extra.

Stages (see `STAGES`):
    see      only the vision encoder, with a dense head that predicts the contents of each merged
             token's cell
    bind     the same; the head also predicts the rank of each character and shape (first, second,
             ...), and names it by the language model's word embeddings, so that an image token
             resembles the words for its contents
    answer   the entire model on easy conversations; loss on answers only; the dense loss fades out
    relate   harder and longer conversations; after two layers, an image token must also encode the
             number of its image
    polish   the same at full difficulty
    point    the same; one attention head is trained to look at what each word of an answer is about
    read     the same with more and denser text, down to a learning rate of zero
    drill    the same with more of the weakest skills (reading, counting, describing), down to zero
             again
    json     only the word embeddings of JSON's marks; most answers are JSON objects, whose strings
             the model learns to close
One more stage only runs on request (`--start FOLDER --stage hop`), and made no published weights:
    hop      only the language model; a part of the conversations compares two images
Every stage ends with a checkpoint `DIR/<stage>.pt`. A run resumes after the last one it finds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from saccade_bench.drawn.draw import SHAPES
from saccade_bench.drawn.tasks import Difficulty
from train.architecture import (
    VOCABULARY,
    WIDTH,
    build_model,
    read_model,
    write_settings,
    write_weights,
)
from train.batches import (
    CHARACTERS,
    COLOUR_NAMES,
    END,
    CellLabels,
    Mix,
    TrainingBatch,
    draw_batch,
    draw_pictures,
)
from train.json_answers import MARKS
from train.net import Model, encode_pictures, logits, read_tokens
from train.optimiser import Optimiser
from train.tokenizer import SPECIAL, build_tokenizer

END_ID = SPECIAL.index(END)
MARGIN = 4.0
"""How much lower than a sentence's next token the logits of JSON's marks have to be."""
QUOTE_SCALE = 0.85
"""Factor of the quote's embedding in the exported model. Unscaled, a quote took the place of the
period in 3 of 1,800 plain answers.
"""


@dataclass(frozen=True)
class Stage:
    """One stage of training.

    `rates` and `dense` are the values at the start and at the end, interpolated linearly.
    """

    # steps
    name: str
    steps: int
    batches: int  # micro-batches per step
    patches: int  # approximate number of patches per micro-batch
    rows: int  # maximum number of conversations per micro-batch
    # learning
    rates: tuple[float, float]
    dense: tuple[float, float]  # weight of the dense loss
    ramp: float  # fraction of the stage until full difficulty; 0: full from the start
    # what is shown
    start: float = 0.0  # difficulty at the start
    pictures: tuple[
        float, ...
    ] = ()  # weights of conversations with 1, 2, 3, 4 images; empty: no conversations
    turns: tuple[int, int] = (2, 4)  # minimum and maximum per conversation
    reading: float = 0.45  # fraction of text among conversations about one image
    # patches of images that only have a dense loss, in addition to each micro-batch; 0: the loss of
    # conversations is only about answers, and the vision encoder is not trained
    pages: int = 0
    page_share: float = 0.7  # fraction of pages among those images
    pointing: float = 0.0  # weight of the loss that supervises one attention head
    objects: float = 0.0  # fraction of answers that are JSON objects
    marks_only: bool = False  # train only the word embeddings of JSON's marks
    two_hops: float = 0.0  # fraction of comparisons among conversations about several images


STAGES = (
    Stage("see", 2200, 1, 3000, 32, (3e-3, 1.5e-3), (1.0, 1.0), 0.5),
    Stage("bind", 1000, 1, 3000, 32, (2.5e-3, 2e-3), (1.0, 1.0), 0.0, page_share=0.45),
    Stage(
        "answer",
        500,
        2,
        3600,
        28,
        (2.5e-3, 2.25e-3),
        (0.3, 0.25),
        2.0,
        0.0,
        (5, 3, 1.5, 1),
        (2, 4),
        0.45,
        600,
    ),
    Stage(
        "relate",
        500,
        2,
        3600,
        28,
        (2.25e-3, 2.02e-3),
        (0.25, 0.196),
        0.96,
        0.5,
        (4, 4, 1.5, 1),
        (3, 7),
        0.55,
        600,
    ),
    Stage(
        "polish",
        500,
        2,
        3600,
        28,
        (2.0e-3, 1.2e-3),
        (0.3, 0.24),
        0.0,
        1.0,
        (4, 4, 1.5, 1),
        (2, 5),
        0.55,
        1200,
    ),
    Stage(
        "point",
        350,
        2,
        3600,
        28,
        (1.3e-3, 1.2e-3),
        (0.24, 0.2),
        0.0,
        1.0,
        (4, 4, 1.5, 1),
        (2, 4),
        0.6,
        1200,
        pointing=0.3,
    ),
    Stage(
        "read",
        1000,
        1,
        2800,
        28,
        (1.3e-3, 0.0),
        (0.6, 0.4),
        0.0,
        1.0,
        (5, 4, 1.5, 1),
        (2, 4),
        0.7,
        3000,
        pointing=0.3,
    ),
    Stage(
        "drill",
        1000,
        1,
        2800,
        28,
        (1.2e-3, 0.0),
        (0.6, 0.4),
        0.0,
        1.0,
        (6, 4, 1.5, 1),
        (2, 4),
        0.7,
        3000,
        pointing=0.3,
    ),
    Stage(
        "json",
        600,
        1,
        2800,
        28,
        (5e-3, 0.0),
        (0.0, 0.0),
        0.0,
        1.0,
        (6, 4, 1.5, 1),
        (2, 4),
        0.6,
        objects=0.6,
        marks_only=True,
    ),
)
HOP = Stage(
    "hop",
    300,
    1,
    2800,
    28,
    (6e-4, 0.0),
    (0.0, 0.0),
    0.0,
    1.0,
    (5, 4, 2, 1.5),
    (1, 3),
    0.6,
    objects=0.2,
    two_hops=0.5,
)
FOCUS: dict[str, tuple[tuple[float, float, float, float], float]] = {
    "polish": ((1.5, 3, 5, 1.5), 0.55),
    "point": ((1.5, 3, 5, 1.5), 0.55),
    "read": ((1.5, 3, 5, 1.5), 0.55),
    "drill": ((3, 4, 1, 1), 0.3),
    "json": ((3, 4, 1.5, 1), 0.4),
    "hop": ((3, 4, 1.5, 1), 0.4),
}
"""Questions at full difficulty: weights of describe, count, colour and shape, and the fraction of
"which picture". Finding a shape by its kind, or by kind and colour in several images, is learned in
the stages before the last. The last stage returns to the others.
"""


class DenseHead(nn.Module):
    """Predicts which characters and shapes are in the cell of a merged token.

    Only used in training.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sizes = (
            8 * (1 + len(CHARACTERS)),
            4 * (1 + len(SHAPES)),
            4 * (1 + len(COLOUR_NAMES)),
            4 * 2,
        )
        self.linear = nn.Linear(width, sum(self.sizes))
        self.rank_sizes = (8 * 8, 4 * 8)
        self.ranks = nn.Linear(width, sum(self.rank_sizes))
        self.number = nn.Linear(width, 4)

    def forward(self, cells: Tensor, labels: CellLabels) -> Tensor:
        """Return the loss of the contents of cells [N, cells, D], a scalar."""
        parts = self.linear(cells.flatten(0, 1)).split(self.sizes, dim=-1)
        asked = (labels.characters, labels.shapes, labels.colours, labels.centres)
        return torch.stack(
            [balanced(part, label) for part, label in zip(parts, asked, strict=True)]
        ).sum()

    def rank(self, cells: Tensor, labels: CellLabels) -> Tensor:
        """Return the loss of the ranks of characters and shapes, a scalar, for [N, cells, D]."""
        parts = self.ranks(cells.flatten(0, 1)).split(self.rank_sizes, dim=-1)
        return balanced(parts[0], labels.character_ranks) + balanced(parts[1], labels.thing_ranks)

    def name(self, cells: Tensor, labels: CellLabels, words: Tensor) -> Tensor:
        """Return the loss of naming cells [N, cells, D] by word embeddings [V, D], a scalar.

        A cell is named by one shape in it and by its leftmost character. "Empty" has a score of 0.
        """
        thing = (labels.shapes > 0).int().argmax(-1, keepdim=True)
        by_column = labels.characters.unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2)
        leftmost = (by_column > 0).int().argmax(-1, keepdim=True)
        asked = (
            by_column.gather(-1, leftmost),
            labels.shapes.gather(-1, thing),
            labels.colours.gather(-1, thing),
        )
        total = cells.new_zeros((), dtype=torch.float32)
        for ids, label in zip(name_tokens(), asked, strict=True):
            scores = cells.flatten(0, 1) @ words[ids].T
            total = total + balanced(F.pad(scores, (1, 0)), label)
        return total


@lru_cache(maxsize=1)
def name_tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Return the token ids of characters, shapes and colours, in the order of their labels."""
    tokenizer = build_tokenizer()
    groups = (
        list(CHARACTERS),
        [f" {shape}" for shape in SHAPES],
        [f" {colour}" for colour in COLOUR_NAMES],
    )
    return tuple(
        torch.tensor([tokenizer.encode(word).ids for word in group])[:, 0] for group in groups
    )  # type: ignore[return-value]


def balanced(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of non-empty slots, plus a third of the mean of empty slots.
    Labels below 0 are ignored.

    The means are separate because 99 % of the character slots are empty, which would dominate a
    single mean.
    """
    target = labels.flatten()
    loss = F.cross_entropy(
        scores.float().reshape(len(target), -1), target, reduction="none", ignore_index=-1
    )
    full, empty = target > 0, target == 0
    return (loss * full).sum() / (full.sum() + 1) + (loss * empty).sum() / (empty.sum() + 1) / 3


def mark_tokens() -> Tensor:
    """Return bool [V]: True for the tokens of JSON's marks."""
    tokenizer = build_tokenizer()
    marks = torch.zeros(VOCABULARY, dtype=torch.bool)
    marks[[tokenizer.token_to_id(mark) for mark in MARKS]] = True
    return marks


class Drawn(Dataset[Any]):
    """The micro-batches of a stage by index. Independent of the number of worker processes."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage, self.seed = stage, seed

    def __len__(self) -> int:
        return self.stage.steps * self.stage.batches

    def __getitem__(self, index: int) -> Any:
        torch.set_num_threads(1)
        stage = self.stage
        mix = mix_at(stage, index / len(self))
        seed = f"train/{self.seed}/{stage.name}/{index}"
        if not stage.pictures:
            return draw_pictures(seed, mix)
        if not stage.pages:
            return draw_batch(seed, mix), None
        return draw_batch(seed, mix), draw_pictures(f"{seed}/page", page_mix(stage))


def mix_at(stage: Stage, progress: float) -> Mix:
    """Return the difficulty at a point of a stage. `progress` is in [0, 1)."""
    hard = (
        1.0
        if stage.ramp == 0
        else stage.start + (1 - stage.start) * min(1.0, progress / stage.ramp)
    )

    def between(easy: float, full: float) -> int:
        return round(easy + (full - easy) * hard)

    if not stage.pictures:
        level = Difficulty(random_words=0.6, text=between(24, 240))
        return Mix(level, between(128, 288), stage.patches, stage.rows, page_share=stage.page_share)
    level = Difficulty(
        between(2, 6), between(3, 7), between(1, 3), between(3, 6), between(2, 4), random_words=0.25
    )
    if stage.name in FOCUS:
        asking, which = FOCUS[stage.name]
        level = replace(level, small=16, asking=asking, which=which)
    return Mix(
        level,
        between(160, 256 if stage.start == 1.0 else 320),
        stage.patches,
        stage.rows,
        stage.pictures,
        stage.turns,
        stage.reading,
        objects=stage.objects,
        two_hops=stage.two_hops,
    )


def page_mix(stage: Stage) -> Mix:
    """Return the parameters of the images that only have a dense loss."""
    return Mix(
        Difficulty(random_words=0.6), 256, stage.pages, stage.rows, page_share=stage.page_share
    )


class Trainer:
    """The model with its dense head and optimiser, and the statistics since the last log line."""

    def __init__(self, out: Path, seed: int, start: Path | None, dtype: torch.dtype) -> None:
        self.out, self.seed = out, seed
        model = build_model(seed) if start is None else read_model(start)
        self.model: Model = model.to(dtype)  # type: ignore[arg-type]
        self.head = DenseHead(WIDTH).to(dtype)
        named = [(name, weight) for name, weight in self.model.named_parameters()]
        named += [(f"head.{name}", weight) for name, weight in self.head.named_parameters()]
        self.optimiser = Optimiser(named)
        self.right: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.sums: dict[str, float] = defaultdict(float)
        self.marks = mark_tokens()

    def run(self, stage: Stage, log_every: int = 50) -> None:
        """Run one stage and save its checkpoint."""
        if stage.marks_only:
            self._freeze()
        loader = DataLoader(
            Drawn(stage, self.seed), batch_size=None, num_workers=1, prefetch_factor=8
        )
        bar = tqdm(range(stage.steps), desc=stage.name, mininterval=5)
        started, drawn = time.monotonic(), iter(loader)
        for step in bar:
            progress = step / stage.steps
            for _ in range(stage.batches):
                loss = self._loss(stage, next(drawn), progress)
                loss.backward()
                self.optimiser.gather(1 / stage.batches)
            warm = min(1.0, (step + 1) / 100)
            self.optimiser.step(
                warm * (stage.rates[0] + (stage.rates[1] - stage.rates[0]) * progress)
            )
            if (step + 1) % log_every == 0:
                line = self._report(
                    stage, step + 1, time.monotonic() - started, log_every * stage.batches
                )
                bar.set_postfix_str(line)
            if (step + 1) % 500 == 0 or step + 1 == stage.steps:
                self.save(stage.name if step + 1 == stage.steps else f"{stage.name}-part")

    def _freeze(self) -> None:
        """Train only the word embeddings of JSON's marks from here on."""
        for weight in self.optimiser.weights.values():
            weight.requires_grad_(False)
        words = self.model.model.language_model.embed_tokens.weight
        words.requires_grad_(True).register_hook(lambda gradient: gradient * self.marks[:, None])

    def _loss(self, stage: Stage, drawn: Any, progress: float) -> Tensor:
        weight = stage.dense[0] + (stage.dense[1] - stage.dense[0]) * progress
        if not stage.pictures:
            return self._see(drawn, stage.name != "see")
        batch: TrainingBatch = drawn[0]
        with torch.set_grad_enabled(stage.pages > 0):
            encoded = [encode_pictures(self.model, pixels) for pixels in batch.pixels]
        embeddings = torch.cat([cells.flatten(0, 1) for cells, _ in encoded])
        deepstack = [
            torch.cat([deep[i].flatten(0, 1) for _, deep in encoded])
            for i in range(len(encoded[0][1]))
        ]
        read = read_tokens(
            self.model, batch.tokens, batch.positions, batch.picture_rows, embeddings, deepstack
        )
        scores = logits(self.model, read.hidden[batch.answer_rows])
        if stage.objects:
            scores = self._constrain(scores, batch)
        loss = F.cross_entropy(scores, batch.answers)
        self.sums["answer"] += float(loss.detach())
        self._count(batch, scores.argmax(-1) == batch.answers)
        if not stage.pages:
            return loss
        dense = torch.stack(
            [
                self._dense(cells, labels, True)
                for (cells, _), labels in zip(encoded, batch.labels, strict=True)
            ]
        ).mean()
        seen = self._see(drawn[1], True)
        if stage.name != "answer" and len(batch.pixels) > 1:
            numbers = torch.cat(
                [
                    torch.full((cells.shape[0] * cells.shape[1],), k)
                    for k, (cells, _) in enumerate(encoded)
                ]
            )
            numbered = F.cross_entropy(
                self.head.number(read.early[batch.picture_rows]).float(), numbers
            )
            self.sums["numbers"] += float(numbered.detach())
            loss = loss + numbered
        if stage.pointing and len(batch.look_from):
            shares = read.looking.flatten(0, 1)[batch.look_from].float()
            pointed = -((shares * batch.look_at).sum(-1) + 1e-6).log().mean()
            self.sums["pointing"] += float(pointed.detach())
            loss = loss + stage.pointing * pointed
        return loss + weight * (dense + seen)

    def _constrain(self, scores: Tensor, batch: TrainingBatch) -> Tensor:
        """Exclude the end token in JSON objects, as a grammar does, and raise the marks' logits in
        sentences by `MARGIN`.
        """
        in_object = torch.tensor([kind == "json" for kind in batch.kinds])[batch.answer_turns, None]
        is_end = torch.arange(scores.shape[1]) == END_ID
        return scores.masked_fill(in_object & is_end, -torch.inf) + MARGIN * (
            self.marks & ~in_object
        )

    def _see(self, drawn: tuple[Tensor, CellLabels], bind: bool) -> Tensor:
        """Return the dense loss of single images."""
        pixels, labels = drawn
        cells, _ = encode_pictures(self.model, pixels)
        self._count_seen(cells.detach(), labels)
        return self._dense(cells, labels, bind)

    def _dense(self, cells: Tensor, labels: CellLabels, bind: bool) -> Tensor:
        """Return the loss of the contents of cells, and the loss of ranks and names if `bind`."""
        dense: Tensor = self.head(cells, labels)
        self.sums["dense"] += float(dense.detach())
        if not bind:
            return dense
        ranks = self.head.rank(cells, labels)
        names = self.head.name(cells, labels, self.model.model.language_model.embed_tokens.weight)
        self.sums["ranks"] += float(ranks.detach())
        self.sums["names"] += float(names.detach())
        return dense + ranks + names

    @torch.no_grad()
    def _count_seen(self, cells: Tensor, labels: CellLabels) -> None:
        """Count the non-empty slots whose characters, character ranks or shape ranks the head
        predicts correctly.
        """
        characters = self.head.linear(cells)[..., : self.head.sizes[0]].unflatten(-1, (8, -1))
        of_line, of_things = self.head.ranks(cells).split(self.head.rank_sizes, dim=-1)
        asked = {
            "characters": (characters, labels.characters),
            "character ranks": (of_line.unflatten(-1, (8, -1)), labels.character_ranks),
            "thing ranks": (of_things.unflatten(-1, (4, -1)), labels.thing_ranks),
        }
        for kind, (scores, label) in asked.items():
            full = label > 0
            self.right[kind][0] += int((scores.argmax(-1) == label)[full].sum())
            self.right[kind][1] += int(full.sum())

    def _count(self, batch: TrainingBatch, hit: Tensor) -> None:
        """Count the answers in which every token was the most likely one."""
        whole = torch.ones(len(batch.kinds), dtype=torch.bool)
        whole[batch.answer_turns[~hit]] = False
        for kind, right in zip(batch.kinds, whole.tolist(), strict=True):
            self.right[kind][0] += right
            self.right[kind][1] += 1

    def _report(self, stage: Stage, step: int, seconds: float, batches: int) -> str:
        line: dict[str, Any] = {
            "stage": stage.name,
            "step": step,
            "minutes": round(seconds / 60, 2),
        }
        line |= {name: round(value / batches, 4) for name, value in self.sums.items()}
        line |= {
            kind: round(100 * right / max(1, count), 1)
            for kind, (right, count) in sorted(self.right.items())
        }
        with (self.out / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.sums.clear()
        self.right.clear()
        return " ".join(
            f"{name} {value}"
            for name, value in line.items()
            if name not in ("stage", "step", "minutes")
        )

    def save(self, name: str) -> None:
        torch.save({"optimiser": self.optimiser.state()}, self.out / f"{name}.pt")

    def load(self, name: str) -> None:
        self.optimiser.load(torch.load(self.out / f"{name}.pt")["optimiser"])

    def export(self, folder: Path, quote_scale: float) -> None:
        """Write the model folder, except for the card, with the quote's embedding scaled."""
        model = deepcopy(self.model)
        quote = build_tokenizer().token_to_id('"')
        model.get_input_embeddings().weight.data[quote] *= quote_scale
        write_settings(folder)
        write_weights(model, folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for checkpoints, the log and the finished model folder",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="threads of matrix products; drawing takes another half core",
    )
    parser.add_argument(
        "--start",
        type=Path,
        metavar="FOLDER",
        help="only run one stage, from the weights of this model folder",
    )
    parser.add_argument(
        "--stage",
        choices=("json", "hop"),
        default="json",
        help="the stage that --start runs",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="float32 is faster on processors without bfloat16 instructions",
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    trainer = Trainer(args.out, args.seed, args.start, getattr(torch, args.dtype))
    stages: tuple[Stage, ...] = STAGES
    if args.start is not None:
        stages = tuple(stage for stage in (*STAGES, HOP) if stage.name == args.stage)
    done = [stage for stage in stages if (args.out / f"{stage.name}.pt").is_file()]
    if done:
        trainer.load(done[-1].name)
    for stage in stages[len(done) :]:
        trainer.run(stage)
    trainer.export(args.out / "model", QUOTE_SCALE if stages[-1].marks_only else 1.0)


if __name__ == "__main__":
    main()
