"""Code that all stored objects share: the client's metadata, and paging of lists (`limit`, `order`,
`after`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from msgspec import Meta
from starlette.datastructures import QueryParams

from saccade.core.errors import InvalidRequest

T = TypeVar("T")
MAX_METADATA = 16
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=MAX_METADATA),
]


@dataclass(frozen=True, slots=True)
class Paging:
    """Which page of a list a client requests."""

    limit: int  # maximum number of items
    newest: bool  # the newest item is first
    after: str  # id of the item before the first; "" for the start of the list

    @classmethod
    def of(cls, query: QueryParams, default: int, most: int) -> Paging:
        """Read the page from a query string. default, most: for `limit`. Raises InvalidRequest that
        names the field.
        """
        limit, order = query.get("limit", str(default)), query.get("order", "desc")
        wanted = whole_number(limit, 1, most)
        if wanted is None:
            raise InvalidRequest(f"limit is {limit[:20]!r}; it must be 1 to {most}", "limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f'order is {order[:20]!r}; it must be "asc" or "desc"', "order")
        return cls(wanted, order == "desc", query.get("after", ""))

    def rest(self, listed: Iterable[T], id_of: Callable[[T], str]) -> list[T]:
        """Return the items that follow the item with the id `after`. listed: all items, the oldest
        first.

        Raises InvalidRequest if there is no item with that id.
        """
        found = list(listed)
        if self.newest:
            found.reverse()
        if not self.after:
            return found
        place = next((i for i, each in enumerate(found) if id_of(each) == self.after), None)
        if place is None:
            raise InvalidRequest(f"after: there is no {self.after[:200]!r}", "after")
        return found[place + 1 :]


def whole_number(text: str, least: int, most: int) -> int | None:
    """Parse an integer from `least` to `most`. Returns None if `text` is anything else."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most))):
        return None
    return int(text) if least <= int(text) <= most else None
