"""Pages that arrive from host memory keep their names, whatever leaves the pool meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

from saccade.cache.content import Content, page_name, root_name
from saccade.cache.pages import PagePool
from saccade.cache.pins import PinTable
from saccade.cache.prefix import Node, PrefixCache
from saccade.cache.snapshots import Snapshots
from saccade.core.types import Request, SamplingParams
from saccade.plugins.tiers.kept_pages import OffloadedPages
from saccade.plugins.tiers.page_arrivals import PageArrivals
from saccade.sched.sequence import Sequence

TOKENS = tuple(range(100, 121))
SIZE, PAGES, SNAPSHOTS = 2, 8, 2


def test_a_snapshot_that_leaves_does_not_shift_the_names_of_arriving_pages() -> None:
    pool = PagePool(40, SIZE)
    snapshots: Snapshots[Node] = Snapshots(0, SNAPSHOTS)
    tiers = OffloadedPages(b"identity" * 2, 100, 100, host_bytes=100 * 100)
    prefix = PrefixCache(pool, PinTable(0), snapshots, tiers)
    arrivals = PageArrivals(SimpleNamespace(prefix=prefix, pool=pool))  # type: ignore[arg-type]
    content = Content([*TOKENS], (), ())
    names = [root_name(tiers.identity, "", "")]
    for index in range(PAGES):
        names.append(page_name(names[-1], content.page(index, SIZE)))

    # A sequence has computed eight pages, with states after the second and the last. The last six
    # leave the pool.
    pages = pool.allocate(PAGES)
    assert pages is not None
    node = prefix.extend(prefix.hold(content, []), content, pages, PAGES)
    for depth in (2, PAGES):
        line = prefix.allocate_slot()
        assert line is not None and prefix.attach(node, content, depth, line)
    prefix.leave(node, content, pages, PAGES)
    assert prefix.evict(PAGES - 2) == PAGES - 2
    tiers.take_moves()

    # They arrive for another sequence, while the snapshot of the second page is given away.
    waiting = Sequence(Request("b", TOKENS, (), (), SamplingParams()), 0, None)
    path = prefix.find(waiting.content)
    assert len(path) == 2 and arrivals.awaits(waiting, path, lambda: True)
    while path[-1].snapshot is not None:
        prefix.allocate_slot()
    path = prefix.find(waiting.content, path)
    arrivals.count_coming(waiting, path)
    (arrival,) = arrivals._under_way.values()
    arrivals._hear([(name, "read", "host") for name in list(arrival.reading)], ())
    assert not arrivals._under_way

    found, at = [], prefix._roots["", ""]
    while at.children:
        at = next(iter(at.children.values()))
        found.append(prefix.name(at))
    assert len(found) > 2 and found == names[1 : len(found) + 1]
