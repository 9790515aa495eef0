"""Every page is whole on 80x24, 120x40 and 200x50, in a pipe and in any colours: nothing that matters is lost."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from kvoffd_client.cli.bench import report_table
from kvoffd_client.cli.block_commands import _blocks_table
from kvoffd_client.cli.console import print_list, print_page
from kvoffd_client.cli.disk_commands import disks_page
from kvoffd_client.cli.json_objects import BenchReport, BenchResult
from kvoffd_client.cli.shared_commands import shared_page
from kvoffd_client.cli.stats_page import StatsPage
from kvoffd_proto.admin import BlockInfo, HealthLevel
from kvoffd_proto.messages import KeyState
from kvoffd_proto.stats import DaemonStats, Problem

Render = Callable[..., str]
SCREENS = [(80, 24), (120, 40), (200, 50)]
LABEL = "meta-llama/Llama-3.1-405B-Instruct tp8 fp8"
NAMESPACE = b"\x07" * 32


@pytest.fixture
def troubled(busy: DaemonStats) -> DaemonStats:
    """A daemon with everything on its page."""
    misses = {"evicted": 90, "tier_late": 8, "no_space": 2}
    return msgspec.structs.replace(
        busy,
        errors={"forbidden": 3, "no_room": 2, "bad_token": 1, "malformed": 7, "not_ready": 9},
        health=HealthLevel.DEGRADED,
        health_problems=[Problem("pool_pinned"), Problem("disk_errors"), Problem("disk_errors")],
        ended_sessions={"closed": 1_234_567, "gone": 12, "malformed": 1},
        last_minute=msgspec.structs.replace(busy.last_minute, misses=misses),
        pool=msgspec.structs.replace(busy.pool, numa_remote_slots=3, bytes={**busy.pool.bytes, "quarantined": 2**20}),
    )


@pytest.fixture
def pages(troubled: DaemonStats) -> dict[str, RenderableType]:
    blocks = [BlockInfo(bytes(range(32)), KeyState.READY, 2 * 2**20, 12, 0, bytes(8))]
    result = BenchResult("8,000 keys, all missing, p50", 123_456.0, "µs", 23_456.0, 5.26, 0.123)
    return {
        "stats": StatsPage(troubled),
        "disks": disks_page(troubled.disks, troubled.tiers),
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
    troubled: DaemonStats, render: Render, width: int, height: int
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


def test_a_pipe_gets_whole_names_and_no_control_codes(
    pages: dict[str, RenderableType], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    for name, page in pages.items():
        (print_page if name == "stats" else print_list)(page)
        text = capsys.readouterr().out
        assert "\x1b" not in text
        assert not any(line.endswith(" ") for line in text.splitlines()), name
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
