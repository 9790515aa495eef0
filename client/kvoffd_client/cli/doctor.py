"""``kvoffd-cli doctor``: is it healthy, does it pay off, and what would help most."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvoffd_client.admin_client import AdminClient, read_stats
from kvoffd_client.cli.findings import FEWEST_LOOKUPS, Facts, Finding, Value, find, judge_value
from kvoffd_client.cli.format import Line, percent, print_json, print_line, say
from kvoffd_client.cli.stats import UNTIMED
from kvoffd_client.cli.target import CliError, Directory, Json, Url, check_names_one, local_directory, open_admin
from kvoffd_client.errors import KvoffdClientError
from kvoffd_proto.messages import BENCH_LABEL
from kvoffd_proto.stats import DaemonStats
from kvoffd_proto.units import format_count, format_duration, format_rate, format_size, plural, printable

TEST_BLOCKS, TEST_LAYERS, TEST_PAGE_BYTES = 8, 4, 1 << 18
"""Eight blocks of 1 MiB."""
STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
LEVEL_STATUS = {"error": 2, "warning": 1, "info": 0}
NOUNS = {"error": "error", "warning": "warning", "info": "note"}


class SelfTest(msgspec.Struct, frozen=True):
    """Blocks that were stored and loaded again: ``problem`` is empty where all bytes were the same."""

    problem: str
    bytes: int = 0
    store_seconds: float = 0.0
    load_seconds: float = 0.0


class Report(msgspec.Struct, frozen=True):
    """What doctor prints. All findings are here, the heaviest first."""

    healthy: bool
    paying_off: bool | None
    verdict: list[str]
    value: Value
    findings: list[Finding]
    self_test: SelfTest | None = None

    @property
    def status(self) -> int:
        failed = self.self_test is not None and self.self_test.problem
        return 2 if failed else max((LEVEL_STATUS[one.level] for one in self.findings), default=0)


def doctor(
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Store and load eight blocks, and compare them.")
    ] = False,
    directory: Directory = None,
    url: Url = "",
    json: Json = False,
) -> int:
    """Say whether it is healthy, and pays off.

    Then what would help most. It looks at the daemon and, without --url, at its clients.

    Exit status: 0 no warning; 1 a warning: it works, and could work better; 2 an error, or no answer.
    """
    check_names_one(directory, url)
    if url and self_test:
        raise CliError("--self-test stores blocks over the sockets of this node; leave --url away.")
    if url:
        facts = Facts(read_stats(url))
    else:
        with open_admin(directory) as admin:
            sessions = [one for one in admin.sessions().sessions if one.session_id != admin.session_id]
            facts = Facts(admin.stats(), admin.namespaces().namespaces, sessions)
    report = report_of(facts, run_self_test(local_directory(directory)) if self_test else None)
    if json:
        print_json(msgspec.to_builtins(report))
    else:
        show(report)
    return report.status


def run_self_test(place: Path) -> SelfTest:
    """Store blocks of a namespace that no engine has, load them into other memory, and compare the bytes."""
    from kvoffd_client.testing import FakeEngine

    name, keys = f"{BENCH_LABEL}self-test {os.getpid()}", [os.urandom(32) for _ in range(TEST_BLOCKS)]
    blocks, others = range(TEST_BLOCKS), range(TEST_BLOCKS, 2 * TEST_BLOCKS)
    try:
        with FakeEngine(place, name, 1, TEST_LAYERS, 2 * TEST_BLOCKS, TEST_PAGE_BYTES) as engine:
            try:
                engine.fill(blocks, seed=int.from_bytes(keys[0][:8], "big"))
                stored = engine.store(keys, blocks)
                found = engine.lookup(keys)
                loaded = engine.load(keys[:found], others[:found])
                for result, what in ((stored, "stored"), (loaded, "loaded")):
                    if result.error is not None:
                        lost = f"{len(result.failed_keys)} of {TEST_BLOCKS} blocks were not {what}"
                        return SelfTest(f"{lost}: {result.error.sentence}")
                if found < TEST_BLOCKS:
                    return SelfTest(f"{found} of the {TEST_BLOCKS} blocks that were stored were found.")
                if engine.checksums(blocks) != engine.checksums(others):
                    return SelfTest("The bytes that were loaded are not those that were stored.")
            finally:
                with AdminClient(place) as admin:
                    admin.clear(engine.namespace.fingerprint)
    except KvoffdClientError as error:
        return SelfTest(str(error))
    return SelfTest("", loaded.bytes, stored.seconds, loaded.seconds)


def report_of(facts: Facts, test: SelfTest | None = None) -> Report:
    found, value = find(facts), judge_value(facts)
    healthy = not any(one.level == "error" for one in found) and not (test is not None and test.problem)
    return Report(healthy, value.paying_off, list(_verdict(facts, found, value, healthy, test)), value, found, test)


def _verdict(facts: Facts, found: Sequence[Finding], value: Value, healthy: bool, test: SelfTest | None) -> list[str]:
    count, up = facts.engine_count, format_duration(facts.stats.uptime_seconds)
    engines = "" if count is None else f", with {count or 'no'} engine{plural(count)}"
    counts = {noun: sum(one.level == level for one in found) for level, noun in NOUNS.items()}
    state = ("It works" if counts["warning"] else "Healthy") if healthy else "Not healthy"
    state += "".join(f", {count} {noun}{plural(count)}" for noun, count in counts.items() if count)
    first = f"{state}. kvoffd {printable(facts.stats.version)}, up for {up}{engines}."
    lines = [first, _payoff(facts.stats, value)]
    if count is None:
        lines.append("Its clients were not looked at; for these run doctor there, without --url.")
    if test is not None:
        if test.problem:
            lines.append(f"Self-test failed: {printable(test.problem)}")
        else:
            stored, loaded = (format_rate(test.bytes / max(1e-9, s)) for s in (test.store_seconds, test.load_seconds))
            done = f"{format_size(test.bytes)} were stored and loaded, and are the same"
            lines.append(f"Self-test: {done} (stored at {stored}, loaded at {loaded}).")
    return lines


def _payoff(stats: DaemonStats, value: Value) -> str:
    if value.paying_off is None:
        lookups = f"{format_count(value.lookups)} lookup{plural(value.lookups)}" if value.lookups else "no lookup"
        return f"Too early to say whether it pays off: {lookups} so far, and {FEWEST_LOOKUPS} are needed."
    total, what = stats.since_start, f"{format_count(value.loaded_tokens)} tokens"
    if total.loaded_bytes and not value.loaded_tokens:  # not every engine says how many tokens a block has
        what = format_size(total.loaded_bytes)
    text = f"{'Paying off' if value.paying_off else 'Not paying off'}: engines loaded {what}"
    if total.loaded_keys:
        loaded, own = (percent(keys, total.asked_keys) for keys in (total.loaded_keys, total.not_needed_keys))
        text += f" and did not compute them. Of the keys asked for {loaded} were loaded"
        text += f", and {own} not needed" if total.not_needed_keys else ""
    text += "."
    if value.saved_seconds:
        text += f" That saved {format_duration(value.saved_seconds)} of prefill."
    elif value.loaded_tokens:
        text += f" How much prefill that saved is not known: {UNTIMED}."
    life = stats.lifetime
    if life.loaded_tokens > value.loaded_tokens and life.since:
        since = datetime.fromtimestamp(life.since, UTC).date().isoformat()
        saved = f" and {format_duration(life.saved_seconds)}" if life.saved_seconds else ""
        text += f" Since {since}: {format_count(life.loaded_tokens)} tokens{saved}."
    return f"{text} {value.why_not}".rstrip()


def show(report: Report) -> None:
    say(*((line, "bold") for line in report.verdict))
    for number, one in enumerate(report.findings, 1):
        head: Line = f"{number}. {one.level} {one.check}", STYLES[one.level]
        say("", head, f"{one.evidence} {one.meaning}".rstrip())
        if one.fix:
            print_line(f"   > {one.fix}")
    if not report.findings:
        say("No findings.")
