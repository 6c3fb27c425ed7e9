"""The part of the engine that only servers with a language model have. It handles grammars, their
masks, and metrics of KV pages.

A server that only encodes images does not use this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from saccade.core.errors import RequestError
from saccade.core.metrics import Metrics
from saccade.core.plan import Masks
from saccade.core.types import Delta, ImageKey, Request
from saccade.sched.scheduler import GenerationScheduler

if TYPE_CHECKING:
    from saccade.sched.grammar_state import GrammarState


class GrammarRequests(Protocol):
    """Queues requests until their grammars are compiled. A plugin compiles these in threads."""

    @property
    def waiting(self) -> bool:
        """Return True if there are requests that `take_ready` has not returned yet."""
        ...

    def prepare(self, request: Request) -> None:
        """Start to compile the grammar of a request, and queue the request."""
        ...

    def drop(self, id: str) -> bool:
        """Remove a request. Returns True if it was waiting."""
        ...

    def take_ready(self) -> list[tuple[Request, GrammarState | RequestError]]:
        """Remove and return the requests whose grammar is compiled or has failed."""
        ...

    def fail_all(self, error: str) -> list[Delta]:
        """Remove every waiting request, and return a delta with the error for each."""
        ...


class LanguageHalf:
    """Handles grammars, masks and metrics of the language model for the engine loop."""

    def __init__(
        self, scheduler: GenerationScheduler, open_grammars: Callable[[str], GrammarRequests]
    ) -> None:
        """Use the loop's scheduler.

        open_grammars: called with the tokenizer's JSON, before the first request with a grammar.
        """
        self._scheduler = scheduler
        self._open_grammars = open_grammars
        self._grammars: GrammarRequests | None = None

    # ---- requests with a grammar

    @property
    def waiting(self) -> bool:
        """Return True if a request's grammar is being compiled."""
        return self._grammars is not None and self._grammars.waiting

    def read_tokenizer(self, tokenizer_json: str) -> None:
        """Start to load the tokenizer, which grammars need."""
        self._grammars = self._open_grammars(tokenizer_json)

    def prepare_grammar(self, request: Request) -> None:
        """Start to compile a request's grammar.

        Once it is compiled, `add_with_grammar` passes the request to the scheduler.
        """
        assert self._grammars is not None, "the front end sends the tokenizer first"
        self._grammars.prepare(request)

    def drop(self, id: str) -> bool:
        """Remove a request that waits for its grammar. Returns True if it was waiting."""
        return self._grammars is not None and self._grammars.drop(id)

    def fail_all(self, error: str) -> list[Delta]:
        """Remove every request that waits for its grammar, and return a delta with the error for
        each.
        """
        return [] if self._grammars is None else self._grammars.fail_all(error)

    def add_with_grammar(self) -> list[Delta]:
        """Pass requests whose grammars are compiled to the scheduler, and return the deltas.

        Requests whose grammars have failed end with an error.
        """
        deltas: list[Delta] = []
        if self._grammars is None:
            return deltas
        for request, grammar_state in self._grammars.take_ready():
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
        """See `GenerationScheduler.take_masks`."""
        return self._scheduler.take_masks()

    def take_cancel(self) -> bool:
        """See `GenerationScheduler.take_cancel`."""
        return self._scheduler.take_cancel()

    def embedding_ready(self, key: ImageKey) -> list[Delta]:
        """See `GenerationScheduler.embedding_ready`."""
        return self._scheduler.embedding_ready(key)

    # ---- metrics

    def measure(self, metrics: Metrics) -> None:
        """Copy counters and gauges of pages, pins and the scheduler's parts to `metrics`."""
        pool, prefix, cached = self._scheduler.pool, self._scheduler.prefix, 0
        if prefix is not None:
            cached = prefix.pages
            prefix.end_pins()
            metrics.set("saccade_pinned", prefix.pinned, cache="kv")
            metrics.set("saccade_pins", len(prefix.pins), cache="kv")
            metrics.set("saccade_pins_evicted_total", prefix.pins.given_way, cache="kv")
            metrics.set("saccade_kv_evictions_total", prefix.evictions)
        metrics.set("saccade_kv_pages", pool.free, owner="free")
        metrics.set("saccade_kv_pages", cached, owner="prefix")
        used = pool.capacity - pool.free - cached
        metrics.set("saccade_kv_pages", used, owner="sequences")
        metrics.set("saccade_kv_utilization", used / pool.capacity)
        metrics.set("saccade_kv_page_tokens", pool.page_size)
        blocks = {"block_size": str(pool.page_size), "num_gpu_blocks": str(pool.capacity)}
        metrics.set("saccade_cache_config_info", 1, **blocks)
        self._scheduler.measure(metrics)
