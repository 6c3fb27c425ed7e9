"""Measures JSON values without recursion, because clients may nest them to any depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of a JSON value."""

    # the lengths of all strings and keys, plus 2 per list or object and 1 per other value
    characters: int
    depth: int  # nesting of lists and objects; 0 for other values


def extent(value: Any) -> Extent:
    """Measure a value that consists of strings, numbers, lists and dictionaries."""
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
