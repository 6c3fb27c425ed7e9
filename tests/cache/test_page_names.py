"""A page's name differs wherever anything differs that its keys and values depend on."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from saccade.cache.content import (
    NAME_BYTES,
    PageIdentity,
    PageKey,
    page_name,
    root_name,
    state_name,
)
from saccade.core.types import ImageKey

NUMBERS = st.integers(0, 2**31 - 1)
KEYS = st.builds(ImageKey, st.binary(min_size=32, max_size=32), st.binary(max_size=16), st.text())
TIMES = st.none() | NUMBERS
SHOWN = st.lists(st.tuples(NUMBERS, NUMBERS, KEYS, NUMBERS, TIMES), max_size=3).map(tuple)
PAGES = st.tuples(st.lists(NUMBERS, min_size=1, max_size=20).map(tuple), SHOWN)
ROOTS = st.tuples(st.binary(max_size=20), st.text(max_size=5), st.text(max_size=5))
IDENTITY = PageIdentity("weights", "cpu float32", "auto", "layers", 16)


@given(ROOTS, ROOTS)
def test_prefixes_of_other_servers_salts_and_adapters_begin_otherwise(
    one: tuple[bytes, str, str], other: tuple[bytes, str, str]
) -> None:
    assert (root_name(*one) == root_name(*other)) == (one == other)


@given(PAGES, PAGES, st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_two_names_are_the_same_only_of_the_same_page_after_the_same_pages(
    one: PageKey, other: PageKey, before: bytes, instead: bytes
) -> None:
    assert (page_name(before, one) == page_name(before, other)) == (one == other)
    assert (page_name(before, one) == page_name(instead, one)) == (before == instead)
    assert len({page_name(before, one), state_name(before), before}) == 3
    assert len(page_name(before, one)) == NAME_BYTES


@given(PAGES, st.data())
def test_any_change_in_any_part_of_a_page_changes_its_name(
    page: PageKey, data: st.DataObject
) -> None:
    (tokens, shown), parent = page, bytes(32)
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = (*tokens[:place], tokens[place] + 1, *tokens[place + 1 :])
    others: list[PageKey] = [(changed, shown), ((*tokens, 0), shown), (tokens[:-1], shown)]
    if shown:
        at, length, key, row, time = shown[0]
        keys = [
            replace(key, digest=bytes([key.digest[0] ^ 1]) + key.digest[1:]),
            replace(key, settings=key.settings + b"\0"),
            replace(key, salt=key.salt + "\0"),
        ]
        later = 0 if time is None else time + 1
        first = [
            (at + 1, length, key, row, time),
            (at, length + 1, key, row, time),
            (at, length, key, row + 1, time),
            (at, length, key, row, later),
            *((at, length, each, row, time) for each in keys),
        ]
        others += [(tokens, (each, *shown[1:])) for each in first]
        others += [(tokens, shown[1:]), (tokens, (*shown, shown[0]))]
    names = [page_name(parent, each) for each in (page, *others)]
    assert len(set(names)) == len(names)


def test_every_part_of_an_identity_counts() -> None:
    parts = [replace(IDENTITY, page_size=17)]
    for each in fields(IDENTITY):
        if each.name != "page_size":
            changed: dict[str, Any] = {each.name: getattr(IDENTITY, each.name) + "x"}
            parts.append(replace(IDENTITY, **changed))
    for one, other in combinations([IDENTITY, *parts], 2):
        assert one.digest() != other.digest()
