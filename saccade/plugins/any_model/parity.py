"""Checks whether a server's answers equal transformers' own.

A child process runs transformers' own `generate` (`reference.py`). The caller computes the server's
answers. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from saccade.core.errors import CheckpointError
from saccade.core.types import Size
from saccade.ipc.child import Channel, Child, Codec, Disconnected
from saccade.ipc.environment import engine_environment
from saccade.plugins.any_model.facts import LAST_SECONDS, OwnProcessor

MODULE = "saccade.plugins.any_model.reference"
NEW_TOKENS = 8
TEXTS = ("Say something.", "How many legs have a cat and two birds?")
SIZES: tuple[Size, ...] = ((64, 64), (240, 320))
SLACK = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""For each dtype, the maximum difference between two logits that rounding may swap."""


@dataclass(frozen=True, slots=True)
class ReferenceBoot:
    """The message that starts the child process.

    processor: the image processor, or None for text-only questions.
    far: rotate all texts like texts of more than `far` tokens. With None, the rotation is
    unchanged.
    """

    folder: str
    dtype: str
    processor: OwnProcessor | None
    far: int | None


@dataclass(frozen=True, slots=True)
class ReferenceQuestion:
    """Requests the first `count` tokens of the answer to a prompt.

    size: add the image `checkered` at this size. With None, there is no image.
    """

    tokens: tuple[int, ...]
    size: Size | None
    count: int


@dataclass(frozen=True, slots=True)
class Expected:
    """transformers' greedy tokens, and for each the difference between its logit and the second
    best.

    error: the reason if there are no tokens.
    """

    tokens: tuple[int, ...] = ()
    leads: tuple[float, ...] = ()
    error: str = ""


ASKER: Codec[ReferenceQuestion, Expected] = Codec(ReferenceQuestion, Expected)
REFERENCE: Codec[Expected, ReferenceQuestion] = Codec(Expected, ReferenceQuestion)


class ReferenceChild:
    """Runs transformers' own `generate` in a child process.

    The child stops when this process exits, or with `close`.
    """

    def __init__(
        self, folder: Path, dtype: str, processor: OwnProcessor | None, far: int | None
    ) -> None:
        """Start the child. The arguments are the fields of `ReferenceBoot`."""
        boot = ReferenceBoot(str(folder), dtype, processor, far)
        self._child = Child.spawn(MODULE, boot, (), engine_environment())
        self._channel = Channel(self._child.socket, ASKER)

    def ask(self, question: ReferenceQuestion) -> Expected:
        """Send a question to the child and return its answer. Blocks. Raises CheckpointError."""
        try:
            self._channel.send(question)
            answer = self._channel.receive()
        except Disconnected:
            self._child.wait_sync(LAST_SECONDS)
            raise CheckpointError(
                f"--parity generate: the process with transformers' own model {self._child.ending}"
            ) from None
        if answer.error:
            raise CheckpointError(
                f"--parity generate: transformers cannot generate the reference: {answer.error}"
            )
        return answer

    def close(self) -> None:
        self._child.end_sync()


def checkered(size: Size) -> npt.NDArray[np.uint8]:
    """Return a test image of this size, uint8 [H, W, 3], with details in every part."""
    y, x = np.mgrid[0 : size[0], 0 : size[1]]
    planes = (x * 3 + y, x * y // 7, (x // 8 + y // 8) % 2 * 255)
    return (np.stack(planes, axis=-1) % 256).astype(np.uint8)


def compare(ours: Sequence[int], expected: Expected, dtype: str, what: str) -> None:
    """Raise CheckpointError at the first token that differs by more than rounding."""
    for place, (own, theirs) in enumerate(zip(ours, expected.tokens)):
        if own == theirs:
            continue
        if expected.leads[place] > SLACK[dtype]:
            raise CheckpointError(
                f"--parity generate: token {place + 1} of the answer to {what} is {own}; "
                f"transformers' own generate samples {theirs}, {expected.leads[place]:.3g} ahead "
                "of the next best: the model is not served, because its answers would be wrong"
            )
        return  # after a different token, answers are not comparable
    if len(ours) < len(expected.tokens):
        raise CheckpointError(
            f"--parity generate: the answer to {what} ends after {len(ours)} tokens"
        )
