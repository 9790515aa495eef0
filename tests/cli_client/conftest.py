"""Statistics to render, busy and fresh."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console, RenderableType

from kvoffd_proto.stats import (
    DirectionStats,
    DiskFault,
    DiskStats,
    Histogram,
    IntegrityStats,
    NamespaceStats,
    PoolStats,
    RecentStats,
    SharedServer,
    SharedStats,
    StatsReply,
    TieringStats,
)

GIB = 2**30
FINGERPRINT = bytes.fromhex("ab12cd34" + "00" * 28)
OTHER = bytes.fromhex("ffee0011" + "22" * 28)


def direction(
    nbytes: int = 0, busy_seconds: float = 0.0, speed: float = 0.0, jobs: int = 0, failed: int = 0
) -> DirectionStats:
    return DirectionStats(
        jobs=jobs,
        failed_jobs=failed,
        bytes=nbytes,
        busy_seconds=busy_seconds,
        queued_jobs=2 if jobs else 0,
        running_jobs=1 if jobs else 0,
        bytes_per_second=speed,
    )


def recent(window_s: float, asked: int, ready: int, pending: int = 0, seconds: float = 0.0) -> RecentStats:
    return RecentStats(window_s, seconds or window_s, asked, asked, ready, pending, 4 * 10**9, 2 * 10**9, 50, 7, 1.0)


def namespace(fingerprint: bytes, label: str, asked: int = 0, ready: int = 0, prefix: int = 0) -> NamespaceStats:
    return NamespaceStats(
        namespace=fingerprint,
        label=label,
        ready_blocks=12_345,
        ready_bytes=12 * GIB,
        writing_blocks=3,
        lookups=1_204,
        keys_asked=asked,
        keys_ready=ready,
        prefix_keys_ready=prefix,
        stored_blocks=20_000,
        stored_bytes=118 * GIB,
        loaded_bytes=240 * GIB,
        evicted_blocks=7_655,
        invalidated_blocks=0,
        half_stored_blocks=0,
        dropped_keys=12,
        declined_keys=7,
        recent=[recent(10, 10, 1), recent(100, asked // 10, ready // 10), recent(1000, asked // 2, ready // 2)],
    )


def disk(directory: str, state: str, problem: str = "") -> DiskStats:
    return DiskStats(
        directory=directory,
        state=state,
        problem=problem,
        size_bytes=500 * GIB,
        physical_bytes=500 * GIB,
        used_bytes=125 * GIB,
        blocks=64_000,
        oldest_seconds=7_200.0,
        read_blocks=1_024,
        read_bytes=2 * GIB,
        written_blocks=4_096,
        written_bytes=8 * GIB,
        lifetime_written_bytes=9_000 * GIB,
        evicted_blocks=0,
        refused_writes=0,
        queued_reads=0,
        queued_writes=0,
        running_reads=0,
        running_writes=0,
        busy_seconds=1.5,
        direct=True,
        errors={DiskFault.CORRUPT: 1},
    )


@pytest.fixture
def fresh() -> StatsReply:
    """A daemon that nobody has used."""
    return StatsReply(
        request_id=1,
        epoch=7,
        daemon_version="0.1.0",
        pid=4242,
        uptime_seconds=0.0,
        policy="lru",
        pool=PoolStats(
            pool_bytes=20 * GIB,
            usable_bytes=20 * GIB,
            table_bytes=5 * 2**20,
            free_bytes=20 * GIB,
            writing_bytes=0,
            ready_bytes=0,
            leaving_bytes=0,
            pinned_bytes=0,
            quarantined_bytes=0,
            spilled_slots=0,
        ),
        store=direction(),
        load=direction(),
        leases=0,
        pinned_blocks=0,
        sessions=1,
        lookups_per_second=0.0,
        requests=2,
        errors={},
        events_published=0,
        cpu_seconds=0.0,
        resident_bytes=84 * 2**20,
        namespaces=[],
        integrity=IntegrityStats(0, 0, 0, 0, 0),
    )


@pytest.fixture
def busy() -> StatsReply:
    """A daemon with two engines in the middle of their work."""
    return StatsReply(
        request_id=2,
        epoch=7,
        daemon_version="0.1.0",
        pid=4242,
        uptime_seconds=8_040.0,
        policy="lru",
        pool=PoolStats(
            pool_bytes=20 * GIB,
            usable_bytes=20 * GIB,
            table_bytes=5 * 2**20,
            free_bytes=7 * GIB,
            writing_bytes=GIB // 4,
            ready_bytes=12 * GIB + GIB // 2,
            leaving_bytes=GIB // 4,
            pinned_bytes=2 * GIB,
            quarantined_bytes=0,
            spilled_slots=0,
        ),
        store=direction(118 * GIB, 12.0, 1.42e9, 1_204, 3),
        load=direction(240 * GIB, 30.0, 2.1e9, 1_234_567),
        lookup_seconds=Histogram({"0.0001": 92_160, "0.00025": 102_400, "+Inf": 102_400}, 9.0),
        leases=12,
        pinned_blocks=480,
        sessions=3,
        lookups_per_second=1_204.4,
        requests=1_102_400,
        errors={"BAD_TOKEN": 3, "NOT_READY": 12, "from_the_future": 1},
        events_published=812,
        cpu_seconds=80.4,
        resident_bytes=84 * 2**20,
        namespaces=[
            namespace(FINGERPRINT, "meta-llama/Llama-3.1-8B-Instruct", 100_000, 72_300, 65_000),
            namespace(OTHER, "tiny"),
        ],
        integrity=IntegrityStats(4_096, 4 * GIB, 0, 0, 0),
        below=TieringStats(2_048, 2 * GIB, 12, {"corrupt": 1}, 3.1e9, 4_096, 4 * GIB, 3, 0, "reuse", 40 * GIB, 1_357),
        shared=[
            SharedStats(
                "redis://valkey:6379",
                True,
                1,
                4e-4,
                1_024,
                512,
                32,
                500,
                GIB,
                4,
                700,
                GIB,
                90,
                12,
                3,
                1,
                {},
                {"full": 1},
                [
                    SharedServer("valkey-0:6379", True, ""),
                    SharedServer("valkey-1:6379", False, "valkey-1:6379 cannot be reached: no."),
                ],
                2,
            )
        ],
        disks=[disk("/mnt/nvme0/kvoffd", "serving"), disk("/mnt/nvme1/kvoffd", "failed", "It cannot be opened.")],
        recent=[
            recent(10, 500, 5),
            recent(100, 1000, 600, 300),
            recent(1000, 0, 0),
            recent(0, 100_000, 72_300, 0, 8040),
        ],
    )


@pytest.fixture
def render() -> Callable[..., str]:
    """Text of a renderable on a screen of ``width`` columns, without colours."""

    def text_of(page: RenderableType, width: int = 80) -> str:
        stream = StringIO()
        Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(page)
        return stream.getvalue()

    return text_of
