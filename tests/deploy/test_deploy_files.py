"""The files of deploy/: they parse, and the paths, metrics and options that they name exist."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import yaml
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from saccade.commands import app
from saccade.core.metrics import DECLARED
from saccade.core.options import ConnectionOptions
from saccade.edge.metrics_text import LORA_INFO
from saccade.plugins.route.proxy import OWN_PATHS
from saccade_bench.fixtures.server import Server, serving

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCS = DEPLOY.parent / "docs"
MANIFESTS = sorted(DEPLOY.rglob("*.yaml"))
VALIDATOR = "kubernetes-validate==1.37.0"
"""A package with Kubernetes' JSON schemas, fetched once by uv."""
COMPOSE_VALIDATOR = "check-jsonschema==0.39.0"
"""A package with the schema of compose files, fetched once by uv."""
KUBERNETES = {"v1", "apps/v1", "autoscaling/v2"}


def documents(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def containers() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        for document in documents(path):
            template = document.get("spec", {}).get("template", {})
            yield from template.get("spec", {}).get("containers", ())


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_each_manifest_parses(path: Path) -> None:
    assert all(isinstance(each, dict) for each in documents(path))


def test_each_kustomization_names_files_that_exist() -> None:
    for path in DEPLOY.rglob("kustomization.yaml"):
        (document,) = documents(path)
        files = [name for each in document.get("configMapGenerator", ()) for name in each["files"]]
        for name in (*document["resources"], *files):
            assert (path.parent / name).exists(), f"{path}: {name}"


def test_each_container_runs_a_command_with_options_that_exist() -> None:
    for container in containers():
        arguments = [each for each in container["args"] if "keys.txt" not in each]
        app.parse_args(arguments, exit_on_error=False, print_error=False)


def test_options_in_the_environment_exist() -> None:
    sources = (*DEPLOY.rglob("*"), *(DOCS / name for name in ("deploy.md", "operate.md")))
    texts = "".join(path.read_text() for path in sources if path.is_file())
    names = set(re.findall(r"SACCADE_([A-Z_]+)", texts)) - {"MODEL"}  # no option, but a word
    assert {"KV_CACHE_DIR", "METRICS_WITHOUT_KEY", "API_KEY"} <= names
    options = (DOCS / "options.md").read_text()
    for name in names:
        assert f"`--{name.lower().replace('_', '-')}`" in options, name


def test_the_patch_for_events_adds_options_that_exist() -> None:
    (document,) = documents(DEPLOY / "kubernetes" / "events" / "kustomization.yaml")
    patch = yaml.safe_load(document["patches"][0]["patch"])
    (server,) = (each for each in containers() if each["name"] == "saccade")
    added = [each["value"] for each in patch if each["path"].endswith("/args/-")]
    app.parse_args(["serve", *server["args"][1:-2], *added], exit_on_error=False, print_error=False)
    assert [each["value"][0]["name"] for each in patch if each["path"].endswith("/env")] == [
        "POD_IP"
    ]
    assert "env" not in server and any("$(POD_IP)" in each for each in added)


def test_probes_ask_the_server_and_the_router_for_paths_that_they_have() -> None:
    probes = [
        container[name]["httpGet"]["path"]
        for container in containers()
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
        if name in container
    ]
    assert set(probes) == {"/readyz", "/livez"} <= OWN_PATHS


def test_the_grace_period_outlasts_the_servers_own() -> None:
    grace = ConnectionOptions().shutdown_grace
    compose = documents(DEPLOY / "compose.yaml")[0]["services"]["saccade"]["stop_grace_period"]
    unit = re.search(r"^TimeoutStopSec=(\d+)$", (DEPLOY / "saccade.service").read_text(), re.M)
    pods = re.findall(
        r"terminationGracePeriodSeconds: (\d+)", "".join(map(Path.read_text, MANIFESTS))
    )
    assert unit and pods
    for seconds in (compose.removesuffix("s"), unit[1], *pods):
        assert grace + 10 <= float(seconds)


def test_the_picker_and_the_autoscaler_read_gauges_that_exist() -> None:
    gauges = {metric.name for metric in DECLARED if metric.kind == "gauge" and not metric.labels}
    (picker,) = documents(DEPLOY / "kubernetes" / "picker" / "picker-config.yaml")
    extractor = next(each for each in picker["plugins"] if "parameters" in each)["parameters"]
    (engine,) = extractor["engineConfigs"]
    infos = {engine.pop("loraSpec"), engine.pop("cacheInfoSpec")}
    assert infos == {LORA_INFO, "saccade_cache_config_info"}
    named = {value for name, value in engine.items() if name.endswith("Spec")}
    assert len(named) == 3 and named <= gauges
    assert extractor["defaultEngine"] == engine["name"]
    (server,) = (each for each in documents(SERVER) if each["kind"] == "StatefulSet")
    assert server["spec"]["template"]["metadata"]["labels"]["llm-d.ai/engine-type"] == "saccade"
    (scaler,) = documents(DEPLOY / "kubernetes" / "picker" / "autoscaler.yaml")
    assert scaler["spec"]["metrics"][0]["pods"]["metric"]["name"] in gauges


SERVER = DEPLOY / "kubernetes" / "server" / "server.yaml"


@pytest.mark.more
def test_the_pickers_rules_find_their_values_in_metrics(tmp_path: Path) -> None:
    """As core-metrics-extractor reads them: a gauge by name, and two infos by their labels."""
    (picker,) = documents(DEPLOY / "kubernetes" / "picker" / "picker-config.yaml")
    extractor = next(each for each in picker["plugins"] if "parameters" in each)["parameters"]
    rules = {key: name for key, name in extractor["engineConfigs"][0].items() if key != "name"}
    with serving("demo", tmp_path) as server:
        server.chat({"role": "user", "content": "hello"}, max_tokens=4)
        page = httpx.get(f"{server.url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert {families[name].type for name in rules.values()} == {"gauge"}
    found = {key: families[name].samples[-1] for key, name in rules.items()}
    infos = {key: found.pop(key).labels for key in ("loraSpec", "cacheInfoSpec")}
    assert {key: sample.value for key, sample in found.items()} == dict.fromkeys(found, 0)
    adapters = "max_lora", "running_lora_adapters", "waiting_lora_adapters"
    assert infos["loraSpec"].keys() == set(adapters)
    assert int(infos["cacheInfoSpec"]["block_size"]) == 16
    assert int(infos["cacheInfoSpec"]["num_gpu_blocks"]) > 0


def test_the_router_names_every_replica() -> None:
    (document,) = documents(DEPLOY / "kubernetes" / "replicas" / "kustomization.yaml")
    (replicas,) = (each["count"] for each in document["replicas"])
    router = next(each for each in containers() if each["name"] == "router")
    workers = [each.partition("=")[2] for each in router["args"] if each.startswith("--workers")]
    assert workers == [f"http://saccade-{n}.saccade-pods:8000" for n in range(replicas)]


PROGRAM = f"""
import sys, yaml
from kubernetes_validate import validate
checked = 0
for path in sys.argv[1:]:
    for each in yaml.safe_load_all(open(path)):
        if each and each["apiVersion"] in {KUBERNETES}:
            validate(each, "1.31", strict=True)
            checked += 1
print(checked)
"""


@pytest.mark.more
def test_manifests_fit_kubernetes_schemas(tmp_path: Path) -> None:
    uv = [sys.executable, "-m", "uv", "run", "--no-project", "--quiet", "--with", VALIDATOR]
    planted = tmp_path / "planted.yaml"
    planted.write_text(SERVER.read_text().replace("replicas: 1", "replica: 1"))

    def validate(*paths: Path) -> subprocess.CompletedProcess[str]:
        command = [*uv, "--python", sys.executable, "python", "-c", PROGRAM, *map(str, paths)]
        return subprocess.run(command, capture_output=True, text=True, timeout=100)

    found = subprocess.run([*uv, "python", "-c", ""], capture_output=True, timeout=100)
    if found.returncode:
        pytest.skip(f"{VALIDATOR} cannot be had here")
    done = validate(*(path for path in MANIFESTS if "kubernetes" in path.parts))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 6
    assert "replica" in validate(planted).stderr


SCHEMAS = yaml.safe_load((Path(__file__).parent / "schemas.yaml").read_text())


def test_what_kubernetes_does_not_define_fits_schemas_too() -> None:
    found = [each for path in MANIFESTS for each in documents(path)]
    custom = [each for each in found if each.get("kind") in SCHEMAS]
    assert {each["kind"] for each in custom} == SCHEMAS.keys()
    for each in custom:
        jsonschema.validate(each, SCHEMAS[each["kind"]])
        with pytest.raises(jsonschema.ValidationError, match="planted"):
            jsonschema.validate({**each, "planted": 1}, SCHEMAS[each["kind"]])
    (picker,) = (each for each in custom if each["kind"] == "EndpointPickerConfig")
    names = {each.get("name", each["type"]) for each in picker["plugins"]}
    assert set(re.findall("'pluginRef': '(.+?)'", str(picker))) == names
    rest = {each["apiVersion"] for each in found if "apiVersion" in each and each not in custom}
    assert rest == KUBERNETES, "and these are validated by Kubernetes' own schemas"


@pytest.mark.more
def test_the_compose_file_fits_its_schema(tmp_path: Path) -> None:
    uv = [sys.executable, "-m", "uv", "run", "--no-project", "--quiet", "--with", COMPOSE_VALIDATOR]
    uv += ["--python", sys.executable, "check-jsonschema"]
    planted = tmp_path / "compose.yaml"
    planted.write_text((DEPLOY / "compose.yaml").read_text().replace("cap_drop", "planted"))

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*uv, *arguments], capture_output=True, text=True, timeout=100)

    if run("--version").returncode:
        pytest.skip(f"{COMPOSE_VALIDATOR} cannot be had here")
    schema = "--builtin-schema", "vendor.compose-spec"
    done = run(*schema, DEPLOY / "compose.yaml")
    assert done.returncode == 0, done.stdout
    assert "planted" in run(*schema, planted).stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_one_that_systemd_reads(tmp_path: Path) -> None:
    unit = tmp_path / "saccade.service"
    text = (DEPLOY / "saccade.service").read_text()
    unit.write_text(text.replace("/opt/saccade/bin/saccade", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert str(unit) not in done.stderr and "saccade.service" not in done.stderr, done.stderr


@contextmanager
def nginx(server: Server, folder: Path) -> Iterator[httpx.Client]:
    """Run nginx with deploy/nginx.conf in front of `server`, and return a client of it by TLS."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    words += f" -addext subjectAltName=DNS:localhost -keyout {key} -out {certificate}"
    subprocess.run(words.split(), check=True, capture_output=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    site = (DEPLOY / "nginx.conf").read_text()
    for name, here in (
        ("127.0.0.1:8000", server.url.removeprefix("http://")),
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("llm.example.com;", "localhost;"),
        ("/etc/ssl/certs/llm.example.com.pem", str(certificate)),
        ("/etc/ssl/private/llm.example.com.key", str(key)),
    ):
        assert name in site
        site = site.replace(name, here)
    (folder / "site.conf").write_text(site)
    paths = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    main = folder / "main.conf"
    main.write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        + f"http {{ access_log off; include {folder}/site.conf;\n"
        + "".join(f"{each}_temp_path {folder}/{each};\n" for each in paths)
        + "}\n"
    )
    process = subprocess.Popen(["nginx", "-c", main, "-e", folder / "error.log"])
    trusted = ssl.create_default_context(cafile=str(certificate))
    try:
        with httpx.Client(base_url=f"https://localhost:{port}", verify=trusted, timeout=60) as http:
            for _ in range(100):
                with suppress(httpx.TransportError):
                    http.get("/health")
                    break
                time.sleep(0.1)
            yield http
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.more
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_with_tls_passes_chats_streams_and_large_images(tmp_path: Path) -> None:
    options = ("--allowed-hosts", "localhost", "--files-dir", str(tmp_path / "files"))
    with serving("demo", tmp_path, *options) as server, nginx(server, tmp_path) as http:
        assert http.get("/readyz").status_code == 200
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        assert http.post("/v1/chat/completions", json=chat).status_code == 200
        with http.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and len(lines) > 2
        picture = tmp_path / "noise.bmp"
        Image.effect_noise((3000, 2400), 80).convert("RGB").save(picture)  # 20 MB
        assert picture.stat().st_size > 20e6
        with picture.open("rb") as file:
            sent = http.post("/v1/files", data={"purpose": "vision"}, files={"file": file})
        assert sent.status_code == 200, sent.text
        part = {"type": "file", "file": {"file_id": sent.json()["id"]}}
        text = {"type": "text", "text": "What is it?"}
        chat["messages"] = [{"role": "user", "content": [part, text]}]
        answer = http.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 200, answer.text
