"""The prefix cache: a trie of full KV pages, with one root per cache salt and adapter.

The trie has one reference to each of its pages in the page pool, and determines the order of
eviction.

Edges are compared exactly: by token ids, and by images with their offsets. A sequence holds a path
from the root, whose pages are the first in its page table. Pages that no sequence holds can be
evicted: leaves first, the least recently used one first.

    find -> hold -> extend ... extend -> leave

A pin (`pins.py`) is set on the last page of a path. It also keeps the earlier pages, because a page
with children is not evicted. A client is charged for the pages on the path that it has not pinned
yet. Pinned pages are evicted if no other page can be, so that pins never block a sequence.

If the hashes of tiles are available, a page can also be found by the tiles that it contains
(`by_tiles`). So images that begin with the same tiles share the pages of these tiles, stored under
the first image's key, in the pool and in host memory. Hashes of tiles are lost at a restart, so
this is disabled if pages are stored on disk.

If the model has a recurrent state per sequence (`snapshots.py`), a path can be used only up to its
last page with a snapshot. A snapshot is evicted with its page, or earlier.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

from saccade.cache.content import Content, PageKey, Partition, TileKey, page_name, root_name
from saccade.cache.pages import DUMMY_PAGE, PagePool
from saccade.cache.pins import PinTable

if TYPE_CHECKING:
    from saccade.cache.listeners import PageListener
    from saccade.cache.page_tiers import PageTiers
    from saccade.cache.snapshots import Snapshots  # only for models with recurrent states

MAX_UNSAVED = 1024  # finished sequences whose pages are still to be saved
MAX_TILE_PAGES = 1 << 16
"""Maximum number of evicted pages whose tile hashes are remembered."""
GONE = -1
"""Value of `Node.used` for a page that was removed from the trie."""
NO_PINS: dict[str, int] = {}
"""Shared empty value for nodes without pins. Never modified."""


NO_TILE_CHILDREN: dict[TileKey, Node] = {}
"""Shared empty value for nodes without children that have a `tile_key`. Never modified."""


class Node:
    """A cached page, or a root, which has no page. `depth` is the number of pages from the root to
    here.
    """

    __slots__ = (
        "children",
        "depth",
        "holders",
        "key",
        "name",
        "page",
        "parent",
        "partition",
        "pinned",
        "snapshot",
        "tile_children",
        "tile_key",
        "used",
    )

    def __init__(self, parent: Node | None, key: PageKey, page: int, partition: Partition) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.partition = partition
        self.children: dict[PageKey, Node] = {}
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.used = 0
        # for each client: its own pin on this page (0 or 1), plus its number of pinned children
        self.pinned = NO_PINS
        self.snapshot: int | None = None  # the slot with the state after this page, if any
        self.name: bytes | None = None  # the page's hash, computed at the first use
        self.tile_key: TileKey | None = None  # `key` in terms of tiles, if their hashes are known
        self.tile_children = NO_TILE_CHILDREN  # children by `tile_key`
        self.holders = 0  # of roots only: a root is removed once it has no holder and no children


class PrefixCache:
    """Finds, holds and evicts the cached KV pages of running and finished sequences."""

    def __init__(
        self,
        pool: PagePool,
        pins: PinTable[Node] | None = None,
        snapshots: Snapshots[Node] | None = None,
        kept: PageTiers | None = None,
        by_tiles: Callable[[PageKey], TileKey | None] | None = None,
    ) -> None:
        """Create an empty cache.

        pins: an empty table whose share is in pages, or None to disable pins.
        snapshots: required for a model with a recurrent state per sequence, otherwise None.
        kept: the tiers to which evicted pages are written, or None to drop evicted pages.
        by_tiles: returns a page's key with tiles instead of images, or None if the tiles of an
            image are unknown.
        """
        self._by_tiles = by_tiles
        self.kept = kept
        self._identity = b"" if kept is None else kept.identity
        self._listener: PageListener | None = None
        # last pages of finished sequences, still to be saved. Beyond the maximum length, pages are
        # saved only when they are evicted.
        self._unsaved: deque[Node] = deque(maxlen=MAX_UNSAVED)
        # hashes of evicted pages, by the hash of the page before and by their tiles
        self._tile_names: dict[tuple[bytes, TileKey], bytes] = {}
        self.snapshots = snapshots
        self.pins = PinTable() if pins is None else pins
        self.pinned = 0  # pages with a pin
        self._pool = pool
        self._roots: dict[Partition, Node] = {}
        self._clock = count(1)
        # heap of (used, tie-breaker, node). An entry is stale unless `used` equals the node's.
        self._leaves: list[tuple[int, int, Node]] = []
        self.pages = 0
        self.evictable = 0  # pages that `evict` could free now
        self.evictions = 0

    def listen(self, listener: PageListener, identity: bytes) -> None:
        """Report to `listener` every page that is stored or removed from now on.

        Call this while the cache is empty.

        identity: a digest of everything that pages depend on (`PageIdentity.digest`).
        """
        assert not self.pages and (self.kept is None or self._identity == identity)
        self._listener, self._identity = listener, identity

    def find(self, content: Content, known: Sequence[Node] = ()) -> list[Node]:
        """Return the longest cached path that a sequence can resume from. This has no side effects.

        The path leaves at least one token to compute.

        known: an earlier result for this content, from which the search continues.
        """
        path = [*known]
        # Leaves are evicted first, so if a page is cached, all pages before it are.
        while path and path[-1].used == GONE:
            path.pop()
        node = path[-1] if path else self._roots.get(content.partition)
        size = self._pool.page_size
        while node is not None and (len(path) + 1) * size < len(content.tokens):
            key, at = content.page(len(path), size), node
            node = at.children.get(key)
            if node is None and self._by_tiles is not None and at.tile_children:
                tile_key = self._by_tiles(key)
                node = at.tile_children.get(tile_key) if tile_key is not None else None
            if node is not None:
                path.append(node)
        return self.resumable(path)

    def resumable(self, path: list[Node]) -> list[Node]:
        """Truncate a path, in place, to the part that a sequence can resume from, and return it."""
        if self.snapshots is not None:
            while path and path[-1].snapshot is None:
                path.pop()
        return path

    def hold(self, content: Content, path: Sequence[Node], *, idle: bool = False) -> Node:
        """Hold a path that `find` has just returned, so that its pages are not evicted.

        Returns the last node of the path, or the root if the path is empty.

        idle: True to not count this as a use of the path's last snapshot.
        """
        for node in path:
            self.evictable -= self._pool.refs[node.page] == 1
        self._pool.retain(node.page for node in path)
        at = content.partition
        root = self._roots.setdefault(at, Node(None, ((), ()), DUMMY_PAGE, at))
        root.holders += 1
        if self.snapshots is not None and path and not idle:
            self.snapshots.touch(path[-1])
        return path[-1] if path else root

    def extend(self, node: Node, content: Content, pages: Sequence[int], whole: int) -> Node:
        """Add the pages `[node.depth, whole)` of a running sequence to the trie.

        Returns the last node that the sequence holds now. Stops at the first page whose content is
        already cached in another page. A page table is append-only, so the sequence continues to
        use its own page. That page, and those after it, are not added before `leave`.
        """
        while node.depth < whole:
            key = content.page(node.depth, self._pool.page_size)
            if key in node.children:
                break
            page = pages[node.depth]
            self._pool.retain((page,))
            node = self._add(node, key, page)
        return node

    def leave(
        self,
        node: Node,
        content: Content,
        pages: Sequence[int],
        whole: int,
        *,
        idle: bool = False,
        names: Sequence[bytes] = (),
    ) -> Node:
        """Release a sequence's hold, and return the node of the last full page.

        Its first `whole` pages stay cached. Its other pages become free, and so do pages that
        duplicate cached ones.

        idle: True to not count this as a use of the pages. They are then evicted first, unless
            another sequence uses them.
        names: the hashes in `kept` of the pages after the held ones.
        """
        held, named = node, iter(names)
        duplicates: list[int] = []
        for page in pages[node.depth : whole]:
            name = next(named, None)
            key = content.page(node.depth, self._pool.page_size)
            if key in node.children:
                node = node.children[key]
                duplicates.append(page)
            else:
                node = self._add(node, key, page, name)
                node.used = 0 if idle else next(self._clock)
                self.evictable += 1
        self._release(held, idle=idle)
        self._push_if_evictable(node)
        if self.kept is not None and "disk" in self.kept.tiers and node.depth:
            self._unsaved.append(node)
        self._pool.release(duplicates)
        self._pool.release(pages[whole:])
        return node

    def attach(
        self, node: Node, content: Content, depth: int, line: int, *, idle: bool = False
    ) -> bool:
        """Make slot `line` the cached snapshot of the state after the first `depth` pages of the
        content.

        Returns True if the cache owns the slot now, and False if a duplicate page hides that page.

        node: any node on the content's path.
        idle: True to evict the snapshot before others until it is used.
        """
        assert self.snapshots is not None and depth > 0
        while node.parent is not None and node.depth > depth:
            node = node.parent
        while node.depth < depth:
            child = node.children.get(content.page(node.depth, self._pool.page_size))
            if child is None:
                return False
            node = child
        if node.snapshot is None:
            node.snapshot = line
            self.snapshots.attach(node, line, idle=idle)
        else:
            if not idle:
                self.snapshots.touch(node)
            self.snapshots.release(line)
        return True

    def allocate_slot(self) -> int | None:
        """Return a slot for a snapshot, or None while all slots are being written.

        It is a free slot, or the slot of the least recently used snapshot, which is evicted.
        Snapshots of pinned pages are evicted last.
        """
        assert self.snapshots is not None
        line, node = self.snapshots.allocate_slot(lambda node: not node.pinned)
        if node is not None:
            node.snapshot = None
        return line

    def evict(self, n: int, *, keep: bool = True, pinned: bool = True) -> int:
        """Free up to `n` pages that no sequence holds, pinned ones last. Return how many were
        freed.

        keep: True to write them to `kept`, if there is one.
        pinned: True to also free pinned pages.
        """
        self.end_pins()
        freed: list[int] = []
        while len(freed) < min(n, self.evictable):
            node = self._next_leaf()
            if node is None and not pinned:
                break
            if node is None:
                self._unpin_oldest()
                continue
            assert node.parent is not None
            if self.kept is not None and keep:
                self.kept.write_page(self.name(node), node.page, node.snapshot)
                self._remember_tiles(node)
            del node.parent.children[node.key]
            if node.tile_key is not None:
                del node.parent.tile_children[node.tile_key]
            node.used = GONE
            if self._listener is not None:
                self._listener.page_removed(self.name(node))
            if self.snapshots is not None and node.snapshot is not None:
                self.snapshots.detach(node)
            freed.append(node.page)
            self._push_if_evictable(node.parent)
        self._pool.release(freed)
        self.pages -= len(freed)
        self.evictable -= len(freed)
        self.evictions += len(freed)
        return len(freed)

    def flush(self) -> None:
        """Remove every pin, and every page that no sequence holds."""
        for client, node in self.pins.in_order():
            self._unpin(client, node)
        self.evict(self.evictable, keep=False)
        self._unsaved.clear()
        self._tile_names.clear()

    # ---- other tiers

    def name(self, node: Node) -> bytes:
        """Return the hash of the page of a node (see `content.py`)."""
        unnamed: list[Node] = []
        while node.name is None and node.parent is not None:
            unnamed.append(node)
            node = node.parent
        name = node.name or root_name(self._identity, *node.partition)
        for each in reversed(unnamed):
            each.name = name = page_name(name, each.key)
        return name

    def stored_name(self, parent: bytes | None, content: Content, index: int) -> bytes:
        """Return the hash under which `kept` stores page `index` of `content`.

        If `kept` has a page with the same tiles, this is the hash of that page.

        parent: the hash of the page before, or None for the first page.
        """
        key = content.page(index, self._pool.page_size)
        parent = parent or root_name(self._identity, *content.partition)
        if self._tile_names and key[1] and self._by_tiles is not None:
            tile_key = self._by_tiles(key)
            named = None if tile_key is None else self._tile_names.get((parent, tile_key))
            if named is not None and self.kept is not None and named in self.kept:
                return named
        return page_name(parent, key)

    def _remember_tiles(self, node: Node) -> None:
        assert node.parent is not None
        if node.tile_key is not None:
            if len(self._tile_names) >= MAX_TILE_PAGES:
                del self._tile_names[next(iter(self._tile_names))]
            self._tile_names[self.name(node.parent), node.tile_key] = self.name(node)

    def _chain(self, node: Node) -> list[tuple[bytes, bool]]:
        """Return for each page from the root to `node` its hash, and True if it has a snapshot."""
        chain = []
        while node.parent is not None:
            chain.append((self.name(node), node.snapshot is not None))
            node = node.parent
        return chain[::-1]

    @property
    def unsaved(self) -> bool:
        """Return True if `save` may have pages to copy."""
        return bool(self._unsaved)

    def save(self, nbytes: int) -> None:
        """Copy about `nbytes` of the pages of finished sequences to disk, the first pages of each
        first.
        """
        assert self.kept is not None
        while self._unsaved and nbytes > 0:
            node, chain = self._unsaved[0], []
            while node.parent is not None:
                if node.used != GONE:
                    chain.append(node)
                node = node.parent
            for each in reversed(chain):
                name = self.name(each)
                nbytes -= self.kept.write_page(name, each.page, each.snapshot, ("disk",))
                if nbytes <= 0:
                    return
            self.kept.used([self.name(each) for each in reversed(chain)])
            self._unsaved.popleft()

    # ---- pins

    def pin(self, node: Node, content: Content, pages: int, client: str, seconds: int) -> int:
        """Pin the first `pages` computed pages of the sequence that holds `node`, for `seconds`.

        This pins them in this cache and in `kept`. Returns the number of pages pinned here. It is
        less than `pages` if a duplicate page hides the others, or if they exceed what the client
        may pin.
        """
        self.end_pins()
        while node.parent is not None and node.depth > pages:
            node = node.parent
        while node.depth < pages:
            child = node.children.get(content.page(node.depth, self._pool.page_size))
            if child is None:
                break
            node = child
        if self.kept is not None:
            self.kept.pin(self._chain(node), client, seconds)
        room = self.pins.budget_of(client)
        while node.parent is not None and node.depth > room:
            node = node.parent
        if not node.depth:
            return 0
        if self.pins.set(client, node, seconds):
            self._charge(client, node)
        for other, beyond in self.pins.beyond():
            self._unpin(other, beyond)
        return node.depth if self.pins.has(client, node) else 0

    def hit(self, path: Sequence[Node], client: str) -> None:
        """Renew the pins of `client` on `path`, after a sequence was admitted with these pages."""
        self.end_pins()
        for node in path if len(self.pins) else ():
            if client in node.pinned:
                self.pins.hit(client, node)
        if self.kept is not None and self.kept.pinned:
            self.kept.hit([self.name(node) for node in path], client)

    def end_pins(self) -> None:
        """Remove expired pins."""
        for client, node in self.pins.due():
            self._unpin(client, node)

    def _unpin_oldest(self) -> None:
        """Drop the first pin on a page that no sequence holds.

        Such a pin must exist. It does once all unpinned pages without holders have been evicted.
        """
        client, node = next(
            (client, node)
            for client, node in self.pins.in_order()
            if self._pool.refs[node.page] == 1
        )
        self._unpin(client, node)
        self.pins.given_way += 1

    def _charge(self, client: str, node: Node) -> None:
        while node.parent is not None:
            if not node.pinned:
                node.pinned = {}
                self.pinned += 1
            before = node.pinned.get(client, 0)
            node.pinned[client] = before + 1
            if before:
                return
            self.pins.charge(client, 1)
            node = node.parent

    def _unpin(self, client: str, node: Node) -> None:
        self.pins.drop(client, node)
        last = node
        while node.parent is not None:
            node.pinned[client] -= 1
            if node.pinned[client]:
                break
            del node.pinned[client]
            self.pins.charge(client, -1)
            if not node.pinned:
                node.pinned = NO_PINS
                self.pinned -= 1
            node = node.parent
        self._push_if_evictable(last)

    # ---- the trie

    def owned(self) -> Iterator[int]:
        """Yield every page in the trie."""
        todo = list(self._roots.values())
        while todo:
            node = todo.pop()
            todo += node.children.values()
            if node.depth:
                yield node.page

    def _add(self, parent: Node, key: PageKey, page: int, name: bytes | None = None) -> Node:
        node = Node(parent, key, page, parent.partition)
        node.name = name
        parent.children[key] = node
        if self._by_tiles is not None and key[1]:
            tile_key = self._by_tiles(key)
            if tile_key is not None and tile_key not in parent.tile_children:
                parent.tile_children = parent.tile_children or {}
                parent.tile_children[tile_key], node.tile_key = node, tile_key
        self.pages += 1
        if self._listener is not None:
            before = self.name(parent) if parent.depth else None
            self._listener.page_stored(self.name(node), before, key, node.partition)
        return node

    def _release(self, node: Node, *, idle: bool) -> None:
        leaf = node
        while node.parent is not None:
            self._pool.release((node.page,))
            if self._pool.refs[node.page] == 1:
                node.used = node.used if idle else next(self._clock)
                self.evictable += 1
            node = node.parent
        node.holders -= 1
        self._push_if_evictable(leaf)

    def _next_leaf(self) -> Node | None:
        """Remove the next evictable page without a pin from the heap and return it, or None."""
        while self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if node.used == used and self._is_evictable(node):
                return node
        return None

    def _is_evictable(self, node: Node) -> bool:
        return not (node.children or node.pinned) and self._pool.refs[node.page] == 1

    def _push_if_evictable(self, node: Node) -> None:
        """Add `node` to the heap of evictable leaves, if it is one.

        If it is a root without pages and holders, remove it.
        """
        if node.depth == 0:
            if not node.children and not node.holders:
                self._roots.pop(node.partition, None)
        elif self._is_evictable(node):
            heapq.heappush(self._leaves, (node.used, next(self._clock), node))
            if len(self._leaves) > 2 * self.pages + 64:
                self._leaves = [
                    (used, tie, node)
                    for used, tie, node in self._leaves
                    if node.used == used and self._is_evictable(node)
                ]
                heapq.heapify(self._leaves)
