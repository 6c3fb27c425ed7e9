"""Switches for benchmarks: mechanisms measured with and without."""

from saccade.plugin import Plugin

PLUGIN = Plugin("switches", options="saccade.core.settings:SwitchSettings")
