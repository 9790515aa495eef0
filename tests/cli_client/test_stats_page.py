"""The page people judge us by."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvoffd_client.cli.disk_commands import disks_page
from kvoffd_client.cli.shared_commands import SHARED_ERRORS, shared_page
from kvoffd_client.cli.stats_page import StatsPage
from kvoffd_proto.stats import DaemonStats

Render = Callable[..., str]

MIB = 1 << 20


def line_with(text: str, start: str) -> str:
    """The line that begins with ``start``, with single spaces."""
    return " ".join(next(line for line in text.splitlines() if line.startswith(start)).split())


@pytest.mark.parametrize("width", [80, 120])
def test_a_fresh_daemon_shows_no_nonsense(fresh: DaemonStats, render: Render, width: int) -> None:
    text = render(StatsPage(fresh), width)
    assert max(len(line) for line in text.splitlines()) <= width
    for noise in ("nan", "inf", "None", "error", "Health"):
        assert noise not in text
    assert "none open" in text
    assert line_with(text, "Errors") == "Errors none"
    assert "0 B of 20.0 GiB" in text


@pytest.mark.parametrize(("width", "spared"), [(80, False), (116, True)])
def test_what_a_disk_was_spared_is_beside_what_it_was_written(
    busy: DaemonStats, render: Render, width: int, spared: bool
) -> None:
    titles, numbers = render(StatsPage(busy), width).split("\nDisk ", 1)[1].splitlines()[:2]
    assert (titles.split()[-1] == "spared") == spared
    assert (numbers.split()[-1] == "1,357") == spared


def test_a_pool_of_nothing_divides_by_nothing(fresh: DaemonStats, render: Render) -> None:
    empty = msgspec.structs.replace(fresh.pool, size_bytes=0, usable_bytes=0, bytes={}, table_bytes=0)
    assert "0 B of 0 B" in render(StatsPage(msgspec.structs.replace(fresh, pool=empty)))


def test_what_fences_dropped_and_what_pinning_takes_is_shown_where_there_is_any(
    busy: DaemonStats, render: Render
) -> None:
    assert not {"cancelled", "unsent", "page-locking"} & set(render(StatsPage(busy), 120).split())
    pool = msgspec.structs.replace(busy.pool, pinning_gpu_bytes=40 * MIB)
    text = render(StatsPage(msgspec.structs.replace(busy, pool=pool, cancelled_stores=12, unsent_stores=7)), 120)
    assert line_with(text, "store") == "store 118 GiB 10.6 GB/s 1,204 3 2 1 12 7"
    assert "page-locking it takes 40.0 MiB of a GPU's memory" in text


@pytest.mark.parametrize("width", [120, 170, 200])
def test_quotas_and_rates_have_columns_where_there_are_any_and_room(
    busy: DaemonStats, render: Render, width: int
) -> None:
    first, *others = busy.namespaces
    limited = msgspec.structs.replace(
        first,
        quota_bytes=10 << 30,
        prefill_tokens_per_second=20_480.0,
        load_tokens_per_second=300_000.0,
        skipped_loads=7,
    )
    text = render(StatsPage(msgspec.structs.replace(busy, namespaces=[limited, *others])), width)
    for word in ("at most", "10.0 GiB", "computes", "20,480/s", "300,000/s", "left out"):
        assert (word in text) == (width >= 170)
    assert "at most" not in render(StatsPage(busy), width)
    computes = msgspec.structs.replace(first, prefill_tokens_per_second=20_480.0)
    text = render(StatsPage(msgspec.structs.replace(busy, namespaces=[computes])), width)
    assert ("20,480/s" in text) == (width >= 170), "nothing was loaded so far"


def test_columns_line_up(busy: DaemonStats, render: Render) -> None:
    for width in (80, 120):
        lines = render(StatsPage(busy), width).splitlines()
        first = next(index for index, line in enumerate(lines) if line.startswith("Namespace"))
        header, one, two = (line.rstrip() for line in lines[first : first + 3])
        assert len(header) == len(one) == len(two)
        assert one.index("ab12cd34") == two.index("ffee0011")


def test_errors_come_with_their_meaning_most_frequent_first(busy: DaemonStats, render: Render) -> None:
    lines = render(StatsPage(busy), 200).splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("Errors"))
    assert lines[first].split()[1:3] == ["12", "not_ready"]
    assert "recompute it." in lines[first]
    assert lines[first + 1].split()[:2] == ["3", "bad_token"]
    assert lines[first + 2].split()[:2] == ["2", "disk_corrupt"]
    assert "they were recomputed" in lines[first + 2]
    assert lines[first + 3].split() == ["1", "from_the_future"]


def test_a_pool_that_is_still_touched_says_so(fresh: DaemonStats, render: Render) -> None:
    starting = msgspec.structs.replace(fresh.pool, usable_bytes=fresh.pool.size_bytes // 4)
    assert "25.0 % of the pool's memory is touched" in render(StatsPage(msgspec.structs.replace(fresh, pool=starting)))


def test_a_quarantined_slot_is_no_memory_that_is_still_to_be_touched(fresh: DaemonStats, render: Render) -> None:
    lost = 1 << 20
    pool = msgspec.structs.replace(fresh.pool, usable_bytes=fresh.pool.usable_bytes - lost, bytes={"quarantined": lost})
    text = render(StatsPage(msgspec.structs.replace(fresh, pool=pool)))
    assert "in quarantine" in text
    assert "starting" not in text


def test_replies_that_clients_do_not_read_are_shown(busy: DaemonStats, render: Render) -> None:
    text = render(StatsPage(msgspec.structs.replace(busy, errors={}, replies_dropped={"gone": 3, "unread": 7})), 120)
    assert line_with(text, "Errors").startswith("Errors 7 unread_replies Replies were dropped")


def test_names_of_clients_cannot_move_the_cursor(busy: DaemonStats, render: Render) -> None:
    evil = msgspec.structs.replace(busy.namespaces[0], model="\x1b[2J[red]x[/red]")
    text = render(StatsPage(msgspec.structs.replace(busy, namespaces=[evil])), 120)
    assert "\x1b" not in text
    assert "?[2J[red]x[/re" in text


@pytest.mark.parametrize(("ready", "free", "full_cells"), [(1, 10**12 - 1, 1), (0, 10**12, 0), (10**12, 0, None)])
def test_the_bar_is_never_empty_for_something(
    fresh: DaemonStats, render: Render, ready: int, free: int, full_cells: int | None
) -> None:
    pool = msgspec.structs.replace(
        fresh.pool, size_bytes=10**12, usable_bytes=10**12, bytes={"ready": ready, "free": free}
    )
    bar = line_with(render(StatsPage(msgspec.structs.replace(fresh, pool=pool))), "Pool").split()[1]
    assert bar.count("█") == (len(bar) if full_cells is None else full_cells)


@pytest.mark.parametrize(("seconds", "shown"), [(0.0, "< 1 h"), (909.0, "< 1 h"), (7_200.0, "< 3 h")])
def test_the_age_of_blocks_on_disk_is_told_to_the_hour(
    busy: DaemonStats, render: Render, seconds: float, shown: str
) -> None:
    disk = msgspec.structs.replace(busy.disks[0], oldest_seconds=seconds)
    assert f"the oldest {shown}\n" in render(disks_page([disk], None))


def test_many_namespaces_leave_room_for_the_rest(busy: DaemonStats, render: Render) -> None:
    many = [
        msgspec.structs.replace(busy.namespaces[0], model=f"model-{number:02}", ready_bytes=number)
        for number in range(30)
    ]
    text = render(StatsPage(msgspec.structs.replace(busy, namespaces=many)), 120)
    assert [line[:8] for line in text.splitlines() if line.startswith("model-")] == [
        f"model-{number}" for number in range(29, 17, -1)
    ]
    assert "and 18 smaller" in text


def test_a_shared_tier_shows_what_it_does_and_what_its_errors_mean(busy: DaemonStats, render: Render) -> None:
    text = render(shared_page(busy.shared), width=200)
    assert "redis://valkey:6379: reachable" in text
    assert "found 512" in text
    assert f"full 1: {SHARED_ERRORS['full']}" in text
    assert "server valkey-0:6379: answers\n" in text
    assert "server valkey-1:6379: cannot be used: valkey-1:6379 cannot be reached: no.\n" in text
    assert "since an engine reset them: 2; `kvoffd-cli clear --namespace NAME --all-nodes`" in text
    assert "--shared URL" in render(shared_page([]))
