"""All other architectures, computed by transformers' own modules."""

from saccade.plugin import Checkpoints, Plugin

PLUGIN = Plugin(
    "any_model",
    options="saccade.core.settings:ParitySettings",
    checkpoints=Checkpoints(
        families="saccade.plugins.any_model.family",
        parity="saccade.plugins.any_model.parity_check:check_parity",
    ),
)
