"""Logs requests, and what delayed slow ones."""

from saccade.plugin import Http, Plugin

PLUGIN = Plugin(
    "request_log",
    options="saccade.plugins.request_log.options:LogOptions",
    asked="saccade.plugins.request_log.options:is_enabled",
    needs_options=True,
    http=Http(answer_log="saccade.plugins.request_log.request_log:RequestLog"),
)
