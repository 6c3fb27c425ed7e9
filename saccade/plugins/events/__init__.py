"""Events of the KV cache and the embedding cache, published over ZeroMQ for cache-aware routers."""

from saccade.plugin import Plugin, Scheduling

PLUGIN = Plugin(
    "events",
    options="saccade.plugins.events.options:EventOptions",
    asked="saccade.plugins.events.options:is_enabled",
    needs_options=True,
    scheduling=Scheduling(engine_part="saccade.plugins.events.cache_events:CacheEvents"),
)
