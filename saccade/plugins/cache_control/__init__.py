"""Cache options of requests: breakpoints that pin KV pages, and reasons of cache misses."""

from saccade.plugin import Plugin

PLUGIN = Plugin(
    "cache_control", cache_part="saccade.plugins.cache_control.tracker:CacheControlTracker"
)
