"""Images by URL: `http(s):`, and `file:` below one allowed directory."""

from saccade.plugin import Plugin

PLUGIN = Plugin(
    "fetch",
    options="saccade.plugins.fetch.options:FetchOptions",
    fetcher="saccade.plugins.fetch.fetcher:Fetcher",
)
