"""Training of the demo model: networks, data, optimiser and script. Not part of the wheel."""
