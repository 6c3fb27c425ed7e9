"""Arguments of a backend that prepares its kernels for a worker, by the function that `Ops.prepare`
names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from saccade.core.config import EngineConfig
from saccade.ipc.messages import Load
from saccade.nn.protocol import Attention, FamilyNet
from saccade.runtime.batch import Batcher
from saccade.runtime.memory import EmbeddingMemory
from saccade.runtime.sampling.sampler import Sampler
from saccade.runtime.vision.packed_encoder import PackedEncoder

TRIAL_TOKENS = 8
"""Tokens of a sequence by which a prompt's rows are compared with those that decode."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What was loaded, and from which folder."""

    load: Load
    folder: Path


@dataclass(frozen=True, slots=True)
class Start:
    """A worker's parts before the first step."""

    net: FamilyNet
    config: EngineConfig
    attention: Attention
    batcher: Batcher
    encoder: PackedEncoder
    sampler: Sampler | None  # the first rank's
    embeddings: EmbeddingMemory
    like: torch.Tensor  # as embeddings
    ranks: int  # on this machine
    records: bool  # steps of a few rows will be recorded
    origin: Origin | None  # `None` if the network was made by hand


Prepare = Callable[[Start], tuple[bool, str]]
"""Compiles a worker's kernels before its first step. Returns whether rows are exact, as in
`messages.Begun`, and what was done, for people. Every rank takes part.
"""
