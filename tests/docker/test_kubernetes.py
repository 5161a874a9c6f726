"""The manifests are valid, belong together, and name routes, figures and settings that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from server.api.gate import OPEN_PATHS
from server.commands.serve import EngineOptions, ModelChoice, Place, check_server, server_config
from server.config import load_server_config
from server.config.cluster import load_cluster_config
from server.engine.figures import declared
from server.metrics import Metrics
from tests.fakes.fake_runner import fake_info

FOLDER = Path(__file__).resolve().parents[2] / "docker" / "kubernetes"
CUSTOM: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "custom_resources.yaml").read_text()
)
VERSIONS = {
    "RayService": "ray.io/v1",
    "InferencePool": "inference.networking.k8s.io/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
}
KINDS = ("plain", "ray")


def _kustomization(kind: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((FOLDER / kind / "kustomization.yaml").read_text())
    return read


def _resources(kind: str) -> list[dict[str, Any]]:
    return [
        yaml.safe_load((FOLDER / kind / name).read_text())
        for name in _kustomization(kind)["resources"]
    ]


def _one(kind: str, resource: str) -> dict[str, Any]:
    return next(r for r in _resources(kind) if r["kind"] == resource)


def _pods(resource: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pod templates of a Deployment or a RayService."""
    if resource["kind"] == "Deployment":
        yield resource["spec"]["template"]
    elif resource["kind"] == "RayService":
        cluster = resource["spec"]["rayClusterConfig"]
        yield cluster["headGroupSpec"]["template"]
        for group in cluster["workerGroupSpecs"]:
            yield group["template"]


def _containers(kind: str) -> Iterator[dict[str, Any]]:
    """Of all pods of a kind."""
    for resource in _resources(kind):
        for pod in _pods(resource):
            yield from pod["spec"]["containers"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kustomization_names_every_file(kind: str) -> None:
    read = _kustomization(kind)
    of_maps = (file for generator in read["configMapGenerator"] for file in generator["files"])
    named = {*read["resources"], *read.get("configurations", ()), *of_maps}
    assert named | {"kustomization.yaml"} == {path.name for path in (FOLDER / kind).iterdir()}
    maps = {generator["name"] for generator in read["configMapGenerator"]}
    used = {
        volume["configMap"]["name"]
        for resource in _resources(kind)
        for pod in _pods(resource)
        for volume in pod["spec"]["volumes"]
        if "configMap" in volume
    }
    assert used == maps


def test_a_ray_service_names_the_config_map_as_kustomize_does() -> None:
    """kustomize gives a map's name a digest, and knows the places of built-in kinds alone."""
    told = yaml.safe_load((FOLDER / "ray" / "name-references.yaml").read_text())
    (reference,) = told["nameReference"]
    assert reference["kind"] == "ConfigMap"
    service, found = _one("ray", "RayService"), list[Any]()
    for place in reference["fieldSpecs"]:
        assert place["kind"] == "RayService"
        there: list[Any] = [service]
        for part in place["path"].split("/"):
            inner = [node[part] for node in there if part in node]
            there = [n for one in inner for n in (one if isinstance(one, list) else [one])]
        found += there
    assert found == ["tailor-fleet"] * len(list(_pods(service)))


@pytest.mark.parametrize("kind", KINDS)
def test_resources_are_what_kubernetes_takes(kind: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for resource in _resources(kind):
        if resource["kind"] in CUSTOM:
            assert resource["apiVersion"] == VERSIONS[resource["kind"]]
            Draft202012Validator(CUSTOM[resource["kind"]]).validate(resource["spec"])
            for pod in _pods(resource):
                named = {**pod["metadata"], "name": "pod"}
                whole = {"apiVersion": "v1", "kind": "Pod", "metadata": named, "spec": pod["spec"]}
                validate.validate(whole, validate.latest_version(), strict=True)
        else:
            validate.validate(resource, validate.latest_version(), strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_selectors_select_and_volumes_and_ports_are_there(kind: str) -> None:
    resources = _resources(kind)
    pods = [pod for resource in resources for pod in _pods(resource)]
    labels = [pod["metadata"]["labels"] for pod in pods]
    for resource in resources:
        selector = resource["spec"].get("selector")
        if selector is not None:
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= have.items() for have in labels), resource["kind"]
    for pod in pods:
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        for container in pod["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            ports = {port["name"] for port in container["ports"]}
            probes = [v for k, v in container.items() if k.endswith("Probe")]
            asked = [probe["httpGet"]["port"] for probe in probes]
            assert all(port in ports for port in asked if isinstance(port, str))


def test_a_server_s_probes_figures_and_times_are_those_of_the_server() -> None:
    config = load_server_config(FOLDER / "plain" / "server.yaml")
    assert config.metrics.vllm_aliases and config.listen.host == "0.0.0.0"
    [pod] = _pods(_one("plain", "Deployment"))
    [container] = pod["spec"]["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"]["path"] in OPEN_PATHS
    assert container["ports"][0]["containerPort"] == config.listen.port
    [pool_port] = _one("plain", "InferencePool")["spec"]["targetPorts"]
    assert pool_port["number"] == config.listen.port
    before_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > config.limits.drain_s + before_s
    assert not config.metrics.require_key  # the scrapers of the manifests have none
    metrics = Metrics(vllm_aliases=True)
    metrics.engine_ready("m/0", "m", replace(fake_info(), figures=declared()))
    metrics.engine_told("m/0", [0.0 if figure.kind == "gauge" else None for figure in declared()])
    told = metrics.exposition().decode()
    [metric] = _one("plain", "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert f"# TYPE {metric['pods']['metric']['name']} gauge" in told
    comment = (FOLDER / "plain" / "inference-pool.yaml").read_text()
    for name in ("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert name in comment and f"# TYPE {name} gauge" in told


def test_a_server_starts_with_the_keys_of_its_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    [pod] = _pods(_one("plain", "Deployment"))
    [container] = pod["spec"]["containers"]
    for variable in container["env"]:
        key = variable["valueFrom"]["secretKeyRef"]["key"]
        monkeypatch.setenv(variable["name"], f"secret-{key}")
    place = Place(config=FOLDER / "plain" / "server.yaml")
    what = ModelChoice(tasks=FOLDER.parents[1] / "configs" / "tasks")  # as the image has them
    config = server_config(place, what, EngineOptions())
    assert {key.id: (key.secret(), key.admin) for key in config.keys} == {
        "admin": ("secret-admin", True), "clients": ("secret-api", False)
    }  # fmt: skip
    check_server(config)


def test_a_ray_service_deploys_the_fleet_of_its_cluster_yaml() -> None:
    schema = pytest.importorskip("ray.serve.schema")
    service = _one("ray", "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    [application] = schema.ServeDeploySchema(**config).applications
    cluster, _ = load_cluster_config(FOLDER / "ray" / Path(application.args["config"]).name)
    assert application.import_path == "server.fleet.app:build"
    assert cluster.ingress.http == "proxy" and config["http_options"]["port"] == 8000
    [head, worker] = _pods(service)
    for pod in (head, worker):
        assert pod["spec"]["terminationGracePeriodSeconds"] > cluster.drain_s + 5.0
        [container] = pod["spec"]["containers"]
        folders = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert application.args["config"].startswith(folders["fleet"])
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    cores = float(worker["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    replicas, ingress = cluster.replicas, cluster.ingress
    asked = replicas.most * replicas.num_cpus + ingress.replicas * ingress.num_cpus
    assert asked <= cores * group["minReplicas"]


def test_a_ray_service_is_closed_and_outlives_its_head() -> None:
    service = _one("ray", "RayService")
    cluster, server = load_cluster_config(FOLDER / "ray" / "cluster.yaml")
    ray = service["spec"]["rayClusterConfig"]
    assert (
        ray["authOptions"] == {"mode": "token"}
        and "redisAddress" in ray["gcsFaultToleranceOptions"]
    )
    head, worker = _pods(service)
    for pod in (head, worker):
        [container] = pod["spec"]["containers"]
        # The keys are files, so that they are in no process's environment.
        assert not any("valueFrom" in one for one in container["env"])
        [folder] = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "keys"]
        assert all(key.file and key.file.startswith(f"{folder}/") for key in server.keys)
        waits = {one["name"]: one["value"] for one in container["env"]}
        assert int(waits["RAY_gcs_rpc_server_reconnect_timeout_s"]) >= 600
    before_s = worker["spec"]["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert worker["spec"]["terminationGracePeriodSeconds"] > before_s >= cluster.drain_s
    policy = _one("ray", "NetworkPolicy")["spec"]
    [expression] = policy["podSelector"]["matchExpressions"]
    labels = {pod["metadata"]["labels"][expression["key"]] for pod in (head, worker)}
    assert labels == set(expression["values"]) and policy["policyTypes"] == ["Ingress"]
    open_to_all = [rule for rule in policy["ingress"] if "from" not in rule]
    assert [[port["port"] for port in rule["ports"]] for rule in open_to_all] == [[8000]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_container_has_limits_of_whole_cores_and_memory(kind: str) -> None:
    """From them follow threads and KV cache (server/machine.py); without them, the whole node's."""
    for container in _containers(kind):
        limits = container["resources"]["limits"]
        assert int(limits["cpu"]) >= 1 and limits["memory"].endswith("Gi")


@pytest.mark.parametrize("kind", KINDS)
def test_the_alert_on_a_server_that_is_down_knows_the_job_of_the_pod_monitor(kind: str) -> None:
    """Which the Prometheus operator calls NAMESPACE/NAME."""
    rules = (FOLDER.parents[1] / "configs/prometheus/rules/alerts.yml").read_text()
    (jobs,) = re.findall(r'up\{job=~"(.+)"\}', rules)
    name = _one(kind, "PodMonitor")["metadata"]["name"]
    assert re.fullmatch(jobs, f"{_kustomization(kind)['namespace']}/{name}")


@pytest.mark.parametrize("kind", KINDS)
def test_no_image_comes_from_a_named_host(kind: str) -> None:
    assert all("/" not in container["image"] for container in _containers(kind))
