"""The size of a JSON value, without recursion: a client may nest values arbitrarily."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of a JSON value."""

    # those in all strings, keys included, plus two per pair of brackets and one per other value
    characters: int
    depth: int  # lists and objects within each other. It is 0 for a value that is neither.


def extent(value: Any) -> Extent:
    """Measure strings, numbers, lists and dictionaries."""
    characters = depth = 0
    left = [(value, 0)]
    while left:
        each, level = left.pop()
        depth = max(depth, level)
        if isinstance(each, str):
            characters += len(each)
        elif isinstance(each, Mapping):
            characters += sum(len(key) if isinstance(key, str) else 1 for key in each)
            left += [(inner, level + 1) for inner in each.values()]
            characters += 2
            depth = max(depth, level + 1)
        elif isinstance(each, list | tuple):
            left += [(inner, level + 1) for inner in each]
            characters += 2
            depth = max(depth, level + 1)
        else:
            characters += 1
    return Extent(characters, depth)
