from __future__ import annotations

from collections.abc import Callable

from saccade.cache.content import Content, overlapping
from saccade.core.plan import Splice
from saccade.core.types import ImageKey, Span
from saccade.sched.builder import splices
from saccade.sched.chunk import chunk_limit, whole
from tests.sched.simulator import picture

A, B = picture(0, 10), picture(1, 10)  # 40 patches each
SPANS = (Span(5, 10, 0), Span(20, 10, 1))
CONTENT = Content([1] * 40, SPANS, (A, B))


def showable(names: str) -> Callable[[ImageKey], bool]:
    return lambda key: {A.key: "a", B.key: "b"}[key] in names


def test_only_images_that_share_a_token_with_the_chunk_count() -> None:
    assert (
        list(overlapping(SPANS, 0, 5))
        == list(overlapping(SPANS, 15, 20))
        == list(overlapping(SPANS, 30, 40))
        == []
    )
    assert list(overlapping(SPANS, 14, 21)) == list(SPANS)
    assert chunk_limit(CONTENT.spans, CONTENT.images, 0, 5, showable("")) == (5, None)
    assert chunk_limit(CONTENT.spans, CONTENT.images, 15, 20, showable("")) == (20, None)


def test_a_chunk_stops_before_an_image_that_is_not_there() -> None:
    assert chunk_limit(CONTENT.spans, CONTENT.images, 0, 40, showable("")) == (5, A.key)
    assert chunk_limit(CONTENT.spans, CONTENT.images, 0, 40, showable("a")) == (20, B.key)
    assert chunk_limit(CONTENT.spans, CONTENT.images, 0, 40, showable("b")) == (5, A.key)
    assert chunk_limit(CONTENT.spans, CONTENT.images, 8, 40, showable("")) == (8, A.key)
    assert chunk_limit(CONTENT.spans, CONTENT.images, 0, 40, showable("ab")) == (40, None)


def test_a_chunk_ends_before_an_image_that_it_would_show_in_part() -> None:
    ends = {end: whole(CONTENT.spans, 0, end) for end in (5, 6, 14, 15, 20, 21, 29, 30, 31)}
    assert ends == {5: 5, 6: 5, 14: 5, 15: 15, 20: 20, 21: 20, 29: 20, 30: 30, 31: 31}
    assert whole(CONTENT.spans, 8, 12) == 8, "nothing of an image that was begun"
    assert whole(CONTENT.spans, 8, 15) == 15, "its rest"


def test_splices_name_batch_rows_and_embedding_rows() -> None:
    assert splices(CONTENT, 8, 22, row=100) == [Splice(100, 7, A.key, 3), Splice(112, 2, B.key, 0)]
    assert splices(CONTENT, 30, 40, row=0) == []
