"""Statistics are copied by name from what counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec import Struct

from kvoffd.server import stats as stats_module
from kvoffd.server.handlers import filled
from kvoffd_client import AdminClient
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from tests.kit.daemon import DaemonProcess
from tests.kit.struct_wire import NAMESPACE, WireClient, stats


class Counted(Struct):
    count: int
    tokens: int
    hits: int
    size: int


def test_a_field_comes_from_the_first_source_that_has_it() -> None:
    first, second = SimpleNamespace(tokens=1), SimpleNamespace(tokens=2, hits=3, size=4)
    assert filled(Counted, first, second, count=5, size=6) == Counted(5, 1, 3, 6)


def test_a_field_that_nobody_counts_is_an_error() -> None:
    with pytest.raises(AttributeError, match=r"Counted\.size"):
        filled(Counted, SimpleNamespace(count=1, tokens=1, hits=1))


def test_what_an_engine_learned_is_told_and_what_it_left_out_adds_up() -> None:
    with DaemonProcess("16MiB") as daemon, WireClient(daemon.directory, m.Role.SCHEDULER) as scheduler:

        def tell(namespace: bytes, *figures: float) -> m.ReportEngine:
            return m.ReportEngine(scheduler.next_id(), namespace, *figures)  # type: ignore[arg-type]

        scheduler.open_namespace()
        scheduler.ask(tell(NAMESPACE, 20_000.0, 300_000.0, 3, 1, 4))
        scheduler.ask(tell(NAMESPACE, 21_000.0, 0.0, 2, 0))
        scheduler.refused(tell(b"x" * 32, 1.0, 1.0, 1, 1))
        scheduler.refused(tell(NAMESPACE, 1.0, 1.0, 2**62, 1))
        scheduler.refused(tell(NAMESPACE, float("inf"), 1.0, 1, 1))
        scheduler.refused(tell(NAMESPACE, 1.0, float("nan"), 1, 1))
        (found,) = stats(daemon.directory).namespaces
        assert (found.prefill_tokens_per_second, found.load_tokens_per_second) == (21_000.0, 0.0)
        assert (found.skipped_loads, found.paused_stores, found.late_lookups) == (5, 1, 4)


def test_what_became_of_requests_is_kept_with_the_reason_of_a_miss() -> None:
    def report(name: str, key: bytes = b"", group: int = 0, reason: str = "") -> m.RequestReport:
        return m.RequestReport(name, 1.0, 100, 3, 2, 0, 0, m.Outcome.MISSED, 0, group, key, reason)

    with (
        DaemonProcess("16MiB") as daemon,
        WireClient(daemon.directory, m.Role.SCHEDULER) as scheduler,
        AdminClient(daemon.directory) as admin,
    ):

        def tell(*reports: m.RequestReport, namespace: bytes = NAMESPACE) -> m.ReportRequests:
            return m.ReportRequests(scheduler.next_id(), namespace, list(reports))

        scheduler.open_namespace()
        scheduler.ask(tell(report("short"), report("new", b"k" * 32), report("told", b"k" * 32, reason="partial")))
        for wrong in (
            tell(report("a", b"k" * 31)),
            tell(report("a", b"k" * 64)),
            tell(report("a"), report("a", b"k" * 32, group=7)),
            tell(report("a" * 129)),
            tell(report("a"), namespace=b"x" * 32),
            tell(*[report("a")] * 257),
        ):
            scheduler.refused(wrong)
        found = admin.ask(a.Requests).requests
        assert [(one.report.request, one.report.reason) for one in found] == [
            ("short", ""),
            ("new", "unknown"),
            ("told", "partial"),
        ]
        assert [one.report.request for one in admin.ask(a.Requests, "o").requests] == ["short", "told"]
        assert [one.report.request for one in admin.ask(a.Requests, "", 1).requests] == ["told"]
        for number in range(1200 // 200):
            scheduler.ask(tell(*[report(f"{number}-{one}") for one in range(200)]))
        found = admin.ask(a.Requests).requests
        assert (len(found), found[0].report.request, found[-1].report.request) == (1000, "1-0", "5-199")


def test_memory_is_told_as_0_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError

    assert stats_module._resident_bytes() > 0
    monkeypatch.setattr(stats_module, "open", refuse, raising=False)
    assert stats_module._resident_bytes() == 0
