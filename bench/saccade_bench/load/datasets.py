"""The data sets: seeded workloads, as sessions of turns.

The same options and seed produce the same sessions, if the server tokenizes text to the same length
(see `Calibration`).
"""

from __future__ import annotations

import ast
import base64
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from saccade.core.errors import ConfigError
from saccade_bench.eval.mmmu import load_questions
from saccade_bench.eval.ocr import OcrLine, draw_reading
from saccade_bench.load.clips import FPS, DrawnClip
from saccade_bench.load.images import Dice, DrawnImage, parse_resolution
from saccade_bench.load.words import WORDS
from saccade_bench.load.workload import File, Json, Session, Turn, TurnPart
from saccade_bench.options import (
    DatasetName,
    DatasetOptions,
    ImageOptions,
    LoadOptions,
    RandomMM,
    TextOptions,
)

IMAGE_ANSWER_TOKENS = 8
"""Answer length of image requests in `text-beside-images`, which measures the text streams."""
QUIET_IMAGES = 3
"""Intervals of `image_every` seconds before the first image of `text-beside-images`."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Token count of text on the server: `overhead + per_char * c` tokens for c characters."""

    overhead: float = 10.0
    per_char: float = 0.25

    def tokens(self, chars: int, messages: int = 1) -> float:
        return self.overhead * messages + self.per_char * chars


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that determines a workload."""

    data: DatasetOptions
    load: LoadOptions
    images: ImageOptions
    text: TextOptions
    random_mm: RandomMM
    calibration: Calibration
    symmetric: bool = False  # if True, lengths vary in both directions, as in vLLM's client


class Maker:
    """Generator of the random questions and images of one workload. No two are equal."""

    def __init__(self, recipe: Recipe, stream: int = 0) -> None:
        self.recipe = recipe
        self.dice = Dice(recipe.load.seed, stream)
        self._prefix = self._words(Dice(recipe.load.seed, 8), recipe.text.random_prefix_len)
        self._sizes = parse_resolution(recipe.images.image_resolution)
        self._first = Dice(recipe.load.seed, stream, 1).between(0, 1 << 40)
        self._drawn = 0

    def image(self, size: tuple[int, int] | None = None) -> DrawnImage:
        options = self.recipe.images
        width, height = size or self._sizes.draw(self.dice)
        return DrawnImage(options.image_content, width, height, self.seed(), options.image_format)

    def screenshots(self) -> Callable[[int], DrawnImage]:
        """Return a function from step (from 1) to the screenshot of a new desktop at that step."""
        (width, height), seed, kind = (
            self._sizes.draw(self.dice),
            self.seed(),
            self.recipe.images.image_format,
        )
        return lambda step: DrawnImage("document", width, height, seed, kind, step)

    def footage(self) -> Callable[[int], DrawnImage]:
        """Return a function from frame index (from 0) to the frame of a new clip."""
        (width, height), seed = self._sizes.draw(self.dice), self.seed()
        kind = self.recipe.images.image_format
        return lambda number: DrawnImage("moving", width, height, seed, kind, number)

    def reading(self, number: int) -> OcrLine:
        width, height = self._sizes.draw(self.dice)
        return draw_reading(self.seed(), ("number", "word")[number % 2], (width, height))

    def question(self) -> str:
        """Return random words of the requested length, in the server's tokens."""
        return self._words(self.dice, self._length(self.recipe.text.random_input_len))

    def _words(self, dice: Dice, tokens: int) -> str:
        chars = round(tokens / self.recipe.calibration.per_char)
        words: list[str] = []
        while chars > 0:
            words.append(WORDS[dice.between(0, len(WORDS) - 1)])
            chars -= len(words[-1]) + 1
        return " ".join(words)

    def answer_length(self) -> int:
        return self._length(self.recipe.text.random_output_len)

    def turn(
        self,
        images: Sequence[TurnPart],
        text: str | None = None,
        first: bool = True,
        expected: str | None = None,
    ) -> Turn:
        think, text = 0.0 if first else self.think(), text or self.question()
        parts: tuple[TurnPart, ...] = (*images, text)
        if self._prefix and first:
            parts = (f"{self._prefix} {text}", *images)
        return Turn(parts, self.answer_length(), think, expected)

    def think(self) -> float:
        mean = self.recipe.data.think_time
        return -mean * math.log1p(-self.dice.share()) if mean else 0.0

    def seed(self) -> int:
        self._drawn += 1
        return self._first + self._drawn

    def _length(self, longest: int) -> int:
        ratio = self.recipe.text.random_range_ratio
        low, high = 1.0 if ratio is None else ratio, 1.0
        if self.recipe.symmetric:
            low, high = 1 - (ratio or 0), 1 + (ratio or 0)
        return self.dice.between(max(1, int(longest * low)), math.ceil(longest * high))


def build(recipe: Recipe) -> tuple[Session, ...]:
    """Generate the workload. Raises ConfigError for invalid options or an unreadable file."""
    return tuple(DATASETS[recipe.data.dataset_name](Maker(recipe), recipe.load.num_prompts))


def warmup(recipe: Recipe) -> tuple[Session, ...]:
    """Generate requests like the first ones, with other images and text unless read from a file."""
    if not recipe.load.warmup_requests:
        return ()
    sessions = DATASETS[recipe.data.dataset_name](
        Maker(recipe, stream=7), recipe.load.warmup_requests
    )
    return tuple(Session((_brief(session),), session.tenant) for session in sessions)


def _brief(session: Session) -> Turn:
    """Return the first turn, with a short answer if it is long only to run next to others."""
    turn = session.turns[0]
    if session.due is None:
        return turn
    return replace(turn, max_tokens=min(turn.max_tokens, IMAGE_ANSWER_TOKENS))


def _image(maker: Maker, count: int) -> Iterator[Session]:
    for _ in range(count):
        yield Session(
            (maker.turn([maker.image() for _ in range(maker.recipe.images.image_count)]),)
        )


def _random_mm(maker: Maker, count: int) -> Iterator[Session]:
    options = maker.recipe.random_mm
    buckets = parse_buckets(options.random_mm_bucket_config)
    base, spread = (
        options.random_mm_base_items_per_request,
        options.random_mm_num_mm_items_range_ratio,
    )
    low, high = max(0, math.floor(base * (1 - spread))), math.ceil(base * (1 + spread))
    most = parse_limit(options.random_mm_limit_mm_per_prompt)
    for _ in range(count):
        images = []
        for _ in range(min(maker.dice.between(low, high), most)):
            share = maker.dice.share()
            size = next((size for size, upto in buckets if share < upto), buckets[-1][0])
            images.append(maker.image(size))
        yield Session((maker.turn(images),))


def parse_limit(text: str) -> int:
    """Parse the maximum number of images per request. Raises ConfigError."""
    try:
        limit = json.loads(text)
    except ValueError:
        limit = None
    if isinstance(limit, dict):
        limit = limit.get("image", 0)
    if not isinstance(limit, int) or limit < 0:
        raise ConfigError(
            f'--random-mm-limit-mm-per-prompt {text}: expected a number, or {{"image": 1}}'
        )
    return limit


def parse_buckets(text: str) -> list[tuple[tuple[int, int], float]]:
    """Return each bucket's (width, height) and the cumulative fraction of images up to it.

    Raises ConfigError.
    """
    wanted = (
        "--random-mm-bucket-config: expected {(height, width, 1): share, ...} with shares above 0"
    )
    try:
        config = ast.literal_eval(text)
        shares = {
            (int(height), int(width), int(frames)): float(share)
            for (height, width, frames), share in config.items()
        }
    except (ValueError, SyntaxError, TypeError, AttributeError):
        raise ConfigError(f"{wanted}, got {text}") from None
    if not shares or any(share <= 0 or min(key) < 1 for key, share in shares.items()):
        raise ConfigError(f"{wanted}, got {text}")
    if any(frames != 1 for _, _, frames in shares):
        raise ConfigError(
            "--random-mm-bucket-config: frames other than 1 are video: see --dataset-name video"
        )
    total, upto, buckets = sum(shares.values()), 0.0, []
    for (height, width, _), share in shares.items():
        upto += share / total
        buckets.append(((width, height), upto))
    return buckets


def _multiturn_image(maker: Maker, count: int) -> Iterator[Session]:
    for _ in range(count):
        yield Session(
            tuple(
                maker.turn(
                    [maker.image() for _ in range(maker.recipe.images.image_count)],
                    first=number == 0,
                )
                for number in range(maker.recipe.data.rounds)
            )
        )


def _repeat(maker: Maker, count: int) -> Iterator[Session]:
    """Assign requests to tenants in round-robin order. Of each tenant's images, exactly
    `repeat_ratio` (rounded) are repeats.
    """
    data, per_request = maker.recipe.data, maker.recipe.images.image_count
    tenants = min(data.tenants, count)
    groups: list[list[Turn]] = []
    for tenant in range(tenants):
        requests = len(range(tenant, count, tenants))
        images = iter(_repeated(maker, requests * per_request, data.repeat_ratio, data.zipf))
        groups.append(
            [maker.turn([next(images) for _ in range(per_request)]) for _ in range(requests)]
        )
    chats = max(1, data.sessions // tenants) if data.sessions else 0
    streams: list[list[Session]] = []
    for tenant, turns in enumerate(groups):
        name = f"tenant {tenant}" if tenants > 1 else ""
        dealt = (
            [turns[i::chats] for i in range(min(chats, len(turns)))]
            if chats
            else [[turn] for turn in turns]
        )
        streams.append([Session(_with_pauses(maker, chat), name) for chat in dealt])
    for place in range(max(map(len, streams))):
        yield from (stream[place] for stream in streams if place < len(stream))


def _with_pauses(maker: Maker, turns: Sequence[Turn]) -> tuple[Turn, ...]:
    return tuple(
        Turn(turn.parts, turn.max_tokens, maker.think() if number else 0.0, turn.expected)
        for number, turn in enumerate(turns)
    )


def _repeated(maker: Maker, count: int, ratio: float, exponent: float) -> Iterator[DrawnImage]:
    """Yield `count` images. round(ratio * count) of them are repeats of earlier ones (but at most
    count - 1).

    The r-th distinct image is repeated with a weight of r ** -exponent (Zipf).
    """
    repeats = min(round(ratio * count), max(0, count - 1))
    places = list(range(1, count))
    for i in range(
        repeats
    ):  # the first steps of a Fisher-Yates shuffle choose the places of the repeats
        j = maker.dice.between(i, len(places) - 1)
        places[i], places[j] = places[j], places[i]
    again = set(places[:repeats])
    known: list[DrawnImage] = []
    upto: list[float] = []  # cumulative weights of `known`
    for place in range(count):
        if place in again:
            mark = maker.dice.share() * upto[-1]
            yield known[next(i for i, edge in enumerate(upto) if mark < edge)]
        else:
            known.append(maker.image())
            upto.append((upto[-1] if upto else 0.0) + len(known) ** -exponent)
            yield known[-1]


def _agent(maker: Maker, count: int) -> Iterator[Session]:
    for _ in range(count):
        shot = maker.screenshots()
        turns = tuple(
            maker.turn([shot(step)], first=step == 1)
            for step in range(1, maker.recipe.data.rounds + 1)
        )
        yield Session(turns, keep_images=maker.recipe.data.keep_images)


def _video(maker: Maker, count: int) -> Iterator[Session]:
    data = maker.recipe.data
    step = FPS * maker.recipe.images.image_count
    if not step:
        raise ConfigError("--image-count 0: a clip of --dataset-name video has at least 1 second")
    whole = step * data.rounds
    for _ in range(count):
        frame = maker.footage()
        clips = []
        for number in range(data.rounds):
            first, last = 0, whole
            if data.video_turns == "growing":
                last = step * (number + 1)
            elif data.video_turns == "overlapping" and data.video_form != "file":
                first, last = step * number, step * number + whole
            sparse = data.video_turns == "overlapping" and data.video_form == "file" and number % 2
            frames = tuple(map(frame, range(first, last)))
            clips.append(DrawnClip(frames, data.video_form, FPS / 2 if sparse else FPS))
        turns = (maker.turn([clip], first=not place) for place, clip in enumerate(clips))
        yield Session(tuple(turns), alone=True)


def _ocr(maker: Maker, count: int) -> Iterator[Session]:
    for number in range(count):
        reading = maker.reading(number)
        yield Session(
            (
                maker.turn(
                    [File(reading.encoded, "png")], reading.question, expected=reading.expected
                ),
            )
        )


def _text_beside_images(maker: Maker, count: int) -> Iterator[Session]:
    """Start all text streams at once, then send `count` images, one per interval.

    The first image waits for `QUIET_IMAGES` intervals, so that the streams also run without images.
    """
    data = maker.recipe.data
    for _ in range(data.text_streams):
        yield Session((maker.turn([]),), due=0.0)
    for number in range(count):
        turn = replace(maker.turn([maker.image()]), max_tokens=IMAGE_ANSWER_TOKENS)
        yield Session((turn,), due=(QUIET_IMAGES + number) * data.image_every)


def _mmmu(maker: Maker, count: int) -> Iterator[Session]:
    questions = load_questions(maker.recipe.data.dataset_path)
    if not questions:
        raise ConfigError(f"--dataset-path {maker.recipe.data.dataset_path}: no questions")
    for number in range(count):
        question = questions[number % len(questions)]
        parts: list[TurnPart] = [
            part if isinstance(part, str) else File(part, "png") for part in question.parts()
        ]
        yield Session((Turn(tuple(parts), maker.answer_length()),))


def _custom(maker: Maker, count: int) -> Iterator[Session]:
    """Read JSON lines of the form {"messages": [...], "max_tokens"?, "expected"?}.

    Every user message is a turn. Assistant messages are ignored.
    """
    if maker.recipe.data.dataset_path is None:
        raise ConfigError("--dataset-name custom needs --dataset-path FILE.jsonl")
    path = Path(maker.recipe.data.dataset_path)
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dataset-path {path}: {error}") from None
    if not lines:
        raise ConfigError(f"--dataset-path {path}: no lines")
    for number in range(count):
        yield _custom_session(lines[number % len(lines)], path, maker)


def _custom_session(line: Json, path: Path, maker: Maker) -> Session:
    turns: list[Turn] = []
    before: list[Json] = []
    for message in line.get("messages", ()):
        if message.get("role") == "user":
            parts = _custom_parts(message["content"], path.parent)
            length = int(line.get("max_tokens", 0)) or maker.answer_length()
            turns.append(
                Turn(
                    parts,
                    length,
                    maker.think() if turns else 0.0,
                    line.get("expected"),
                    tuple(before),
                )
            )
            before = []
        elif message.get("role") != "assistant":
            before.append(message)
    if not turns:
        raise ConfigError(f"--dataset-path {path}: a line has no user message")
    return Session(tuple(turns))


def _custom_parts(content: str | list[Json], folder: Path) -> tuple[TurnPart, ...]:
    """Return a message's text and images, which are data URLs or paths relative to the data set."""
    if isinstance(content, str):
        return (content,)
    parts: list[TurnPart] = []
    for part in content:
        if part.get("type") == "text":
            parts.append(part["text"])
            continue
        url = part["image_url"]["url"]
        if url.startswith("data:image/"):
            kind, _, data = url.removeprefix("data:image/").partition(";base64,")
            parts.append(File(base64.b64decode(data), kind))
        else:
            parts.append(
                File(
                    (folder / url).read_bytes(), Path(url).suffix.lstrip(".").replace("jpg", "jpeg")
                )
            )
    return tuple(parts)


FROM_FILES: frozenset[DatasetName] = frozenset(("mmmu", "custom"))
"""Data sets whose images are read from files, and do not depend on the seed."""

DATASETS: dict[DatasetName, Callable[[Maker, int], Iterator[Session]]] = {
    "image": _image,
    "text-beside-images": _text_beside_images,
    "random-mm": _random_mm,
    "multiturn-image": _multiturn_image,
    "repeat": _repeat,
    "agent": _agent,
    "mmmu": _mmmu,
    "custom": _custom,
    "ocr": _ocr,
    "video": _video,
}
