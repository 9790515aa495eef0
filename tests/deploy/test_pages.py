"""What the pages name exists: metrics, commands and their options, programs and targets of the Makefile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvoffd
from kvoffd.observe.metrics import all_metrics
from kvoffd_client.cli.app import make_command
from kvoffd_proto.messages import PROTOCOL_VERSION
from kvoffd_proto.stats import MISS_REASONS

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "FAQ.md",
    "client/README.md",
    "client/COMPARISON.md",
    "client/ENGINE.md",
    "deploy/README.md",
    "deploy/FLEET.md",
    "deploy/RELEASE.md",
    "deploy/SECURITY.md",
    "deploy/shared.md",
    "deploy/peers.md",
    "RELIABILITY.md",
    "tests/README.md",
    "tests/bench/README.md",
)
CONNECTOR = "".join(path.read_text() for path in (ROOT / "client" / "kvoffd_client" / "vllm").glob("*.py"))
METRICS = {spec.name for spec in all_metrics(None)}
OTHERS = {"kvoffd_client"}
COMMAND = re.compile(r"kvoffd-cli((?: [a-z][a-z-]*)*)((?: [^`\n#]*)?)")


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def test_the_table_of_reasons_is_complete() -> None:
    (_, table) = text_of("deploy/README.md").split(
        "| `reason` | the block was | decided by | more hits by |\n|---|---|---|---|\n"
    )
    rows = table.split("\n\n")[0].splitlines()
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(MISS_REASONS)


@pytest.mark.parametrize("page", PAGES)
def test_every_metric_exists(page: str) -> None:
    for name in re.findall(r"\bkvoffd_[a-z]+_[a-z_]+\b\*?", text_of(page)):
        known = name.endswith("*") and any(one.startswith(name[:-1]) for one in METRICS)
        engines = f"vllm:{name.removesuffix('_total')}" in CONNECTOR
        assert known or engines or name.removesuffix("_bucket") in METRICS | OTHERS, name


@pytest.mark.parametrize("page", PAGES)
def test_every_command_exists_with_its_options(page: str) -> None:
    root: Any = make_command()
    for words, rest in COMMAND.findall(text_of(page)):
        command = root
        for word in words.split():
            if not hasattr(command, "commands"):
                break  # an argument
            assert word in command.commands, f"kvoffd-cli{words}"
            command = command.commands[word]
        options = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)(--[a-z-]+)", rest)) <= options | {"--help"}, f"kvoffd-cli{words}{rest}"


@pytest.mark.parametrize("page", PAGES)
def test_every_program_exists(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    assert set(re.findall(r"(?:`|^    )make ([a-z-]+)", text_of(page), re.MULTILINE)) <= targets
    for name in re.findall(r"python -m (tests(?:\.\w+)+)", text_of(page)):
        place = ROOT.joinpath(*name.split("."))
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), name


def test_a_clear_names_what_it_clears() -> None:
    """``clear --all-nodes`` alone, on a page or in a message, is no command that works."""
    wrong = re.compile(r"clear[\s\"]+--all-nodes")
    places = (*ROOT.glob("*.md"), *(ROOT / "deploy").rglob("*.md"), *(ROOT / "kvoffd").rglob("*.py"))
    found = [place.name for place in places if place.name != "CHANGELOG.md" and wrong.search(place.read_text())]
    assert found == []


def test_the_sizes_of_models_are_computed_from_their_configurations() -> None:
    rows = re.findall(
        r"^\| (.+?) \| ([\d x()+]+) \| ([\d.]+) \| ([\d,]+) \|$", text_of("deploy/README.md"), re.MULTILINE
    )
    assert len(rows) == 8
    for model, config, kib, tokens in rows:
        token_bytes = 2 * eval(config.replace("x", "*"), {"__builtins__": {}}) * (1 if "MLA" in model else 2)
        assert token_bytes == float(kib) * 1024, model
        assert int(tokens.replace(",", "")) == (64 << 30) // token_bytes, model


def test_what_two_pages_measure_is_one_figure_with_its_record() -> None:
    record = "(../tests/bench/results/2026-11-26-peers-cpu.md)"
    (row,) = [line for line in text_of("client/COMPARISON.md").splitlines() if "lookups / copies" in line]
    (same,) = [line for line in text_of("README.md").splitlines() if "lookups / copies" in line]
    figures = same.split("|")[2].strip()
    assert figures.endswith(" faster")
    assert figures in row
    assert record in row


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    here = (ROOT / page).parent
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text_of(page)):
        path, _, anchor = target.partition("#")
        file = here / path if path else ROOT / page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            names = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in names, target


def test_the_matrix_of_versions_ends_with_this_protocol() -> None:
    rows = re.findall(r"^\| (?:[\d.]+|next) \| (\d+) \| ", text_of("deploy/README.md"), re.MULTILINE)
    assert rows[-1] == str(PROTOCOL_VERSION)


def test_the_version_in_commands_and_manifests_is_the_packages() -> None:
    deploy = ROOT / "deploy"
    files = [*deploy.glob("docker/*Dockerfile"), *deploy.glob("kubernetes/*/*.yaml"), deploy / "README.md"]
    texts = [file.read_text() for file in files]
    versions = {version for text in texts for version in re.findall(r"\bkvoffd:(\d+\.\d+\.\d+)\b", text)}
    engine_tags = {version for text in texts for version in re.findall(r"\bvllm-kvoffd:(\d+\.\d+\.\d+)\b", text)}
    assert versions - engine_tags == {kvoffd.__version__}
    images = yaml.safe_load((deploy / "kubernetes" / "base" / "kustomization.yaml").read_text())["images"]
    assert {image["name"]: image["newTag"] for image in images} == {
        "kvoffd": kvoffd.__version__,
        "vllm-kvoffd": max(engine_tags),
    }
    assert f"ARG VERSION={kvoffd.__version__}\n" in (deploy / "docker" / "Dockerfile").read_text()
