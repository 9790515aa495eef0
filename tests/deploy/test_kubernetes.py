"""The Kubernetes manifests, as kustomize makes them, against the API's own schemas and against what kvoffd needs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import kubernetes_validate
import pytest
import yaml

from kvoffd.config import load_config
from kvoffd.memory_estimate import memory_estimate, memory_summary
from kvoffd_proto.units import parse_size

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
WAYS = sorted(
    file.parent.name for file in KUBERNETES.glob("*/kustomization.yaml") if "\nkind: Kustomization" in file.read_text()
)
PLAIN = ("daemonset", "engine", "sidecar")
# The oldest with the sidecars we use, one in wide use, and the newest that the validator knows.
VERSIONS = ("1.29", "1.33", kubernetes_validate.latest_version())
KUSTOMIZE = (
    ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"] if shutil.which("kubectl") else []
)
MIB = 1024 * 1024
UNITS = {"Mi": MIB, "Gi": 1024 * MIB}

Manifest: TypeAlias = dict[str, Any]


needs_kustomize = pytest.mark.skipif(not KUSTOMIZE, reason="neither kubectl nor kustomize is installed")


@cache
def rendered(way: str) -> str:
    """What kustomize makes of one directory."""
    ended = subprocess.run([*KUSTOMIZE, str(KUBERNETES / way)], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr, "kustomize warns"
    return ended.stdout


def parsed(text: str) -> list[Manifest]:
    """The documents of a text, by libyaml: PyYAML's own parser takes half a second for a chart."""
    return [one for one in yaml.load_all(text, Loader=yaml.CSafeLoader) if one is not None]


@cache
def _validate(document: str, version: str) -> None:
    kubernetes_validate.validate(json.loads(document), version, strict=True)  # unknown fields are errors


def validate(document: Manifest) -> None:
    """Check a document by the API's schemas. One that a chart makes again and again is checked once."""
    for version in VERSIONS:
        _validate(json.dumps(document, sort_keys=True), version)


def manifests(way: str) -> list[Manifest]:
    """The documents of one directory; without kustomize those of its files, which is all but names of images."""
    if KUSTOMIZE:
        return parsed(rendered(way))
    if way not in PLAIN:
        pytest.skip("neither kubectl nor kustomize is installed")
    resources = yaml.safe_load((KUBERNETES / way / "kustomization.yaml").read_text())["resources"]
    return [yaml.safe_load((KUBERNETES / way / file).read_text()) for file in resources]


def manifest(way: str, kind: str) -> Manifest:
    """The document of that kind in that directory."""
    return next(document for document in manifests(way) if document["kind"] == kind)


def pod_of(document: Manifest) -> Manifest | None:
    """The pod's spec in a Pod or in what makes pods."""
    if document["kind"] == "Pod":
        return document["spec"]
    return document["spec"]["template"]["spec"] if "template" in document.get("spec", {}) else None


def pods() -> Iterator[Manifest]:
    found = [pod for way in PLAIN for document in manifests(way) if (pod := pod_of(document)) is not None]
    assert len(found) == 3
    yield from found


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def daemons() -> list[tuple[Manifest, Manifest]]:
    """Every (pod, container) that runs the daemon."""
    return [(pod, c) for pod in pods() for c in containers(pod) if c.get("args") == ["serve"]]


def environment(container: Manifest) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container.get("env", [])}


def quantity(text: str) -> int:
    """Bytes of a Kubernetes quantity such as 17Gi."""
    return int(text[:-2]) * UNITS[text[-2:]]


@pytest.mark.parametrize("way", WAYS)
def test_every_manifest_is_valid(way: str) -> None:
    documents = manifests(way)
    assert documents
    for document in documents:
        validate(document)


def test_the_daemons_configuration_is_accepted_and_its_pool_fits_the_container() -> None:
    for _, container in daemons():
        variables = {name: text for name, text in environment(container).items() if name.startswith("KVOFFD_")}
        config = load_config({}, variables)
        memory = container["resources"]["limits"]["memory"]
        assert container["resources"]["requests"]["memory"] == memory
        needed = sum(memory_estimate(config).values())
        assert quantity(memory) >= needed
        assert needed <= config.pool_bytes * 1.082 + 256 * MIB, "what deploy/README.md has for 8 GiB and more"


def test_the_memory_formula_of_the_readme() -> None:
    """Operators set limits by it, and the Helm chart does."""
    page = (KUBERNETES.parent / "README.md").read_text()
    (formula,) = re.findall(r"^    memory = (.+?)\n\n", page, re.MULTILINE | re.DOTALL)
    share, process, of_disk, least, reads, writes, store, helper = map(float, re.findall(r"[\d.]+", formula))
    for pool_mib, said in ((256, "526 MiB for a pool of 256 MiB"), (4096, "4.47 GiB for 4 GiB"), (65536, "67.7 GiB")):
        needed_mib = sum(memory_estimate(load_config({"pool_size": f"{pool_mib}MiB"}, {})).values()) / MIB
        assert pool_mib * share + process == pytest.approx(needed_mib, rel=0.001)
        assert said in page
        number, unit = said.split()[:2]
        assert float(number) == pytest.approx(needed_mib / {"MiB": 1, "GiB": 1024}[unit], rel=0.001)
    plain = sum(memory_estimate(load_config({}, {})).values())
    secret = {"peer_secret_file": "/secret"}
    for settings, more_mib in (
        ({"disk": ["/a=1GiB"]}, least + reads + writes),
        ({"disk": ["/a=500GiB", "/b=1TiB"]}, 1524 * 1024 * of_disk / 100 + 2 * reads + writes),
        ({"shared": ["redis://a", "s3://b"]}, 2 * store),
        ({"peers": ["a:1", "b:1"], **secret}, 2 * store + helper),
        ({"peers": ["a:1", "10.0.0.0/16:1"], **secret}, 9 * store + helper),
        ({"peers": ["a:1", "10.0.0.0/16:1", "dns+engines:1"], **secret}, 9 * store + helper),
        ({"peer_listen": "*:1", **secret}, helper),
    ):
        needed_mib = (sum(memory_estimate(load_config(settings, {})).values()) - plain) / MIB
        assert more_mib == pytest.approx(needed_mib, rel=0.03), settings
        assert more_mib >= needed_mib
    assert f"helper process for peers {helper:.0f} MiB" in memory_summary(
        load_config({"peer_listen": "*:1", **secret}, {})
    )


def test_the_pool_is_in_memory_that_outlives_the_daemon() -> None:
    for pod, container in daemons():
        variables = environment(container)
        path = Path(variables["KVOFFD_POOL_FILE"])
        (mount,) = [m for m in container["volumeMounts"] if Path(m["mountPath"]) == path.parent]
        (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
        if "emptyDir" in volume:
            assert volume["emptyDir"]["medium"] == "Memory"
            room = quantity(volume["emptyDir"]["sizeLimit"])
            # 1.7 % are the slot table.
            assert room >= 1.02 * parse_size(variables["KVOFFD_POOL_SIZE"])
        else:
            assert volume["hostPath"]["path"].startswith("/dev/shm/")
        others = [c for c in containers(pod) if c is not container and c["name"] != "own-directory"]
        for other in others:
            assert mount["name"] not in [m["name"] for m in other.get("volumeMounts", [])]


def test_on_a_node_what_was_cleared_outlives_a_reboot() -> None:
    (pod,) = filter(None, map(pod_of, manifests("daemonset")))
    (daemon,) = pod["containers"]
    (mount,) = [m for m in daemon["volumeMounts"] if m["mountPath"] == environment(daemon)["STATE_DIRECTORY"]]
    (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
    assert volume["hostPath"] == {"path": "/var/lib/kvoffd", "type": "DirectoryOrCreate"}
    assert f"chmod 0700 /pool {mount['mountPath']}" in pod["initContainers"][0]["command"][-1]


def user_of(pod: Manifest, container: Manifest) -> int:
    return {**pod["securityContext"], **container.get("securityContext", {})}["runAsUser"]


def test_engines_may_connect_and_find_their_blocks_again() -> None:
    engines = [(pod, container) for pod in pods() for container in containers(pod) if container["name"] == "vllm"]
    assert len(engines) == 2
    for _, daemon in daemons():
        allowed = load_config({}, {"KVOFFD_ALLOWED_UIDS": environment(daemon)["KVOFFD_ALLOWED_UIDS"]})
        assert {user_of(*engine) for engine in engines} <= set(allowed.allowed_uids)
    for pod, engine in engines:
        security = pod["securityContext"]
        assert 10064 in [*security.get("supplementalGroups", []), security.get("fsGroup")], "the daemon's group"
        config = json.loads(engine["args"][engine["args"].index("--kv-transfer-config") + 1])
        assert config == {"kv_connector": "KvoffdConnector", "kv_role": "kv_both"}
        assert "PYTHONHASHSEED" not in environment(engine), "vLLM's default hash does without"
        (mount,) = [m for m in engine["volumeMounts"] if m["mountPath"] == "/dev/shm"]
        (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
        assert volume["emptyDir"]["medium"] == "Memory"
    for pod in pods():
        for container in (c for c in containers(pod) if c["name"] in ("kvoffd", "vllm")):
            mount = next(m for m in container["volumeMounts"] if m["name"] == "kvoffd-sockets")
            assert (mount["mountPath"], "subPath" in mount) == ("/run/kvoffd", False), "no single socket is mounted"
        # No pod waits for another after a reboot, when /run is empty.
        types = {volume["hostPath"]["type"] for volume in pod["volumes"] if "hostPath" in volume}
        assert types <= {"DirectoryOrCreate"}
        assert pod["enableServiceLinks"] is False, "a Service named kvoffd puts no KVOFFD_PORT into an environment"


def test_the_daemon_runs_with_the_least_rights() -> None:
    """The kubelet gives volumes to fsGroup, and by default makes each of their files 0660, for every new pod."""
    for pod, container in daemons():
        security = container["securityContext"]
        assert forbidden(pod["securityContext"], container) == set()
        assert "add" not in security["capabilities"]
        assert security["readOnlyRootFilesystem"] is True
        assert pod["securityContext"]["fsGroup"] == security["runAsGroup"]
        assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
        assert pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize("way", ["daemonset", "sidecar"])
def test_on_gpu_nodes_the_daemon_sees_all_gpus_and_takes_none(way: str) -> None:
    (plain,) = filter(None, map(pod_of, manifests(way)))
    (pod,) = filter(None, map(pod_of, manifests(f"{way}-gpu")))
    assert pod["runtimeClassName"] == "nvidia"
    (daemon,) = [c for c in containers(pod) if c["name"] == "kvoffd"]
    (without,) = [c for c in containers(plain) if c["name"] == "kvoffd"]
    added = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    assert environment(daemon) == {**environment(without), **added}
    assert daemon["resources"] == without["resources"]


def forbidden(of_pod: Manifest, container: Manifest) -> set[str]:
    """What PodSecurity's level `restricted` forbids of a container (kubernetes.io/docs, "Pod Security Standards")."""
    security = of_pod | container["securityContext"]
    capabilities = security.get("capabilities", {})
    checks = {
        "root": security.get("runAsNonRoot") is not True or security.get("runAsUser") == 0,
        "privileged": security.get("privileged", False),
        "escalation": security.get("allowPrivilegeEscalation") is not False,
        "seccomp": security.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"),
        "capabilities": "ALL" not in capabilities.get("drop", ())
        or not set(capabilities.get("add", ())) <= {"NET_BIND_SERVICE"},
        "selinux": security.get("seLinuxOptions", {}).get("type", "container_t") != "container_t",
        "hostPort": any("hostPort" in port for port in container.get("ports", [])),
    }
    return {name for name, violated in checks.items() if violated}


@needs_kustomize
@pytest.mark.parametrize(
    ("way", "needed"),
    [
        ("sidecar", set()),
        ("sidecar-gpu", set()),
        ("engine", {"hostPath"}),
        ("daemonset", {"hostPath", "root", "capabilities"}),
        ("daemonset-gpu", {"hostPath", "root", "capabilities"}),
        ("daemonset-selinux", {"hostPath", "root", "capabilities", "selinux"}),
    ],
)
def test_pods_need_no_more_than_what_the_readme_says_of_podsecurity(way: str, needed: set[str]) -> None:
    """Only the DaemonSet's directories and the one chown of its init container, in a namespace that allows them."""
    documents = manifests(way)
    (pod,) = filter(None, map(pod_of, documents))
    found = {name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)}
    found |= {kind for volume in pod["volumes"] for kind in volume if kind not in ("name", "emptyDir", "secret")}
    found |= {name for container in containers(pod) for name in forbidden(pod["securityContext"], container)}
    assert found == needed
    (namespace,) = {document["metadata"].get("namespace", "") for document in documents if pod_of(document)}
    assert namespace == ("kvoffd" if needed else "")
    labels = manifest("daemonset", "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "privileged"
