from __future__ import annotations

from typing import ClassVar

import pytest

from saccade.cache.content import Content, PageKey
from saccade.cache.pages import PagePool
from saccade.cache.prefix import PrefixCache
from saccade.core.types import Image, ImageKey, Span

A, B = (Image(ImageKey(bytes([n] * 32), bytes(16)), (1, 4, 4), 4, 16, (64, 64)) for n in range(2))


def text(*tokens: int, salt: str = "") -> Content:
    return Content(list(tokens), (), (), salt)


def shown(image: Image, start: int = 2, offset: int = 0) -> Content:
    return Content([1, 1, 9, 9, 9, 9, 1, 1, 1], (Span(start, 4, 0, offset),), (image,))


class Case:
    def __init__(self, pages: int = 32, size: int = 2) -> None:
        self.pool = PagePool(pages + 1, size)
        self.cache = PrefixCache(self.pool)

    def serve(self, content: Content, *, idle: bool = False) -> list[int]:
        """Compute `content` as a sequence would, leave it cached; returns its pages."""
        path = self.cache.find(content)
        node = self.cache.hold(content, path)
        whole = len(content.tokens) // self.pool.page_size
        pages = [step.page for step in path] + self.pool.allocate(
            self.pool.pages_for(len(content.tokens)) - len(path)
        )
        node = self.cache.extend(node, content, pages, whole)
        self.cache.leave(node, content, pages, whole, idle=idle)
        return pages

    def found(self, content: Content) -> int:
        return len(self.cache.find(content)) * self.pool.page_size


def test_a_match_leaves_at_least_one_token() -> None:
    case = Case()
    case.serve(text(1, 2, 3, 4))
    assert case.found(text(1, 2, 3, 4)) == 2
    assert case.found(text(1, 2, 3, 4, 5)) == 4
    assert case.found(text(1, 2, 9, 4, 5)) == 2
    assert case.found(text(1)) == 0


def test_the_same_pages_are_found_again() -> None:
    case = Case()
    pages = case.serve(text(1, 2, 3, 4, 5))
    assert [node.page for node in case.cache.find(text(1, 2, 3, 4, 7))] == pages[:2]
    assert case.serve(text(1, 2, 3, 4, 7))[:2] == pages[:2]


class Counted(Content):
    """Counts the pages that are looked at."""

    looked: ClassVar[int] = 0

    def page(self, index: int, size: int) -> PageKey:
        Counted.looked += 1
        return super().page(index, size)


def test_a_path_found_before_is_not_walked_again() -> None:
    """A prompt of many seen images has hundreds of pages, and is looked up twice."""
    case, tokens = Case(), list(range(20))
    case.serve(text(*tokens))
    content = Counted([*tokens, 20], (), ())
    path = case.cache.find(content)
    assert len(path) == Counted.looked == 10
    assert case.cache.find(content, path) == path and Counted.looked == 10
    case.serve(text(*tokens, 20, 21))
    content.tokens.extend((21, 22))
    longer = case.cache.find(content, path)
    assert longer[:10] == path and len(longer) == Counted.looked == 11
    case.cache.evict(4)
    shorter = case.cache.find(content, longer)
    assert shorter == longer[:7] == case.cache.find(content)
    case.cache.flush()
    assert not case.cache.find(content, shorter)


@pytest.mark.parametrize(
    "other", [shown(B), shown(A, start=3), shown(A, offset=1), text(1, 1, 9, 9, 9, 9, 1, 1, 1)]
)
def test_a_hit_across_a_picture_means_the_same_picture_at_the_same_offset(other: Content) -> None:
    case = Case()
    case.serve(shown(A))
    assert case.found(shown(A)) == 8
    assert case.found(other) == 2


def test_two_pictures_in_one_page_are_told_apart() -> None:
    case = Case(size=4)

    def pair(split: int) -> Content:
        return Content([9] * 4 + [1] * 2, (Span(0, split, 0), Span(split, 4 - split, 1)), (A, A))

    case.serve(pair(1))
    assert case.found(pair(1)) == 4 and case.found(pair(2)) == 0


def test_salts_do_not_see_each_other() -> None:
    case = Case()
    case.serve(text(1, 2, 3, salt="a"))
    assert case.found(text(1, 2, 3, salt="a")) == 2
    assert case.found(text(1, 2, 3)) == case.found(text(1, 2, 3, salt="b")) == 0


def test_the_least_recently_used_leaf_goes_first_and_held_pages_stay() -> None:
    case = Case()
    case.serve(text(1, 1, 2, 2, 0))
    case.serve(text(1, 1, 3, 3, 0))
    case.serve(text(1, 1, 2, 2, 0))
    assert case.cache.pages == case.cache.evictable == 3
    assert case.cache.evict(1) == 1
    assert case.found(text(1, 1, 3, 3, 0)) == 2 and case.found(text(1, 1, 2, 2, 0)) == 4
    held = text(1, 1, 7)
    node = case.cache.hold(held, case.cache.find(held))
    assert case.cache.evictable == 1
    assert case.cache.evict(10) == 1 and case.cache.pages == 1
    case.cache.leave(node, held, [node.page], 1)
    assert case.cache.evict(10) == 1
    assert case.cache.evictions == 3 and case.pool.free == case.pool.capacity


def test_what_nobody_waited_for_goes_first_until_somebody_uses_it() -> None:
    """Its own pages alone: what it shares with others is as old as their last use of it."""
    case = Case()
    case.serve(text(1, 1, 2, 2, 0))
    ahead, later = text(1, 1, 3, 3, 0), text(1, 1, 4, 4, 0)
    for content in (ahead, later):
        case.serve(content, idle=True)
    case.serve(later)
    assert case.cache.evict(1) == 1
    assert [case.found(each) for each in (ahead, later, text(1, 1, 2, 2, 0))] == [2, 4, 4]
    assert case.cache.evict(1) == 1
    assert case.found(later) == 4, "by now it is somebody's, and used later than the first"


def test_simultaneous_twins_keep_their_own_pages_and_cache_one_copy() -> None:
    case = Case()
    content = text(1, 2, 3, 4, 5)
    nodes = [case.cache.hold(content, []) for _ in range(2)]
    tables = [case.pool.allocate(3) for _ in range(2)]
    nodes = [case.cache.extend(node, content, table, 2) for node, table in zip(nodes, tables)]
    assert [node.depth for node in nodes] == [2, 0]
    case.pool.audit([*tables, case.cache.owned()])
    for node, table in zip(nodes, tables):
        case.cache.leave(node, content, table, 2)
    case.pool.audit([case.cache.owned()])
    assert [node.page for node in case.cache.find(content)] == tables[0][:2]


def test_what_follows_a_duplicate_is_cached_when_its_holder_leaves() -> None:
    case = Case()
    first, second = text(1, 2, 3), text(1, 2, 3, 4, 5)
    node = case.cache.hold(second, [])
    table = case.pool.allocate(3)
    case.serve(first)
    node = case.cache.extend(node, second, table, 2)
    assert node.depth == 0 and case.found(second) == 2
    case.cache.leave(node, second, table, 2)
    assert case.found(second) == 4
    case.pool.audit([case.cache.owned()])


def test_the_roots_of_departed_tenants_are_forgotten() -> None:
    case = Case()
    for n in range(10):
        case.serve(text(1, 2, 3, salt=str(n)))
        case.serve(text(1, salt=f"short {n}"))
    case.cache.evict(100)
    assert case.cache._roots == {}


def test_repeated_use_does_not_grow_the_eviction_queue() -> None:
    case = Case()
    for _ in range(1000):
        case.serve(text(1, 2, 3))
    assert len(case.cache._leaves) <= 2 * case.cache.pages + 65
