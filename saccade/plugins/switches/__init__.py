"""Switches that disable mechanisms, to measure their effect in benchmarks."""

from saccade.plugin import Plugin

PLUGIN = Plugin("switches", options="saccade.core.settings:SwitchSettings")
