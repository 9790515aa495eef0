"""Every page is whole on 80x24, 120x40 and 200x50: no line is wider, and nothing that matters is lost."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from rich.cells import cell_len

from kvoffd_client.bench.results import Cost, Report, Result
from kvoffd_client.cli.bench_commands import _report_table
from kvoffd_client.cli.block_commands import _blocks_table
from kvoffd_client.cli.monitor_commands import event_lines
from kvoffd_client.cli.stats_page import StatsPage
from kvoffd_proto.blocks import BlockInfo
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, kv_topic
from kvoffd_proto.messages import KeyState, StatsReply

Render = Callable[..., str]
SCREENS = [(80, 24), (120, 40), (200, 50)]
LABEL = "meta-llama/Llama-3.1-405B-Instruct tp8 fp8"


def lines_of(text: str, width: int) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    assert all(cell_len(line) <= width for line in lines)
    return lines


@pytest.mark.parametrize(("width", "height"), SCREENS)
def test_blocks_have_a_line_each_and_as_much_of_their_key_as_fits(render: Render, width: int, height: int) -> None:
    blocks = [
        BlockInfo(bytes(range(32)), KeyState.READY, 2 * 2**20, 12, True),
        BlockInfo(b"\xff" * 64, KeyState.WRITING, 4096, 0, False),
    ]
    head, first, second = lines_of(render(_blocks_table(blocks), width), width)
    assert head.split() == ["key", "state", "size", "pins", "held"]
    assert first.split()[1:] == ["ready", "2.00", "MiB", "12", "by", "an", "operator"]
    assert second.split()[1:] == ["writing", "4.00", "KiB", "0"]
    assert first.startswith(bytes(range(16)).hex()), "enough to name the block by"
    assert (bytes(range(32)).hex() in first) == (width >= 120)
    assert (b"\xff" * 64).hex() in lines_of(render(_blocks_table(blocks), 1000), 1000)[2], "in a pipe all of it"


@pytest.mark.parametrize(("width", "height"), SCREENS)
@pytest.mark.parametrize("checksums", [None, 0.004])
def test_a_bench_shows_case_value_and_floor(render: Render, width: int, height: int, checksums: float | None) -> None:
    cases = ["64 keys, all hits, p50", "1,000 keys while 8 engines store and load, p99"]
    results = [Result(case, 123_456.0, "lookups/s", 234_567.0, Cost(79.5e-6, "lookup", checksums)) for case in cases]
    text = render(_report_table(Report("lookup", "an echo", results)), width)
    lines = lines_of(text, width)
    for case, line in zip(cases, lines[1:3], strict=True):
        assert line.startswith(case)
        assert "123,456 lookups/s" in line
    for title in ("value/floor", "daemon CPU", *["of it checksums"] * (checksums is not None)):
        assert title in " ".join(lines), "shown, or named below"
    assert ("Not shown" in text) == (width < (100 if checksums is None else 130))
    assert len(lines) <= height


@pytest.mark.parametrize(("width", "height"), SCREENS)
def test_an_event_is_one_line(width: int, height: int) -> None:
    name = b"\x07" * 32
    events = [
        BlockStored([b"\xaa" * 32] * 999_999 + [b"\xbb" * 32], None, [], 16, None, "CPU", None, 1),
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
def test_a_watched_page_has_whole_sentences_of_errors_where_they_fit(
    busy: StatsReply, render: Render, width: int, height: int
) -> None:
    errors = {"forbidden": 3, "no_room": 2}
    for stats in (busy, msgspec.structs.replace(busy, errors=errors)):
        text = render(StatsPage(stats, lines=height, footnote="12:00:00, every 1 s; Ctrl-C ends"), width)
        lines = lines_of(text, width)
        assert len(lines) <= height
        assert lines[-1].startswith("12:00:00")
    flat = " ".join(text.split())
    for code in (ErrorCode.FORBIDDEN, ErrorCode.NO_ROOM):
        assert code.name.lower() in flat
        assert (" ".join(code.sentence.split()) in flat) or (width == 80 and "…" in flat)
    assert width == 80 or "…" not in "".join(lines[-4:])
