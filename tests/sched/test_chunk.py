from __future__ import annotations

from saccade.cache.content import Content, overlapping
from saccade.core.plan import Splice
from saccade.core.types import Span
from saccade.sched.chunk import PatchBudget, Sight, reach, splices
from tests.sched.simulator import picture

A, B = picture(0, 10), picture(1, 10)  # 40 patches each
SPANS = (Span(5, 10, 0), Span(20, 10, 1))
CONTENT = Content([1] * 40, SPANS, (A, B))


def sight(resident: str = "", arrived: str = "", patches: int = 100, spent: int = 0) -> Sight:
    names = {A.key: "a", B.key: "b"}
    return Sight(
        lambda key: "device" if names[key] in resident else None,
        lambda key: names[key] in arrived,
        PatchBudget(patches, spent),
    )


def test_only_pictures_that_share_a_token_with_the_chunk_count() -> None:
    assert (
        list(overlapping(SPANS, 0, 5))
        == list(overlapping(SPANS, 15, 20))
        == list(overlapping(SPANS, 30, 40))
        == []
    )
    assert list(overlapping(SPANS, 14, 21)) == list(SPANS)
    assert reach(CONTENT, 0, 5, sight()) == (5, [])
    assert reach(CONTENT, 15, 20, sight()) == (20, [])


def test_a_chunk_stops_before_a_picture_that_is_not_there() -> None:
    assert reach(CONTENT, 0, 40, sight()) == (5, [A.key, B.key])
    assert reach(CONTENT, 0, 40, sight(resident="a")) == (20, [B.key])
    assert reach(CONTENT, 0, 40, sight(arrived="b")) == (5, [A.key])
    assert reach(CONTENT, 8, 40, sight()) == (8, [A.key, B.key])
    assert reach(CONTENT, 0, 40, sight(resident="b", arrived="a")) == (40, [])


def test_a_step_encodes_within_its_patch_budget_but_always_one_picture() -> None:
    assert reach(CONTENT, 0, 40, sight(arrived="ab", patches=79)) == (20, [])
    assert reach(CONTENT, 0, 40, sight(arrived="ab", patches=80)) == (40, [])
    assert reach(CONTENT, 0, 40, sight(arrived="ab", patches=1)) == (20, [])
    assert reach(CONTENT, 0, 40, sight(arrived="ab", patches=1, spent=1)) == (5, [])


def test_a_picture_that_stands_twice_is_counted_once() -> None:
    twice = Content([1] * 40, SPANS, (A, A))
    assert reach(twice, 0, 40, sight(arrived="a", patches=1)) == (40, [])


def test_splices_name_batch_rows_and_embedding_rows() -> None:
    assert splices(CONTENT, 8, 22, row=100) == [Splice(100, 7, A.key, 3), Splice(112, 2, B.key, 0)]
    assert splices(CONTENT, 30, 40, row=0) == []
