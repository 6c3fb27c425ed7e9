"""Lets ranks agree on a change: every rank tries to read it, then either all ranks make it or none
does.

This module also formats the reasons why something could not be read.
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
"""Reported instead of a fingerprint if a rank succeeded and the contents of ranks differ, so that
they have no common fingerprint.
"""


def attempt(source: Path, make: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of `make()` and "", or `None` and the reason why `source` cannot be read.

    Catches all errors except PeerLost, so that an unreadable source does not stop the rank.
    """
    try:
        return make(), ""
    except PeerLost:
        raise
    except StartupError as refused:
        why = str(refused)
    except RecursionError:
        why = f"{shown(source)} cannot be read: it is nested too deeply"
    except (RuntimeError, MemoryError) as refused:  # torch has no specific class on a CPU
        why = f"{shown(source)}: not enough memory: {str(refused)[:200]}"
    except (OSError, ValueError) as refused:
        why = f"{shown(source)} cannot be read: {reason(refused)}"
    except Exception as refused:  # unexpected errors caused by the files' contents
        log.exception("%s cannot be read", shown(source))
        why = f"{shown(source)} cannot be read: {type(refused).__name__}: {refused}"
    return None, sendable(why)


def agree(fingerprint: str, like: torch.Tensor, everyone: Shard) -> bool:
    """Return True if all ranks report the same fingerprint. Blocks until all have called it.

    fingerprint: the content's fingerprint, or "" if this rank failed to read it.
    """
    mine = [float(byte) for byte in bytes.fromhex(fingerprint)]
    sent = torch.zeros(1 + FINGERPRINT_BYTES, device=like.device)
    sent[0] = not mine
    sent[1 : 1 + len(mine)] = torch.tensor(mine)
    total = everyone.all_reduce(sent.clone())
    return bool(total[0] == 0) and torch.equal(total, sent * everyone.size)
