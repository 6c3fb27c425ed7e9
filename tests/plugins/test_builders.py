"""Claims about the fields of plugins' records in which only one plugin may provide something."""

from __future__ import annotations

import pytest

from saccade import plugins as found
from saccade.core.errors import ConfigError
from saccade.plugin import Caches, Offer, Plugin, Requests
from saccade.plugins import builder

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
