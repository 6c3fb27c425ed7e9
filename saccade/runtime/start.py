"""The arguments of `Ops.prepare`, the function with which a backend prepares its kernels before a
worker's first step.
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
"""The number of tokens of the sequence for which prefill is compared with decoding."""


@dataclass(frozen=True, slots=True)
class Origin:
    """How the network was loaded, and the directory with its checkpoint."""

    load: Load
    folder: Path


@dataclass(frozen=True, slots=True)
class Start:
    """The components of a worker before its first step, with which kernels can be prepared."""

    net: FamilyNet
    config: EngineConfig
    attention: Attention
    batcher: Batcher
    encoder: PackedEncoder
    sampler: Sampler | None  # on rank 0 only
    embeddings: EmbeddingMemory
    like: torch.Tensor  # an empty embedding, with the dtype and device of all embeddings
    ranks: int  # number of ranks on this machine
    records: bool  # whether small decode steps will be captured and replayed
    origin: Origin | None  # `None` if the network was not loaded from a checkpoint


Prepare = Callable[[Start], tuple[bool, str]]
"""Compiles a worker's kernels before its first step. Returns whether results are batch-invariant
(as in `messages.Started`), and a description for the log. All ranks must call it.
"""
