"""The overview of ``kvoffd-cli`` stays one screen with all that can be wrong, and with long names."""

from __future__ import annotations

from msgspec import structs

from kvoffd_client.cli.overview import HEIGHT, WIDTH, overview
from kvoffd_proto.admin import SessionInfo
from kvoffd_proto.findings import Facts
from kvoffd_proto.messages import Role
from kvoffd_proto.stats import MISS_REASONS, PROMPT_SOURCES, DaemonStats, DiskStats, PoolStats, Problem, Window

LONG = "a name that is longer than a line " * 9


def test_it_stays_one_screen() -> None:
    window = Window(
        seconds=3600.0,
        asked_keys=100_000,
        misses=dict.fromkeys(MISS_REASONS, 1000),
        prompt_tokens=dict.fromkeys(PROMPT_SOURCES, 12_345_678),
        saved_seconds=100.0,
        loaded_tokens=1,
    )
    stats = DaemonStats(
        version="0.3.0.dev1 (commit 0123456789ab)",
        node=LONG,
        pool=PoolStats(size_bytes=10, bytes={"free": 5}, at_the_end=LONG),
        last_hour=window,
        since_start=window,
        verdict=LONG,
        health_problems=[Problem(f"problem_{number}", LONG) for number in range(40)],
        disks=[DiskStats(f"/mnt/{LONG}{number}", False, "failed") for number in range(20)],
    )
    sessions = [
        SessionInfo(number, Role.SCHEDULER, f"\x1b[2J{LONG}{number}", "", 1, 1, 1.0, 1.0, 0, 0, 0, 0, 0, [bytes(32)])
        for number in range(40)
    ]
    lines = overview(Facts(stats, (), sessions))
    assert len(lines) == HEIGHT
    assert max(map(len, lines)) <= WIDTH
    assert all(line.isprintable() for line in lines)
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [
        *("kvoffd", "state", "pool", "engines", "tokens", "saved", "missed"),
        *["tier"] * 3, *["warning"] * 5, "more",
    ]  # fmt: skip
    assert "          and 17 more: kvoffd-cli stats tiers" in lines
    assert any("more findings: kvoffd-cli doctor --all" in line for line in lines)
    nothing = overview(Facts(DaemonStats(), (), []))
    assert "engines   none" in nothing
    assert "tokens    since the start: none reported" in nothing
    assert overview(Facts(structs.replace(stats, health_problems=[]), (), []))[-1].startswith("more")
