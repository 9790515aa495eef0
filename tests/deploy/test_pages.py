"""What the pages name exists: settings, metrics, fields of JSON, reasons, commands and their options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvoffd.cache import POLICY_NAMES
from kvoffd.config import SETTINGS
from kvoffd.observe.metrics import all_metrics
from kvoffd_client.cli.app import COMMANDS, make_command
from kvoffd_client.cli.findings import KINDS
from kvoffd_proto import admin, messages, stats

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "client/README.md", "deploy/README.md", "deploy/shared.md")
CONNECTOR = "".join(path.read_text() for path in (ROOT / "client" / "kvoffd_client" / "vllm").glob("*.py"))
MODULES = (stats, admin, messages)
STRUCTS = [one for module in MODULES for one in vars(module).values() if isinstance(one, type)]
FIELDS = {name for one in STRUCTS if issubclass(one, msgspec.Struct) for name in one.__struct_fields__}
METRICS = {spec.name for spec in all_metrics(None)}
NAMES = FIELDS | METRICS | KINDS.keys() | stats.MISS_REASONS.keys() | set(map(str, stats.DiskFault))
NAMES |= {setting.name for setting in SETTINGS} | {*POLICY_NAMES}
NAMES |= set(re.findall(r'"([a-z_]+)"', CONNECTOR)) | set(re.findall(r"^    ([a-z_]+): ", CONNECTOR, re.MULTILINE))
OTHERS = """
    vLLM, its plugins and its clients: gpu_memory_utilization buffer_steps kv_role kv_consumer kv_producer kv_both
    kv_connector_extra_config kv_load_failure_policy kv_transfer_params multi_modal_uuids mm_processor_cache_gb
    reset_connector recompute external_launcher load_inplace self_describing_kv_events abort keep wait block_size
    kv_load_tiers reset_running_requests cache_salt reset_prefix_cache update_weights reload_weights load_weights
    max_load_tokens max_offload_tokens
    Systems and stores: chown exec nohup rm tini sched_setaffinity spc_t baseline restricted selinux rule_files
    interrupt maxclients maxmemory optional
    Python: ask fence put_block kvoffd_client requested insert remove candidates
    Columns, values and parts of pages: n content metrics stored loaded config kvoffd writers internal slower
    kv_namespace
"""
COMMAND = re.compile(r"kvoffd-cli((?: [a-z]+)*)((?: [^`\n#]*)?)")


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def words_of(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text_of(page))


@pytest.mark.parametrize("page", PAGES)
def test_every_name_exists(page: str) -> None:
    names = {word for word in words_of(page) if re.fullmatch(r"[a-z]+(_[a-z0-9]+)*", word)}
    assert sorted(names - NAMES - set(OTHERS.split()) - COMMANDS.keys()) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_metric_exists(page: str) -> None:
    for name in re.findall(r"\bkvoffd_[a-z]+_[a-z_]+\b\*?", text_of(page)):
        known = name.endswith("*") and any(one.startswith(name[:-1]) for one in METRICS)
        engines = f"vllm:{name.removesuffix('_total')}" in CONNECTOR
        assert known or engines or name.removesuffix("_bucket") in METRICS or name in FIELDS, name


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
