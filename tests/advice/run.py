"""Runs a made-up day through a real daemon: fake engines with the real client library report each prompt."""

from __future__ import annotations

import signal
import sys
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from msgspec import structs

from kvoffd_client import AdminClient
from kvoffd_client.cli.doctor import gather_facts
from kvoffd_client.fake_engine import KEY_BYTES, FakeEngine
from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.scheduler_client import LookupFuture
from kvoffd_proto.findings import Facts, Finding, find
from kvoffd_proto.messages import COMING, READY, GroupKeys, GroupSpec, GroupTransfer, Outcome, PromptReport
from tests.kit.command import DEADLINE_S, command, start_cli
from tests.kit.daemon import DaemonProcess
from tests.kit.redis_server import RedisServer
from tests.kit.slow_link import SlowLink
from tests.kit.waiting import wait_until

from .days import BLOCK_TOKENS, Day, Prompt

ENGINE_BLOCKS = 64
DAY_S = 86_400.0
LOOK_S = 0.3
SERVE = Path(__file__).with_name("serve.py")


class DayEngine(FakeEngine):
    """An engine that answers prompts and reports them, with a prefix cache of its own."""

    def __init__(self, directory: Path, day: Day, number: int) -> None:
        groups = [GroupSpec("full_attention", BLOCK_TOKENS)]
        namespace = NamespaceSpec.named(day.tenants[number], 1, KEY_BYTES, groups, page_bytes=day.block_bytes)
        super().__init__(directory, namespace, 1, 1, ENGINE_BLOCKS, day.block_bytes, name=f"engine {number}")
        self._own: OrderedDict[bytes, None] = OrderedDict()
        self._own_blocks, self._events, self._patience_s = day.own_blocks, day.events, day.patience_s
        self._first_lease = 0
        self.scheduler.report(day.prefill_rate, 0, 0)

    def _look_up(self, keys: Sequence[bytes], peer: str, *, again: bool) -> LookupFuture:
        future = self.scheduler.lookup([GroupKeys(0, b"".join(keys))], again, reported=not again)
        if not again:
            self._first_lease = future.lease_id
        assert future.wait(DEADLINE_S)
        assert not future.failed
        return future

    def begin(self, prompt: Prompt) -> tuple[Prompt, list[bytes], int]:
        """Look a prompt up, as engines do when it arrives."""
        keys = _keys_of(prompt)
        return prompt, keys, self.lookup(keys, self._patience_s)

    def end(self, begun: tuple[Prompt, list[bytes], int]) -> None:
        """Load what was found, store the rest, and report the prompt."""
        prompt, keys, found = begun
        own = next((number for number, key in enumerate(keys) if key not in self._own), len(keys))
        outcome, covered, load_lease = Outcome.MISSED, own, 0
        is_late = (last := self._lookup.last) is not None and last.pending and not last.asking
        if own == len(keys):
            outcome = Outcome.NOT_NEEDED
        elif found > own:
            load_lease = last.lease_id if last is not None else 0
            assert self.load(keys[own:found], range(found - own)).ok
            outcome, covered = Outcome.LOADED, found
        self.release()
        self._store(prompt, keys, covered)
        for key in keys:
            self._own[key] = None
            self._own.move_to_end(key)
        while len(self._own) > self._own_blocks:
            self._own.popitem(last=False)
        missing = keys[covered] if covered < len(keys) else b""
        behind = last.states[0][covered:] if last is not None else b""
        coming = len(behind) - len(behind.lstrip(bytes([READY, *COMING])))
        self.scheduler.report_prompt(
            PromptReport(
                "prompt", time.time(), prompt.tokens, len(keys), 0, 0, 0,
                outcome, reason="tier_late" if is_late and covered < len(keys) else "",
                loaded_tokens=(covered - own) * BLOCK_TOKENS, own_tokens=own * BLOCK_TOKENS,
                missing_key=missing, missing_number=covered + 1 if missing else 0,
                lease_id=self._first_lease, load_lease_id=load_lease, own_keys=[own], covered_keys=[covered],
                coming_keys=[coming] if missing else [],
            )
        )  # fmt: skip
        # A second of a day is here some microseconds: at its own pace the daemon would hear of prompts out of order.
        with self.scheduler._transport.lock:
            self.scheduler._send_reports()

    def _store(self, prompt: Prompt, keys: Sequence[bytes], first: int) -> None:
        if first == len(keys):
            return
        transfer = GroupTransfer.of(keys[first:], range(len(keys) - first))
        transfer = transfer._replace(before=keys[first - 1] if first else b"")
        if self._events:
            parents = [bytes(KEY_BYTES), *keys][first : len(keys)]
            tokens = [array("I", [content] * BLOCK_TOKENS).tobytes() for content in prompt.blocks[first:]]
            transfer = transfer._replace(parents=b"".join(parents), tokens=b"".join(tokens))
        job_id = next(self._job_ids)
        (worker,) = self.workers
        worker.store(job_id, [transfer])
        self._result(job_id, keys[first:], DEADLINE_S)
        worker.fence([job_id], 0.0)


def _keys_of(prompt: Prompt) -> list[bytes]:
    keys, before = [], b""
    for content in prompt.blocks:
        before = blake2b(before + content.to_bytes(8, "big"), digest_size=KEY_BYTES).digest()
        keys.append(before)
    return keys


@dataclass(frozen=True)
class Came:
    """Outcome of a day.

    Attributes:
        facts: input of doctor, as if the run had taken a day.
        findings: doctor's.
        by_source: tokens of prompts by source.
    """

    facts: Facts
    findings: list[Finding]
    by_source: dict[str, int]

    @property
    def computed_percent(self) -> float:
        return 100 * self.by_source.get("computed", 0) / sum(self.by_source.values())


def _has_seen_all(admin: AdminClient) -> bool:
    """Whether the daemon has looked at all tokens of blocks, as far as two looks tell."""
    before = admin.stats().namespaces
    time.sleep(LOOK_S)
    return [one.branching for one in admin.stats().namespaces] == [one.branching for one in before]


def as_a_day(facts: Facts) -> Facts:
    """Return what doctor would know if the run had taken a day."""
    return replace(facts, stats=structs.replace(facts.stats, uptime_seconds=DAY_S))


def run(day: Day, place: Path, trace: Path | None = None, commands: Sequence[Sequence[str]] = ()) -> Came:
    """Run a day. ``trace``: a file to record it to. ``commands``: of ``kvoffd-cli``, before the first prompt."""
    settings = dict(day.settings)
    with ExitStack() as stack:
        if "disk" in settings:
            place.mkdir(exist_ok=True, parents=True)
            settings["disk"] = f"{place}={settings['disk']}"
        if day.store:
            server = stack.enter_context(RedisServer())
            link = stack.enter_context(SlowLink(server.port, day.store_bytes_per_second))
            settings["shared"] = link.url
        program = [sys.executable, str(SERVE)]
        daemon = stack.enter_context(DaemonProcess(f"{day.pool_bytes}B", program=program, **settings))
        engines = [stack.enter_context(DayEngine(daemon.directory, day, at)) for at in range(len(day.tenants))]
        with AdminClient(daemon.directory) as admin:
            for words in commands:
                status, said = command(daemon, *words)
                assert not status, said
            recorder = trace and stack.enter_context(
                start_cli("trace", "record", str(trace), "--directory", str(daemon.directory))
            )
            if trace is not None:
                wait_until(trace.exists, DEADLINE_S)
            for together in day.rounds:
                begun = [(engines[number], engines[number].begin(prompt)) for number, prompt in together]
                for engine, one in begun:
                    engine.end(one)
                if day.store:  # in a real day it has the time to write
                    wait_until(lambda: not any(one.queued_writes for one in admin.stats().shared), DEADLINE_S)
            tokens = sum(prompt.tokens for together in day.rounds for _, prompt in together)
            wait_until(lambda: admin.stats().since_start.all_prompt_tokens == tokens, DEADLINE_S)
            if day.events:
                wait_until(lambda: _has_seen_all(admin), DEADLINE_S)
            if recorder:
                recorder.send_signal(signal.SIGINT)
                assert recorder.wait(DEADLINE_S) == 0
            facts = as_a_day(gather_facts(admin, {}))
    return Came(facts, find(facts), facts.stats.since_start.prompt_tokens)
