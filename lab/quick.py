"""Simulation of the caches alone, for traces of millions: every call goes through the real prefix
and embedding caches at once, as if it were the only one; a queue of work estimates the time.

What is left out beside `stepwise`: calls do not hold pages and embeddings while others run, prompts
are not shared while they are still being computed, and nobody is preempted. Pages may be larger
than the server's, so that fewer are counted: a page then is `grain` tokens. Owns the queue. Knows
nothing of tables.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from lab.costs import Costs, Machine
from lab.options import Routing
from lab.outcome import Outcome, StepCounts, tiers
from lab.router import Router
from lab.trace import RequestTrace, Shown, TracedCall, page_names
from saccade.cache.content import Content
from saccade.cache.embeddings import EmbeddingCache, Worth, saved_encoding
from saccade.cache.pages import PagePool
from saccade.cache.prefix import PrefixCache
from saccade.core.plan import Move
from saccade.core.types import ImageKey
from saccade.tools.bench.measure import Distribution


class QueuedServer:
    """One replica: its caches, and when it will have done what has come in so far (ms)."""

    def __init__(self, machine: Machine, costs: Costs, grain: int, worth: Worth) -> None:
        self.pool = PagePool(max(2, 1 + machine.kv_tokens // grain), 1)
        self.prefix = PrefixCache(self.pool) if machine.prefix_cache else None
        self.embeddings = EmbeddingCache(machine.budgets, machine.embedding_bytes, worth=worth)
        self.counts = StepCounts()
        self.free = 0.0
        self.busy = 0.0
        self._machine = machine
        self._costs = costs
        self._grain = grain
        self._moved: Counter[str] = Counter()
        self._pixels: OrderedDict[ImageKey, int] = (
            OrderedDict()
        )  # decoded pictures that lie in the arena: bytes, least recently used first
        self._pixel_bytes = 0

    def serve(self, call: TracedCall, now: float) -> tuple[float, float] | None:
        """When the first token comes, and the last. None if the prompt is too long."""
        pictures, length = call.pictures, call.length
        if length + call.answer.length > min(
            self._machine.limits.context_length, self.pool.capacity * self._grain
        ):
            self.counts.refused += 1
            return None
        cached = self._prefix(call, length)
        encoded, took, decode = self._pictures(call, cached)
        costs, limits = self._costs, self._machine.limits
        took += costs.encode_ms(encoded) + costs.prefill_ms(cached, length - cached)
        took += costs.step * -(-(length - cached) // limits.chunk_tokens)
        ready = (
            now
            + costs.request
            + sum(shown.pixels for shown in pictures) * costs.seen / 1e6
            + decode
        )
        first = max(self.free, ready) + took
        # Steps that only write answers are shared by all that run; those of a server that is not
        # busy keep nobody waiting.
        pace = costs.row + length * costs.context
        later = call.answer.length * (pace + costs.step / limits.max_running)
        self.free = first + later
        self.busy += took + later
        counts = self.counts
        counts.requests += 1
        counts.prompt_tokens += length
        counts.cached_tokens += cached
        counts.images += len(pictures)
        return first, first + (call.answer.length - 1) * (costs.step + pace)

    def end(self) -> StepCounts:
        self.counts.pages_evicted = (
            self.prefix.evictions * self._grain // self._machine.page_size if self.prefix else 0
        )
        self.counts.moved = dict(self._moved)
        return self.counts

    def _prefix(self, call: TracedCall, length: int) -> int:
        """Tokens found; all whole pages of the call are then cached."""
        if self.prefix is None:
            return 0
        prefix, pool, grain = self.prefix, self.pool, self._grain
        names = page_names((*call.pieces, call.answer), grain)
        # The prompt's last page is never looked for, so that it may have been begun by something
        # else than it goes on with here.
        path = prefix.find(Content(names[: -(-length // grain)], (), (), call.tenant))
        # The last answer token has no keys and values.
        computed = length + call.answer.length - 1
        content = Content(names, (), (), call.tenant)
        node = prefix.hold(content, path)
        missing = -(-computed // grain) - len(path)
        if pool.free < missing:
            prefix.evict(missing - pool.free)
        pages = [step.page for step in path]
        pages += pool.take(missing, pages[-1] if pages else None)
        prefix.leave(node, content, pages, computed // grain)
        return len(path) * grain

    def _pictures(self, call: TracedCall, cached: int) -> tuple[list[int], float, float]:
        """Patches of each picture to encode; ms of moves; ms until the last picture is decoded."""
        embeddings, counts, costs = self.embeddings, self.counts, self._costs
        encoded: list[int] = []
        took = 0.0
        workers = [0.0] * costs.workers
        at = 0
        for piece in call.pieces:
            at += piece.length
            if piece.shown is None:
                continue
            if at <= cached:
                counts.images_kv += 1
                continue
            image, key = piece.shown.image, piece.shown.image.key
            place = embeddings.locate(key)
            embeddings.count_lookup(place)
            if place is None:
                took += self._move(embeddings.admit(key, image.num_tokens))
                evicted, _ = embeddings.save(key)
                took += self._move(evicted)
                encoded.append(image.num_patches)
                heapq.heapreplace(workers, workers[0] + self._decode(piece.shown))
            else:
                counts.images_embedding += 1
                if place == "disk":
                    took += self._move([embeddings.fetch(key)])
                    embeddings.fetched(key, whole=True)
                if place != "device":
                    took += self._move(embeddings.to_device(key))
            embeddings.pin(key)
            embeddings.unpin(key)
        return encoded, took, max(workers)

    def _decode(self, shown: Shown) -> float:
        """Have the pixels of a picture that is to be encoded; returns the ms until they are
        there.
        """
        counts, key, nbytes = self.counts, shown.image.key, 3 * shown.resized
        counts.images_encoded += 1
        counts.patches_encoded += shown.image.num_patches
        self._moved["pixels to engine"] += nbytes
        if key in self._pixels:
            counts.pixels_reused += 1
            self._pixels.move_to_end(key)
            return 0.0
        counts.images_decoded += 1
        self._pixels[key] = nbytes
        self._pixel_bytes += nbytes
        while self._pixel_bytes > self._machine.arena_bytes and len(self._pixels) > 1:
            self._pixel_bytes -= self._pixels.popitem(last=False)[1]
        return self._costs.decode_ms(shown.pixels, shown.resized)

    def _move(self, moves: Sequence[Move]) -> float:
        took = 0.0
        for move in moves:
            if move.target is None:
                continue
            nbytes = move.num_tokens * self._machine.embedding_bytes
            self._moved[f"{move.source} to {move.target}"] += nbytes
            took += (
                nbytes
                / (self._costs.disk_gbs if move.source == "disk" else self._costs.host_gbs)
                / 1e6
            )
        return took


def run(
    trace: RequestTrace,
    machine: Machine,
    costs: Costs,
    grain: int,
    replicas: int = 1,
    routing: Routing = "random",
    worth: Worth = saved_encoding,
    told: Callable[[], None] | None = None,
) -> Outcome:
    """The whole trace, in the order in which its calls are sent.

    `told` is called for every request.
    """
    servers = [QueuedServer(machine, costs, grain, worth) for _ in range(replicas)]
    router = Router(routing, replicas, seed=0)
    later: list[tuple[float, int, int]] = []  # when, chat, round: of chats that have begun
    waits: list[float] = []
    last = 0.0
    session = 0
    while session < trace.sessions or later:
        if session < trace.sessions and (not later or trace.start(session) <= later[0][0]):
            now, chat, round = trace.start(session), session, 0
            session += 1
        else:
            now, chat, round = heapq.heappop(later)
        call = trace.call(chat, round)
        loads = (
            [max(0.0, server.free - now) / 100 for server in servers]
            if routing == "bounded"
            else ()
        )
        served = servers[router.choose(call, chat, loads)].serve(call, now)
        if told:
            told()
        if served is None:
            continue
        waits.append(served[0] - now)
        last = max(last, served[1])
        if round + 1 < trace.rounds(chat):
            heapq.heappush(later, (served[1] + trace.pause(chat, round + 1), chat, round + 1))
    counts = StepCounts()
    for server in servers:
        counts.add(server.end())
    return Outcome(
        level="caches",
        routing=routing if replicas > 1 else None,
        page_tokens=grain,
        duration=last,
        busy=tuple(server.busy / last if last else 0.0 for server in servers),
        counts=counts,
        tiers=tiers(server.embeddings for server in servers),
        ttft=Distribution.of(waits),
    )
