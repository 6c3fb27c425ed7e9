"""Creates the config file for Ray Serve, which `serve run` and `serve deploy` read.

Does not import Ray, so that the file can be written anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from saccade.core.errors import ConfigError
from saccade.core.options import usable_cores
from saccade.plugins.ray.options import DeployOptions
from saccade.plugins.route.options import SpreadOptions

ENGINE, INGRESS, ENCODER = "engine", "ingress", "encoder"
"""Names of the deployments."""
REQUESTS = "requests"
"""Name of the metric that replicas report to Ray, and that `by_queue` uses."""
APP = "saccade.plugins.ray.serving:app"
ROUTER = "saccade.plugins.ray.serving.DigestAffinityRouter"
POLICY = "saccade.plugins.ray.serving:by_queue"
GRACE = "--shutdown-grace"
INGRESS_CPUS = 0.5
SERVER_CPUS = 4.0
"""Number of CPU cores for each server, if the machine has enough."""
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
MARGIN_SECONDS = 20.0
"""Seconds between the end of a server's own grace period and the time when Ray kills its
replica.
"""


def with_bookings(
    deploy: DeployOptions, files: Sequence[Path] = DRIVER_FILES, cores: int | None = None
) -> DeployOptions:
    """Return `deploy` with the resources that Ray reserves for each server.

    Options that are not set are derived from this machine.
    """
    gpus, cpus = deploy.gpus, deploy.cpus
    if gpus is None:
        gpus = float(any(path.exists() for path in files))
    if cpus is None:
        left = (cores or usable_cores()) - INGRESS_CPUS * deploy.ingresses
        cpus = min(SERVER_CPUS, max(INGRESS_CPUS, left / (deploy.replicas + deploy.encoders)))
    return replace(deploy, gpus=gpus, cpus=round(cpus, 2))


def describe_booking(model: str, deploy: DeployOptions) -> str:
    """Return a summary of the deployment for the terminal."""
    servers = f"{deploy.replicas} server{'s' * (deploy.replicas != 1)}"
    if deploy.max_replicas is not None:
        servers = f"{deploy.replicas} to {deploy.max_replicas} servers"
    encoders = f", {deploy.encoders} of role encode" if deploy.encoders else ""
    return (
        f"{servers} of {model}{encoders}, each with {deploy.cpus:g} cores (--cpus) and "
        f"{deploy.gpus:g} GPUs (--gpus)"
    )


def check_serve_options(options: Sequence[str]) -> None:
    """Raise ConfigError for options that replicas set themselves, and for secrets.

    Secrets must not be written to the file.
    """
    for option in options:
        name = option.partition("=")[0]
        if name in ("--host", "--port"):
            raise ConfigError(f"{name} is chosen by each replica. Set the public address before --")
        if name in ("--role", "--encoders"):
            raise ConfigError(
                f"{name}: the deployment sets roles itself (saccade deploy ray --encoders N)"
            )
        if name == "--api-key":
            raise ConfigError(
                "--api-key: the file would contain the key; set SACCADE_API_KEY where Ray "
                "starts, or give --api-keys-file"
            )


def ray_config(
    model: str, serve_options: Sequence[str], deploy: DeployOptions, spread: SpreadOptions
) -> dict[str, Any]:
    """Return the content of the config file."""
    deploy = with_bookings(deploy)
    given = any(option.partition("=")[0] == GRACE for option in serve_options)
    grace = [] if given else [GRACE, f"{deploy.drain:g}"]
    args: dict[str, Any] = {
        "model": model,
        "options": [*serve_options, *grace],
        "affinity": spread.affinity,
        "max_body_mb": spread.max_body_mb,
        "max_requests": spread.max_requests,
        "host": deploy.host,
        "allowed_hosts": list(spread.allowed_hosts),
        "cors_origins": list(spread.cors_origins),
    }
    if deploy.encoders:
        args["encoders"] = True
    if spread.max_inflight_mb is not None:
        args["max_inflight_mb"] = spread.max_inflight_mb
    application = {
        "name": "saccade",
        "route_prefix": "/",
        "import_path": APP,
        "args": args,
        "deployments": [
            _engine(deploy),
            *([_encoder(deploy)] if deploy.encoders else []),
            _ingress(deploy, spread),
        ],
    }
    http = {"host": deploy.host, "port": deploy.port, "request_timeout_s": None}
    return {"proxy_location": "EveryNode", "http_options": http, "applications": [application]}


def _engine(deploy: DeployOptions) -> dict[str, Any]:
    scale: dict[str, Any] = {"num_replicas": deploy.replicas}
    if deploy.max_replicas is not None:
        autoscaling = {
            "min_replicas": deploy.replicas,
            "max_replicas": deploy.max_replicas,
            "target_ongoing_requests": deploy.target_requests,
            "policy": {"policy_function": POLICY},
        }
        scale = {"autoscaling_config": autoscaling}
    router = {"request_router_class": ROUTER, "request_routing_stats_period_s": 2.0}
    return {"name": ENGINE, **scale, **_server(deploy), "request_router_config": router}


def _encoder(deploy: DeployOptions) -> dict[str, Any]:
    """Return the config of the encoders' deployment.

    No requests are routed to this deployment. The other servers get its address, and send it their
    images.
    """
    return {"name": ENCODER, "num_replicas": deploy.encoders, **_server(deploy)}


def _server(deploy: DeployOptions) -> dict[str, Any]:
    return {
        "max_ongoing_requests": deploy.max_ongoing,
        "logging_config": {"enable_access_log": False},  # the ingress polls once per second
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": deploy.drain + MARGIN_SECONDS,
        "ray_actor_options": {"num_cpus": deploy.cpus, "num_gpus": deploy.gpus},
    }


def _ingress(deploy: DeployOptions, spread: SpreadOptions) -> dict[str, Any]:
    return {
        "name": INGRESS,
        "num_replicas": deploy.ingresses,
        "max_ongoing_requests": spread.max_requests,
        "graceful_shutdown_timeout_s": deploy.drain + MARGIN_SECONDS,
        "ray_actor_options": {"num_cpus": INGRESS_CPUS},
    }


def as_yaml(value: Mapping[str, Any]) -> str:
    """Format the config as YAML: mappings and lists of mappings as blocks, and other values as
    JSON.
    """
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, each in value.items():
        if isinstance(each, Mapping) and each:
            yield f"{indent}{name}:"
            yield from _lines(each, indent + "  ")
        elif isinstance(each, list) and each and isinstance(each[0], Mapping):
            yield f"{indent}{name}:"
            for item in each:
                first, *rest = _lines(item, indent + "  ")
                yield f"{indent}- {first.strip()}"
                yield from rest
        else:
            yield f"{indent}{name}: {json.dumps(each)}"
