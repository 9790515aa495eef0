"""A shared store in a network namespace of its own, whose only link goes down in the middle of reads and comes back."""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvoffd.tiers.tier import Result
from tests.kit.redis_server import MISSING, PROGRAM, START_S
from tests.kit.require import missing, require
from tests.kit.waiting import wait_until
from tests.tiers.shared_rig import ONE, SLOT_BYTES, Answer, SharedRig

pytestmark = pytest.mark.usefixtures("short_pauses")
PORT = 6379
NET = f"10.231.{os.getpid() // 64 % 256}"
OURS, THEIRS = (f"{NET}.{os.getpid() % 64 * 4 + number}" for number in (1, 2))
BLOCKS = 12
RATE = "tbf rate 50mbit burst 256kb latency 1s"


def ip(*words: str, program: str = "ip") -> None:
    subprocess.run([program, *words], check=True, capture_output=True, timeout=30)


class Far:
    """A ``redis-server`` at the other end of a link between two network namespaces."""

    def __init__(self, stack: ExitStack) -> None:
        self.name, near, far = (f"kvoffd{letter}{os.getpid() % 10**7}" for letter in "nab")
        self.link = near
        ip("netns", "add", self.name)
        stack.callback(ip, "netns", "del", self.name)
        ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", self.name)
        ip("addr", "add", f"{OURS}/30", "dev", near)
        ip("link", "set", near, "up")
        ip("-n", self.name, "addr", "add", f"{THEIRS}/30", "dev", far)
        ip("-n", self.name, "link", "set", far, "up")
        # So slow that reads are under way for a second.
        ip("-n", self.name, "qdisc", "add", "dev", far, "root", *RATE.split(), program="tc")
        assert PROGRAM is not None
        command = [PROGRAM, "--port", str(PORT), "--bind", THEIRS, "--protected-mode", "no", "--save", ""]
        server = subprocess.Popen(["ip", "netns", "exec", self.name, *command], stdout=subprocess.DEVNULL, cwd="/tmp")
        stack.callback(server.wait, 30.0)
        stack.callback(server.kill)
        wait_until(self._answers, START_S)

    def _answers(self) -> bool:
        try:
            socket.create_connection((THEIRS, PORT), 1.0).close()
        except OSError:
            return False
        return True

    def set_link(self, state: str) -> None:
        ip("link", "set", self.link, state)
        if state == "up":
            wait_until(self._answers, START_S)


@pytest.fixture
def far() -> Iterator[Far]:
    there = os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc")))
    require("root", there, "network namespaces need root and iproute2")
    require("redis", PROGRAM, MISSING)
    with ExitStack() as stack:
        try:
            made = Far(stack)
        except subprocess.CalledProcessError as error:
            missing("root", f"network namespaces are not to be had here: {error.stderr.decode().strip()}")
        yield made


def test_a_partition_in_the_middle_of_reads_is_a_miss_in_time_and_never_a_wrong_byte(far: Far) -> None:
    rig = SharedRig(f"redis://{THEIRS}:{PORT}", ask_deadline_s=0.2).reachable()
    blocks = [rig.block(number, (SLOT_BYTES,)) for number in range(BLOCKS)]
    for number, block in enumerate(blocks):
        rig.block(number, (SLOT_BYTES,))
        rig.store(block)
    rig.until(lambda: rig.ask_anew(*blocks) == [Answer.YES] * BLOCKS)
    started = time.monotonic()
    reads = [rig.begin_read(block, deadline_s=20.0, slot=8 + number) for number, block in enumerate(blocks)]
    rig.until(lambda: any(reads))
    far.set_link("down")
    rig.until(lambda: all(reads), 40.0)
    assert time.monotonic() - started < 40.0
    for number, ended in enumerate(reads):
        if ended == [Result.DONE]:
            rig.block(number, (SLOT_BYTES,))
            assert rig.pool[(8 + number) * SLOT_BYTES :][:SLOT_BYTES] == rig.pool[:SLOT_BYTES]
        else:
            assert ended in ([Result.DEADLINE], [Result.FAILED])
    assert [Result.DONE] in reads
    if reads.count([Result.DONE]) == BLOCKS:
        pytest.skip("the machine was so slow that all was read before the link went down")
    landed = bytes(rig.pool)
    times = []
    while rig.tier.available():
        keys = [(100 + len(times)).to_bytes(32, "big")]
        asked = time.monotonic()
        rig.question(keys, prefix=True, fingerprint=ONE, length=SLOT_BYTES)
        rig.until(lambda keys=keys: rig.answers(ONE, keys) != [Answer.ASKED])  # type: ignore[misc]
        times.append(time.monotonic() - asked)
    assert not times or statistics.median(times) < 1.0  # none where the reads have shown it already
    far.set_link("up")
    started = time.monotonic()
    rig.until(lambda: rig.tier.available(), 40.0)
    assert bytes(rig.pool) == landed, "what was on its way lands nowhere"
    late = rig.block(BLOCKS, (SLOT_BYTES,))
    rig.until(lambda: rig.write(late) is Result.DONE, 40.0)
    rig.until(lambda: rig.ask_anew(late) == [Answer.YES])
    assert rig.load(late) is Result.DONE
    assert time.monotonic() - started < 60.0
    assert rig.tier.counters.mismatches == 0
    assert rig.close()
