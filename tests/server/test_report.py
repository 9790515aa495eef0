"""Statistics are copied by name from what counts."""

from __future__ import annotations

import pytest

from kvoffd.server import stats as stats_module
from kvoffd_client import AdminClient
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from tests.kit.daemon import DaemonProcess
from tests.kit.struct_wire import NAMESPACE, WireClient


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
