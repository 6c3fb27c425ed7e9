"""Cache options of requests: breakpoints that pin computed pages, and reasons for cache misses."""

from saccade.plugin import Plugin, Scheduling

PLUGIN = Plugin(
    "cache_control",
    scheduling=Scheduling(cache_part="saccade.plugins.cache_control.tracker:CacheControlTracker"),
)
