"""Runs servers on Ray Serve, and writes the config file that deploys them."""

from saccade.plugin import Command, Plugin

PLUGIN = Plugin(
    "ray",
    requires=("route",),
    commands=(
        Command(
            "deploy",
            "saccade.plugins.ray.command:app",
            "Write a config file that runs Saccade on a cluster.",
        ),
    ),
)
