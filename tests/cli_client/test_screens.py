"""Every page is whole on 80x24, 120x40 and 200x50, in a pipe and in any colours: nothing that matters is lost."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from kvoffd_client.cli.admin_commands import _engines_page, _namespaces_page, _sessions_page, engines_of
from kvoffd_client.cli.bench import report_table
from kvoffd_client.cli.block_commands import _blocks_table
from kvoffd_client.cli.console import print_list, print_page
from kvoffd_client.cli.disk_commands import disks_page
from kvoffd_client.cli.json_objects import BenchReport, BenchResult
from kvoffd_client.cli.monitor_commands import event_lines
from kvoffd_client.cli.shared_commands import shared_page
from kvoffd_client.cli.stats_page import StatsPage
from kvoffd_proto.admin import BlockInfo, HealthLevel, NamespaceInfo, SessionInfo
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, kv_topic
from kvoffd_proto.messages import GroupSpec, KeyState, Role
from kvoffd_proto.stats import StatsReply

Render = Callable[..., str]
SCREENS = [(80, 24), (120, 40), (200, 50)]
LABEL = "meta-llama/Llama-3.1-405B-Instruct tp8 fp8"
NAMESPACE = b"\x07" * 32


def session(number: int, role: Role | None, name: str) -> SessionInfo:
    software = "kvoffd 0.1.0, vllm 0.33.0+cpu"
    nbytes, namespaces = 123 * 2**30, [NAMESPACE] * (role in (Role.SCHEDULER, Role.WORKER))
    return SessionInfo(
        number,
        role,
        name,
        software,
        4_194_304,
        65_534,
        86_400.0,
        0.2,
        12_345,
        4_321,
        1,
        nbytes,
        999,
        namespaces,
        nbytes,
    )


@pytest.fixture
def sessions() -> list[SessionInfo]:
    """Two vLLM engines of one model with two workers each, a console, and a client that has not said what it is."""
    engines = [("3fa85f64", 0), ("9c1d02aa", 10)]
    of_engines = [
        session(first + number, role, f"vllm:{engine} {LABEL} {role}{suffix}")
        for engine, first in engines
        for number, role, suffix in ((1, Role.SCHEDULER, ""), (2, Role.WORKER, " 0"), (3, Role.WORKER, " 1"))
    ]
    return [*of_engines, session(100, Role.ADMIN, "admin"), session(2_000_000_000, None, "")]


@pytest.fixture
def troubled(busy: StatsReply) -> StatsReply:
    """A daemon with everything on its page."""
    _, hundred, _, whole = busy.recent
    misses = {"evicted": 90, "disk_late": 8, "no_room": 2}
    recent = [*busy.recent[:1], msgspec.structs.replace(hundred, misses=misses), busy.recent[2]]
    return msgspec.structs.replace(
        busy,
        errors={"forbidden": 3, "no_room": 2, "bad_token": 1, "malformed": 7, "not_ready": 9},
        health=HealthLevel.DEGRADED,
        health_problems={"pool_pinned": 1, "disk_errors": 2},
        ended_sessions={"closed": 1_234_567, "gone": 12, "malformed": 1},
        recent=[*recent, msgspec.structs.replace(whole, misses=misses)],
        pool=msgspec.structs.replace(busy.pool, spilled_slots=3, quarantined_bytes=2**20),
    )


def namespace_infos() -> list[NamespaceInfo]:
    groups = [GroupSpec("full_attention", 16), GroupSpec("sliding_window", 16, 4096)]
    shards = [[2**20] * 8, [2**19] * 8]
    return [
        NamespaceInfo(bytes([n]) * 32, label, 8, 32, groups, shards, 123_456, 123 * 2**30, 4_321, 16, "{}")
        for n, label in ((7, LABEL), (8, ""))
    ]


@pytest.fixture
def pages(troubled: StatsReply, sessions: list[SessionInfo]) -> dict[str, RenderableType]:
    labels = {NAMESPACE: LABEL}
    blocks = [BlockInfo(bytes(range(32)), KeyState.READY, 2 * 2**20, 12, 0, bytes(8))]
    result = BenchResult("8,000 keys, all missing, p50", 123_456.0, "µs", 23_456.0, 5.26, 0.123)
    return {
        "stats": StatsPage(troubled),
        "sessions": _sessions_page(sessions, labels),
        "engines": _engines_page(engines_of(sessions), labels),
        "namespaces": _namespaces_page(namespace_infos()),
        "disks": disks_page(troubled.disks, troubled.below),
        "shared": shared_page(troubled.shared),
        "blocks": _blocks_table(blocks),
        "bench": report_table(BenchReport("lookup", "an echo", [result])),
    }


def lines_of(text: str, width: int) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    assert all(cell_len(line) <= width for line in lines)
    return lines


@pytest.mark.parametrize(("width", "height"), SCREENS)
def test_blocks_have_a_line_each_and_as_much_of_their_key_as_fits(render: Render, width: int, height: int) -> None:
    blocks = [
        BlockInfo(bytes(range(32)), KeyState.READY, 2 * 2**20, 12, 0, bytes(8)),
        BlockInfo(b"\xff" * 64, KeyState.WRITING, 4096, 0, 0, bytes(8)),
    ]
    head, first, second = lines_of(render(_blocks_table(blocks), width), width)
    assert head.split() == ["key", "state", "size", "pins"]
    assert first.split()[1:] == ["ready", "2.00", "MiB", "12"]
    assert second.split()[1:] == ["writing", "4.00", "KiB", "0"]
    assert first.startswith(bytes(range(16)).hex()), "enough to name the block by"
    assert (bytes(range(32)).hex() in first) == (width >= 120)
    assert (b"\xff" * 64).hex() in lines_of(render(_blocks_table(blocks), 1000), 1000)[2], "in a pipe all of it"


@pytest.mark.parametrize(("width", "height"), SCREENS)
def test_an_event_is_one_line(width: int, height: int) -> None:
    name = b"\x07" * 32
    events = [
        BlockStored([b"\xaa" * 32] * 999_999 + [b"\xbb" * 32], 16, "CPU", 1),
        BlockRemoved([b"\xcc" * 32], "CPU", 0),
        AllBlocksCleared(),
    ]
    for labels in ({name: LABEL, b"\x08" * 32: "tiny"}, {name: "tiny"}, {}):
        lines = list(event_lines(kv_topic(name), 12_345_678, EventBatch(0.5, events), labels, width))
        stored, removed, cleared = lines_of("\n".join(lines), width)
        assert "12345678  07070707" in stored
        assert "group 1  1000000 blocks  aaaaaaaaaaaa" in stored
        assert ("to bbbbbbbbbbbb" in stored) == (width >= 120)
        assert "cccccccccccc" in removed
        assert cleared.endswith("cleared  all blocks")
        assert stored.index("stored") == removed.index("removed") == cleared.index("cleared")
        if width == 200 and name in labels:
            assert labels[name] in stored


@pytest.mark.parametrize(("width", "height"), SCREENS)
def test_sessions_are_a_line_each_with_what_tells_them_apart(
    pages: dict[str, RenderableType], sessions: list[SessionInfo], render: Render, width: int, height: int
) -> None:
    text = render(pages["sessions"], width)
    head, *rows = lines_of(text, width)
    for title in ("id", "role", "name", "namespace", "pinned", "jobs"):
        assert title in head.split(), "always there"
    for title in ("software", "pid", "uid", "age", "idle", "leases", "memory", "unacked"):
        assert title in " ".join(text.split()), "shown, or named below"
    assert ("Not shown" in text) == (width < 200)
    assert [row.split()[0] for row in rows[: len(sessions)]] == [str(one.session_id) for one in sessions]
    assert [row.split()[1] for row in rows[: len(sessions)]] == [one.role or "new" for one in sessions]
    assert sum("vllm:3fa85f" in row for row in rows) == sum("vllm:9c1d02" in row for row in rows) == 3
    assert len(rows) < height


@pytest.mark.parametrize(("width", "height"), SCREENS)
def test_two_engines_of_one_model_are_two_rows(
    pages: dict[str, RenderableType], sessions: list[SessionInfo], render: Render, width: int, height: int
) -> None:
    assert [(one.schedulers, one.workers) for one in engines_of(sessions)] == [(1, 2), (1, 2)]
    text = render(pages["engines"], width)
    head, first, second = lines_of(text, width)[:3]
    assert head.split()[:4] == ["engine", "namespace", "schedulers", "workers"]
    assert first.startswith("vllm:3fa85f")
    assert second.startswith("vllm:9c1d02")
    for row in (first, second):
        assert "369 GiB" in row, "pinned bytes of all of them"
        assert ("vllm" in row and LABEL in row) or width < 200
    assert len(text.splitlines()) <= height


@pytest.mark.parametrize(("width", "height"), SCREENS)
def test_namespaces_are_a_line_each(pages: dict[str, RenderableType], render: Render, width: int, height: int) -> None:
    text = render(pages["namespaces"], width)
    head, first, second = lines_of(text, width)[:3]
    assert "label  " in head
    assert head.split()[-3:] == ["blocks", "size", "sessions"] or width > 80
    assert "07070707" in first
    assert first.split()[0].startswith("meta-llama/Ll")
    assert second.startswith("(no label)")
    for title in ("ranks", "groups", "tokens/block", "block size", "writing"):
        assert title in " ".join(text.split()), "shown, or named below"
    assert ("Not shown" in text) == (width < 120)


@pytest.mark.parametrize(("width", "height"), SCREENS)
def test_quotas_of_namespaces_are_shown_where_there_are_any(render: Render, width: int, height: int) -> None:
    infos = [msgspec.structs.replace(one, quota_bytes=200 << 30) for one in namespace_infos()]
    text = render(_namespaces_page(infos), width)
    head, first, *_ = lines_of(text, width)
    assert " ".join(head.split()).endswith("at most")
    assert " ".join(first.split()).endswith("200 GiB")
    assert "at most: the quota" in " ".join(text.split())


@pytest.mark.parametrize(("width", "height"), SCREENS)
def test_disks_lose_nothing(pages: dict[str, RenderableType], render: Render, width: int, height: int) -> None:
    text = render(pages["disks"], width)
    assert "…" not in text
    flat = " ".join(" ".join(lines_of(text, width)).split())
    for words in (
        "/mnt/nvme0/kvoffd: serving, errors 1",
        "/mnt/nvme1/kvoffd: failed",
        "It cannot be opened.",
        "corrupt 1:",
    ):
        assert words in flat


@pytest.mark.parametrize(("width", "height"), SCREENS)
def test_the_page_tells_which_sessions_ended_and_what_is_unusual(
    troubled: StatsReply, render: Render, width: int, height: int
) -> None:
    lines = lines_of(render(StatsPage(troubled), width), width)
    (ended,) = (line for line in lines if line.startswith("Sessions"))
    assert ended.split(maxsplit=1)[1] == "that ended: 1,234,567 closed, 12 gone, 1 malformed"
    (health,) = (line for line in lines if line.startswith("Health"))
    assert health.split(maxsplit=1)[1] == "degraded: pool_pinned, disk_errors; see kvoffd-cli health"
    (errors,) = (index for index, line in enumerate(lines) if line.startswith("Errors"))
    assert "…" not in "".join(lines[errors:])
    for words in ("3 slots so far lie", "1.00 MiB in quarantine"):
        assert any(words in line for line in lines)


@pytest.mark.parametrize(
    "notice", ["", "The kvoffd daemon in /run/kvoffd did not answer in time; try again later. " * 2]
)
@pytest.mark.parametrize("count", [0, 1, 2, 30])
@pytest.mark.parametrize(("width", "height"), SCREENS)
def test_a_watched_page_fits_its_screen_and_cuts_no_error(
    troubled: StatsReply, render: Render, width: int, height: int, count: int, notice: str
) -> None:
    stats = msgspec.structs.replace(troubled, namespaces=troubled.namespaces[:1] * count)
    footnote = "12:00:00, every 1 s; Ctrl-C ends"
    lines = lines_of(render(StatsPage(stats, notice, footnote, lines=height), width), width)
    assert len(lines) <= height
    assert lines[-1] == footnote
    (first,) = (index for index, line in enumerate(lines) if line.startswith("Errors"))
    told = " ".join(" ".join(lines[first:]).split())
    assert "…" not in told
    for code in ("not_ready", "malformed", "forbidden", "no_room", "disk_corrupt", "bad_token"):
        assert code in told
    assert (ErrorCode.FORBIDDEN.sentence in told) == (width >= 120)
    assert ("`kvoffd-cli stats` explains them" in told) == (width == 80)
    listed = any(line.startswith("meta-llama") for line in lines)
    assert listed == bool(count) or (width == 80 and f"and {count} namespace{'s' * (count != 1)}; " in " ".join(lines))


def test_a_pipe_gets_whole_names_and_no_control_codes(
    pages: dict[str, RenderableType], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    for name, page in pages.items():
        (print_page if name == "stats" else print_list)(page)
        text = capsys.readouterr().out
        assert "\x1b" not in text
        assert not any(line.endswith(" ") for line in text.splitlines()), name
        if name in ("sessions", "engines", "namespaces"):
            assert LABEL in text
        assert ("…" in text) == (name == "stats"), "the label of a namespace on its page"


@pytest.mark.parametrize("no_color", [False, True])
def test_colours_are_the_terminal_s_own_or_none(pages: dict[str, RenderableType], no_color: bool) -> None:
    """Light or dark: neither black nor white, no background, no shade of ours."""
    allowed = {"0", "1", "2"} | (set() if no_color else {"31", "32", "33"})
    used: set[str] = set()
    for page in pages.values():
        console = Console(width=120, force_terminal=True, color_system="truecolor", no_color=no_color, highlight=False)
        with console.capture() as captured:
            console.print(page)
        used |= {code for codes in re.findall(r"\x1b\[([0-9;]*)m", captured.get()) for code in codes.split(";")}
    assert used == allowed
