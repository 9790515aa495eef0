"""The Helm chart, as Helm's own code renders it, against the API's schemas and the manifest that kustomize has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvoffd import __version__
from kvoffd.config import load_config
from kvoffd.memory_estimate import memory_estimate
from kvoffd_proto.units import UnitError, parse_size
from tests.deploy.test_kubernetes import MIB, containers, environment, manifest, parsed, quantity, validate
from tests.kit.require import require

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "kvoffd"
PYTHON = ROOT / ".venv-servers" / "bin" / "python"
"""Its helm-python-sdk is Helm 4 as a library: `make servers`."""
GIB = 1024 * MIB
SIDECARS = "sidecar", "sidecar-gpu"
RENDER = r"""
import json, sys
from helm_python import Chart, HelmError
try:
    chart = Chart.load(sys.argv[1])
    values = json.loads(sys.argv[2])
    chart.validate_schema(values)
    made = chart.render(values, name="kvoffd", namespace="kvoffd")
    print(*(made[name] for name in sorted(made)), sep="\n---\n")
except HelmError as error:
    sys.exit(str(error))
"""


@cache
def has_helm() -> bool:
    words = [PYTHON, "-c", "import helm_python"]
    return PYTHON.exists() and not subprocess.run(words, stderr=subprocess.DEVNULL).returncode


@cache
def helm(values: str) -> subprocess.CompletedProcess[str]:
    require("helm", has_helm(), "helm-python-sdk is not in .venv-servers")
    return subprocess.run(
        [PYTHON, "-c", RENDER, CHART, values], capture_output=True, text=True, timeout=60, check=False
    )


def documents(**values: object) -> list[dict[str, Any]]:
    """What the chart makes, hooks included; valid by the API's schemas, as far as these have the kind."""
    ended = helm(json.dumps(values))
    assert ended.returncode == 0, ended.stderr
    notes, _, others = ended.stdout.partition("\n---\n")
    assert notes.strip(), "NOTES.txt comes first"
    found = parsed(others)
    for document in found:
        assert document["metadata"]["namespace"] == "kvoffd"
        if "monitoring.coreos.com" not in document["apiVersion"]:
            validate(document)
    return found


def rendered(kind: str = "DaemonSet", name: str = "kvoffd", **values: object) -> dict[str, Any]:
    (document,) = [one for one in documents(**values) if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return document


def daemon_of(document: dict[str, Any]) -> dict[str, Any]:
    pod = document["spec"]["template"]["spec"]
    (container,) = [one for one in (*pod["initContainers"], *pod["containers"]) if one["name"] == "kvoffd"]
    return container


def comparable(document: dict[str, Any]) -> dict[str, Any]:
    """The same without kvoffd's resources, and with variables in an order of their own: patches put theirs first."""
    pod = document["spec"]["template"]["spec"]
    for container in (*pod["initContainers"], *pod["containers"]):
        container.get("env", []).sort(key=lambda one: one["name"])
    del daemon_of(document)["resources"]
    return document


@pytest.mark.parametrize(
    ("way", "values"),
    [("daemonset", {}), ("daemonset-gpu", {"gpu": True}), ("daemonset-selinux", {"selinux": True})],
)
def test_the_chart_is_what_kustomize_makes(way: str, values: dict[str, object]) -> None:
    chosen = {"poolSize": "64GiB", "nodeSelector": {"example.com/kvoffd": "true"}}
    assert comparable(rendered(**values, **chosen)) == comparable(manifest(way, "DaemonSet"))


@pytest.mark.parametrize("gpu", [False, True])
def test_with_a_sidecar_too(gpu: bool) -> None:
    anywhere = {"tolerations": None, "poolSize": "16GiB"}
    made = rendered("Deployment", "vllm-kvoffd", sidecar={"enabled": True}, gpu=gpu, **anywhere)
    expected = manifest(SIDECARS[gpu], "Deployment")
    assert made["metadata"].pop("namespace") == "kvoffd"
    for document in (made, expected):
        volumes = document["spec"]["template"]["spec"]["volumes"]
        (pool,) = [one["emptyDir"] for one in volumes if one["name"] == "kvoffd-pool"]
        assert quantity(pool.pop("sizeLimit")) >= 1.025 * 16 * GIB
    assert comparable(made) == comparable(expected)
    own = {"enabled": True, "model": "m", "args": ["--x"], "memory": "64Gi", "image": {"repository": "r", "tag": "1"}}
    document = rendered("Deployment", "vllm-kvoffd", sidecar=own, gpu=gpu)
    (engine,) = document["spec"]["template"]["spec"]["containers"]
    assert (engine["image"], engine["args"][0], engine["args"][-1]) == ("r:1", "m", "--x")
    assert engine["resources"]["limits"]["memory"] == "64Gi"


def test_with_the_pages_values_it_starts_on_any_cluster() -> None:
    """No label of a node, no class and no Secret is needed, and no more memory than a small node has."""
    page = (ROOT / "deploy" / "README.md").read_text()
    (command,) = re.findall(
        r"^    helm install kvoffd \S+/deploy/helm/kvoffd (.+?[^\\])$", page, re.MULTILINE | re.DOTALL
    )
    given = dict(re.findall(r"--set (\S+?)=(\S+)", command))
    assert given.keys() == {"image.repository", "poolSize"}
    repository = given["image.repository"]
    pod = rendered(image={"repository": repository}, poolSize=given["poolSize"])["spec"]["template"]["spec"]
    assert not pod.keys() & {"nodeSelector", "affinity", "priorityClassName", "imagePullSecrets", "runtimeClassName"}
    assert {one["image"] for one in containers(pod)} == {f"{repository}:{__version__}"}
    assert all(one["hostPath"]["type"] == "DirectoryOrCreate" for one in pod["volumes"])
    assert quantity(daemon_of(rendered())["resources"]["limits"]["memory"]) < 5 * GIB


EVERYTHING: dict[str, Any] = {
    "poolSize": "1.5GiB",
    "disks": [{"path": "/mnt/a", "size": "1TiB"}, {"path": "/mnt/b", "size": "100GB"}],
    "shared": {"urls": ["rediss://valkey:6379", "s3://bucket"], "secret": "stores"},
    "peers": {"listen": True, "hosts": ["node-a:7400", "10.0.0.0/16:7400"], "secret": "fleet"},
    "podMonitor": {"enabled": True, "labels": {"release": "mine"}, "interval": "15s"},
    "prometheusRule": {"enabled": True},
    "networkPolicy": {"enabled": True, "monitoring": [{"namespaceSelector": {"matchLabels": {"name": "watch"}}}]},
    "priorityClassName": "system-node-critical",
    "imagePullSecrets": [{"name": "registry"}],
    "affinity": {"nodeAffinity": {}},
    "tolerations": [{"operator": "Exists"}],
    "podLabels": {"team": "serving", "app.kubernetes.io/name": "other"},
    "podAnnotations": {"prometheus.io/scrape": "false"},
    "image": {"repository": "r/kvoffd", "tag": "7", "pullPolicy": "Always"},
    "env": {"KVOFFD_LOG_LEVEL": "debug", "UCX_TLS": "tcp"},
}


@pytest.mark.parametrize(
    "values",
    [{"poolSize": size} for size in ("256MiB", "1.5 GiB", "20GB", "64Gi", "512mib", "1TiB")]
    + [{"poolSize": "4GiB", "disks": [{"path": "/d", "size": size}]} for size in ("1GiB", "500GiB", "7.5TB")]
    + [{"peers": {"hosts": ["a:1", "dns+engines:7400"], "secret": "fleet"}}]
    + [{key: EVERYTHING[key] for key in some} for some in (["shared"], ["peers"], ["disks", "shared", "peers"])],
)
def test_memory_is_what_the_daemon_needs(values: dict[str, Any]) -> None:
    container = daemon_of(rendered(**values))
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
    memory = quantity(container["resources"]["limits"]["memory"])
    needed = sum(memory_estimate(load_config({}, settings_of(container))).values())
    assert needed <= memory <= needed * 1.02 + MIB


def settings_of(container: dict[str, Any]) -> dict[str, str]:
    return {name: text for name, text in environment(container).items() if name.startswith("KVOFFD_")}


def test_values_go_where_they_belong() -> None:
    document = rendered(**EVERYTHING)
    template = document["spec"]["template"]
    pod, container = template["spec"], daemon_of(document)
    config = load_config({}, settings_of(container))
    assert [*map(str, config.disk)] == ["/mnt/a=1TiB", "/mnt/b=97656250KiB"]
    assert (config.shared, config.peers) == (
        ("rediss://valkey:6379", "s3://bucket"),
        ("node-a:7400", "10.0.0.0/16:7400"),
    )
    assert (config.peer_listen, config.log_level) == ("*:7400", "debug")
    assert environment(container)["UCX_TCP_PORT_RANGE"] == "7500-7599"
    assert {"name": "peers", "containerPort": 7400, "hostPort": 7400} in container["ports"]
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    for path in ("/mnt/a", "/mnt/b"):
        assert volumes[mounts[path]]["hostPath"] == {"path": path, "type": "Directory"}
    for file, secret in ((config.shared_password_file, "stores"), (config.peer_secret_file, "fleet")):
        assert volumes[mounts[str(Path(file).parent)]]["secret"] == {"secretName": secret, "defaultMode": 0o440}
    assert {one["image"] for one in containers(pod)} == {"r/kvoffd:7"}
    assert {one["imagePullPolicy"] for one in containers(pod)} == {"Always"}
    for name in ("priorityClassName", "imagePullSecrets", "affinity", "tolerations"):
        assert pod[name] == EVERYTHING[name]
    assert template["metadata"]["labels"] == {"app.kubernetes.io/name": "kvoffd", "team": "serving"}
    assert template["metadata"]["annotations"]["prometheus.io/scrape"] == "false"
    sidecar = daemon_of(rendered("Deployment", "vllm-kvoffd", **EVERYTHING, sidecar={"enabled": True}))
    assert {"name": "peers", "containerPort": 7400} in sidecar["ports"], "pods of one node have one each"


def test_peers_take_the_image_with_nixl() -> None:
    document = rendered(peers=EVERYTHING["peers"])
    assert daemon_of(document)["image"].endswith(f"/kvoffd:{__version__}-peers")


def test_a_network_policy_lets_in_what_is_used() -> None:
    policy = rendered("NetworkPolicy", **EVERYTHING)["spec"]
    (labels,) = policy["podSelector"].values()
    assert labels.items() <= rendered(**EVERYTHING)["spec"]["template"]["metadata"]["labels"].items()
    scrapes, asked, moved = policy["ingress"]
    assert scrapes["from"] == EVERYTHING["networkPolicy"]["monitoring"]
    assert (asked["ports"], "from" in asked) == ([{"protocol": "TCP", "port": 7400}], False)
    assert moved["ports"] == [{"protocol": "TCP", "port": 7500, "endPort": 7599}]
    assert moved["from"] == [{"podSelector": policy["podSelector"]}]
    engine = rendered("NetworkPolicy", networkPolicy={"enabled": True}, sidecar={"enabled": True})["spec"]["ingress"]
    assert [one["ports"][0]["port"] for one in engine] == ["metrics", "http"]


def test_what_is_mistyped_is_refused() -> None:
    for wrong in (
        {"poolsize": "1GiB"},
        {"poolSize": 64},
        {"poolSize": "64G"},
        {"poolSize": "64"},
        {"disks": [{"path": "/d", "size": "1G"}]},
        {"env": {"POOL": "x"}},
        {"env": {"KVOFFD_DISK": "/d=1TiB"}},
        {"memory": "70Gi"},
        {"disks": [{"path": "x", "size": "1GiB"}]},
        {"shared": {"urls": ["redis://user:password@valkey"]}},
        {"shared": {"secret": "s"}},
        {"peers": {"listen": True}},
        {"peers": {"hosts": ["node-a"], "secret": "s"}},
    ):
        assert helm(json.dumps(wrong)).returncode, wrong


def test_the_schema_takes_the_sizes_that_the_daemon_takes() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["definitions"]["size"]["pattern"]
    taken = "64GiB", "64 GiB", "1.5GiB", "64Gi", "64gib", "20GB", "64 GB", "512MiB"
    for text in (*taken, "64G", "64K", "1T", "x", "-1GiB", "1PiB", ""):
        try:
            parse_size(text)
        except UnitError:
            assert not re.search(schema, text), text
        else:
            assert re.search(schema, text), text


def test_what_the_pool_leaves_on_the_nodes_is_removed_with_the_release() -> None:
    """The hooks come in an order in which each finds what it needs; the pods run where the daemons ran."""
    chosen = {"nodeSelector": {"a": "b"}, "imagePullSecrets": [{"name": "registry"}]}
    hooks = [one for one in documents(**chosen) if "helm.sh/hook" in one["metadata"].get("annotations", {})]
    weights = {one["kind"]: int(one["metadata"]["annotations"].get("helm.sh/hook-weight", 0)) for one in hooks}
    assert weights == {"ServiceAccount": 0, "Role": 0, "RoleBinding": 0, "DaemonSet": 1, "Job": 2}
    assert {one["metadata"]["annotations"]["helm.sh/hook"] for one in hooks} == {"post-delete"}
    pod = next(one for one in hooks if one["kind"] == "DaemonSet")["spec"]["template"]["spec"]
    assert chosen.items() <= pod.items()
    daemons = rendered(**chosen)["spec"]["template"]["spec"]
    paths = {one["hostPath"]["path"] for one in pod["volumes"] if "hostPath" in one}
    assert paths <= {one["hostPath"]["path"] for one in daemons["volumes"]}
    assert "/dev/shm/kvoffd" in paths
    assert "/var/lib/kvoffd" not in paths, "with it goes what a disk's blocks were cleared by"
    for values in ({"cleanup": False}, {"sidecar": {"enabled": True}}):
        assert all("annotations" not in one["metadata"] for one in documents(**values))


class Kubernetes(BaseHTTPRequestHandler):
    """A DaemonSet whose pods become ready one after the other."""

    asked = 0

    def do_GET(self) -> None:
        Kubernetes.asked += 1
        assert self.headers["Authorization"] == "Bearer a token"
        status = {"observedGeneration": 1, "numberReady": Kubernetes.asked - 1, "desiredNumberScheduled": 2}
        body = json.dumps({"metadata": {"generation": 1}, "status": {} if Kubernetes.asked == 1 else status}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_the_job_waits_for_all_nodes(tmp_path: Path) -> None:
    command = rendered("Job", "kvoffd-cleanup")["spec"]["template"]["spec"]["containers"][0]["command"]
    (tmp_path / "token").write_text("a token")
    (tmp_path / "ca.crt").write_bytes(Path("/etc/ssl/certs/ca-certificates.crt").read_bytes())
    with HTTPServer(("127.0.0.1", 0), Kubernetes) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        run = partial(subprocess.run, capture_output=True, text=True, timeout=60)
        ended = run([sys.executable, *command[1:3], url, str(tmp_path), command[-1]])
        assert (ended.returncode, ended.stdout) == (0, "Cleaned 2 nodes.\n"), ended.stderr
        assert Kubernetes.asked == 3
        ended = run([sys.executable, *command[1:3], url, str(tmp_path), "0.5"])
        assert ended.returncode == 1
        assert "3 of 2 nodes are cleaned" in ended.stderr
        server.shutdown()


def test_it_has_the_release_of_kvoffd() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
