"""Agree on a change across ranks: each rank tries to read it, then all make it or none does.

Owns the words for what could not be read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from saccade.core.errors import StartupError
from saccade.core.given_paths import reason, sendable, shown
from saccade.nn.adapter_files import FINGERPRINT_BYTES
from saccade.parallel import PeerLost, Shard

log = logging.getLogger("saccade")

T = TypeVar("T")
UNDERSTOOD = "00" * FINGERPRINT_BYTES
"""A fingerprint for what differs from rank to rank."""


def attempt(source: Path, make: Callable[[], T]) -> tuple[T | None, str]:
    """Return `make()` and "", or `None` and the reason why `source` cannot be read.

    Catches every error except PeerLost, so that an unreadable source leaves the rank running.
    """
    try:
        return make(), ""
    except PeerLost:
        raise
    except StartupError as refused:
        why = str(refused)
    except RecursionError:
        why = f"{shown(source)} cannot be read: it is nested too deeply"
    except (RuntimeError, MemoryError) as refused:  # torch has no class of its own on a CPU
        why = f"{shown(source)}: not enough memory: {str(refused)[:200]}"
    except (OSError, ValueError) as refused:
        why = f"{shown(source)} cannot be read: {reason(refused)}"
    except Exception as refused:  # whatever the files made of our own code
        log.exception("%s cannot be read", shown(source))
        why = f"{shown(source)} cannot be read: {type(refused).__name__}: {refused}"
    return None, sendable(why)


def agree(fingerprint: str, like: torch.Tensor, everyone: Shard) -> bool:
    """Return True if every rank has read the same.

    fingerprint: "" where this rank could not read.
    """
    mine = [float(byte) for byte in bytes.fromhex(fingerprint)]
    sent = torch.zeros(1 + FINGERPRINT_BYTES, device=like.device)
    sent[0] = not mine
    sent[1 : 1 + len(mine)] = torch.tensor(mine)
    total = everyone.all_reduce(sent.clone())
    return bool(total[0] == 0) and torch.equal(total, sent * everyone.size)
