"""What doctor finds: every kind of finding is brought about, a healthy busy daemon has none, and none contradict."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs

from kvoffd_client.cli.doctor import report_of
from kvoffd_client.cli.stats import UNTIMED
from kvoffd_proto.admin import NamespaceInfo, SessionInfo
from kvoffd_proto.findings import KINDS, EngineMetrics, Facts, command_of, find, judge_value, sentence_of
from kvoffd_proto.messages import GroupSpec, Role
from kvoffd_proto.stats import (
    MISS_REASONS,
    BranchPoint,
    CopyStats,
    DaemonStats,
    DiskStats,
    Histogram,
    HitCurve,
    Lifetime,
    NamespaceStats,
    PoolStats,
    Problem,
    SettingInfo,
    SharedStats,
    TieringStats,
    Window,
)
from kvoffd_proto.verdict import doubt_points, needed_tokens, own_suffices

GIB = 2**30
SIZES = ("0.1", "0.2", "0.5", "1", "2", "5", "10")
FLAT = (10, 30, 60, 60, 60, 60, 60)
RISING = (4, 6, 17, 26, 33, 36, 36)
NAMES = ("llama", "qwen")


def curve(percents: tuple[float, ...] = FLAT, found: float = 60, asked: int = 1_000_000) -> HitCurve:
    ratios = {size: at / 100 for size, at in zip(SIZES, percents, strict=True)}
    return HitCurve(asked, round(asked * found / 100), ratios)


def traffic(**changes: Any) -> dict[str, Any]:
    """10,000 keys: half were loaded, a tenth the engines had themselves, the others had never been stored."""
    return {
        "lookups": 1000, "asked_keys": 10_000, "loaded_keys": 5000, "not_needed_keys": 1000,
        "misses": {"unknown": 4000}, "found_keys": {"pool": 6000}, "asked_tokens": 160_000, "loaded_tokens": 80_000,
        "saved_seconds": 20.0, "loaded_bytes": 10 * GIB, "stored_bytes": 20 * GIB, "stored_blocks": 8000,
        "prompt_tokens": {"computed": 64_000, "engine": 16_000, "pool": 70_000, "store": 10_000},
    } | changes  # fmt: skip


def counted(number: int = 1, **changes: Any) -> NamespaceStats:
    found = {"ready_blocks": 8000, "ready_bytes": 16 * GIB, "prefill_tokens_per_second": 4000.0, "curve": curve()}
    id_ = (bytes([number]) * 32).hex()
    return NamespaceStats(id=id_[:12], model=NAMES[number - 1], fingerprint=id_, **(traffic() | found | changes))


def info(
    number: int = 1, label: str = "", sessions: int = 2, shard_bytes: int = 2**21, **fields: object
) -> NamespaceInfo:
    label = label or NAMES[number - 1]
    described = json.dumps({"model": label, "tokens_per_hash": 16, **fields})
    groups, shards = [GroupSpec("full", 16)], [[shard_bytes]]
    return NamespaceInfo(bytes([number]) * 32, label, 1, 32, groups, shards, 8000, 16 * GIB, sessions, described)


def session(number: int, role: Role, age_s: float = 3600.0, name: str = "m") -> SessionInfo:
    return SessionInfo(number, role, name, "vllm", 7, 0, age_s, 1.0, 0, 0, 0, 0, 0, [bytes([1]) * 32])


DECLINED = Window(seconds=3600.0, **traffic(misses={"rejected": 900, "evicted": 100, "unknown": 3000}))
ENGINE = EngineMetrics({
    "vllm:kvoffd_connected": 1, "vllm:kvoffd_lookups_total": 1000, "vllm:kv_offload_load_bytes_total": 10 * GIB,
    "vllm:external_prefix_cache_hits_total": 80_000, "vllm:external_prefix_cache_queries_total": 160_000,
    "vllm:prompt_tokens_total": 160_000,
})  # fmt: skip
SETTINGS = {"pool_file": "", "pool_size": "20GiB", "disk": "", "disk_deadline": "5s"}
STATS = DaemonStats(
    version="0.2.0",
    policy="learned",
    uptime_seconds=7200.0,
    requests=100_000,
    last_hour_requests=100_000,
    last_hour_errors={"not_ready": 1000},
    pool=PoolStats(
        size_bytes=20 * GIB, bytes={"ready": 16 * GIB, "free": 4 * GIB}, memory="private", huge_page_bytes=20 * GIB
    ),
    store=CopyStats(jobs=5000, failed_jobs=2),
    load=CopyStats(jobs=5000),
    since_start=Window(seconds=7200.0, **traffic()),
    last_hour=Window(seconds=3600.0, **traffic()),
    namespaces=[counted()],
    curve=curve(),
    curve_seen_bytes=16 * GIB,
    last_hour_loop_blocked=Histogram({"0.001": 9900, "0.01": 10_000, "+Inf": 10_000}),
    settings=[SettingInfo(name, value) for name, value in SETTINGS.items()],
)
ENGINES = [session(1, Role.SCHEDULER), session(2, Role.WORKER)]
BUSY = Facts(STATS, [info()], ENGINES, {"http://engine:8000": ENGINE}, 0, "advise")
DISK = DiskStats(
    "/mnt/nvme0", True, "serving", size_bytes=500 * GIB, used_bytes=100 * GIB, physical_bytes=100 * GIB, blocks=50_000,
    oldest_seconds=90_000.0, read_bytes=10 * GIB, written_bytes=20 * GIB,
)  # fmt: skip


def facts(stats: dict[str, Any] | None = None, **changes: Any) -> Facts:
    return Facts(**{name: getattr(BUSY, name) for name in Facts.__dataclass_fields__} | changes | (
        {"stats": structs.replace(STATS, **stats)} if stats else {}
    ))  # fmt: skip


def space(**changes: Any) -> Facts:
    """The only namespace has other counts, and so have all together."""
    counts = {name: value for name, value in changes.items() if name in Window.__struct_fields__}
    return facts({
        "namespaces": [counted(**changes)],
        "since_start": Window(seconds=7200.0, **traffic(**counts)),
        "last_hour": Window(seconds=3600.0, **traffic(**counts)),
    })  # fmt: skip


def engine(**changes: float) -> Facts:
    named = {f"vllm:{name}": value for name, value in changes.items()}
    return facts(engines={"http://engine:8000": EngineMetrics({**ENGINE.metrics, **named})})


def with_disk(free_bytes: int | None = None, skipped: int = 0, **changes: Any) -> Facts:
    disk = structs.replace(DISK, **changes)
    tiers = TieringStats(write_mode="always", written_blocks=1000, not_written={"budget": skipped, "unlikely": 500})
    return facts(
        {"disks": [disk], "tiers": tiers},
        disks_free_bytes={"/mnt/nvme0": free_bytes} if free_bytes else {},
    )


FAILING = CopyStats(last_hour_jobs=1000, last_hour_failed_jobs=50)
BLOCKED = Histogram({"0.01": 900, "0.1": 1000, "+Inf": 1000})
HALF = structs.replace(info(2, "llama"), sessions=0)
EVICTED = {"misses": {"evicted": 3000, "unknown": 1000}}
LACKING = Window(seconds=7200.0, **traffic(**EVICTED))
FOR_SPACE = {"misses": {"evicted": 300, "rejected": 2000, "no_space": 700, "unknown": 1000}}
SMALL_DISK = {
    "used_bytes": 450 * GIB, "physical_bytes": 500 * GIB, "evicted_blocks": 110_000, "written_bytes": 1000 * GIB
}  # fmt: skip
CASES: dict[str, Facts] = {
    "errors": facts({"last_hour_errors": {"not_ready": 1001}}),
    "failed_stores": facts({"store": FAILING}),
    "failed_loads": facts({"load": FAILING}),
    "loop_blocked": facts({"last_hour_loop_blocked": BLOCKED}),
    "no_engine": facts(sessions=[], namespaces=[], engines={}),
    "partial_blocks": space(partial_blocks=4000),
    "engine_refused": facts(sessions=[structs.replace(session(1, Role.SCHEDULER), problem="worker 0: No CUDA here.")]),
    "halves_apart": facts(sessions=[session(1, Role.SCHEDULER, name="vllm:12345678 llama scheduler")]),
    "workers_missing": facts(sessions=[session(1, Role.SCHEDULER)]),
    "lookups_late": space(late_lookups=200),
    "swapped": facts(swapped_bytes=GIB),
    "huge_pages": facts({"pool": structs.replace(STATS.pool, memory="shared", huge_page_bytes=0)}, huge_pages="never"),
    "unpinnable": facts({"pool": structs.replace(STATS.pool, unpinnable_bytes=GIB)}),
    "integrated_gpu": facts({"pool": structs.replace(STATS.pool, integrated_gpus=1)}),
    "numa": facts({"pool": structs.replace(STATS.pool, numa_remote_slots=4000)}),
    "disk_space": with_disk(300 * GIB),
    "disk_too_small": with_disk(**SMALL_DISK, read_bytes=200 * GIB),
    "tier_late": space(misses={"tier_late": 500, "unknown": 3500}, found_keys={"pool": 4000, "disk": 2000}),
    "tier_down": space(misses={"tier_down": 1500, "unknown": 2500}),
    "disk_writes": with_disk(written_bytes=600 * GIB),
    "disk_write_limit": with_disk(skipped=500, written_bytes=600 * GIB, read_bytes=200 * GIB),
    "not_shared": facts(namespaces=[info(1), info(2, "llama", tokens_per_hash=64)]),
    "left_behind": facts(namespaces=[HALF, info(1, tokens_per_hash=64)]),
    "pool_too_small": facts(
        {
            "curve": curve(RISING, 26),
            "curve_seen_bytes": 200 * GIB,
            "since_start": LACKING,
        }
    ),
    "lru_is_better": facts({"curve": curve(FLAT, 55), "last_hour": DECLINED}),
    "thrash": space(**EVICTED),
    "pool_too_large": facts({"curve_seen_bytes": GIB}),
    "starving": facts(
        {"namespaces": [counted(), counted(2, ready_bytes=GIB, quota_bytes=GIB, curve=curve(RISING, 5))]}
    ),
    "crowding": facts(
        {
            "namespaces": [counted(ready_bytes=15 * GIB, curve=curve((1,) * 7, 1)), counted(2, curve=curve(RISING, 5))],
            "since_start": LACKING,
        }
    ),
    "prompts_differ": facts({"namespaces": [counted(branching=BranchPoint(1024, 1240, 410_000, 1_000_000))]}),
    "engine_unreachable": facts(engines={"http://engine:8000": EngineMetrics(problem="It does not answer.")}),
    "engine_without": facts(engines={"http://engine:8000": EngineMetrics({"vllm:num_requests_running": 1.0})}),
    "engine_away": engine(kvoffd_connected=0),
    "engine_late": engine(kvoffd_late_lookups_total=120),
    "hits_disagree": engine(kv_offload_load_bytes_total=0),
}  # fmt: skip


def test_each_finding_is_brought_about_and_alone() -> None:
    assert find(BUSY) == []
    assert CASES.keys() == KINDS.keys()
    for check, given in CASES.items():
        found = find(given)
        assert [one.check for one in found] == [check]
        (one,) = found
        assert one.evidence.endswith((".", "!")), check
        assert one.meaning.endswith("."), check
        assert one.fix
        assert "{" not in one.fix.replace('{"kv_connector"', ""), check
        assert report_of(given).status == {"error": 2, "warning": 1, "info": 0}[one.level]


def test_a_fix_can_be_copied_only_where_it_is_a_command() -> None:
    """Others are settings, or advice in words."""
    commands = {check for check, given in CASES.items() if command_of(find(given)[0])}
    assert commands == {
        "no_engine", "workers_missing", "swapped", "huge_pages", "numa", "disk_space", "tier_down", "not_shared",
        "left_behind", "thrash", "starving", "crowding", "prompts_differ", "engine_unreachable", "engine_without",
        "hits_disagree",
    }  # fmt: skip


def test_of_two_findings_about_one_disk_it_is_said_which_comes_first() -> None:
    small = with_disk(**SMALL_DISK)
    writes, space = find(small)
    assert (writes.check, space.check) == ("disk_writes", "disk_too_small")
    assert "First give it more space (see disk_too_small)" in writes.evidence


def test_a_disk_that_was_filled_once_is_not_too_small() -> None:
    """It evicts for blocks of another size, and its contents were not replaced even once."""
    assert find(with_disk(**{**SMALL_DISK, "evicted_blocks": 49_999}, read_bytes=200 * GIB)) == []


@pytest.mark.parametrize(
    ("misses", "points"),
    [
        ({"unknown": 4000}, 0.0),
        ({"unknown": 2000, "computing": 2000}, 0.0),
        ({"unknown": 3970, "evicted": 30}, 0.0),
        ({"unknown": 3700, "evicted": 100, "rejected": 100, "after_gap": 100}, 300 / 90),
        ({"evicted": 2000, "rejected": 2000}, 36 - 26),
    ],
)
def test_more_memory_promises_no_more_than_what_was_missed_for_want_of_it(
    misses: dict[str, int], points: float
) -> None:
    found = find(facts({
        "curve": curve(RISING, 26),
        "curve_seen_bytes": 200 * GIB,
        "since_start": Window(seconds=7200.0, **traffic(misses=misses)),
    }))  # fmt: skip
    assert [one.check for one in found] == ["pool_too_small"] * bool(points)
    for one in found:
        assert 100 * one.weight <= points


def test_the_three_ways_to_lack_space_count_together() -> None:
    """Under `learned` a pool that is too small shows in what is rejected."""
    (found,) = find(space(**FOR_SPACE))
    assert found.check == "thrash"
    assert "30.0 % of the keys asked for in the last hour" in found.evidence


def test_the_write_limit_is_raised_by_what_was_skipped_where_the_disks_are_read() -> None:
    limited = {"written_bytes": 600 * GIB, "skipped": 500}
    (found,) = find(with_disk(read_bytes=200 * GIB, **limited))
    assert "25.0 % of the blocks" in found.evidence
    assert found.fix.startswith('disk_write_per_day = "10800GiB"')  # half as much again as 600 GiB in two hours
    assert [one.check for one in find(with_disk(read_bytes=GIB, **limited))] == ["disk_writes"]


def test_a_quota_that_is_used_is_no_reason_for_a_larger_pool() -> None:
    limited = counted(ready_bytes=GIB, quota_bytes=GIB, curve=curve(RISING, 26))
    pool = structs.replace(STATS.pool, bytes={"ready": GIB, "free": 19 * GIB})
    asked = {"curve": curve(RISING, 26), "curve_seen_bytes": 200 * GIB}
    (found,) = find(facts({"namespaces": [limited], "pool": pool, **asked}))
    assert found.check == "starving"
    assert " uses all its quota of 1.00 GiB. " in found.evidence
    assert found.fix == f"kvoffd-cli namespaces quota {limited.id} --max 2GiB"


def test_stores_that_failed_for_want_of_space_are_told_from_others() -> None:
    lost = Window(**traffic(no_space_keys=120, no_space_causes={"pinned": 100, "writing": 20}))
    (found,) = find(facts({"store": FAILING, "last_hour": lost}))
    assert found.evidence == (
        "In the last hour 50 of 1,000 store jobs failed. 100 blocks had no space: leases and copies pinned the pool."
    )
    lost = Window(**traffic(no_space_keys=120, no_space_causes={"quota": 100, "writing": 20}))
    assert not find(facts({"store": FAILING, "last_hour": lost})), "quotas refused them"


def test_what_was_over_an_hour_ago_is_no_finding() -> None:
    """It was one until the daemon's end. Its counts stay in the statistics."""
    failed = CopyStats(jobs=1000, failed_jobs=500)
    over = {
        "store": failed,
        "load": failed,
        "loop_blocked_seconds": BLOCKED,
        "since_start": Window(**traffic(late_lookups=200, partial_blocks=4000)),
        "namespaces": [counted(late_lookups=200, partial_blocks=4000)],
    }
    assert find(facts(over)) == []


def test_every_other_error_and_warning_comes_before_what_is_only_worth_knowing() -> None:
    problems = [Problem("disk_hangs", "A."), Problem("pool_corrupt", "B.")]
    many = facts({"health_problems": problems, "curve_seen_bytes": GIB}, sessions=[session(1, Role.SCHEDULER)])
    assert [one.check for one in find(many)] == ["pool_corrupt", "disk_hangs", "workers_missing", "pool_too_large"]
    assert report_of(many).verdict[0].startswith("Not healthy, 1 error, 2 warnings, 1 note. ")
    warned = report_of(CASES["not_shared"])
    assert (warned.healthy, warned.verdict[0]) == (
        True,
        "It works, 1 warning. kvoffd 0.2.0, up for 2 h, with 1 engine.",
    )
    down = facts({"ready": False, "health_problems": [Problem("stopping", "The daemon is stopping.")]})
    assert report_of(down).status == 2


def test_workers_are_counted_by_engine() -> None:
    """Where names tell which are one engine's. A scheduler of another name may be a tool's."""
    two = structs.replace(info(), world_size=2)
    three = [session(0, Role.SCHEDULER), *(session(number, Role.WORKER) for number in range(3))]
    given = facts(namespaces=[two], sessions=[*three, session(9, Role.SCHEDULER)])
    assert [one.evidence for one in find(given)] == ["llama (010101010101): 1 of 2 workers of an engine are connected."]
    whole = three[:3]
    for others in ([session(9, Role.SCHEDULER, name="tool")], [session(9, Role.WORKER, name="worker")]):
        assert find(facts(namespaces=[two], sessions=[*whole, *others])) == []


def test_an_engine_whose_halves_reach_two_daemons_is_found_at_both() -> None:
    """Also where other engines of the namespace are whole."""

    def halves(name: str, *roles: Role, age_s: float = 3600.0, first: int = 10) -> list[SessionInfo]:
        names = {Role.SCHEDULER: f"vllm:{name} llama scheduler", Role.WORKER: f"vllm:{name} llama worker 0"}
        return [session(number, role, age_s, names[role]) for number, role in enumerate(roles, first)]

    whole = halves("whole", Role.SCHEDULER, Role.WORKER)
    for role, half in ((Role.SCHEDULER, "its scheduler is"), (Role.WORKER, "workers are")):
        for others in ([], whole, ENGINES):
            (found,) = find(facts(sessions=[*others, *halves("1234", role, first=20)]))
            assert found.evidence == f"Of the engine vllm:1234 llama only {half} connected."
    assert find(facts(sessions=[*whole, *halves("1234", Role.SCHEDULER, age_s=30.0, first=20)])) == []
    (scheduler,) = halves("1234", Role.SCHEDULER, first=20)
    refused = structs.replace(scheduler, problem="The scheduler is connected to the daemon in /run/kvoffd, but.")
    assert [one.check for one in find(facts(sessions=[*whole, refused]))] == ["engine_refused"]
    moved = structs.replace(whole[1], namespaces=[bytes([2]) * 32])
    assert [one.check for one in find(facts(sessions=[*ENGINES, whole[0], moved]))] == []


def test_slots_on_other_nodes_are_compared_with_the_slots_of_all_ranks() -> None:
    pool = structs.replace(STATS.pool, numa_remote_slots=4000)
    (found,) = find(CASES["numa"])
    assert found.evidence == "Since the start 4,000 slots were taken on another NUMA node than their GPU."
    assert find(facts({"pool": pool, "namespaces": [counted(world_size=8)]})) == []


def test_no_limit_that_is_advised_is_none() -> None:
    """0 is no limit of writes, and a quota that lets nothing in."""
    little = facts({"disks": [structs.replace(DISK, size_bytes=1 << 19, written_bytes=1 << 20, read_bytes=0)]})
    assert [one.fix[:27] for one in find(little)] == ['disk_write_per_day = "1MiB"']
    limited, pool = counted(ready_bytes=0, quota_bytes=0, curve=curve(RISING, 5)), PoolStats(size_bytes=20 * GIB)
    assert [one.fix.split()[-1] for one in find(facts({"namespaces": [limited], "pool": pool}))] == ["1MiB"]


def test_an_engine_without_a_prompt_is_not_away() -> None:
    """Before its first one vLLM does not say that it is connected."""
    fresh = EngineMetrics({"vllm:kvoffd_connected": 0})
    assert find(facts(engines={"http://engine:8000": fresh})) == []
    found = find(facts(engines={"http://engine:8000": fresh}, sessions=[]))
    assert [one.check for one in found] == ["engine_away"]


def test_hits_of_another_connector_are_not_missed_here() -> None:
    """Below vLLM's MultiConnector, where a decode engine takes most prompts over NIXL."""
    assert find(engine(external_prefix_cache_hits_total=900_000)) == []
    unused = {"external_prefix_cache_hits_total": 900_000, "kv_offload_load_bytes_total": 0}
    two = [*ENGINES, session(3, Role.SCHEDULER, name="n"), session(4, Role.WORKER, name="n")]
    assert find(facts(engines=engine(**unused).engines, sessions=two)) == []


def test_loads_of_an_earlier_daemon_are_not_missed_here() -> None:
    def checks(lifetime_tokens: int, age_seconds: float | None) -> list[str]:
        more = EngineMetrics({**ENGINE.metrics, "vllm:kv_offload_load_bytes_total": 20 * GIB}, "", age_seconds)
        life = Lifetime(1.0, lifetime_tokens)
        return [one.check for one in find(facts({"lifetime": life}, engines={"http://engine:8000": more}))]

    assert checks(80_000, 60.0) == checks(900_000, 60.0) == checks(80_000, None) == ["hits_disagree"]
    assert checks(80_000, 9000.0) == checks(900_000, None) == []


def test_the_verdict_on_what_it_brought() -> None:
    assert judge_value(BUSY).needed_tokens == 144_000
    early = space(lookups=99)
    assert "Too early to say whether it pays off: 99 lookups so far, 100 are needed." in report_of(early).verdict
    assert "no lookup so far" in report_of(Facts(DaemonStats())).verdict[1]
    untold = report_of(space(asked_tokens=0, loaded_tokens=0, saved_seconds=0.0))
    expected = (
        "Of the prompts' tokens 50.0 % were loaded, the engines' own caches had 10.0 %, and 40.0 % were computed."
    )
    assert untold.verdict[1].startswith(f"Paying off: engines loaded 10.0 GiB instead of computing them. {expected}")
    nothing = {"loaded_keys": 0, "loaded_tokens": 0, "saved_seconds": 0.0, "loaded_bytes": 0, "prompt_tokens": {}}
    minute = facts({"last_minute": Window(lookups=3, asked_keys=9)})
    assert " Nothing of the last minute's 3 lookups. " in report_of(minute).verdict[1]

    def why(given: Facts) -> str:
        report = report_of(given)
        assert report.paying_off is False
        assert report.verdict[1].startswith("Not paying off: ")
        return report.verdict[1].removeprefix("Not paying off: ")

    own = space(**nothing, not_needed_keys=9700, misses={"unknown": 300})
    assert why(own) == "the engines' own caches had 97.0 % of the keys asked for."
    assert why(space(**nothing, stored_blocks=0)).startswith("engines stored nothing: ")
    alone = facts({"since_start": Window(**traffic(**nothing)), "curve": curve((0,) * 7, 0)})
    ending = " not repeat: 0.0 % would be found with ten times the memory."
    assert why(alone) == f"the engines' own caches had 10.0 % of the keys asked for, and the rest does{ending}"
    idle = {"since_start": Window(**traffic(**nothing, not_needed_keys=0)), "curve": curve((0,) * 7, 0)}
    assert why(facts(idle)) == f"prompts do{ending}"
    assert why(space(**nothing)) == f"40.0 % of the keys asked for were missed: {MISS_REASONS['unknown']}."
    unknown = facts({"since_start": Window(**traffic(saved_seconds=0.0)), "lifetime": Lifetime(1.0, 10**7, 3600.0)})
    ending = f" time saved is unknown: {UNTIMED}. Since 1970-01-01: 10.0 M tokens and 1 h."
    assert report_of(unknown).verdict[1].endswith(ending)


def test_a_full_pool_that_evicts_is_judged_by_few_lookups_with_how_sure_that_is() -> None:
    few = {"lookups": 22, "asked_keys": 352, "loaded_keys": 0, "not_needed_keys": 172, "misses": {"evicted": 180}}
    few |= {"loaded_tokens": 0, "saved_seconds": 0.0, "evicted_blocks": 40, "prompt_tokens": {}}
    window, rises = Window(**traffic(**few)), curve((4, 6, 10, 16, 33, 60, 60), 0)
    stats = {"since_start": window, "last_hour": window, "curve": rises, "curve_seen_bytes": 200 * GIB}
    report = report_of(facts(stats, engines={}))
    assert report.verdict[1] == (
        "Not paying off: 51.1 % of the keys asked for were missed: evicted to make space for other blocks. From only "
        "22 lookups: give or take 10 percentage points."
    )
    assert report.findings[0].check == "pool_too_small"
    assert report.findings[0].evidence.endswith(" From only 22 lookups: give or take 10 percentage points.")
    little = report_of(facts(stats | {"curve": curve(RISING, 0)}, engines={}))
    assert little.findings == [], "less than the doubt is no advice to buy memory"
    half_empty = facts(stats | {"pool": PoolStats(size_bytes=20 * GIB, bytes={"ready": 8 * GIB})})
    assert report_of(half_empty).paying_off is False, "a judgement is not taken back after a clear"
    half = Window(**traffic(**few | {"loaded_keys": 90}))
    assert round(doubt_points(half)) == 20, "of the keys that the engines lack a half is loaded"


def test_what_was_saved_in_money() -> None:
    """1,200 s in two hours on two ranks are 8 hours of a GPU a day."""
    total = Window(seconds=7200.0, **traffic(saved_seconds=1200.0, saved_gpu_seconds=2400.0))
    stats: dict[str, Any] = {"since_start": total, "last_day": total}
    assert judge_value(facts(stats)).gpu_seconds_a_day == 8 * 3600
    assert report_of(facts(stats)).verdict[1].endswith(" At this rate it saves 8.0 GPU hours a day.")
    assert report_of(facts(stats), gpu_hour=3.5).verdict[1].endswith(" 8.0 GPU hours a day, worth 28.00 a day.")
    early = facts(stats | {"uptime_seconds": 3599.0, "last_day": structs.replace(total, seconds=3599.0)})
    verdict = report_of(early, gpu_hour=3.5).verdict[1]
    assert " of prefill, worth " in verdict
    assert verdict.endswith(" so far. A figure for a day takes an hour: the daemon is up for 59 min 59 s.")


def test_a_pool_with_free_space_crowds_nobody() -> None:
    """After a clear nobody has blocks; an empty namespace is no one's fault, also while others have all blocks."""
    starved = CASES["crowding"]
    assert [one.check for one in find(starved)] == ["crowding"]
    emptied = [counted(ready_bytes=0, ready_blocks=0, curve=curve(RISING, 5)), *starved.stats.namespaces]
    assert [one.check for one in find(facts({"namespaces": emptied, "since_start": LACKING}))] == ["crowding"]
    pool = PoolStats(size_bytes=20 * GIB, bytes={"ready": 2 * GIB, "free": 18 * GIB})
    cleared = Facts(
        **{name: getattr(starved, name) for name in Facts.__dataclass_fields__}
        | {"stats": structs.replace(starved.stats, pool=pool)}
    )
    assert find(cleared) == []


def test_keys_are_counted_where_engines_report_no_prompts() -> None:
    total = Window(**traffic(prompt_tokens={}, **EVICTED))
    (found,) = find(facts({"curve": curve(RISING, 26), "curve_seen_bytes": 200 * GIB, "since_start": total}))
    why = "Since the start 40.0 % of the keys asked for were missed; it would be 31.0 % with a pool"
    assert found.evidence.startswith(why)


def test_what_pays_off_is_counted_in_tokens() -> None:
    """Tails of prompts are in no block: of keys the engines' caches had 96 %, of tokens 88 %."""
    tokens = {"computed": 12_000, "engine": 88_000}
    own = Window(**traffic(loaded_keys=0, not_needed_keys=9600, misses={"unknown": 400}, prompt_tokens=tokens))
    assert not own_suffices(own)
    assert needed_tokens(own) == 12_000
    assert judge_value(facts({"since_start": own})).sentence.startswith("Not paying off: ")
    hardly = {"computed": 99_500, "engine": 0, "pool": 500}
    given = facts({"since_start": Window(**traffic(prompt_tokens=hardly))})
    assert judge_value(given).paying_off is False, "half of the keys, and half a percent of the tokens"


def test_a_longer_deadline_is_advised_only_where_reads_miss_it() -> None:
    late = {"misses": {"tier_late": 500, "unknown": 3500}, "found_keys": {"pool": 4000, "shared": 2000}}
    total = Window(**traffic(**late))
    settings = [*STATS.settings, SettingInfo("shared_deadline", "2s")]
    for failed, fix, gain in (
        ({"deadline": 500}, 'shared_deadline = "4s"; then restart the daemon', 5.0),
        ({}, "a larger pool_size, or a faster disk or store", None),
    ):
        store = SharedStats("redis://s", up=True, promotions_failed=failed)
        (found,) = find(facts({"since_start": total, "last_hour": total, "shared": [store], "settings": settings}))
        assert (found.check, found.fix) == ("tier_late", fix)
        assert found.gain == (gain and pytest.approx(gain))
    for known, fix in (
        ([], "a longer disk_deadline or shared_deadline; then restart the daemon"),  # statistics without settings
        (settings, 'shared_deadline = "4s"; then restart the daemon'),
    ):
        store = SharedStats("redis://s", up=True, promotions_failed={"deadline": 500})
        (found,) = find(facts({"since_start": total, "last_hour": total, "shared": [store], "settings": known}))
        assert (found.check, found.fix) == ("tier_late", fix)


def test_what_tiers_had_too_late_a_larger_pool_would_have_in_time() -> None:
    late = {"misses": {"tier_late": 2000, "unknown": 2000}, "found_keys": {"pool": 4000, "shared": 2000}}
    total = Window(**traffic(**late))
    stats = {"curve": curve(RISING, 26), "curve_seen_bytes": 200 * GIB, "since_start": total, "last_hour": total}
    found = find(facts(stats | {"shared": [SharedStats("redis://s", up=True)]}))
    assert {one.check: one.gain for one in found} == {"tier_late": None, "pool_too_small": pytest.approx(9.0)}


def test_a_pool_that_is_too_large_has_a_size_that_suffices() -> None:
    (found,) = find(CASES["pool_too_large"])
    assert (found.fix, found.gain) == ('pool_size = "1280MiB"; then restart the daemon', 0.0)


def test_a_namespace_that_crowds_others_is_limited() -> None:
    """Half of what is asked finds nothing in 15 of 20 GiB; the others would have 3.6 times the space.

    Of what they ask, a pool of 3.6 times the size finds 34.6 % by lru, not 26 %: of what all ask 4.3 points.
    """
    (found,) = find(CASES["crowding"])
    assert found.fix == f"kvoffd-cli namespaces quota {'01' * 6} --max 1920MiB"
    assert "llama (010101010101) has 48.4 % of the blocks." in found.evidence
    assert found.gain == pytest.approx(0.9 * 4.3125), "engines have a tenth themselves"
    limited = [structs.replace(one, quota_bytes=20 * GIB) for one in CASES["crowding"].stats.namespaces]
    assert find(facts({"namespaces": limited, "since_start": LACKING})) == []


def test_sizes() -> None:
    (found,) = find(CASES["pool_too_small"])
    assert found.evidence == (
        "Since the start engines computed 40.0 % of the prompts' tokens; it would be 31.0 % with a pool of 100 GiB, "
        "not 20.0 GiB "
        "(estimated for lru, without quotas)."
    )
    assert found.gain == pytest.approx(9.0), "ten points of the nine tenths that engines lack"
    assert found.fix.startswith('pool_size = "100GiB", or disk = ["/mnt/nvme=80GiB"]; then restart the daemon')
    with_tier = {"disks": [DISK], "since_start": Window(**traffic(found_keys={"pool": 5000, "disk": 1000}, **EVICTED))}
    (found,) = find(facts({"curve": curve(RISING, 26), "curve_seen_bytes": 200 * GIB, **with_tier}))
    assert found.evidence.endswith(" Tiers had 10.0 % of the keys asked for.")
    assert found.fix == 'pool_size = "100GiB"; then restart the daemon'
    assert found.gain == pytest.approx(6.75), "the disk has a quarter of what a larger pool would find"
    little = facts({"curve": curve(RISING, 34), "curve_seen_bytes": 200 * GIB, "since_start": LACKING})
    assert find(little)[0].level == "info", "two points are a sentence"
    worse = find(
        facts(
            {"curve": curve(RISING, 19), "curve_seen_bytes": 200 * GIB, "since_start": LACKING, "last_hour": DECLINED}
        )
    )
    assert [(one.check, round(one.weight, 3)) for one in worse] == [("pool_too_small", 0.09), ("lru_is_better", 0.063)]
    assert worse[1].evidence == (
        "Since the start engines computed 40.0 % of the prompts' tokens with the policy learned; it would be 33.7 % "
        "with lru "
        "(estimated)."
    )
    learned_is_better = facts({"curve": curve(RISING, 40), "curve_seen_bytes": 200 * GIB, "since_start": LACKING})
    assert find(learned_is_better) == []


def test_lru_is_better_is_said_only_where_the_policy_is_the_cause_and_for_long() -> None:
    less = {"curve": curve(FLAT, 55), "last_hour": DECLINED}
    assert [one.check for one in find(facts(less))] == ["lru_is_better"]
    hour = Window(seconds=3600.0, **traffic(misses={"invalidated": 400, "unknown": 3500, "rejected": 100}))
    for other in (
        {"policy": "lru"},
        {"uptime_seconds": 3599.0},
        {"curve": curve(FLAT, 58.1)},
        {"last_hour": hour},
        {"namespaces": [counted(quota_bytes=GIB)]},
    ):
        assert "lru_is_better" not in {one.check for one in find(facts({**less, **other}))}, other


def test_what_a_rollout_left_behind_is_named_with_what_differs() -> None:
    (beside,) = find(facts(namespaces=[info(1), info(2, "llama", hash_probe="7b" * 32)]))
    assert "differ: PYTHONHASHSEED differs." in beside.evidence
    assert beside.fix == "kvoffd-cli namespaces diff 010101010101 020202020202"
    salted = facts(namespaces=[info(1, salt="a"), info(2, "llama", salt="b")])
    assert find(salted) == [], "that is what a salt is for"
    empty = facts(namespaces=[structs.replace(HALF, ready_bytes=0), info(1, tokens_per_hash=64)])
    assert find(empty) == []


def test_what_the_daemon_says_is_not_said_twice() -> None:
    late = {"last_hour": Window(**traffic(late_lookups=200))}
    assert [one.check for one in find(facts(late))] == ["lookups_late"]
    twice = find(facts({**late, "health_problems": [Problem("lookups_late", "In the last 100 s ...")]}))
    assert [one.evidence for one in twice] == ["In the last 100 s ..."]


@pytest.mark.parametrize(
    ("memory", "file", "fix"),
    [
        ("private", "", "more free memory when the daemon starts"),
        ("shared", "", "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        (
            "shared",
            "/dev/shm/a node/kvoffd.pool",  # in a directory of the file system that is mounted at /dev/shm
            "mount -o remount,huge=advise $(findmnt -no TARGET -T '/dev/shm/a node/kvoffd.pool')",
        ),
    ],
)
def test_small_pages_have_the_fix_of_their_memory(memory: str, file: str, fix: str) -> None:
    settings = [SettingInfo(name, value) for name, value in (SETTINGS | {"pool_file": file}).items()]
    pool = structs.replace(STATS.pool, memory=memory, huge_page_bytes=GIB, page_slowdown=1.94)
    (found,) = find(facts({"pool": pool, "settings": settings}, huge_pages="never"))
    assert (found.check, found.fix.startswith(fix)) == ("huge_pages", True)
    assert command_of(found) == ("" if memory == "private" else fix), "what is a command can be copied"
    assert "1.9 times as long" in found.evidence
    unknown = structs.replace(pool, memory="")  # an earlier daemon does not say
    assert not find(facts({"pool": unknown, "settings": settings}))


def test_a_place_at_which_one_prompt_differs_is_said_in_the_singular() -> None:
    assert sentence_of(BranchPoint(32, 1, 96, 960)).startswith(
        "1 prompt differs from others after 32 tokens and continues with 96 tokens that were stored before."
    )
    assert sentence_of(BranchPoint(32, 2, 192, 960), " of m").startswith(
        "2 prompts of m differ after 32 tokens and continue with 96 tokens each that were stored before."
    )
