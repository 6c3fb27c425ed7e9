"""Several keys, each with its own files and caches."""

from saccade.plugin import Plugin

PLUGIN = Plugin("tenants", options="saccade.core.settings:KeySettings")
