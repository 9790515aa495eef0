"""What commands say of answers that a real daemon seldom gives."""

from __future__ import annotations

import io
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from kvoffd_client.cli import actions, main
from kvoffd_client.cli.show import engine_table
from kvoffd_client.cli.stats import day_sentence, print_stats, tier_details
from kvoffd_proto.admin import NamespacesReply, SessionInfo
from kvoffd_proto.engines import engines_of
from kvoffd_proto.messages import Role
from kvoffd_proto.stats import DaemonStats, NamespaceStats, SettingInfo, SharedStats, Window


def rows(count: int) -> list[NamespaceStats]:
    return [NamespaceStats(id=f"{number:012x}", fingerprint=f"{number:064x}") for number in range(count)]


def test_the_namespaces_that_stats_leaves_out_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    print_stats(DaemonStats(namespaces=rows(64)))
    assert "and 59 more; " in capsys.readouterr().out


def test_namespaces_that_are_not_shared_may_be_so_after_a_damaged_state() -> None:
    lines = [
        str(line) for line in tier_details(DaemonStats(shared=[SharedStats("redis://valkey", unshared_namespaces=2)]))
    ]
    assert any("2 namespaces are not shared, after a reset or a damaged state: " in line for line in lines)


def test_clear_names_the_peers_that_may_keep_copies_also_those_that_do_not_answer_now(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = SettingInfo("peers", "node-b:7400, dns+engines:7400, 10.0.0.0/16:7400")
    now = DaemonStats(shared=[SharedStats("peer://node-b:7400")], settings=[peers])
    admin = SimpleNamespace(namespaces=lambda: NamespacesReply(0, []), stats=lambda: now, clear=lambda _: 3)
    monkeypatch.setattr(actions, "open_admin", lambda _: nullcontext(admin))
    assert main(["clear", "--all", "--yes"]) == 0
    keepers = "peer://node-b:7400, peer://dns+engines:7400, peer://10.0.0.0/16:7400 keep their copies"
    assert keepers in " ".join(capsys.readouterr().out.split())


def test_clear_on_all_nodes_counts_what_the_reset_of_all_has_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one: Any = SimpleNamespace(namespace=bytes(32), label="tiny", ready_blocks=8, ready_bytes=4096)
    admin = SimpleNamespace(
        namespaces=lambda: NamespacesReply(1, [one]),
        stats=DaemonStats,
        reset_fleet=lambda fingerprint: 8,
    )
    monkeypatch.setattr(actions, "open_admin", lambda directory: nullcontext(admin))
    assert main(["clear", "tiny", "--all-nodes", "--yes"]) == 0
    assert capsys.readouterr().out.startswith("Dropped 8 blocks from namespace tiny ")


def test_a_store_that_is_down_used_what_it_used() -> None:
    def usage(**fields: Any) -> str:
        lines = map(str, tier_details(DaemonStats(shared=[SharedStats("redis://valkey", **fields)])))
        return next(line.strip() for line in lines if line.split()[0] in ("uses", "used", "usage"))

    assert usage(up=True, used_bytes=1 << 30) == "uses 1.00 GiB, without a limit"
    assert usage(up=False, used_bytes=1 << 30) == "used 1.00 GiB, without a limit, when it last answered"
    assert usage(up=False) == "usage unknown"


def test_what_was_not_computed_in_a_day_is_one_figure() -> None:
    tokens = {"computed": 80_000, "engine": 8_000, "pool": 10_000, "peer": 2_000}
    day = Window(seconds=86_400.0, prompt_tokens=tokens, saved_gpu_seconds=3.1 * 3600)
    assert day_sentence(day) == (
        "of the last 24 h's prompt tokens 12.0 % were loaded instead of computed, which saved 3.1 GPU hours"
    )
    early = structs.replace(day, seconds=600.0, saved_gpu_seconds=12.0)
    assert day_sentence(early).startswith("of the last 10 min's prompt tokens 12.0 % ")
    assert day_sentence(early).endswith(", which saved 12.0 s of a GPU")
    assert day_sentence(structs.replace(day, saved_gpu_seconds=0.0)).endswith("instead of computed"), "no known rate"
    assert day_sentence(Window(prompt_tokens={"computed": 9})) == ""


def test_pids_of_an_engine_are_told_apart() -> None:
    def session(number: int, role: Role, pid: int) -> SessionInfo:
        name = f"vllm:1 m {role}" + f" {number}" * (role == Role.WORKER)
        return SessionInfo(number, role, name, "vllm", pid, 0, 9.0, 1.0, 0, 0, 0, 0, 0, [bytes(32)])

    def shown(*pids: int) -> str:
        workers = [session(number, Role.WORKER, pid) for number, pid in enumerate(pids)]
        screen = io.StringIO()
        Console(file=screen, width=100).print(engine_table(engines_of([session(9, Role.SCHEDULER, 12), *workers]), 80))
        return screen.getvalue()

    assert "scheduler pid 12, worker pid 34, 35" in shown(34, 35)
    assert "1 worker, pid 12" in shown(12)
    assert "0 workers, pid 12" in shown()
