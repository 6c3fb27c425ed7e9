"""Pause, sleep, new weights and adapters: operations for the operator of a server."""

from saccade.plugin import Http, Plugin

PLUGIN = Plugin(
    "operator",
    http=Http(
        routes="saccade.plugins.operator.handlers:operator_routes",
        paths=(
            "/pause",
            "/pause_generation",
            "/resume",
            "/continue_generation",
            "/is_paused",
            "/update_weights",
            "/update_weights_from_disk",
            "/sleep",
            "/wake_up",
            "/is_sleeping",
            "/release_memory_occupation",
            "/resume_memory_occupation",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
        ),
        operations="saccade.plugins.operator.description:OPERATIONS",
    ),
)
