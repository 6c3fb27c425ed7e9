"""Several API keys, each with separate files and caches."""

from saccade.plugin import Plugin

PLUGIN = Plugin("tenants", options="saccade.core.settings:KeySettings")
