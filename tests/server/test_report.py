"""Statistics are copied by name from what counts."""

from __future__ import annotations

from kvoffd_client import AdminClient
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from tests.kit.daemon import DaemonProcess
from tests.kit.wire import NAMESPACE, WireClient, refused


def test_what_became_of_requests_is_kept_with_the_reason_of_a_miss() -> None:
    def report(name: str, key: bytes = b"", group: int = 0, reason: str = "") -> m.RequestReport:
        return m.RequestReport(name, 1.0, 100, 3, 2, 0, 0, m.Outcome.MISSED, 0, group, key, reason)

    with (
        DaemonProcess("16MiB") as daemon,
        WireClient(daemon.directory, "scheduler") as scheduler,
        AdminClient(daemon.directory) as admin,
    ):

        def tell(*reports: m.RequestReport, namespace: bytes = NAMESPACE) -> None:
            scheduler.ask(m.ReportRequests, namespace, list(reports))

        scheduler.open_namespace()
        tell(report("short"), report("new", b"k" * 32), report("told", b"k" * 32, reason="partial"))
        for wrong in (
            [report("a", b"k" * 31)],
            [report("a", b"k" * 64)],
            [report("a"), report("a", b"k" * 32, group=7)],
            [report("a" * 129)],
            [report("a")] * 257,
        ):
            refused(tell, *wrong)
        refused(tell, report("a"), namespace=b"x" * 32)
        found = admin.ask(a.Requests).requests
        assert [(one.report.request, one.report.reason) for one in found] == [
            ("short", ""),
            ("new", "unknown"),
            ("told", "partial"),
        ]
        assert [one.report.request for one in admin.ask(a.Requests, "o").requests] == ["short", "told"]
        assert [one.report.request for one in admin.ask(a.Requests, "", 1).requests] == ["told"]
        for number in range(1200 // 200):
            tell(*[report(f"{number}-{one}") for one in range(200)])
        found = admin.ask(a.Requests).requests
        assert (len(found), found[0].report.request, found[-1].report.request) == (1000, "1-0", "5-199")
