"""Requests' wishes for the caches: breakpoints that keep computed pages, and reasons of misses."""

from saccade.plugin import Plugin

PLUGIN = Plugin(
    "cache_control", cache_part="saccade.plugins.cache_control.tracker:CacheControlTracker"
)
