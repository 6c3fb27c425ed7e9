"""Reads images by URL: `http(s):`, and `file:` below one allowed directory."""

from saccade.plugin import Plugin, Requests

PLUGIN = Plugin(
    "fetch",
    options="saccade.plugins.fetch.options:FetchOptions",
    requests=Requests(fetcher="saccade.plugins.fetch.fetcher:Fetcher"),
)
