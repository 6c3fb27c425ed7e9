"""Why a picture is not resident: by what was encoded before, and without telling one tenant of
another.
"""

from __future__ import annotations

from saccade.cache.embeddings import KEYS_PER_DIGEST, GhostList
from saccade.core.types import ImageKey


def key(digest: int = 1, settings: int = 1, salt: str = "") -> ImageKey:
    return ImageKey(bytes([digest]) * 32, bytes([settings]) * 16, salt)


def test_what_was_never_encoded_was_never_seen() -> None:
    seen = GhostList()
    assert seen.why_missing(key()) == "never seen"
    seen.add(key())
    assert seen.why_missing(key(digest=2)) == "never seen"


def test_what_was_encoded_has_been_evicted() -> None:
    seen = GhostList()
    seen.add(key())
    seen.add(key(settings=2))
    assert seen.why_missing(key()) == seen.why_missing(key(settings=2)) == "evicted"


def test_other_settings_are_named() -> None:
    seen = GhostList()
    seen.add(key())
    assert seen.why_missing(key(settings=2)) == "other settings"


def test_a_tenant_never_learns_what_another_has_sent() -> None:
    seen = GhostList()
    seen.add(key(salt="mine"))
    assert seen.why_missing(key(salt="yours")) == seen.why_missing(key()) == "never seen"
    assert seen.why_missing(key(settings=2, salt="mine")) == "other settings"
    seen.add(key(digest=2))
    for settings in (1, 2):
        asked = key(2, settings, "mine")
        assert seen.why_missing(asked) == "never seen", "without a salt is no less another's"


def test_how_often_another_tenant_has_sent_it_changes_no_reason() -> None:
    seen = GhostList()
    seen.add(key(salt="mine"))
    for settings in range(2 * KEYS_PER_DIGEST):
        seen.add(key(settings=settings, salt="yours"))
    assert seen.why_missing(key(salt="mine")) == "evicted"


def test_memory_is_bounded_by_pictures_and_by_ways_to_see_one() -> None:
    seen = GhostList(size=2)
    for digest in (1, 2, 3):
        seen.add(key(digest))
    assert [seen.why_missing(key(digest)) for digest in (1, 2, 3)] == [
        "never seen",
        "evicted",
        "evicted",
    ]
    for settings in range(KEYS_PER_DIGEST + 1):
        seen.add(key(9, settings))
    assert seen.why_missing(key(9, 0)) == "other settings"
    assert seen.why_missing(key(9, KEYS_PER_DIGEST)) == seen.why_missing(key(9, 1)) == "evicted"
