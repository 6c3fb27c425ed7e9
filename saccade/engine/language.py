"""The part of the engine that only a language model needs: grammars, masks, pages.

Owns nothing: the scheduler and the guides do. The loop asks for each of these where a server that
only encodes has nothing.
"""

from __future__ import annotations

from saccade.core.errors import RequestError
from saccade.core.metrics import Metrics
from saccade.core.plan import PAGE_OUTCOMES, Masks
from saccade.core.types import Delta, ImageKey, Request
from saccade.engine.grammar_loader import GrammarLoader
from saccade.sched.parts.speculative import SpeculativeDecoding
from saccade.sched.scheduler import GenerationScheduler


class LanguageHalf:
    """The language model's part of the engine. `scheduler` is the loop's own."""

    def __init__(self, scheduler: GenerationScheduler, grammar_loader: GrammarLoader) -> None:
        self._scheduler = scheduler
        self._grammar_loader = grammar_loader

    # ---- requests with a grammar

    @property
    def waiting(self) -> bool:
        """Return True if some request's grammar is still in preparation."""
        return self._grammar_loader.waiting

    def prepare_grammar(self, request: Request) -> None:
        """Prepare the grammar state for a request's grammar. `add_with_grammar` queues the
        request.
        """
        self._grammar_loader.prepare(request)

    def drop(self, id: str) -> bool:
        """Forget a request that waits for its grammar. Returns True if it was waiting."""
        return self._grammar_loader.drop(id)

    def fail_all(self, error: str) -> list[Delta]:
        """End every waiting request with an error."""
        return self._grammar_loader.fail_all(error)

    def add_with_grammar(self) -> list[Delta]:
        """Queue the requests whose grammars are ready, and end those whose grammars have failed."""
        deltas: list[Delta] = []
        for request, grammar_state in self._grammar_loader.take_ready():
            if isinstance(grammar_state, RequestError):
                error = Delta(
                    request.id, finish="error", error=grammar_state.message, code=grammar_state.code
                )
                deltas.append(error)
            else:
                deltas += self._scheduler.add_request(request, grammar_state)
        return deltas

    # ---- steps

    def take_masks(self) -> tuple[Masks | None, list[Delta]]:
        """Take masks, as `GenerationScheduler.take_masks` does."""
        return self._scheduler.take_masks()

    def take_halt(self) -> bool:
        """Take a halt, as `GenerationScheduler.take_halt` does."""
        return self._scheduler.take_halt()

    def embedding_ready(self, key: ImageKey) -> list[Delta]:
        """Report an embedding, as `GenerationScheduler.embedding_ready` does."""
        return self._scheduler.embedding_ready(key)

    # ---- figures

    def measure(self, metrics: Metrics) -> None:
        """Copy the levels of pages, snapshots and pins into the metrics that users see."""
        pool, prefix, cached = self._scheduler.pool, self._scheduler.prefix, 0
        if prefix is not None:
            cached = prefix.pages
            prefix.end_pins()
            metrics.set("saccade_pinned", prefix.pinned, cache="kv")
            metrics.set("saccade_pins", len(prefix.pins), cache="kv")
            metrics.set("saccade_pins_given_way_total", prefix.pins.given_way, cache="kv")
            metrics.set("saccade_kv_evictions_total", prefix.evictions)
            if prefix.kept is not None:
                self._measure_kept(metrics)
            if (snapshots := prefix.snapshots) is not None:
                metrics.set("saccade_snapshots", len(snapshots))
                metrics.set("saccade_snapshot_evictions_total", snapshots.evictions)
        if (speculative := self._scheduler.part(SpeculativeDecoding)) is not None:
            speculative.drafter.measure(metrics)
        metrics.set("saccade_kv_pages", pool.free, owner="free")
        metrics.set("saccade_kv_pages", cached, owner="prefix")
        used = pool.capacity - pool.free - cached
        metrics.set("saccade_kv_pages", used, owner="sequences")
        metrics.set("saccade_kv_utilization", used / pool.capacity)
        metrics.set("saccade_kv_page_tokens", pool.page_size)

    def _measure_kept(self, metrics: Metrics) -> None:
        """Copy the levels of what is kept beside the pool."""
        prefix = self._scheduler.prefix
        assert prefix is not None and prefix.kept is not None
        restored = self._scheduler.counts.restored_tokens
        for place, tier in prefix.kept.tiers.items():
            metrics.set("saccade_kv_kept", len(tier.book), tier=place)
            metrics.set("saccade_kv_kept_bytes", tier.book.used_bytes, tier=place)
            metrics.set("saccade_kv_kept_budget_bytes", tier.book.budget_bytes, tier=place)
            metrics.set("saccade_kv_kept_evictions_total", tier.book.evictions, tier=place)
            tier.pinned.end_due()
            given_way = tier.pinned.book.given_way
            metrics.set("saccade_pinned", tier.pinned.nbytes, cache=f"kv {place}")
            metrics.set("saccade_pins_given_way_total", given_way, cache=f"kv {place}")
            metrics.set("saccade_restored_tokens_total", restored[place], tier=place)
            for outcome in PAGE_OUTCOMES:
                count = tier.counts[outcome]
                metrics.set("saccade_kv_kept_total", count, tier=place, outcome=outcome)
