"""Options for cache events, and their requirements."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec

from saccade.core.errors import ConfigError
from saccade.core.extras import how_to_install
from saccade.core.options import ServeOptions
from saccade.core.tuning import at_least, option, tuned

_ENDPOINT = re.compile(r"tcp://[^/\s]+:(\*|\d{1,5})|ipc://\S+")


@dataclass(frozen=True, slots=True)
class EventOptions:
    """Events of the caches, for routers."""

    kv_events_endpoint: str | None = None
    """Publish which token blocks the prefix cache stores and removes, over ZeroMQ in vLLM's format
    (needs the extra events). Events contain the tokens of prompts, and readers need no key: use a
    private network.
    """
    kv_events_replay_endpoint: str | None = None
    """Address (tcp://*:5558) that replays events to readers that missed some."""
    kv_events_topic: str = ""
    """Topic of these events. llm-d reads kv@POD@MODEL."""
    embedding_events_endpoint: str | None = None
    """Like --kv-events-endpoint, for image embeddings that are stored and removed."""
    embedding_events_replay_endpoint: str | None = None
    """Like --kv-events-replay-endpoint, for image embeddings."""
    events_buffer_steps: int = tuned(10_000, "Batches of events kept for replays, at most 64 MiB.")

    def __post_init__(self) -> None:
        at_least(1, self, "events_buffer_steps")
        for cache in "kv", "embedding":
            names = f"{cache}_events_endpoint", f"{cache}_events_replay_endpoint"
            for name in names:
                check_endpoint(option(name), getattr(self, name))
            if getattr(self, names[1]) and not getattr(self, names[0]):
                raise ConfigError(
                    f"{option(names[1])} replays what {option(names[0])} publishes: set both"
                )


def check_endpoint(name: str, endpoint: str | None) -> None:
    """Raise ConfigError unless ZeroMQ can parse the endpoint."""
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        raise ConfigError(f"{name} {endpoint!r}: give tcp://HOST:PORT, tcp://*:PORT or ipc://PATH")


def is_enabled(options: ServeOptions) -> bool:
    """Return True if events should be published. Raises ConfigError if they cannot be."""
    events = options.of(EventOptions)
    if events.kv_events_endpoint is not None:
        if options.role == "encode":
            raise ConfigError(
                "--kv-events-endpoint: a server of role encode has no KV cache; use "
                "--embedding-events-endpoint"
            )
        if options.caches.disable_radix_cache:
            raise ConfigError("--kv-events-endpoint: disable_radix_cache leaves no cache to report")
    elif events.embedding_events_endpoint is None:
        return False
    if find_spec("zmq") is None:
        raise ConfigError("cache events need ZeroMQ: " + how_to_install(".[events]"))
    return True
