"""The Helm chart, as Helm's own code renders it, against the API's schemas and the manifest that kustomize has."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvoffd import __version__
from tests.deploy.test_kubernetes import VERSIONS, manifest
from tests.kit.require import require

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "kvoffd"
PYTHON = ROOT / ".venv-servers" / "bin" / "python"
"""Its helm-python-sdk is Helm 4 as a library: `make servers`."""
RENDER = """
import json, sys
from helm_python import Chart, HelmError
try:
    chart = Chart.load(sys.argv[1])
    values = json.loads(sys.argv[2])
    chart.validate_schema(values)
    print(*chart.render(values, name="kvoffd", namespace="kvoffd").values(), sep="---")
except HelmError as error:
    sys.exit(str(error))
"""


@cache
def helm(values: str) -> subprocess.CompletedProcess[str]:
    there = (
        PYTHON.exists()
        and not subprocess.run([PYTHON, "-c", "import helm_python"], stderr=subprocess.DEVNULL).returncode
    )
    require("helm", there, "helm-python-sdk is not in .venv-servers")
    return subprocess.run(
        [PYTHON, "-c", RENDER, CHART, values], capture_output=True, text=True, timeout=60, check=False
    )


def rendered(**values: object) -> dict[str, Any]:
    ended = helm(json.dumps(values))
    assert ended.returncode == 0, ended.stderr
    (document,) = filter(None, yaml.safe_load_all(ended.stdout))
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)
    return document


def sorted_env(document: dict[str, Any]) -> dict[str, Any]:
    """The same with the variables in an order of their own: a patch puts its own first, and the chart last."""
    (container,) = document["spec"]["template"]["spec"]["containers"]
    container["env"].sort(key=lambda one: one["name"])
    return document


@pytest.mark.parametrize(("way", "values"), [("daemonset", {}), ("daemonset-gpu", {"gpu": True})])
def test_the_chart_is_what_kustomize_makes(way: str, values: dict[str, object]) -> None:
    assert sorted_env(rendered(**values)) == sorted_env(manifest(way, "DaemonSet"))


def test_values_go_where_they_belong() -> None:
    disk = {"path": "/mnt/nvme0/kvoffd", "size": "1TiB"}
    image = {"repository": "r/kvoffd", "tag": "7"}
    env = {"KVOFFD_SHARED": "redis://valkey:6379", "KVOFFD_POOL_FILE": ""}
    document = rendered(disk=disk, image=image, env=env, poolSize="128GiB", memory="140Gi", allowedUids="2000,2001")
    pod = document["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    found = {one["name"]: one.get("value") for one in container["env"]}
    assert found | {"KVOFFD_DISK": "/disk=1TiB", "KVOFFD_POOL_SIZE": "128GiB", **env} == found
    assert found["KVOFFD_ALLOWED_UIDS"] == "2000,2001"
    assert container["resources"]["limits"] == {"memory": "140Gi"}
    assert {one["image"] for one in (*pod["initContainers"], container)} == {"r/kvoffd:7"}
    assert {"name": "kvoffd-disk", "hostPath": {"path": disk["path"], "type": "Directory"}} in pod["volumes"]
    assert {"name": "kvoffd-disk", "mountPath": "/disk"} in container["volumeMounts"]


def test_what_is_mistyped_is_refused() -> None:
    for wrong in (
        {"poolsize": "1GiB"},
        {"poolSize": 64},
        {"env": {"POOL": "x"}},
        {"memory": "70"},
        {"disk": {"path": "x"}},
    ):
        assert helm(json.dumps(wrong)).returncode, wrong


def test_it_has_the_release_of_kvoffd() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
