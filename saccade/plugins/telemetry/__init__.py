"""Sends traces of requests to an OpenTelemetry collector."""

from saccade.plugin import Http, Plugin

PLUGIN = Plugin(
    "telemetry",
    options="saccade.plugins.telemetry.options:TelemetryOptions",
    asked="saccade.plugins.telemetry.options:is_enabled",
    needs_options=True,
    http=Http(recorder="saccade.plugins.telemetry.recorder:build_recorder"),
)
