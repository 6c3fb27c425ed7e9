"""Gets information about a checkpoint whose model runs with transformers' own modules.

transformers reads the configuration and the processor. It loads torch, which neither the front end
nor the engine may import, so it runs in a child process (`inspector.py`) that answers questions.
The answers are cached in the user's cache directory. Does not import torch.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from saccade.core.decoders import json_decoder
from saccade.core.errors import CheckpointError, ImageError
from saccade.core.private_folder import cache_folder, private_folder
from saccade.core.types import Size, Span
from saccade.ipc.child import Channel, Child, Codec, Disconnected
from saccade.ipc.environment import image_environment
from saccade.plugins.any_model.pixel_tensors import PixelTensor

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
KEPT = "transformers"
"""The name of the directory for answers in the user's cache directory."""
MODULE = "saccade.plugins.any_model.inspector"
KNOWN_SIZES: tuple[Size, ...] = ((16, 16), (64, 64), (256, 256), (1440, 2560))
"""Image sizes that every start needs, for the vision encoder's warm-up, fingerprint and speed."""
LARGE_SIZES: tuple[Size, ...] = (
    (3360, 3360),
    *((512, 512), (448, 672), (672, 448), (384, 768), (768, 384), (320, 960), (960, 320)),
    *((256, 1024), (1024, 256), (160, 1600), (1600, 160)),
)
"""Sizes of the largest images, in all aspect ratios that processors may tile differently. No image
may have more than 1.5 times the tokens or bytes of the largest of these.
"""
LAST_SECONDS = 10.0
"""Seconds that the child may take to exit after it has closed its connection. transformers shuts
down slowly.
"""
MAX_SIZES = 4096
"""Maximum number of sizes that a `SizeTable` caches."""


TensorKind = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class OwnProcessor:
    """Identifies a checkpoint's own image processor."""

    folder: str  # the checkpoint's directory
    choices: str = "{}"  # a JSON object of fields that override those in its files


@dataclass(frozen=True, slots=True)
class ProcessorPixels:
    """The input of image workers (`pixels.py`): the processor, and the tensors that it outputs."""

    processor: OwnProcessor
    tensors: tuple[PixelTensor, ...]


@dataclass(frozen=True, slots=True)
class SizeFacts:
    """The tokens and tensors of an image of this size."""

    size: Size
    tokens: tuple[int, ...]  # these replace the placeholder in the prompt
    tensors: tuple[PixelTensor, ...]  # the processor's output
    # the extent of its rows along each position axis; empty if positions are 1-D
    box: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TextFacts:
    """The sizes and properties of the language model."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    axes: int = 1  # the number of position axes
    windows: tuple[int | None, ...] = ()  # by layer, as in `AttentionShape`
    # texts of up to this many tokens are rotated by the short factors, longer ones by the long ones
    # (longrope)
    near: int | None = None


@dataclass(frozen=True, slots=True)
class Deepstack:
    """Which decoder layers get image features added to their states (deepstack)."""

    layers: tuple[int, ...]  # the layers that get features
    # features are given by layer index, and image tokens have zero embeddings at the first layer
    by_number: bool = False

    @property
    def levels(self) -> int:
        """The number of rows of `hidden` values per image token."""
        return len(self.layers) + (not self.by_number)


@dataclass(frozen=True, slots=True)
class Joints:
    """Rules for the tokens between an image and the text or image next to it."""

    spaced: bool = False  # it inserts a space between an image and a word after it
    # the number of tokens that both end an image and start the next, which adjacent images share
    shared: int = 0


NO_JOINTS = Joints()


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """The tokens, sizes and properties of the image processor and the vision encoder."""

    placeholder: int  # the ID of the token that marks an image in a template
    content: int  # the ID of the token for each row of its embedding in a prompt
    hidden: int
    seen: tuple[int, ...]  # the tokens that image experts process; empty if there are none
    # name, dtype and number of dimensions of each tensor that the processor outputs for any size
    kinds: tuple[TensorKind, ...]
    sizes: tuple[SizeFacts, ...]
    largest: tuple[SizeFacts, ...]
    mark: str  # the text of `placeholder`
    deepstack: Deepstack | None = None  # None: images only affect the decoder's input
    joints: Joints = NO_JOINTS


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Everything that the inspector reports about a model.

    `images` is None for a text-only model.
    """

    model_type: str
    architecture: str
    text: TextFacts
    images: ImageFacts | None


@dataclass(frozen=True, slots=True)
class InspectorBoot:
    """The message that starts an inspector."""

    processor: OwnProcessor


@dataclass(frozen=True, slots=True)
class ModelQuestion:
    """A message that requests the `ModelFacts` of the checkpoint."""


@dataclass(frozen=True, slots=True)
class SizeQuestion:
    """A message that requests the `SizeFacts` of an upright image."""

    size: Size


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """An answer that contains only the reason why a question cannot be answered."""

    why: str


Question = ModelQuestion | SizeQuestion
Answer = ModelFacts | SizeFacts | NoAnswer
ASKER: Codec[Question, Answer] = Codec(Question, Answer)
INSPECTOR: Codec[Answer, Question] = Codec(Answer, Question)


class Inspector:
    """A child process that answers questions about a checkpoint.

    It starts with the first question, and is stopped when this process exits.
    """

    def __init__(self, processor: OwnProcessor) -> None:
        self._processor = processor
        self._child: Child | None = None
        self._channel: Channel[Question, Answer] | None = None

    def ask(self, question: Question) -> Answer:
        """Send a question to the child and return its answer. Blocks, for seconds if the child has
        to start.

        Raises CheckpointError.
        """
        if self._channel is None:
            boot = InspectorBoot(self._processor)
            self._child = Child.spawn(MODULE, boot, (), image_environment())
            self._channel = Channel(self._child.socket, ASKER)
            weakref.finalize(self, self._child.end_sync)
        assert self._child is not None
        try:
            self._channel.send(question)
            return self._channel.receive()
        except Disconnected:
            self._child.wait_sync(LAST_SECONDS)
            ending = self._child.ending
            self.close()
            raise CheckpointError(
                f"{self._processor.folder}: the process that loads it with transformers {ending}"
            ) from None

    def close(self) -> None:
        if self._child is not None:
            self._child.end_sync()
        self._child = self._channel = None


class SizeTable:
    """Requests the `SizeFacts` of each size once, and caches them. This class is thread-safe."""

    def __init__(self, inspector: Inspector, known: Mapping[Size, SizeFacts]) -> None:
        self._inspector = inspector
        self._known = dict(known)
        self._lock = threading.Lock()

    def facts(self, size: Size) -> SizeFacts:
        """Return the `SizeFacts` of a size, from the cache or from the inspector.

        Raises ImageError if the processor rejects it.
        """
        if known := self._known.get(size):
            return known
        with self._lock:
            if known := self._known.get(size):
                return known
            answer = self._inspector.ask(SizeQuestion(size))
            if isinstance(answer, NoAnswer):
                raise ImageError(f"an image of {size[1]} x {size[0]} px: {answer.why}")
            assert isinstance(answer, SizeFacts)
            if len(self._known) >= MAX_SIZES:
                del self._known[next(iter(self._known))]
            self._known[size] = answer
            return answer


def content_spans(
    tokens: Sequence[int], content: int, start: int = 0, image: int = 0
) -> list[Span]:
    """Return the spans of consecutive `content` tokens among an image's tokens.

    start: the index of the first of these tokens in the prompt.
    image: the index of the image.
    """
    spans: list[Span] = []
    row = 0
    for token, run in groupby(tokens):
        length = len(list(run))
        if token == content:
            spans.append(Span(start, length, image, row))
            row += length
        start += length
    return spans


Segment = tuple[int, int, int]
"""The start and end of one image's tokens in a prompt, and the number of its leading tokens that it
shares with the image before it.
"""


def with_images(
    tokens: Sequence[int], placeholder: int, images: Sequence[Sequence[int]], shared: int
) -> tuple[list[int], list[Segment]]:
    """Replace each placeholder in a prompt with its image's tokens, and return the segments of the
    images.

    images: the tokens of each placeholder's image.
    shared: as in `Joints`.
    """
    expanded: list[int] = []
    segments: list[Segment] = []
    before = None
    for at, token in enumerate(tokens):
        if token != placeholder:
            expanded.append(token)
            continue
        image = images[len(segments)]
        written = shared if before is not None and at == before + 1 else 0
        start = len(expanded)
        expanded += image[written:]
        segments.append((start, len(expanded), written))
        before = at
    return expanded, segments


def box_positions(box: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the positions [axes, rows] of an image's rows, relative to its first one.

    box: the extent of the image along each axis.
    """
    return np.indices(box).reshape(len(box), -1)


def counted(
    num_tokens: int, spans: Sequence[Span], blocks: Sequence[npt.NDArray[np.int64]], axes: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Return positions on several axes [axes, num_tokens], and the next position.

    The position of each text token is one more than the previous one on all axes. The rows of an
    image, which must be contiguous, have the positions of its block, offset by the next position.
    The text after it continues from the largest position.
    """
    positions = np.empty((axes, num_tokens), np.int64)
    done = position = 0
    for start, end, image in [(each.start, each.end, each.image) for each in spans]:
        positions[:, done:start] = np.arange(position, position + start - done)
        positions[:, start:end] = blocks[image] + (position + start - done)
        done, position = end, int(positions[:, start:end].max()) + 1
    positions[:, done:] = np.arange(position, position + num_tokens - done)
    return positions, position + num_tokens - done


def read_facts(processor: OwnProcessor, inspector: Inspector) -> ModelFacts:
    """Return a model's facts from the cache, or request them from the inspector and cache them.

    Raises CheckpointError with the reason if the checkpoint cannot be served.
    """
    folder = Path(processor.folder)
    name = f"{_name(folder, processor.choices)}.json"
    with suppress(OSError, msgspec.MsgspecError), private_folder(cache_folder(KEPT)) as kept:
        return json_decoder(ModelFacts).decode(kept.read(name))
    answer = inspector.ask(ModelQuestion())
    if isinstance(answer, NoAnswer):
        inspector.close()
        raise CheckpointError(f"{folder / 'config.json'}: {answer.why}")
    assert isinstance(answer, ModelFacts)
    with suppress(OSError), private_folder(cache_folder(KEPT)) as kept:  # caching is optional
        kept.write(name, msgspec.json.encode(answer))
    return answer


def _name(folder: Path, choices: str) -> str:
    """Return a digest of everything that determines a model's facts.

    These are the JSON files (except for the weights' index), the chat templates, the processor's
    choices, transformers' version, and the code of this package.
    """
    code = Path(__file__).parent.glob("*.py")
    found = sorted([*folder.glob("*.json"), *folder.glob("*.jinja"), *code])
    return _digest(choices, [path for path in found if not path.name.endswith(".index.json")])


def processing(folder: Path) -> str:
    """Return a digest of everything except `choices` that determines the pixels of a checkpoint's
    processor.
    """
    torchvision = str(find_spec("torchvision") is not None)
    return _digest(torchvision, [folder / name for name in PROCESSOR_FILES])


def _digest(told: str, paths: Iterable[Path]) -> str:
    """Return a digest of transformers' version, the string `told`, and the files in `paths` that
    exist.
    """
    digest = blake3(f"{version('transformers')} {told}".encode())
    for path in paths:
        if path.is_file():
            data = path.read_bytes()
            digest.update(f" {path.name} {len(data)} ".encode() + data)
    return digest.hexdigest(32)
