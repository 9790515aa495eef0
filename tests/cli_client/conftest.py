"""Statistics to render, busy and fresh."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console, RenderableType

from kvoffd_proto.admin import HealthLevel
from kvoffd_proto.stats import (
    CopyStats,
    DaemonStats,
    DiskStats,
    Histogram,
    HitCurve,
    IntegrityStats,
    NamespaceStats,
    PoolStats,
    SharedServer,
    SharedStats,
    TieringStats,
    Window,
    namespace_id,
)

GIB = 2**30
FINGERPRINT = bytes.fromhex("ab12cd34" + "00" * 28)
OTHER = bytes.fromhex("ffee0011" + "22" * 28)


def direction(nbytes: int = 0, busy_seconds: float = 0.0, jobs: int = 0, failed: int = 0) -> CopyStats:
    queued, running = (2, 1) if jobs else (0, 0)
    return CopyStats(jobs, failed, nbytes, busy_seconds, queued, running)


def window(seconds: float, asked: int, loaded: int, not_needed: int = 0) -> Window:
    """Traffic in which every other key was evicted."""
    return Window(
        seconds=seconds,
        lookups=asked // 10,
        asked_keys=asked,
        loaded_keys=loaded,
        not_needed_keys=not_needed,
        misses={"evicted": asked - loaded - not_needed},
        found_keys={"pool": loaded + not_needed},
        asked_tokens=16 * asked,
        loaded_tokens=16 * loaded,
        saved_seconds=loaded / 500,
        stored_bytes=4 * 10**9,
        loaded_bytes=2 * 10**9,
        evicted_blocks=50,
        no_space_keys=7,
    )


def namespace(fingerprint: bytes, model: str, asked: int = 0, loaded: int = 0) -> NamespaceStats:
    return NamespaceStats(
        id=namespace_id(fingerprint),
        model=model,
        fingerprint=fingerprint.hex(),
        ready_blocks=12_345,
        ready_bytes=12 * GIB,
        filling_blocks=3,
        lookups=1_204,
        asked_keys=asked,
        loaded_keys=loaded,
        not_needed_keys=0,
        misses={"evicted": asked - loaded},
        found_keys={"pool": loaded},
        asked_tokens=16 * asked,
        loaded_tokens=16 * loaded,
        saved_seconds=loaded / 500,
        stored_blocks=20_000,
        stored_bytes=118 * GIB,
        loaded_bytes=240 * GIB,
        evicted_blocks=7_655,
        no_space_keys=12,
        rejected_keys=7,
    )


def disk(directory: str, state: str, problem: str = "") -> DiskStats:
    return DiskStats(
        directory=directory,
        up=state == "serving",
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
        busy_seconds=1.5,
        direct=True,
        errors={"corrupt": 1},
    )


@pytest.fixture
def fresh() -> DaemonStats:
    """A daemon that nobody has used."""
    return DaemonStats(
        version="0.1.0",
        pid=4242,
        policy="lru",
        pool=PoolStats(20 * GIB, {"free": 20 * GIB}, usable_bytes=20 * GIB, table_bytes=5 * 2**20),
        sessions=1,
        requests=2,
        resident_bytes=84 * 2**20,
    )


@pytest.fixture
def busy() -> DaemonStats:
    """A daemon with two engines in the middle of their work."""
    ratios = {"0.5": 0.4, "1": 0.5, "2": 0.6, "10": 0.7}
    return DaemonStats(
        version="0.1.0",
        pid=4242,
        uptime_seconds=8_040.0,
        policy="lru",
        health=HealthLevel.OK,
        pool=PoolStats(
            20 * GIB,
            {"free": 7 * GIB, "filling": GIB // 4, "ready": 12 * GIB + GIB // 2, "evicting": GIB // 4},
            usable_bytes=20 * GIB,
            table_bytes=5 * 2**20,
            pinned_bytes=2 * GIB,
        ),
        store=direction(118 * GIB, 12.0, 1_204, 3),
        load=direction(240 * GIB, 30.0, 1_234_567),
        lookup_seconds=Histogram({"0.0001": 92_160, "0.00025": 102_400, "+Inf": 102_400}, 9.0),
        leases=12,
        pinned_blocks=480,
        sessions=3,
        requests=1_102_400,
        errors={"bad_token": 3, "not_ready": 12, "from_the_future": 1},
        kv_events=812,
        cpu_seconds=80.4,
        resident_bytes=84 * 2**20,
        namespaces=[
            namespace(FINGERPRINT, "meta-llama/Llama-3.1-8B-Instruct", 100_000, 72_300),
            namespace(OTHER, "tiny"),
        ],
        integrity=IntegrityStats(4_096, 4 * GIB, 0, 0, 0),
        tiers=TieringStats(
            promoted_blocks=2_048,
            promoted_bytes=2 * GIB,
            promotions_waiting=12,
            promotions_failed={"corrupt": 1},
            demoted_blocks=4_096,
            demoted_bytes=4 * GIB,
            demotions_waiting=3,
            writes_avoided=1_357,
            write_budget_left_bytes=40 * GIB,
            write_mode="reuse",
            promotion_bytes_per_second=3.1e9,
        ),
        shared=[
            SharedStats(
                url="redis://valkey:6379",
                up=True,
                breaker_trips=1,
                ask_seconds=4e-4,
                asked_keys=1_024,
                found_keys=512,
                unanswered_keys=32,
                read_blocks=500,
                read_bytes=GIB,
                queued_reads=4,
                written_blocks=700,
                written_bytes=GIB,
                already_stored=90,
                dropped_writes=12,
                queued_writes=3,
                mismatches=1,
                errors={"full": 1},
                servers=[
                    SharedServer("valkey-0:6379", True, ""),
                    SharedServer("valkey-1:6379", False, "valkey-1:6379 cannot be reached: no."),
                ],
                unshared_namespaces=2,
            )
        ],
        disks=[disk("/mnt/nvme0/kvoffd", "serving"), disk("/mnt/nvme1/kvoffd", "failed", "It cannot be opened.")],
        last_minute=window(60, 1000, 600, 100),
        last_hour=window(3600, 50_000, 30_000),
        since_start=window(8040, 100_000, 72_300),
        curve=HitCurve(1_600_000, 1_000_000, ratios),
        curve_seen_bytes=40 * GIB,
    )


@pytest.fixture
def render() -> Callable[..., str]:
    """Text of a renderable on a screen of ``width`` columns, without colours."""

    def text_of(page: RenderableType, width: int = 80) -> str:
        stream = StringIO()
        Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(page)
        return stream.getvalue()

    return text_of
