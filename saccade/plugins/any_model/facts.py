"""The facts about a checkpoint that transformers' own modules serve.

transformers reports them from a separate process, and they are stored in the user's cache
directory. It loads torch, which neither front nor engine may. So a child (`inspector.py`) answers
what is asked about its configuration and its processor. Runs without torch.
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
"""The folder of facts in the user's cache folder."""
MODULE = "saccade.plugins.any_model.inspector"
KNOWN_SIZES: tuple[Size, ...] = ((16, 16), (64, 64), (256, 256), (1440, 2560))
"""Those that every start asks for: of the tower's warm-up, of its fingerprint, of its pace."""
LARGE_SIZES: tuple[Size, ...] = (
    (3360, 3360),
    *((512, 512), (448, 672), (672, 448), (384, 768), (768, 384), (320, 960), (960, 320)),
    *((256, 1024), (1024, 256), (160, 1600), (1600, 160)),
)
"""No image may become more than one and a half times what the largest of these becomes: of large
images, and of every shape that a processor may cut up in another way.
"""
LAST_SECONDS = 10.0
"""A process that has closed its connection ends within them, though transformers is put away
slowly.
"""
MAX_SIZES = 4096
"""So many sizes are remembered."""


TensorKind = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class OwnProcessor:
    """A checkpoint's own image processor."""

    folder: str  # the checkpoint's
    choices: str = "{}"  # a JSON object with the fields that differ from its files


@dataclass(frozen=True, slots=True)
class ProcessorPixels:
    """The part of a recipe for image workers (`pixels.py`): which processor makes which tensors."""

    processor: OwnProcessor
    tensors: tuple[PixelTensor, ...]


@dataclass(frozen=True, slots=True)
class SizeFacts:
    """What an image with this size becomes."""

    size: Size
    tokens: tuple[int, ...]  # replace the placeholder in the prompt
    tensors: tuple[PixelTensor, ...]  # hold its pixels
    # its rows' lengths along each position axis. Empty: positions are offsets in the prompt.
    box: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TextFacts:
    """The language model."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    axes: int = 1  # the positions' axes
    windows: tuple[int | None, ...] = ()  # by layer, as in `AttentionShape`
    # texts up to this many tokens are rotated by short factors, longer ones by long factors
    # (longrope)
    near: int | None = None


@dataclass(frozen=True, slots=True)
class Deepstack:
    """An image's features that are added within the decoder."""

    layers: tuple[int, ...]  # those that get some
    # features go by their layer's number, and the image's tokens are empty before the first one
    by_number: bool = False

    @property
    def levels(self) -> int:
        """Rows of `hidden` values per image token."""
        return len(self.layers) + (not self.by_number)


@dataclass(frozen=True, slots=True)
class Joints:
    """What a processor does where an image meets its neighbours."""

    spaced: bool = False  # it puts a space behind an image that a word follows
    # tokens that end one image and begin the next, written once where two images touch
    shared: int = 0


NO_JOINTS = Joints()


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """The vision tower.

    Token ids: `placeholder` represents an image in a template, `content` each row of its
    embedding in a prompt. `seen` are the tokens that image experts take (empty: there are none).
    """

    placeholder: int
    content: int
    hidden: int
    seen: tuple[int, ...]
    # name, format and number of dimensions for each tensor that images become, whatever their size
    kinds: tuple[TensorKind, ...]
    sizes: tuple[SizeFacts, ...]
    largest: tuple[SizeFacts, ...]
    mark: str  # the placeholder's text
    deepstack: Deepstack | None = None  # None: an image adds nothing to the decoder's layers
    joints: Joints = NO_JOINTS


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a model.

    `images` None: it takes text only.
    """

    model_type: str
    architecture: str
    text: TextFacts
    images: ImageFacts | None


@dataclass(frozen=True, slots=True)
class InspectorBoot:
    """An inspector's order at its start: the checkpoint with this processor."""

    processor: OwnProcessor


@dataclass(frozen=True, slots=True)
class ModelQuestion:
    """Asks for `ModelFacts`."""


@dataclass(frozen=True, slots=True)
class SizeQuestion:
    """Asks for the `SizeFacts` of an upright image."""

    size: Size


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Why there is no answer."""

    why: str


Question = ModelQuestion | SizeQuestion
Answer = ModelFacts | SizeFacts | NoAnswer
ASKER: Codec[Question, Answer] = Codec(Question, Answer)
INSPECTOR: Codec[Answer, Question] = Codec(Answer, Question)


class Inspector:
    """The child that answers for a checkpoint.

    It starts with the first question, and ends with this process.
    """

    def __init__(self, processor: OwnProcessor) -> None:
        self._processor = processor
        self._child: Child | None = None
        self._channel: Channel[Question, Answer] | None = None

    def ask(self, question: Question) -> Answer:
        """Wait for the answer. It takes seconds if the child has to start.

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
                f"{self._processor.folder}: the process that asks transformers about it {ending}"
            ) from None

    def close(self) -> None:
        if self._child is not None:
            self._child.end_sync()
        self._child = self._channel = None


class SizeTable:
    """The facts about sizes, asked for once each, by any threads."""

    def __init__(self, inspector: Inspector, known: Mapping[Size, SizeFacts]) -> None:
        self._inspector = inspector
        self._known = dict(known)
        self._lock = threading.Lock()

    def facts(self, size: Size) -> SizeFacts:
        """Return the facts about a size.

        Raises ImageError if the processor refuses it.
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
    """Return the runs of `content` among an image's tokens.

    The tokens begin at `start` in the prompt.
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
"""Where one image's tokens stand in a prompt, from its begin to its end, and how many of its first
ones the image before it has written.
"""


def with_images(
    tokens: Sequence[int], placeholder: int, images: Sequence[Sequence[int]], shared: int
) -> tuple[list[int], list[Segment]]:
    """Replace each placeholder in a prompt by its image's tokens.

    shared: as in `Joints`. images: one per placeholder.
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
    """Return positions [axes, rows] for an image's rows, from 0."""
    return np.indices(box).reshape(len(box), -1)


def counted(
    num_tokens: int, spans: Sequence[Span], blocks: Sequence[npt.NDArray[np.int64]], axes: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Return positions on several axes [axes, num_tokens], and the next position.

    Text counts on by one on all axes. An image's rows, in one piece, are at its block from there,
    and what follows behind the largest.
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
    """Return the kept facts, or ask the inspector and keep its answer.

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
    with suppress(OSError), private_folder(cache_folder(KEPT)) as kept:  # or it is asked again
        kept.write(name, msgspec.json.encode(answer))
    return answer


def _name(folder: Path, choices: str) -> str:
    """Return a digest over all that the facts follow from.

    These are the JSON files (without the weights' index), the chat templates, the processor's
    choices, transformers' version, and this folder's code.
    """
    code = Path(__file__).parent.glob("*.py")
    found = sorted([*folder.glob("*.json"), *folder.glob("*.jinja"), *code])
    return _digest(choices, [path for path in found if not path.name.endswith(".index.json")])


def processing(folder: Path) -> str:
    """Return a digest over all that a processor's pixels follow from, except its choices."""
    torchvision = str(find_spec("torchvision") is not None)
    return _digest(torchvision, [folder / name for name in PROCESSOR_FILES])


def _digest(told: str, paths: Iterable[Path]) -> str:
    """Return a digest of transformers' version, `told`, and the files that exist."""
    digest = blake3(f"{version('transformers')} {told}".encode())
    for path in paths:
        if path.is_file():
            data = path.read_bytes()
            digest.update(f" {path.name} {len(data)} ".encode() + data)
    return digest.hexdigest(32)
