"""Training batches: random conversations as tensors.

This includes image preprocessing, rendering of conversations as tokens (as the chat template does),
mRoPE positions, and the labels of the dense head.

A batch is rectangular: all conversations have the same number of images, and the k-th images have
the same grid. The drawn sizes differ, and are seldom multiples of 32.
"""

from __future__ import annotations

import io
import math
import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from saccade_bench.drawn.draw import (
    COLOURS,
    SHAPES,
    Scene,
    draw_page,
    draw_size,
    glyphs,
    lines,
    render,
    training_fonts,
)
from saccade_bench.drawn.tasks import (
    LETTERS,
    SCENES,
    Difficulty,
    Draw,
    Exchange,
    Task,
    conversation,
    small_talk,
    two_hops,
)
from train.architecture import FACTOR, MAX_PIXELS, MIN_PIXELS
from train.json_answers import AnswerPart, write_object
from train.pointing import Pointer, pointers
from train.tokenizer import SPECIAL, build_tokenizer

IMAGE = SPECIAL.index("<|image_pad|>")
END = "<|im_end|>"
CHARACTERS = "0123456789" + LETTERS
COLOUR_NAMES = tuple(COLOURS)


# Pictures


def smart_resize(
    height: int, width: int, low: int = MIN_PIXELS, high: int = MAX_PIXELS
) -> tuple[int, int]:
    """Return Qwen's target size (rows, columns): both sides are multiples of 32, the area is within
    the limits, and the aspect ratio is approximately preserved.
    """
    rows, cols = round(height / FACTOR) * FACTOR, round(width / FACTOR) * FACTOR
    rows, cols = max(rows, FACTOR), max(cols, FACTOR)
    if rows * cols > high:
        shrink = math.sqrt(height * width / high)
        return max(FACTOR, math.floor(height / shrink / FACTOR) * FACTOR), max(
            FACTOR, math.floor(width / shrink / FACTOR) * FACTOR
        )
    if rows * cols < low:
        grow = math.sqrt(low / (height * width))
        return math.ceil(height * grow / FACTOR) * FACTOR, math.ceil(width * grow / FACTOR) * FACTOR
    return rows, cols


def preprocess(image: Image.Image) -> Tensor:
    """Resize an image as the server does. Returns uint8 [H, W, 3], with H and W multiples of 32."""
    pixels = torch.from_numpy(np.array(image.convert("RGB")))
    height, width = smart_resize(image.height, image.width)
    if (height, width) == (image.height, image.width):
        return pixels
    planes = pixels.permute(2, 0, 1)[None]  # a view: channels last
    return (
        F.interpolate(planes, size=(height, width), mode="bicubic", antialias=True)[0]
        .permute(1, 2, 0)
        .contiguous()
    )


def roughen(rng: random.Random, image: Image.Image) -> Image.Image:
    """Degrade some images like real ones: rescale them and back, or compress them as JPEG."""
    if rng.random() < 0.15:
        scale = rng.uniform(0.7, 1.6)
        method = rng.choice(
            [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS]
        )
        small = (max(32, round(image.width * scale)), max(32, round(image.height * scale)))
        image = image.resize(small, method).resize(image.size, method)
    if rng.random() < 0.15:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=rng.randint(60, 95))
        image = Image.open(buffer)
    return image


# Labels of the dense head: the contents of each merged cell of 32 x 32 px


@dataclass(frozen=True)
class CellLabels:
    """Labels of all cells. 0 is "empty", -1 is ignored by the loss.

    A cell has 4 x 2 slots of 8 x 16 px for characters, and 2 x 2 patches of 16 px for shapes.
    """

    characters: Tensor  # int64 [N, cells, 8]
    shapes: Tensor  # int64 [N, cells, 4]
    colours: Tensor  # int64 [N, cells, 4]
    centres: Tensor  # int64 [N, cells, 4]; 1 for the patch with a shape's centre
    character_ranks: Tensor  # int64 [N, cells, 8]; position in its line, from 1
    thing_ranks: Tensor  # int64 [N, cells, 4]; position from the left, from 1; -1 on pages


def label_cells(scene: Scene, rows: int, cols: int) -> list[NDArray[np.int64]]:
    """Return the labels of one image on a grid of rows x cols cells, in the order of `CellLabels`,
    each [cells, slots].
    """
    characters, character_ranks = _label_characters(scene, rows, cols)
    shapes, colours, centres, thing_ranks = _label_things(scene, rows, cols)
    cell = [
        (characters, 4),
        (shapes, 2),
        (colours, 2),
        (centres, 2),
        (character_ranks, 4),
        (thing_ranks, 2),
    ]
    return [
        a.reshape(rows, 2, cols, wide).transpose(0, 2, 1, 3).reshape(rows * cols, 2 * wide)
        for a, wide in cell
    ]


def _label_characters(scene: Scene, rows: int, cols: int) -> list[NDArray[np.int64]]:
    """Return the characters and their ranks, each [rows * 2, cols * 4]."""
    across, down = cols * FACTOR / scene.width, rows * FACTOR / scene.height
    characters, ranks = (np.zeros((rows * 2, cols * 4), dtype=np.int64) for _ in range(2))
    ys, xs = (np.arange(rows * 2)[:, None] + 0.5) * 16, (np.arange(cols * 4)[None, :] + 0.5) * 8
    for text in lines(scene):
        for rank, glyph in enumerate(glyphs(text), 1):
            centre_x, centre_y = glyph.x * across, glyph.y * down
            covered = (np.abs(ys - centre_y) < glyph.height * down / 2) & (
                np.abs(xs - centre_x) < glyph.width * across / 2
            )
            covered[
                min(max(int(centre_y // 16), 0), rows * 2 - 1),
                min(max(int(centre_x // 8), 0), cols * 4 - 1),
            ] = True
            characters[covered] = 1 + CHARACTERS.index(glyph.char.lower())
            ranks[covered] = rank
    return [characters, ranks]


def _label_things(scene: Scene, rows: int, cols: int) -> list[NDArray[np.int64]]:
    """Return shapes, colours, centres and ranks, each [rows * 2, cols * 2]."""
    across, down = cols * FACTOR / scene.width, rows * FACTOR / scene.height
    shapes, colours, centres, ranks = (
        np.zeros((rows * 2, cols * 2), dtype=np.int64) for _ in range(4)
    )
    ys, xs = (np.arange(rows * 2)[:, None] + 0.5) * 16, (np.arange(cols * 2)[None, :] + 0.5) * 16
    for rank, thing in enumerate(sorted(scene.shapes, key=lambda shape: shape.x), 1):
        centre_x, centre_y = thing.x * across, thing.y * down
        inside = np.hypot((xs - centre_x) / across, (ys - centre_y) / down) <= 0.9 * thing.radius
        row, col = min(int(centre_y // 16), rows * 2 - 1), min(int(centre_x // 16), cols * 2 - 1)
        inside[row, col] = True
        shapes[inside] = 1 + SHAPES.index(thing.kind)
        colours[inside] = 1 + COLOUR_NAMES.index(thing.colour)
        centres[row, col] = 1
        ranks[inside] = -1 if scene.page else rank
    return [shapes, colours, centres, ranks]


# Conversations as tokens


@lru_cache(maxsize=1)
def _tokenizer() -> Tokenizer:
    return build_tokenizer()


@lru_cache(maxsize=50000)
def _encode(text: str) -> tuple[int, ...]:
    return tuple(_tokenizer().encode(text, add_special_tokens=False).ids)


def _encode_json(text: str) -> list[int]:
    """Return the tokens of JSON. Marks are separate tokens, so that a value has the same tokens as
    in a sentence.
    """
    return [token for part in re.split(r'([{}\[\]":,\n])', text) for token in _encode(part)]


def render_prompt(turn: Exchange, first_picture: int, text_first: bool = False) -> str:
    """Render a turn like the chat template, up to the start of the answer. Images are numbered from
    `first_picture`.
    """
    labels = "".join(
        f"Picture {k}: <|vision_start|><|image_pad|><|vision_end|>"
        for k in range(first_picture, first_picture + len(turn.scenes))
    )
    content = turn.question + labels if text_first else labels + turn.question
    return f"<|im_start|>user\n{content}{END}\n<|im_start|>assistant\n"


@dataclass
class TokenRow:
    """One conversation as tokens.

    `answers` has (index of the preceding token, token, index of the turn) for each answer token.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    pictures: list[int] = field(default_factory=list)  # indices of the image tokens
    answers: list[tuple[int, int, int]] = field(default_factory=list)
    pointers: list[tuple[int, Pointer]] = field(
        default_factory=list
    )  # with the index of the preceding token
    next_position: int = 0

    def add_text(self, ids: Sequence[int], turn: int | None = None) -> None:
        """Append text. Tokens of an answer are recorded with the index of their turn."""
        for token in ids:
            if turn is not None:
                self.answers.append((len(self.tokens) - 1, token, turn))
            self.tokens.append(token)
            self.positions.append((self.next_position,) * 3)
            self.next_position += 1

    def add_picture(self, rows: int, cols: int) -> None:
        """Append an image's tokens. The next position follows the larger side (Qwen's mRoPE)."""
        start = self.next_position
        for row in range(rows):
            for col in range(cols):
                self.pictures.append(len(self.tokens))
                self.tokens.append(IMAGE)
                self.positions.append((start, start + row, start + col))
        self.next_position = start + max(rows, cols)


def tokenise(
    task: Task,
    grids: Sequence[tuple[int, int]],
    system: str = "",
    text_first: bool = False,
    objects: Mapping[int, Sequence[AnswerPart]] = MappingProxyType({}),
) -> TokenRow:
    """Return the entire conversation with its answers.

    `grids` has (rows, cols) of cells for each image in order. `objects` has the turns that are
    answered by a JSON object instead of their sentence, by index.
    """
    row = TokenRow()
    if system:
        row.add_text(_encode(f"<|im_start|>system\n{system}{END}\n"))
    seen, shown = 0, list[Scene]()
    for number, turn in enumerate(task.turns):
        for token in _encode(render_prompt(turn, seen + 1, text_first)):
            if token == IMAGE:
                row.add_picture(*grids[seen])
                seen += 1
            else:
                row.add_text((token,))
        shown += turn.scenes
        if number in objects:
            for part in (*objects[number], AnswerPart(END, False)):
                row.add_text(_encode_json(part.text), number if part.learned else None)
        else:
            row.pointers += _place_pointers(turn, shown, len(row.tokens))
            row.add_text(_encode(turn.answer + END), number)
        row.add_text(_encode("\n"))
    return row


def _place_pointers(
    turn: Exchange, shown: Sequence[Scene], start: int
) -> list[tuple[int, Pointer]]:
    """Return each pointer of an answer, whose first token has index `start`, with the index of the
    token before its word.
    """
    offsets = _tokenizer().encode(turn.answer, add_special_tokens=False).offsets
    return [
        (start + i - 1, pointer)
        for pointer in pointers(turn, shown)
        for i, (a, b) in enumerate(offsets)
        if a <= pointer.start < b
    ]


# Batches


@dataclass(frozen=True)
class TrainingBatch:
    """B conversations with P images each, as tensors."""

    pixels: tuple[Tensor, ...]  # P x uint8 [B, H, W, 3]
    labels: tuple[CellLabels, ...]  # P
    tokens: Tensor  # int64 [B, L]
    positions: Tensor  # int64 [3, B, L]
    picture_rows: Tensor  # int64 [R]: indices in the flattened tokens, by image, conversation, cell
    answer_rows: Tensor  # int64 [A]: indices whose next token is part of an answer
    answers: Tensor  # int64 [A]
    answer_turns: Tensor  # int64 [A]: index into `kinds`
    kinds: tuple[str, ...]
    # int64 [Q]: indices in the flattened tokens whose next token names something in an image
    look_from: Tensor
    look_at: Tensor  # bool [Q, L]: image tokens of the same conversation that show it


@dataclass(frozen=True)
class Mix:
    """Parameters of random batches."""

    level: Difficulty
    largest: int  # px, maximum side of an image
    patches: int  # approximate number of patches per batch
    rows: int  # maximum number of conversations per batch
    weights: tuple[float, ...] = (1.0,)  # of conversations with 1, 2, 3, 4 images
    turns: tuple[int, int] = (2, 4)  # minimum and maximum per conversation
    reading: float = 0.45  # fraction of text among conversations about one image
    page_share: float = 0.7  # fraction of pages among images that only have a dense loss
    objects: float = 0.0  # fraction of answers that are JSON objects
    two_hops: float = 0.0  # fraction of comparisons among conversations about several images


def _draw_grids(rng: random.Random, mix: Mix) -> list[tuple[int, int]]:
    count = rng.choices(range(1, len(mix.weights) + 1), mix.weights)[0]
    count = min(count, mix.level.scenes)
    grids = []
    for _ in range(count):
        width, height = draw_size(rng, 96, mix.largest if count < 3 else min(mix.largest, 256))
        grids.append((round(height / FACTOR), round(width / FACTOR)))
    return grids


def _size_for(rng: random.Random, grid: tuple[int, int]) -> tuple[int, int]:
    """Return a random (width, height) that is resized to this grid."""
    while True:
        height, width = (max(64, side * FACTOR + rng.randint(-16, 16)) for side in grid)
        if smart_resize(height, width) == (grid[0] * FACTOR, grid[1] * FACTOR):
            return width, height


def _with_small_talk(rng: random.Random, task: Task) -> Task:
    turns = list(task.turns)
    if rng.random() < 0.06:
        turns.insert(0, small_talk(rng).turns[0])
    if rng.random() < 0.04:
        turns.append(small_talk(rng).turns[0])
    return Task(task.kind, tuple(turns))


def _stack_pictures(
    rng: random.Random, scenes: Sequence[Sequence[Scene]], grids: Sequence[tuple[int, int]]
) -> tuple[list[Tensor], list[CellLabels]]:
    """Draw the k-th images of all conversations, for every k."""
    pixels, labels = [], []
    for k, (rows, cols) in enumerate(grids):
        column = [row[k] for row in scenes]
        pixels.append(torch.stack([preprocess(roughen(rng, render(scene))) for scene in column]))
        parts = zip(*(label_cells(scene, rows, cols) for scene in column), strict=True)
        labels.append(CellLabels(*(torch.from_numpy(np.stack(part)) for part in parts)))
    return pixels, labels


def _page_or_scene(draw: Draw, size: tuple[int, int], letters: str, page_share: float) -> Scene:
    if draw.rng.random() < page_share:
        return draw_page(draw.rng, size, draw.fonts, letters, min(draw.level.text, 120))
    kind = draw.rng.choices(("number", "word", "shapes", "count"), (2, 2, 1, 1))[0]
    return SCENES[kind](draw, size)


def draw_pictures(seed: str, mix: Mix) -> tuple[Tensor, CellLabels]:
    """Draw single images with the same grid for the first stage. Returns uint8 [N, H, W, 3] and the
    labels of their cells.
    """
    rng = random.Random(seed)
    draw = Draw(rng, mix.level, training_fonts())
    width, height = draw_size(rng, 96, mix.largest)
    grid = (round(height / FACTOR), round(width / FACTOR))
    count = max(4, min(2 * mix.rows, mix.patches // (4 * grid[0] * grid[1])))
    letters = LETTERS + LETTERS.upper() + 4 * "0123456789"
    scenes = [
        [_page_or_scene(draw, _size_for(rng, grid), letters, mix.page_share)] for _ in range(count)
    ]
    pixels, labels = _stack_pictures(rng, scenes, [grid])
    return pixels[0], labels[0]


def draw_batch(seed: str, mix: Mix) -> TrainingBatch:
    """Draw a batch of conversations, which only depends on the seed and `mix`."""
    rng = random.Random(seed)
    draw = Draw(rng, mix.level, training_fonts())
    grids = _draw_grids(rng, mix)
    cells = sum(rows * cols for rows, cols in grids)
    count = max(4, min(mix.rows, mix.patches // (4 * cells)))
    # All have the same number of turns, so that there is little padding. Conversations about text
    # mostly have one question, because a second answer would be a copy.
    weights: tuple[float, ...] | None = None
    turns = rng.randint(*mix.turns)
    if len(grids) == 1:
        reading = rng.random() < mix.reading
        weights = (3, 2.5, 0, 0) if reading else (0, 0, 4, 3)
        turns = (1 if rng.random() < 0.75 else 2) if reading else turns
    tasks, token_rows = [], []
    for _ in range(count):
        sizes = [_size_for(rng, grid) for grid in grids]
        # Only drawn if requested, because every draw changes the rest of the batch.
        if mix.two_hops and len(grids) > 1 and rng.random() < mix.two_hops:
            asked = two_hops(draw, sizes, turns)
        else:
            asked = conversation(draw, sizes, (turns, turns), weights)
        task = _with_small_talk(rng, asked)
        system = "You are a helpful assistant." if rng.random() < 0.04 else ""
        objects = _draw_objects(rng, task, mix.objects) if mix.objects else {}
        tasks.append(_mark(task, objects))
        token_rows.append(tokenise(task, grids, system, rng.random() < 0.2, objects))
    scenes = [[scene for turn in task.turns for scene in turn.scenes] for task in tasks]
    pixels, labels = _stack_pictures(rng, scenes, grids)
    return _assemble(tasks, token_rows, grids, pixels, labels)


def _draw_objects(rng: random.Random, task: Task, share: float) -> dict[int, list[AnswerPart]]:
    """Return a JSON object for this share of the turns, by their index."""
    objects, last = dict[int, list[AnswerPart]](), None
    for number, turn in enumerate(task.turns):
        last = turn.scenes[-1] if turn.scenes else last
        if rng.random() < share:
            objects[number] = write_object(rng, turn, last)
    return objects


def _mark(task: Task, objects: Collection[int]) -> Task:
    """Return the task with the kind "json" for these turns, which are counted separately."""
    turns = [
        replace(turn, kind="json") if i in objects else turn for i, turn in enumerate(task.turns)
    ]
    return replace(task, turns=tuple(turns))


def _assemble(
    tasks: Sequence[Task],
    rows: Sequence[TokenRow],
    grids: Sequence[tuple[int, int]],
    pixels: list[Tensor],
    labels: list[CellLabels],
) -> TrainingBatch:
    length = math.ceil(max(len(row.tokens) for row in rows) / 16) * 16
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    positions = torch.zeros(3, len(rows), length, dtype=torch.int64)
    kinds: list[str] = []
    answers: list[tuple[int, int, int]] = []
    for b, (task, row) in enumerate(zip(tasks, rows, strict=True)):
        tokens[b, : len(row.tokens)] = torch.tensor(row.tokens)
        positions[:, b, : len(row.tokens)] = torch.tensor(row.positions).T
        answers += [
            (b * length + place, token, len(kinds) + turn) for place, token, turn in row.answers
        ]
        kinds += [turn.kind for turn in task.turns]
    edges = np.cumsum([0] + [r * c for r, c in grids])
    places = (
        torch.tensor([row.pictures for row in rows]) + torch.arange(len(rows))[:, None] * length
    )  # [B, cells of all images]
    picture_rows = torch.cat(
        [places[:, edges[k] : edges[k + 1]].reshape(-1) for k in range(len(grids))]
    )
    where, what, turn_of = torch.tensor(answers).unbind(1)
    looks = _look(rows, labels, edges, length)
    return TrainingBatch(
        tuple(pixels),
        tuple(labels),
        tokens,
        positions,
        picture_rows,
        where,
        what,
        turn_of,
        tuple(kinds),
        *looks,
    )


def _look(
    rows: Sequence[TokenRow], labels: Sequence[CellLabels], edges: NDArray[np.int64], length: int
) -> tuple[Tensor, Tensor]:
    """Return `look_from` and `look_at` of a batch."""
    sources: list[int] = []
    targets: list[Tensor] = []
    for b, row in enumerate(rows):
        for place, pointer in row.pointers:
            characters, things = (
                labels[pointer.picture].character_ranks[b],
                labels[pointer.picture].thing_ranks[b],
            )
            shown = torch.cat([characters, things], dim=-1)
            cells = (shown == pointer.rank if pointer.rank else shown > 0).any(-1)
            target = torch.zeros(length, dtype=torch.bool)
            target[
                torch.tensor(row.pictures[edges[pointer.picture] : edges[pointer.picture + 1]])[
                    cells
                ]
            ] = True
            sources.append(b * length + place)
            targets.append(target)
    if not targets:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, length, dtype=torch.bool)
    return torch.tensor(sources), torch.stack(targets)
