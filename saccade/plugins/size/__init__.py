"""`saccade size`: computes the memory that a model's server takes, without loading its weights."""

from saccade.plugin import Command, Plugin

PLUGIN = Plugin(
    "size",
    commands=(
        Command(
            "size",
            "saccade.plugins.size.command:app",
            "Show the memory that a model takes, and the context that fits.",
        ),
    ),
)
