"""The file for Ray Serve: what it says, what may not be in it, and that it needs no Ray."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from saccade.commands import app
from saccade.core.errors import ConfigError
from saccade.plugins.ray.deploy import as_yaml, ray_config, with_bookings
from saccade.plugins.ray.options import DeployOptions
from saccade.plugins.route.options import SpreadOptions

SERVE = ("--dtype", "float32", "--served-model-name", 'it\'s "x": #1\n')


@pytest.mark.parametrize("most", [None, 4])
def test_the_file_is_the_deployment_as_yaml(most: int | None) -> None:
    deploy = DeployOptions(replicas=2, max_replicas=most, gpus=2, drain=5)
    told = ray_config("some/model", SERVE, deploy, SpreadOptions(affinity="none"))
    assert yaml.safe_load(as_yaml(told)) == told
    (application,) = told["applications"]
    assert application["args"]["options"] == [*SERVE, "--shutdown-grace", "5"]
    engine, _ = application["deployments"]
    assert ("num_replicas" in engine) == (most is None) != ("autoscaling_config" in engine)
    assert engine["ray_actor_options"]["num_gpus"] == 2


def test_the_ingress_is_told_which_pages_may_use_it() -> None:
    spread = SpreadOptions(allowed_hosts=("images.example",), cors_origins=("https://a.example",))
    told = ray_config("some/model", SERVE, DeployOptions(host="127.0.0.1"), spread)
    args = told["applications"][0]["args"]
    assert args["host"] == told["http_options"]["host"] == "127.0.0.1"
    assert (args["allowed_hosts"], args["cors_origins"]) == (
        ["images.example"],
        ["https://a.example"],
    )


def test_encoders_are_a_deployment_of_their_own() -> None:
    told = ray_config("some/model", SERVE, DeployOptions(encoders=3, gpus=1), SpreadOptions())
    assert yaml.safe_load(as_yaml(told)) == told
    (application,) = told["applications"]
    engine, encoder, ingress = application["deployments"]
    assert application["args"]["encoders"] is True
    assert [each["name"] for each in (engine, encoder, ingress)] == ["engine", "encoder", "ingress"]
    assert (encoder["num_replicas"], encoder["ray_actor_options"]["num_gpus"]) == (3, 1)
    assert "request_router_config" in engine and "request_router_config" not in encoder


def test_the_command_writes_it_without_ray(tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    words = ["deploy", "ray", "demo", "--output", str(path), "--", "--dtype", "float32"]
    hide = f"import sys; sys.modules['ray'] = None; sys.argv[1:] = {words!r}"
    program = f"{hide}\nfrom saccade.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert re.fullmatch(
        r"1 server of demo, each with [0-9.]+ cores \(--cpus\) and [01] GPUs \(--gpus\); "
        rf"next: serve run {path}\n",
        done.stderr,
    )
    (application,) = yaml.safe_load(path.read_text())["applications"]
    assert application["args"]["model"] == "demo"


@pytest.mark.parametrize(
    ("cores", "replicas", "booked"), [(2, 1, 1.5), (2, 2, 0.75), (1, 4, 0.5), (64, 1, 4.0)]
)
def test_cores_that_are_there_are_booked(cores: int, replicas: int, booked: float) -> None:
    assert with_bookings(DeployOptions(replicas=replicas), cores=cores).cpus == booked
    assert with_bookings(DeployOptions(replicas=replicas, cpus=8), cores=cores).cpus == 8


def test_a_gpu_is_booked_where_there_is_a_driver(tmp_path: Path) -> None:
    driver = tmp_path / "nvidiactl"
    assert with_bookings(DeployOptions(), (driver,)).gpus == 0
    driver.touch()
    assert with_bookings(DeployOptions(), (driver,)).gpus == 1
    assert with_bookings(DeployOptions(gpus=2)).gpus == 2


@pytest.mark.parametrize(
    ("option", "why"),
    [
        (("--port", "3"), "is chosen by each replica"),
        (("--role", "encode"), "the deployment sets roles"),
        (("--host=0.0.0.0",), "is chosen by each replica"),
        (("--api-key", "secret"), "SACCADE_API_KEY"),
        (("--max-running-requests", "-1"), "--max-running-requests"),
    ],
)
def test_what_servers_could_not_take_is_refused(option: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        app(["deploy", "ray", "demo", "--", *option])
    with pytest.raises(ConfigError, match="at least --replicas 3"):
        DeployOptions(replicas=3, max_replicas=2)
