"""The screen of ``top``, drawn of made-up statistics: rates, restarts, low and narrow screens, names, ASCII."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from msgspec import structs
from rich.cells import cell_len
from rich.console import Console

from kvoffd_client.cli import PLAIN
from kvoffd_client.cli.top import HELP, SORTS, VIEWS, History, Reading, Screen
from kvoffd_proto.admin import HealthLevel
from kvoffd_proto.engines import Engine
from kvoffd_proto.stats import (
    CopyStats,
    DaemonStats,
    DiskStats,
    Histogram,
    HitCurve,
    LearnedStats,
    Lifetime,
    NamespaceStats,
    PolicyClass,
    PoolStats,
    Problem,
    SharedServer,
    SharedStats,
    TieringStats,
    Window,
)

GIB = 2**30


def counts(at: int, times: int = 1) -> dict[str, object]:
    """After ``at`` seconds with 100 keys of 16 tokens a second: a half loaded, an eighth in the engines' caches."""
    keys = 100 * times * at
    misses = {"evicted": keys * 3 // 10, "unknown": keys // 10}
    return {
        "lookups": keys // 10, "asked_keys": keys, "loaded_keys": keys // 2, "not_needed_keys": keys // 10,
        "misses": misses, "loaded_tokens": 8 * keys, "saved_seconds": keys / 100, "loaded_bytes": keys << 20,
        "prompt_tokens": {"computed": 6 * keys, "engine": 2 * keys, "pool": 5 * keys, "store": 3 * keys},
        "stored_bytes": keys << 19, "stored_blocks": keys, "evicted_blocks": keys // 5,
    }  # fmt: skip


def stats(at: int, names: tuple[str, ...] = ("llama", "qwen"), uptime_s: float | None = None) -> DaemonStats:
    spaces = [
        NamespaceStats(id=f"{number:012x}", model=name, fingerprint=f"{number:064x}", ready_blocks=1000 * number,
                       ready_bytes=number * GIB, **counts(at, number))  # type: ignore[arg-type]
        for number, name in enumerate(names, 1)
    ]  # fmt: skip
    total = Window(seconds=100.0 + at, **counts(at, sum(range(1, len(names) + 1))))  # type: ignore[arg-type]
    return DaemonStats(
        version="0.2.0",
        policy="learned",
        uptime_seconds=100.0 + at if uptime_s is None else uptime_s,
        pool=PoolStats(
            size_bytes=10 * GIB, bytes={"ready": 5 * GIB, "writing": GIB, "free": 4 * GIB}, pinned_bytes=GIB
        ),
        since_start=total,
        last_hour=total,
        last_minute=total,
        namespaces=spaces,
        curve=HitCurve(1000, 600, {"0.5": 0.5, "1": 0.6, "2": 0.7, "10": 1.0}),
        health=HealthLevel.DEGRADED,
        health_problems=[Problem("disk_hangs", "A call to the disk does not return.")],
        lookup_seconds=Histogram({"0.001": 100, "+Inf": 100}, 0.05),
        disks=[DiskStats("/mnt/nvme0", True, "serving", size_bytes=GIB, used_bytes=GIB // 4, errors={"corrupt": 2})],
        tiers=TieringStats(promoted_bytes=GIB),
        shared=[SharedStats("redis://valkey", True, servers=[SharedServer("valkey-1", False, "Refused.")])],
    )


def drawn(screen: Screen, width: int = 80, height: int = 24) -> list[str]:
    console = Console(file=StringIO(), width=width, height=height, force_terminal=True, legacy_windows=False)
    lines = ["".join(part.text for part in line) for line in console.render_lines(screen.page(console))]
    assert len(lines) <= height
    assert all(cell_len(line) <= width for line in lines)
    return [line.rstrip() for line in lines]


@pytest.fixture
def screen() -> Screen:
    """After ten seconds of traffic."""
    made = Screen(1.0, clock="14:05:22")
    for at in range(11):
        made.reading = Reading(stats(at))
        made.history.add(made.reading.stats)
    return made


def test_the_screen(screen: Screen) -> None:
    lines = drawn(screen)
    text = "\n".join(lines)
    assert lines[0].startswith("kvoffd  DEGRADED: 1 problem  0.2.0  ")
    assert "up 1 min 50 s  learned" in lines[0]
    assert lines[0].endswith("14:05:22")
    assert lines[1].startswith("Pool [█████")
    assert lines[1].endswith("] 60.0 %, 6.00 GiB of 10.0 GiB")
    assert lines[2].strip() == "ready 5.00 GiB  writing 1.00 GiB  free 4.00 GiB  pinned 1.00 GiB"
    assert lines[3] == "Saved   prefill 30.0 s, 24,000 tokens loaded"
    now = next(line for line in lines if line.startswith("now"))
    # 300 keys a second of which 8 tokens each were loaded; of 1 MiB each key.
    shares = ["37.5", "%", "12.5", "%", "31.2", "%", "18.8", "%"]
    assert now.split() == ["now", "4,800", *shares, "300", "MiB", "150", "MiB"]
    titles = lines[lines.index(now) - 1].split()
    assert titles == ["tokens/s", "computed", "own", "pool", "store", "loaded/s", "stored/s"], "those that there were"
    whole = next(line for line in lines if line.startswith("start"))
    assert whole.split()[1:3] == ["436", "37.5"], "in 110 seconds"
    assert "Missed  evicted 30.0 %  never stored 10.0 % in the last hour" in lines
    assert max(map(len, HELP)) <= 80
    assert "Found   60.0 % of tokens; lru 0.5x 50 %, 1x 60 %, 2x 70 %, 10x 100 %" in lines
    assert "Lookups 30/s  queued copies 0  since start: p50 500 µs, p99 990 µs" in lines
    assert "peak 2,400 tokens/s" in text
    assert not [line for line in lines if "copy jobs failed" in line]
    names = [line for line in lines if "0000000000" in line]
    assert [line.split()[0] for line in names] == ["qwen", "llama"], "by tokens, the most first"
    assert names[0].split()[4:] == ["3,200", "37.5", "%", "12.5", "%", "50.0", "%", "evicted"]
    assert any(line.startswith("! disk_hangs: A call") for line in lines)
    assert lines[-1].startswith("1 all  2 clients  3 tiers  4 policy")


def test_hints_are_shown_where_there_are_some(screen: Screen) -> None:
    assert not [line for line in drawn(screen) if line.startswith("Hints")]
    now = stats(10)
    total = structs.replace(now.since_start, retained_blocks=1200, retained_found_keys=3456, unknown_hints=7)
    pool = structs.replace(now.pool, retained_bytes=GIB)
    screen.reading = Reading(structs.replace(now, since_start=total, pool=pool))
    assert "Hints   retained 1.00 GiB  keys found in it 3,456  unknown 7" in drawn(screen)


def test_the_verdict_is_said_where_it_is_not_a_good_one(screen: Screen) -> None:
    def shown(paying_off: bool | None, verdict: str = "") -> list[str]:
        told = {"health": HealthLevel.OK, "health_problems": [], "paying_off": paying_off, "verdict": verdict}
        screen.reading = Reading(structs.replace(stats(10), **told))
        return drawn(screen)

    assert "OK, paying off" in shown(True, "Paying off.")[0]
    assert "Paying off." not in shown(True, "Paying off.")
    bad = shown(False, "Not paying off: prompts do not repeat.")
    assert "OK, not paying off" in bad[0]
    assert "Not paying off: prompts do not repeat." in bad
    early = shown(None, "Too early to say whether it pays off: no lookup so far.")
    assert "OK " in early[0]
    assert "Too early to say whether it pays off: no lookup so far." in early


def test_quotas_leave_room_for_names_and_blocks_may_have_no_count_of_tokens(screen: Screen) -> None:
    few = CopyStats(last_hour_jobs=100, last_hour_failed_jobs=19)
    for at in range(2):
        shown = stats(at)
        untold = {"quota_bytes": 4 * GIB, "loaded_tokens": 0, "saved_seconds": 0.0, "prompt_tokens": {}}
        limited = [structs.replace(one, model=f"org/{one.model}-instruct", **untold) for one in shown.namespaces]
        total = structs.replace(shown.since_start, loaded_tokens=0, saved_seconds=0.0, prompt_tokens={})
        screen.reading = Reading(structs.replace(shown, namespaces=limited, since_start=total, store=few))
        screen.history.add(screen.reading.stats)
    lines = drawn(screen, height=40)
    rows = [line.split() for line in lines if "00000000000" in line]
    assert sorted(row[:5] for row in rows) == [
        ["llama-ins…", "000000000001", "1.00G/4.00G", "-", "-"],
        ["qwen-inst…", "000000000002", "2.00G/4.00G", "-", "-"],
    ]
    assert "Saved   prefill -, - tokens loaded" in lines
    assert next(line for line in lines if line.startswith("now")).split()[1] == "-"
    assert not [line for line in lines if "copy jobs failed" in line], "doctor does not mind so few"
    screen.reading = Reading(structs.replace(stats(1), store=CopyStats(last_hour_jobs=100, last_hour_failed_jobs=20)))
    assert "! 20 copy jobs failed in the last hour: see `kvoffd-cli doctor --all`" in drawn(screen, height=40)


def test_now_is_of_the_last_seconds_and_the_samples_are_bounded() -> None:
    history = History()
    for at in range(0, 5000, 2):
        history.add(stats(at, uptime_s=float(at)))
    idle = stats(4998, uptime_s=5000.0)
    history.add(idle)
    assert history.now().asked_keys == 600, "of the last three seconds: two without anything"
    assert len(history.rates) < 1000
    history.add(idle)
    assert [tokens for tokens, _ in history.rates][-3:] == [2400.0, 2400.0, 0.0], "HTTP may give one answer twice"
    new = NamespaceStats(id="new", **counts(7))  # type: ignore[arg-type]
    assert history.now_of(new).asked_keys == 700, "it was not there before"


def test_every_view_fits_every_screen(screen: Screen) -> None:
    screen.paused, screen.no_answer = True, "No answer since 14:05:23: There is no kvoffd daemon."
    classes = [PolicyClass(f"class {number}", 0.1, 0.5, 0.3, GIB, 1.5) for number in range(50)]
    engines = [Engine(f"engine {number}", [bytes([number]) * 32], ["llama"], 1, 2, [7]) for number in range(50)]
    shown = structs.replace(
        stats(10, tuple(f"model-{number}" * 9 for number in range(50))), learned=LearnedStats(9, 9, classes=classes)
    )
    screen.reading = Reading(shown, engines)
    for screen.view in (*VIEWS, "help"):
        for width, height in ((80, 24), (70, 24), (120, 40), (40, 10), (20, 4), (8, 2), (1, 1), (200, 60)):
            marks = {mark for line in drawn(screen, width, height) for mark in line if not mark.isascii()}
            assert marks <= PLAIN.keys(), "each has a plain form for a locale without it"


def test_names_cannot_move_the_cursor_and_their_ids_stay_whole(screen: Screen) -> None:
    evil = ("\x1b[2Jevil\r\nname", "模型" * 40, "\u202egnip", "a" * 300)
    screen.reading = Reading(stats(10, evil))
    lines = drawn(screen, 80, 40)
    assert all(line.isprintable() for line in lines)
    rows = [line for line in lines if "00000000000" in line]
    assert len(rows) == 4
    assert {cell_len(line.split("GiB")[0]) for line in rows} == {cell_len(rows[0].split("GiB")[0])}, (
        "columns are straight"
    )
    assert any(line.startswith("?[2Jevi") for line in rows)


def test_other_views(screen: Screen) -> None:
    screen.view = "clients"
    assert "No answer yet." in drawn(screen)[2], "it was not asked for them yet"
    screen.paused = True
    assert "Paused." in drawn(screen)[2], "and it will not be"
    screen.reading = Reading(stats(1), [])
    assert "No engine is connected." in drawn(screen)
    fingerprint = bytes.fromhex("000000000001") + bytes(26)
    engine = Engine("vllm 7", [fingerprint], ["tiny"], 1, 4, [7], "", 65.0, 12, GIB, 3, 8 * GIB, GIB, 2 * GIB)
    screen.reading = Reading(stats(1), [engine])
    assert " ".join(drawn(screen)[3].split()) == "vllm 7 000000000001 1 min 5 s ago 1.00 GiB 2.00 GiB 1.00 GiB"
    assert drawn(screen)[4].strip() == "4 workers, pid 7"
    screen.reading = Reading(stats(1), [replace(engine, pids=[], software="vllm 9, on a-pod")])
    drawn_name = " ".join(map(str.strip, drawn(screen)[4:6]))
    assert drawn_name == "4 workers, vllm 9, on a-pod", "in another pid namespace its pids are unknown"
    screen.reading = Reading(stats(1), [engine])
    assert drawn(screen, 120)[3].split()[2:4] == ["tiny", "(000000000001)"], "there is room for the label"
    screen.view = "tiers"
    text = "\n".join(drawn(screen))
    assert "  corrupt 2: blocks read back differed from what was written: a bad drive" in text
    assert "  server valkey-1: cannot be used: Refused." in text
    screen.reading = Reading(structs.replace(stats(1), disks=[], shared=[], tiers=None))
    assert any(line.startswith("There is no disk and no shared store") for line in drawn(screen))
    screen.view = "policy"
    screen.reading = Reading(structs.replace(stats(1), policy="lru"))
    assert "It does not learn." in drawn(screen)
    screen.reading = Reading(stats(1))
    assert "It has not seen enough to learn." in drawn(screen)
    classes = [PolicyClass("old turn 4", 0.5, 0.8, 0.3, 2 * GIB, 1.25)]
    learned = LearnedStats(9, 30_000, classes=classes)
    screen.reading = Reading(structs.replace(stats(1), learned=learned))
    lines = drawn(screen)
    assert "That is little: the following are first estimates." in lines
    text = " ".join(map(str.strip, lines))
    assert "It has seen 9 prompts, which asked for about 0.44 % of the pool's size." in text
    assert "50.0 % old turn 4 perhaps 80.0 % come back, most of them later than was seen so far; 2.00 GiB in" in text


def test_an_empty_daemon_and_one_that_was_there_before() -> None:
    empty = Screen(1.0, Reading(DaemonStats()))
    empty.history.add(DaemonStats())
    for empty.sort in SORTS:
        assert "No namespace: no engine has connected yet." in drawn(empty)
    empty.reading = Reading(structs.replace(stats(1), lifetime=Lifetime(1.0, 10**9, 7200.0)))
    assert "Saved   prefill 3.00 s, 2,400 tokens loaded; 2 h in all" in drawn(empty)


def test_a_high_screen_is_used_and_a_narrow_one_has_whole_columns(screen: Screen) -> None:
    high = drawn(screen, 120, 40)
    assert len([line for line in high if line]) >= 35, "it used 19"
    assert [line.split() for line in high if line.startswith("Missed")] == [
        ["Missed", "1", "min", "1", "hour", "start"]
    ]
    assert ["evicted", "30.0", "%", "30.0", "%", "30.0", "%"] in [line.split() for line in high]
    assert high[-1].startswith("1 all  2 clients")
    narrow = drawn(screen, 70)
    assert narrow[-1].endswith("h help  q quit") or narrow[-1].endswith("h help q quit")
    head = next(line for line in narrow if line.startswith("NAMESPACE"))
    assert head.split() == ["NAMESPACE", "ID", "SIZE", "TOK/S", "COMPUTED", "OWN", "LOADED"]
    assert not [line for line in narrow if line.startswith(("now", "1 hour", "llama", "qwen", "Found")) and "…" in line]
    # All sources at once are wider than the screen: rates of bytes go before them.
    every = dict.fromkeys(("computed", "engine", "pool", "disk", "store", "peer", "other"), 1000)
    now = stats(10)
    screen.reading = Reading(structs.replace(now, since_start=structs.replace(now.since_start, prompt_tokens=every)))
    for width in (70, 80):
        titles = next(line.split() for line in drawn(screen, width) if "tokens/s" in line and "computed" in line)
        assert titles[:8] == ["tokens/s", "computed", "own", "pool", "disk", "store", "peer", "other"]


def test_few_lookups_have_no_percentiles(screen: Screen) -> None:
    def line(counts: dict[str, int]) -> str:
        screen.reading = Reading(structs.replace(stats(10), lookup_seconds=Histogram(counts, 1.0)))
        return next(line for line in drawn(screen) if line.startswith("Lookups")).partition("since start: ")[2]

    assert line({"0.001": 3, "1.0": 7, "+Inf": 7}) == "7, each within 1.00 s"
    assert line({"0.001": 3, "1.0": 6, "+Inf": 7}) == "7, the slowest took more than 1.00 s"
    assert line({}) == "none"
    assert line({"0.001": 19, "+Inf": 19}) == "19, each within 1.00 ms"
    assert line({"0.001": 20, "+Inf": 20}) == "p50 500 µs, p99 990 µs"
