"""The fallback for all other architectures: transformers' own modules compute them."""

from saccade.plugin import Checkpoints, Plugin

PLUGIN = Plugin(
    "any_model",
    options="saccade.core.settings:ParitySettings",
    checkpoints=Checkpoints(
        families="saccade.plugins.any_model.family",
        parity="saccade.plugins.any_model.parity_check:check_parity",
    ),
)
