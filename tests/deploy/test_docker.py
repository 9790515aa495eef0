"""What the Dockerfiles bring. tests/delivery builds the image and runs it."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import kvoffd

DOCKER = Path(__file__).parents[2] / "deploy" / "docker"
FILES = sorted(DOCKER.glob("*Dockerfile"))


def test_what_is_copied_into_the_image_is_what_the_package_is_built_from() -> None:
    ignore = (DOCKER / "Dockerfile.dockerignore").read_text()
    root = DOCKER.parents[1]
    kept = [line[1:] for line in ignore.splitlines() if line.startswith("!")]
    assert {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "kvoffd", "client", "proto"} == set(kept)
    assert all((root / name).exists() for name in kept)
    assert (DOCKER / "engine.Dockerfile.dockerignore").read_text() == ignore


def test_the_version_in_commands_and_manifests_is_the_packages() -> None:
    deploy = DOCKER.parent
    texts = [
        path.read_text() for path in [*FILES, deploy / "README.md", *sorted((deploy / "kubernetes").glob("*/*.yaml"))]
    ]
    versions = {version for text in texts for version in re.findall(r"\bkvoffd:(\d+\.\d+\.\d+)\b", text)}
    engine_tags = {version for text in texts for version in re.findall(r"\bvllm-kvoffd:(\d+\.\d+\.\d+)\b", text)}
    assert versions - engine_tags == {kvoffd.__version__}
    images = yaml.safe_load((deploy / "kubernetes" / "base" / "kustomization.yaml").read_text())["images"]
    assert {image["name"]: image["newTag"] for image in images} == {
        "kvoffd": kvoffd.__version__,
        "vllm-kvoffd": max(engine_tags),
    }
    assert f"ARG VERSION={kvoffd.__version__}\n" in (DOCKER / "Dockerfile").read_text()
