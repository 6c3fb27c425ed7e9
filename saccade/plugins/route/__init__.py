"""`saccade route`: one address for several servers. A request is sent to a server that has seen its
image.
"""

from saccade.plugin import Command, Plugin

PLUGIN = Plugin(
    "route",
    commands=(
        Command(
            "route",
            "saccade.plugins.route.command:app",
            "Route each request to the server that has seen its images.",
            renames=True,
        ),
    ),
)
