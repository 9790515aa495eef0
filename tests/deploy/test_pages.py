"""What the pages name exists: metrics, commands and their options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvoffd.observe.metrics import all_metrics
from kvoffd_client.cli.app import make_command

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "client/README.md", "deploy/README.md", "deploy/shared.md")
CONNECTOR = "".join(path.read_text() for path in (ROOT / "client" / "kvoffd_client" / "vllm").glob("*.py"))
METRICS = {spec.name for spec in all_metrics(None)}
OTHERS = {"kvoffd_client"}
COMMAND = re.compile(r"kvoffd-cli((?: [a-z]+)*)((?: [^`\n#]*)?)")


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


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
