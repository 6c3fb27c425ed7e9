"""Trains the demo model: its networks, data, optimiser and script. Not part of the wheel."""
