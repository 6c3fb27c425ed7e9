"""Images by their URLs: `http(s):`, and `file:` below one allowed folder."""

from saccade.plugin import Plugin

PLUGIN = Plugin(
    "fetch",
    options="saccade.plugins.fetch.options:FetchOptions",
    fetcher="saccade.plugins.fetch.fetcher:Fetcher",
)
