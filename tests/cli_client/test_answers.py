"""What commands say of answers that a real daemon seldom gives."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffd_client.cli import actions, main
from kvoffd_client.cli.stats import print_stats, tier_details
from kvoffd_proto.admin import NamespacesReply
from kvoffd_proto.stats import DaemonStats, NamespaceStats, SharedStats


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
