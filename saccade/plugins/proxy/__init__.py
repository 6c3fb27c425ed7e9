"""`saccade proxy`: a client-side proxy that uploads each image once."""

from saccade.plugin import Command, Plugin

PLUGIN = Plugin(
    "proxy",
    requires=("route",),
    commands=(
        Command(
            "proxy",
            "saccade.plugins.proxy.command:app",
            "Send the bytes of each image to a server once. Run it on the machine of your clients.",
            renames=True,
        ),
    ),
)
