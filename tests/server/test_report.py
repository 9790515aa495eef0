"""Statistics are copied by name from what counts."""

from __future__ import annotations

from kvoffd_client import AdminClient
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from tests.kit.daemon import DaemonProcess
from tests.kit.wire import NAMESPACE, WireClient, refused


def test_what_became_of_requests_is_kept_with_the_reason_of_a_miss() -> None:
    def report(
        name: str, key: bytes = b"", group: int = 0, reason: str = "", outcome: str = "missed"
    ) -> m.PromptReport:
        return m.PromptReport(name, 1.0, 100, 3, 2, 0, 0, outcome, 0, group, key, reason)

    def found(*which: object) -> list[m.PromptReport]:
        return [one.report for one in admin.ask(a.ListPrompts, *which).prompts]

    with (
        DaemonProcess("16MiB") as daemon,
        WireClient(daemon.directory, "scheduler") as scheduler,
        AdminClient(daemon.directory) as admin,
    ):
        scheduler.open_namespace()
        known = [report("short"), report("new", b"k" * 32), report("reasoned", b"k" * 32, reason="partial")]
        known += [report("given up", outcome="late"), report("given up early", b"k" * 32, outcome="late")]
        scheduler.ask(m.ReportPrompts, NAMESPACE, known)
        for wrong in (
            [report("a", b"k" * 31)],
            [report("a", b"k" * 64)],
            [report("a"), report("a", b"k" * 32, group=7)],
            [report("a" * 129)],
            [report("a")] * 257,
        ):
            refused(scheduler.ask, m.ReportPrompts, NAMESPACE, wrong)
        refused(scheduler.ask, m.ReportPrompts, b"x" * 32, [report("a")])
        reasons = {"short": "", "new": "unknown", "reasoned": "partial"}
        assert {one.request: one.reason for one in found()} == reasons | {
            "given up": "late",
            "given up early": "unknown",
        }
        assert [one.request for one in found("o")] == ["short", "reasoned"]
        assert [one.request for one in found("", 1)] == ["given up early"]
        for number in range(6):
            scheduler.ask(m.ReportPrompts, NAMESPACE, [report(f"{number}-{one}") for one in range(200)])
        assert [one.request for one in found()] == [f"{number}-{one}" for number in range(1, 6) for one in range(200)]
