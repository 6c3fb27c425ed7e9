"""Decodes images in chats while the rest of the request body arrives."""

from saccade.plugin import Http, Plugin

PLUGIN = Plugin(
    "early_decode",
    options="saccade.plugins.early_decode.options:EarlyDecodeOptions",
    asked="saccade.plugins.early_decode.options:is_enabled",
    needs_options=True,
    http=Http(body_watcher="saccade.plugins.early_decode.early_decodes:EarlyDecodes"),
)
