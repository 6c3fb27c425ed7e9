"""Claims about the fields of plugins' records in which only one plugin may provide something."""

from __future__ import annotations

import pytest

from saccade import plugins as found
from saccade.core.arena import Arena
from saccade.core.errors import ConfigError
from saccade.core.metrics import Metrics
from saccade.core.model_folder import DEMO
from saccade.families.registry import load_spec
from saccade.media.media import Media
from saccade.plugin import Caches, Offer, Plugin, Requests
from saccade.plugins import builder
from tests.helpers.options import serve_options

OFFER = Offer("json:loads", "json:loads")  # enabled if its argument is the text `true`


def test_an_offer_is_imported_only_if_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = Plugin("one", caches=Caches(page_tiers=OFFER))
    monkeypatch.setattr(found, "plugins", lambda: (enabled, Plugin("other")))
    build = builder(lambda plugin: plugin.caches.page_tiers, "true")
    assert build is not None and build("[1]") == [1]
    assert builder(lambda plugin: plugin.caches.page_tiers, "false") is None
    assert builder(lambda plugin: plugin.requests.uploads) is None


def test_two_plugins_may_not_provide_the_same_part(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tuple(
        Plugin(name, caches=Caches(page_tiers=OFFER), requests=Requests(uploads="json:loads"))
        for name in ("one", "other")
    )
    monkeypatch.setattr(found, "plugins", lambda: pair)
    for socket in (
        lambda plugin: plugin.caches.page_tiers,
        lambda plugin: plugin.requests.uploads,
    ):
        with pytest.raises(ConfigError, match="one and other provide the same part"):
            builder(socket, *["true"] * (socket(pair[0]) == OFFER))
    assert builder(lambda plugin: plugin.caches.page_tiers, "false") is None


@pytest.mark.parametrize(
    "both", [Requests(fetcher="nowhere:imported"), Requests(uploads="nowhere:imported")]
)
def test_two_plugins_that_read_sources_are_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, both: Requests
) -> None:
    monkeypatch.setattr(
        found, "plugins", lambda: (Plugin("a", requests=both), Plugin("b", requests=both))
    )
    arena = Arena.create(1 << 20)
    try:
        with pytest.raises(ConfigError, match="a and b provide the same part"):
            Media(load_spec(DEMO), serve_options(), arena, Metrics())
    finally:
        arena.close()
