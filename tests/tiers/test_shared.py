"""The shared tier over a real server and over a double that breaks on purpose: a miss, never a wrong byte."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvoffd.tiers.fullness import Fullness
from kvoffd.tiers.generations import Generations, Resets
from kvoffd.tiers.header import Block, make_block_group
from kvoffd.tiers.names import generation_name
from kvoffd.tiers.redis_cluster import slot_of
from kvoffd.tiers.redis_connection import CONNECT_S, Demoted, RedisConnection
from kvoffd.tiers.redis_store import NEEDED_COMMANDS, Redis
from kvoffd.tiers.shared import HANGS_S, MAX_REMOVALS, MAX_WRITES, READERS
from kvoffd.tiers.store import Credentials, PutRequest, StoreError, StoreFault, open_store
from kvoffd.tiers.tier import Result
from kvoffd_proto.stats import SHARED_ERRORS
from tests.kit.redis_server import Certificate, RedisServer
from tests.kit.waiting import LONGER_THAN_A_TEST_S
from tests.tiers.faulty_store import FaultyStore
from tests.tiers.shared_conformance import FaultConformance, SharedConformance
from tests.tiers.shared_rig import ONE, OTHER, SLOT_BYTES, SLOTS, Answer, SharedRig, key_of, name_of

pytestmark = pytest.mark.usefixtures("short_pauses")
DONE = Result.DONE
PAGE = Path(__file__).parents[2] / "deploy/SECURITY.md"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


class TestRedis(SharedConformance):
    @pytest.fixture
    def url(self, server: RedisServer) -> str:
        server.command("FLUSHALL")
        return server.url


@pytest.fixture
def rig(store: FaultyStore) -> SharedRig:
    return SharedRig(store.url).reachable()


class TestDouble(FaultConformance):
    refusals = (
        (b"-NOPERM User default has no permissions to run the 'set' command\r\n", "forbidden", "+set"),
        (b"-READONLY You can't write against a read only replica.\r\n", "refused", "replica"),
        (b"-MISCONF Errors writing to the AOF file\r\n", "refused", "MISCONF"),
    )

    @pytest.fixture
    def double(self, store: FaultyStore) -> FaultyStore:
        return store


# --- the double, which breaks as no other can -------------------------------------------------------


WRONG_TYPE = b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"


def test_a_key_of_another_type_is_a_miss_and_is_removed(store: FaultyStore, rig: SharedRig) -> None:
    blocks = rig.store_some(2)
    store.forced_values = {name_of(blocks[0], 0): WRONG_TYPE}
    assert rig.load(blocks[0]) is Result.CORRUPT
    assert rig.tier.counters.mismatches == 1
    rig.until(lambda: list(store.values) == [name_of(blocks[1], 0)])
    assert rig.load(blocks[1]) is DONE


def test_silent_addresses_take_no_longer_than_one(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo

    def look_up(host: str, *rest: Any, **named: Any) -> list[Any]:
        return [(0, 0, 0, "", place) for place in places] if "example" in host else known(host, *rest, **named)

    connect = Mock(wraps=socket.create_connection)

    def given_s() -> float:
        """Seconds that the addresses had together."""
        return sum(call.args[1] for call in connect.call_args_list)

    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):  # whom nobody accepts; beyond them it answers none
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        places = [silent.getsockname()] * 4
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        connection = Redis("valkey.example", 6379, 0, Credentials(), tls=False)
        monkeypatch.setattr(socket, "create_connection", connect)
        with pytest.raises(StoreError, match=r"valkey\.example:6379 cannot be reached: timed out"):
            connection.connect()
        assert len(connect.call_args_list) == len(places)
        assert given_s() <= CONNECT_S
        places[3] = "127.0.0.1", store.port
        connect.reset_mock()
        connection.connect()
        connection.ping(time.monotonic() + 5.0)
        assert len(connect.call_args_list) == len(places)
        assert given_s() <= 1.0001 * CONNECT_S
        opened = connection._connection._socket
        assert opened is not None
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 4 * 60
        connection.close()


@pytest.mark.parametrize(
    ("sent", "closes", "kind"), [(0, False, "timeout"), (1000, False, "timeout"), (1000, True, "disconnected")]
)
def test_what_does_not_come_is_given_up_in_time_and_for_good(sent: int, closes: bool, kind: str) -> None:
    ours, theirs = socket.socketpair()
    connection = RedisConnection(("nowhere", 6379), tls=False, demoted=Demoted())
    connection._socket = ours
    with theirs:
        theirs.sendall(bytes(sent))
        if closes:
            theirs.close()
        began, patience_s = time.monotonic(), 0.4
        with pytest.raises(StoreError) as caught:
            connection.fill([memoryview(bytearray(5000))], began + patience_s)
        assert caught.value.kind == kind
        assert time.monotonic() - began < 5 * patience_s
        assert connection._socket is None, "what comes later goes nowhere"


def test_replies_that_nobody_asked_for_are_not_taken_for_others(store: FaultyStore, rig: SharedRig) -> None:
    blocks = rig.store_some(3)
    value = store.values[name_of(blocks[2], 0)]
    for _ in range(4):  # each thread that reads has a connection
        store.surplus = b"$%d\r\n%s\r\n" % (len(value), value)
        assert rig.load(blocks[0]) is DONE
        assert rig.load(blocks[1]) is DONE
    assert not rig.kinds


def test_a_connection_with_a_wrong_answer_is_closed(store: FaultyStore, rig: SharedRig) -> None:
    blocks = rig.store_some(6)
    assert rig.ask_anew(*blocks) == [Answer.YES] * 6
    value = store.values[name_of(blocks[5], 0)]
    other = b"$%d\r\n%s\r\n" % (len(value), value)
    store.spoil = lambda data: value  # the first of a batch is answered by what belongs to another
    store.surplus = other
    ended = [rig.begin_read(blocks[0], slot=8)]
    rig.until(lambda: all(ended))
    assert ended == [[Result.CORRUPT]]
    store.spoil = bytes
    ended = [rig.begin_read(block, slot=9 + number) for number, block in enumerate(blocks[1:])]
    rig.until(lambda: all(ended))
    assert ended == [[DONE]] * 5
    assert rig.tier.counters.mismatches == 1


ODD_REPLIES = {
    "lines that end with half an end": {b"EXISTS": b":1\n:1\n"},
    "a text where a number belongs": {b"EXISTS": b"$1\r\n1\r\n"},
    "an array of arrays": {b"EXISTS": b"*1\r\n*1\r\n*1\r\n:1\r\n"},
    "a generation of negative length": {b"GET": b"$-7\r\n"},
    "a length with an underscore": {b"GET": b"$1_0\r\n0123456789\r\n"},
}


@pytest.mark.parametrize("reply", ODD_REPLIES)
def test_replies_that_are_none_are_misses_and_not_bugs_of_ours(store: FaultyStore, rig: SharedRig, reply: str) -> None:
    store.forced = ODD_REPLIES[reply]
    for number in range(3):
        assert rig.ask(rig.block(number)) == [Answer.NO]
    assert set(rig.kinds) <= {"protocol", "refused", "timeout"}
    rig.until(lambda: rig.tier.breaker.opened > 0)


@pytest.mark.parametrize("password", ["s3cret", "s3cret\udcff", "s3cret" * 30])
@pytest.mark.parametrize("error", ["ERR unknown command 'AUTH', with args beginning with: '%.99s'", "ERR what is '%s'"])
def test_a_servers_errors_show_no_password(store: FaultyStore, password: str, error: str) -> None:
    store.error = error % password + "\x1b[31m\n" + "A" * 1000
    rig = SharedRig(store.url, password)
    rig.until(lambda: bool(rig.tier.health.problem))
    assert ("ERR what is '***'" if "what" in error else "ERR unknown command 'AUTH'") in rig.tier.health.problem
    assert "s3cret" not in rig.tier.health.problem
    assert rig.tier.health.problem.isprintable()
    assert len(rig.tier.health.problem) < 400


def test_operators_read_what_each_counted_fault_means() -> None:
    not_counted = {StoreFault.UNKEPT, StoreFault.CLOSED}
    assert {*StoreFault} - not_counted | {"mismatch"} == SHARED_ERRORS.keys()


def test_a_store_that_nobody_asks_is_watched(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.tiers.store_health.QUIET_S", 0.02)
    rig = SharedRig(store.url).reachable()
    rig.until(lambda: store.commands[b"PING"] >= 4)
    assert rig.tier.available()
    assert not rig.kinds
    store.error = "NOAUTH Authentication required."
    rig.until(lambda: not rig.tier.available())
    assert rig.tier.breaker.opened == 1
    assert rig.kinds["credentials"]
    store.error = ""
    rig.until(lambda: rig.tier.available())


def test_a_store_that_is_full_is_left_alone_for_a_while(store: FaultyStore, rig: SharedRig) -> None:
    block = rig.block(1)
    rig.store(block)
    store.refuse_writes(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n")
    assert rig.write(rig.block(2)) is Result.FAILED
    assert rig.write(rig.block(3)) is None
    assert rig.tier.counters.dropped_writes == 1, "the other one may be written later"
    assert rig.kinds == {"full": 1}
    assert rig.load(block) is DONE, "reading goes on"
    assert "maxmemory" in rig.tier.health.refusal
    rig.tier.health._write_at = 0.0
    ends: list[Result] = []
    assert [rig.tier.write(rig.block(number), [0], ends.append) for number in (4, 5)] == [True, False], "one is tried"
    rig.until(lambda: bool(ends))
    assert (ends, rig.tier.refuses_writes()) == ([Result.FAILED], True)
    store.forced.clear()
    rig.tier.health._write_at = 0.0
    assert rig.write(rig.block(4)) is DONE
    assert not rig.tier.health.refusal
    taken = [rig.tier.write(rig.block(number), [0], ends.append) for number in (5, 6)]
    assert taken == [True, True]
    rig.until(lambda: len(ends) == 3)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("LOADING Redis is loading the dataset in memory", ""),
        ("NOAUTH Authentication required.", "see shared_password_file, which is read at the start."),
        ("WRONGPASS invalid username-password pair", "see shared_password_file, which is read at the start."),
        ("MOVED 1 a:1", "name it redis+cluster://"),
        ("ERR This instance has cluster support disabled", "Name it redis://."),
        ("CLUSTERDOWN Hash slot not served", "set cluster-require-full-coverage no."),
        ("ERR", ""),
        ("A" * 1_000_000, ""),
    ],
    ids=lambda text: text[:8],
)
def test_errors_are_misses_with_a_sentence(store: FaultyStore, rig: SharedRig, error: str, advice: str) -> None:
    block = rig.block(1)
    rig.store(block)
    rig.forget()
    store.error = error
    assert rig.ask(block) == [Answer.NO]
    assert rig.write(rig.block(2)) in (None, Result.FAILED)
    assert sum(rig.kinds.values()) >= 1
    assert advice in rig.tier.health.problem
    assert ("name it redis+cluster://" in rig.tier.health.problem) == error.startswith("MOVED")
    store.error = ""
    rig.until(lambda: rig.tier.available(), 5.0)


BUSY = (
    b"-BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.\r\n",
    b"-LOADING Redis is loading the dataset in memory\r\n",
)


@pytest.mark.parametrize("answer", BUSY, ids=["busy", "loading"])
def test_what_a_busy_server_answers_counts(store: FaultyStore, rig: SharedRig, answer: bytes) -> None:
    """As where a script begins in the middle of a batch."""
    blocks = rig.store_some(5)
    store.busy = {name_of(blocks[3], 0): answer}
    for _ in range(3):
        assert rig.ask_anew(*blocks) == [Answer.YES, Answer.YES, Answer.YES, Answer.NO, Answer.YES]
    store.busy = {}
    assert rig.ask_anew(*blocks) == [Answer.YES] * 5
    store.busy = {name_of(blocks[3], 0): answer}
    ends = [rig.begin_read(block, slot=8 + at) for at, block in enumerate(blocks)]
    rig.until(lambda: all(ends))
    assert ends == [[DONE], [DONE], [DONE], [Result.FAILED], [DONE]]
    assert rig.kinds == {"busy": 1}, "it is not asked again at once"
    assert rig.tier.breaker.opened == 0


LIMIT = b"CONFIG SET maxclients %d\r\n"


@pytest.mark.parametrize("fault", ["a script", "maxclients"])
def test_a_server_that_is_busy_for_a_while_serves_again(fault: str) -> None:
    with RedisServer() as server:
        rig = SharedRig(server.url).reachable()
        rig.store(block := rig.block(1))
        server.command("CONFIG", "SET", "busy-reply-threshold", "1")
        with socket.create_connection(("127.0.0.1", server.port), 5.0) as other:
            if fault == "a script":
                other.sendall(b"EVAL 'while true do end' 0\r\n")
                rig.until(lambda: server.command("PING").startswith(b"-BUSY"))
            else:
                other.sendall(LIMIT % 1)
                assert other.recv(99) == b"+OK\r\n"
                for store in rig.tier._stores:
                    store.interrupt()
            while rig.tier.available():
                assert rig.ask_anew(block) == [Answer.NO]
            assert rig.kinds["busy"] > 0
            assert set(rig.kinds) <= {"busy", "disconnected"}
            if fault == "a script":
                server.command("SCRIPT", "KILL")
            else:
                other.sendall(LIMIT % 1000)
            rig.until(lambda: rig.ask_anew(block) == [Answer.YES])
            assert rig.load(block) is DONE


def test_no_more_is_queued_than_the_bounds_allow(store: FaultyStore, rig: SharedRig) -> None:
    store.answering.clear()
    block = rig.block(1)
    ends: list[Result] = []
    taken = [rig.tier.write(block._replace(key=number.to_bytes(32, "big")), [0], ends.append) for number in range(100)]
    assert sum(taken) == 64
    assert rig.tier.counters.dropped_writes == 0, "those that wait are offered again"
    store.answering.set()
    rig.until(lambda: len(ends) == 64)


def test_a_shorter_copy_that_is_not_removed_is_counted_and_remains_as_short(
    store: FaultyStore, rig: SharedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffd.tiers.shared.HIDDEN_S", 0.0)
    rig.store(block := rig.block(1, first=3))
    store.forced = {b"UNLINK": b"-NOPERM User default has no permissions to run the 'unlink' command\r\n"}
    rig.remove(block)
    rig.until(lambda: rig.tier.counters.dropped_removals == 1)
    assert rig.load(block) is DONE
    assert rig.read_block.first_blocks == (3,), "no load gets what is before it"
    store.answering.clear()
    for number in range(Redis.writers):
        rig.remove(rig.block(number))
    rig.until(lambda: rig.tier._writing.running == Redis.writers)
    for number in range(100):
        rig.remove(rig.block(number))
    assert rig.tier.counters.dropped_removals - 1 == 100 - MAX_WRITES - MAX_REMOVALS, "what waits is bounded"
    store.answering.set()


def test_memory_of_namespaces_is_bounded(rig: SharedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.tiers.fleet_clears.MAX_NAMESPACES", 10)
    asked = [number.to_bytes(32, "big") for number in range(100)]
    for fingerprint in asked:
        rig.tier.clears.poll([fingerprint])
        block = rig.block(1, fingerprint=fingerprint)
        assert rig.ask(block) == [Answer.NO]
    assert list(rig.tier.clears.polled_at) == asked[-10:]
    rig.until(lambda: all(at < inf for at in rig.tier.clears.polled_at.values()))  # none is being polled
    rig.tier.clears.poll(asked)
    assert list(rig.tier.clears.polled_at) == asked[-10:]
    assert not list(rig.tier.generations), "none was raised"


def test_a_raised_generation_makes_all_void_and_is_not_lowered(store: FaultyStore, rig: SharedRig) -> None:
    block = rig.block(1)
    rig.store(block)
    own_name = generation_name(ONE)
    store.values[own_name] = b"7"
    rig.forget()
    assert rig.ask(block) == [Answer.NO]
    assert rig.write(block) is None, "the pool's blocks are of the generation before until somebody has dropped them"
    assert rig.take_voided() == {ONE}
    rig.store(block)
    assert name_of(block, 7) in store.values
    del store.values[own_name]
    rig.ask(rig.block(2))
    assert store.values[own_name] == b"7"
    assert rig.load(block) is DONE


@pytest.mark.parametrize("follows", [True, False])
def test_a_peer_that_has_the_raised_number_already_is_not_asked_for_one_more(
    store: FaultyStore, rig: SharedRig, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    """It would drop what was stored since. In a store the number is another node's, and blocks have its name."""
    monkeypatch.setattr(Redis, "is_peer", follows)
    rig.store(rig.block(1))
    raised = rig.tier.generations.next_of_all(ONE)
    store.values[generation_name(ONE)] = b"%d" % raised
    one = rig.tier.clears.raise_generation(ONE, raised, 0)
    rig.until(lambda: one.ended)
    assert not one.problem
    assert store.values[generation_name(ONE)] == b"%d" % (raised + (not follows))
    assert rig.tier.generations.fleet(ONE) == raised + (not follows)


def test_a_peer_with_a_higher_number_gets_one_above_it(
    store: FaultyStore, rig: SharedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be an earlier clear's, by a clock that is ahead: the peer would keep what it has stored since."""
    monkeypatch.setattr(Redis, "is_peer", True)
    ahead = rig.tier.generations.next_of_all(ONE) + 3600
    store.values[generation_name(ONE)] = b"%d" % ahead
    right, calls = rig.tier._store.raise_generation, count(1)

    def unkept(*arguments: Any) -> int:
        raised = right(*arguments)
        if next(calls) == 1:
            raise StoreError(StoreFault.UNKEPT, "It is not written yet.")
        return raised

    monkeypatch.setattr(rig.tier._store, "raise_generation", unkept)
    assert not rig.raise_generation(ONE).problem
    assert store.values[generation_name(ONE)] == b"%d" % (ahead + 1), "and none above that at the second attempt"
    assert rig.tier.generations.fleet(ONE) == ahead + 1


@pytest.mark.parametrize("kind", ["helper", "protocol"])
def test_a_peer_that_fails_at_a_raise_refuses_no_writes(
    rig: SharedRig, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Nothing is ever written to it, and health would say that it is only read."""
    monkeypatch.setattr(Redis, "is_peer", True)
    monkeypatch.setattr(
        rig.tier._store, "raise_generation", Mock(side_effect=StoreError(StoreFault(kind), "It fails."))
    )
    assert rig.raise_generation(ONE).problem == "It fails."
    rig.until(lambda: rig.kinds[kind] > 0)
    assert rig.tier.health.refusal == ""


def test_a_raise_that_takes_its_time_is_no_store_that_hangs(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a slow bucket: lookups get no answer for that time, and reads go on."""
    monkeypatch.setattr("kvoffd.tiers.fleet_clears.RAISE_S", 60.0)
    monkeypatch.setattr("kvoffd.tiers.redis_connection.STALL_S", 60.0)
    rig = SharedRig(store.url, ask_deadline_s=0.01).reachable()
    rig.until(lambda: not rig.tier._asking.unfinished)
    store.answering.clear()
    one = rig.tier.clears.raise_generation(ONE, rig.tier.generations.next_of_all(ONE), 0)
    rig.question([key_of(1)], prefix=False)
    rig.until(lambda: rig.tier._asking.longest_s > HANGS_S + 0.5)
    store.answering.set()
    rig.until(lambda: one.ended)
    assert (one.problem, rig.kinds, rig.tier.breaker.opened) == ("", {}, 0)


@pytest.mark.parametrize("follows_after", [3, None])
def test_a_peer_that_has_not_followed_is_asked_again_and_holds_no_question_up(
    rig: SharedRig, monkeypatch: pytest.MonkeyPatch, follows_after: int | None
) -> None:
    monkeypatch.setattr(Redis, "is_peer", True)
    monkeypatch.setattr("kvoffd.tiers.fleet_clears.RAISE_S", 2.0)
    rig.store(block := rig.block(1, fingerprint=OTHER))
    right, calls = rig.tier._store.raise_generation, count(1)

    def unkept(*arguments: Any) -> int:
        if (number := next(calls)) == follows_after:
            return right(*arguments)
        raise StoreError(StoreFault.UNKEPT, f"It has not, {number} times.")

    monkeypatch.setattr(rig.tier._store, "raise_generation", unkept)
    one = rig.tier.clears.raise_generation(ONE, rig.tier.generations.next_of_all(ONE), 0)
    rig.until(lambda: bool(one.problem))
    assert not one.ended
    assert rig.ask_anew(block) == [Answer.YES], "while it is asked again"
    rig.until(lambda: one.ended)
    assert ("times" in one.problem) is (follows_after is None)
    assert (rig.tier.health.refusal, rig.kinds, rig.tier.breaker.opened) == ("", {}, 0), "it refuses nothing"


def test_a_store_that_only_fails_to_read_hears_of_a_clear_and_tells_of_one(
    store: FaultyStore, rig: SharedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer whose blocks do not come still has them, and would lend them to others."""
    monkeypatch.setattr("kvoffd.tiers.breaker.PAUSE_S", 600.0)
    monkeypatch.setattr(Redis, "poll_s", 0.0)
    blocks = rig.store_some(2)
    store.cut_after, store.cuts = 40, 100
    assert [rig.load(block) for block in blocks] == [Result.FAILED] * 2, "each is read twice"
    assert not rig.tier.available()
    one = rig.raise_generation(ONE)
    assert not one.problem
    raised = int(store.values[generation_name(ONE)])
    assert raised == rig.tier.generations.fleet(ONE) > 0
    store.values[generation_name(ONE)] = b"%d" % (raised + 1)
    rig.tier.clears.poll([ONE])
    rig.until(lambda: rig.tier.generations.fleet(ONE) == raised + 1)
    assert not rig.tier.available(), "nothing is read yet"
    store.delay_s = 600.0
    while not rig.tier.breaker.silent:
        rig.tier.clears.poll([ONE])
        rig.until(lambda: rig.tier._asking.unfinished == 0)
    assert rig.raise_generation(ONE).problem, "one that answers nothing is not waited for"


def test_of_a_prompt_that_was_given_up_the_store_is_asked_for_nothing_more(store: FaultyStore, rig: SharedRig) -> None:
    """Only what the threads had taken by then is read."""
    most, results, awaited = READERS * Redis.blocks_at_once, list[Result](), True
    blocks = rig.store_some(count := most + 40)
    assert rig.ask_anew(*blocks) == [Answer.YES] * count
    asked_before = store.commands.get(b"GET", 0)
    store.answering.clear()
    for number, block in enumerate(blocks):
        end, at = lambda result, _: results.append(result), [8192 * number]
        assert rig.tier.read(block.group, block.key, at, 5.0, end, lambda: awaited)
    rig.until(lambda: store.commands.get(b"GET", 0) > asked_before)
    awaited = False
    store.answering.set()
    rig.until(lambda: len(results) == count)
    asked = store.commands[b"GET"] - asked_before
    assert 0 < asked <= most
    assert (results.count(DONE), results.count(Result.UNWANTED)) == (asked, count - asked)
    assert (rig.tier.breaker.opened, rig.kinds) == (0, {})
    awaited = True
    assert rig.load(blocks[-1]) is DONE, "nothing is wrong with it"


def test_what_one_store_voids_is_not_read_from_another(store: FaultyStore, rig: SharedRig) -> None:
    """Its blocks may have come from there, and would be written to the first one's new generation."""
    with FaultyStore() as second:
        other = SharedRig(second.url).reachable()
        other.tier.generations = rig.tier.generations
        other.store(block := rig.block(1))
        store.values[generation_name(ONE)] = b"7"
        rig.ask(rig.block(2))
        assert other.ask_anew(block) == [Answer.NO]
        assert second.values[generation_name(ONE)] == b"7", "for nodes that have this store alone"


def test_a_reader_reads_where_the_generation_is_forgotten(store: FaultyStore) -> None:
    writer, reader = (SharedRig(store.url, generations={ONE: 7}).reachable() for _ in range(2))
    writer.store(block := writer.block(1))
    store.forced = {b"SET": b"-NOPERM User reader has no permissions to run the 'set' command\r\n"}
    store.values.pop(generation_name(ONE), None)
    assert reader.ask(block) == [Answer.YES]
    assert reader.load(block) is DONE
    assert reader.tier.breaker.opened == 0
    assert "+set" in reader.tier.health.refusal


def test_a_new_node_follows_the_first_generation_it_sees(store: FaultyStore) -> None:
    store.values[generation_name(ONE)] = store.values[generation_name(OTHER)] = b"7"
    rig = SharedRig(store.url, generations={OTHER: 7}).reachable()
    rig.ask(rig.block(1))
    rig.ask(rig.block(1, fingerprint=OTHER))
    assert rig.take_voided() == {ONE}


BAD_GENERATIONS = [b"x", b"-1", b"9" * 18, b"9" * 19, b"9" * 600]


@pytest.mark.parametrize(
    "reply", [*(b"$%d\r\n%s\r\n" % (len(bad), bad) for bad in BAD_GENERATIONS), WRONG_TYPE, b"$99999999999999\r\n"]
)
def test_a_generation_that_is_no_number_is_of_its_own_namespace_alone(
    store: FaultyStore, rig: SharedRig, reply: bytes
) -> None:
    rig.store(block := rig.block(1), other := rig.block(1, fingerprint=OTHER))
    store.forced_values[generation_name(ONE)] = reply
    for number in range(1, 6):
        assert rig.ask_anew(rig.block(number)) == [Answer.NO]
        assert rig.tier.available()
    assert rig.load(other) is DONE
    assert rig.kinds == {"generation": 5}
    one = rig.raise_generation(ONE)
    assert one.problem
    assert rig.tier.health.refusal == "", "blocks of other namespaces are written"
    assert generation_name(ONE) not in store.values, "a number of 19 digits would be read by nobody"
    store.forced_values.clear()
    rig.until(lambda: rig.ask_anew(block) == [Answer.YES])
    assert rig.load(block) is DONE


@pytest.mark.parametrize("reply", [b"$1\r\nx\r\n", b"$600\r\n" + b"9" * 600 + b"\r\n", WRONG_TYPE])
def test_one_poll_asks_about_all_namespaces_and_one_without_a_number_hides_no_other(
    store: FaultyStore, rig: SharedRig, reply: bytes
) -> None:
    every = [number.to_bytes(32, "big") for number in range(30)]
    store.values.update((generation_name(one), b"%d" % (1 + at)) for at, one in enumerate(every) if at % 2)
    store.forced_values.update({generation_name(every[at]): reply for at in (3, 4, 29)})
    asked = store.commands.get(b"GET", 0)
    rig.tier.clears.poll(every)
    assert rig.tier._asking.unfinished <= 3, "one question besides those of the store's health"
    rig.until(lambda: rig.tier.clears.answered_about(every[28]) > 0)
    right = [at for at in range(1, 30, 2) if at not in (3, 29)]
    assert dict(rig.tier.generations) == {every[at]: 1 + at for at in right}
    assert [at for at, one in enumerate(every) if rig.tier.clears.answered_about(one) < 0] == [3, 4, 29]
    assert (rig.kinds, rig.tier.available()) == ({"generation": 3}, True)
    assert store.commands[b"GET"] - asked <= 3 * len(every), "the rest is asked for again after each"


@pytest.mark.parametrize("last", [b"7", b"x"])
def test_a_store_that_keeps_no_generation_hides_none_of_a_poll(store: FaultyStore, last: bytes) -> None:
    """It lost two, and refuses to have them again: what it answered of the others is followed all the same."""
    every = [number.to_bytes(32, "big") for number in range(4)]
    lost, (cleared, other) = every[:2], every[2:]
    rig = SharedRig(store.url, generations=dict.fromkeys(every, 5)).reachable()
    store.forced[b"SET"] = b"-NOPERM User reader has no permissions to run the 'set' command\r\n"
    store.values.update({generation_name(cleared): b"6", generation_name(other): last})
    rig.tier.clears.poll([cleared, *lost, other])
    rig.until(lambda: rig.tier.clears.answered_about(cleared) > 0)
    assert cleared in rig.take_voided()
    assert all(rig.tier.clears.answered_about(one) > 0 for one in lost)
    assert rig.tier.breaker.opened == 0
    assert "+set" in rig.tier.health.refusal


def test_a_poll_gives_no_generation_back_over_a_number_that_no_node_can_have_written(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = SharedRig(store.url, generations={ONE: 7, OTHER: 7}).reachable()
    monkeypatch.setattr(rig.tier._store, "generations", lambda fingerprints, deadline: [-1, 6])
    raised = Mock(return_value=7)
    monkeypatch.setattr(rig.tier._store, "raise_generation", raised)
    rig.tier.clears.poll([ONE, OTHER])
    rig.until(lambda: rig.tier.clears.answered_about(OTHER) > 0)
    assert [call.args[:3] for call in raised.call_args_list] == [(OTHER, 6, 7)]
    assert rig.tier.clears.answered_about(ONE) < 0
    assert rig.kinds == {"generation": 1}


def test_all_namespaces_are_polled_together_once_one_is_due(store: FaultyStore, rig: SharedRig) -> None:
    """However far apart they were opened: else each would be a question of its own for ever."""
    now = time.monotonic()
    rig.tier.clears.polled_at.update({ONE: now - 2.0, OTHER: now - 1.0})
    rig.tier.clears.poll([ONE, OTHER])
    assert (rig.tier.clears.polled_at[ONE], rig.tier.clears.polled_at[OTHER]) == (now - 2.0, now - 1.0)
    rig.tier.clears.polled_at[ONE] = now - Redis.poll_s
    asked = store.commands.get(b"GET", 0)
    rig.tier.clears.poll([ONE, OTHER])
    rig.until(lambda: min(map(rig.tier.clears.answered_about, (ONE, OTHER))) > 0)
    assert store.commands[b"GET"] - asked == 2
    assert rig.tier.clears.polled_at[ONE] == rig.tier.clears.polled_at[OTHER] > now


@pytest.mark.parametrize("follows", [True, False])
def test_a_peer_is_told_at_once_of_a_clear_and_a_store_is_not(
    store: FaultyStore, rig: SharedRig, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    """All nodes that hear of it would raise the store's number at once, by what it lacked: far above the time."""
    monkeypatch.setattr(Redis, "is_peer", follows)
    rig.tier.clears.poll([ONE])
    rig.until(lambda: rig.tier.clears.answered_about(ONE) > 0)
    assert rig.tier.generations.hear(ONE, 7)
    rig.tier.clears.tell([ONE])
    if follows:
        rig.until(lambda: store.values.get(generation_name(ONE)) == b"7")
    else:
        rig.until(lambda: not rig.tier._asking.unfinished)
        assert generation_name(ONE) not in store.values


@pytest.mark.parametrize(("call", "which"), [("ask", 1), ("ask", 2), ("raise_generation", 1)])
def test_no_number_of_a_store_is_followed_unchecked(
    store: FaultyStore, rig: SharedRig, monkeypatch: pytest.MonkeyPatch, call: str, which: int
) -> None:
    """One that no node can raise would end the namespace's sharing for good, in each store and on each node."""
    store.values[generation_name(ONE)] = b"7"
    right, calls = getattr(rig.tier._store, call), count(1)

    def wrong(*arguments: Any, **options: Any) -> Any:
        found = right(*arguments, **options)
        if next(calls) != which:
            return found
        return (10**18 - 1, found[1]) if call == "ask" else 10**18 - 1

    monkeypatch.setattr(rig.tier._store, call, wrong)
    if call == "ask":
        assert rig.ask_anew(rig.block(1)) == [Answer.NO]
    else:
        assert rig.raise_generation(ONE).problem
    assert rig.kinds == {"generation": 1}
    assert rig.tier.generations.fleet(ONE) in (0, 7)
    assert rig.ask_anew(rig.block(2)) == [Answer.NO]
    assert rig.tier.generations.fleet(ONE) < 10**17
    assert int(store.values[generation_name(ONE)]) < 10**17


def test_a_number_that_no_node_can_raise_is_forgotten_at_the_start() -> None:
    """An earlier release kept one that a store had shown."""
    assert dict(Generations(Resets(followed={ONE: 10**18 - 1, OTHER: 7}))) == {OTHER: 7}


def test_a_thread_that_hangs_opens_the_breaker(
    store: FaultyStore, rig: SharedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = rig.block(1)
    rig.store(block)
    released = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(rig.tier, "ask_deadline_s", 0.5)
        patched.setattr(Redis, "connect", lambda _: released.wait(10.0))
        patched.setattr(rig.tier, "ask_deadline_s", 1.0)
        for number in (2, 3):  # the first is what hangs, the second waits
            rig.question([number.to_bytes(32, "big")], prefix=True, fingerprint=ONE, length=5000)
            rig.until(lambda number=number: rig.tier._asking.waiting == number - 2)  # type: ignore[misc]

        def given_up() -> bool:
            rig.tier.tick()
            return not rig.tier.available()

        rig.until(given_up, 5.0)
        assert rig.kinds == {"timeout": 1}
        assert rig.tier.counters.unanswered_keys == 1
    released.set()
    rig.until(lambda: rig.tier.available(), 5.0)
    assert rig.load(block) is DONE


# --- a time to live ---------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["server", "cluster"])
def test_what_nobody_uses_expires_and_a_use_begins_its_time_anew(of: str, request: pytest.FixtureRequest) -> None:
    running = request.getfixturevalue(of)
    server = running if of == "server" else running.servers[0]
    for one in [server] if of == "server" else running.servers:
        one.command("FLUSHALL")
    rig, other = SharedRig(f"{running.url}?ttl=1h").reachable(), SharedRig(f"{running.url}?ttl=2h").reachable()
    block = next(block for block in map(rig.block, range(99)) if slot_of(name_of(block, 0)) < 5000)
    rig.store(block)
    name = name_of(block, 0)
    assert 3590 <= int(server.command("TTL", name)[1:]) <= 3600
    other.store(block)
    assert other.tier.counters.already_stored == 1
    assert 7190 <= int(server.command("TTL", name)[1:]) <= 7200
    assert other.load(block) is DONE


RIGHTS = re.findall(r"\+([a-z|]+)", NEEDED_COMMANDS)


@pytest.mark.usefixtures("servers_may_stall")
def test_the_rights_that_are_named_suffice() -> None:
    assert all(f"+{right}" in PAGE.read_text() for right in RIGHTS)
    with RedisServer() as server:
        rights = [f"+{right}" for right in RIGHTS if right != "cluster|slots"]
        assert server.command("ACL", "SETUSER", "node", "on", ">s3cret", "~kvoffd/*", *rights) == b"+OK\r\n"
        for url in (server.url, f"{server.url}/1?ttl=1h"):
            rig = SharedRig(url, "s3cret", user="node").reachable()
            (block,) = rig.store_some(1)
            assert rig.load(block) is DONE
            for _ in range(2):
                one = rig.raise_generation(OTHER)
                assert not one.problem
            rig.remove(block)
            rig.until(lambda rig=rig, block=block: rig.ask_anew(block) == [Answer.NO])
            assert not rig.kinds
        server.command("ACL", "SETUSER", "node", "-get")
        rig.until(lambda: rig.ask_anew(block) and rig.kinds["forbidden"] > 0)
        assert "'get' command" in rig.tier.health.problem
        assert "+get" in rig.tier.health.problem


# --- a real server that is full --------------------------------------------------------------------


@pytest.fixture
def looks_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store is asked how full it is by ``look`` alone: between two writes, so that what it evicted is all known."""
    monkeypatch.setattr("kvoffd.tiers.store_health.LOOK_S", LONGER_THAN_A_TEST_S)
    monkeypatch.setattr(Fullness, "wrote_much", lambda _: False)


def look(rig: SharedRig) -> None:
    """Have the store asked how full it is."""
    rig.until(lambda: not rig.tier.health._looking)
    rig.tier.health._look_at = 0.0
    rig.until(lambda: rig.tier.health._look_at > 0.0)


MIB = 1 << 20
BIG = (200_000,)


@pytest.mark.usefixtures("looks_when_asked")
@pytest.mark.parametrize("policy", ["allkeys-lru", "noeviction"])
@pytest.mark.usefixtures("servers_may_stall")
def test_a_real_server_says_that_it_is_full(policy: str) -> None:
    with RedisServer("--maxmemory", "12mb", "--maxmemory-policy", policy) as server:
        rig = SharedRig(server.url).reachable()
        look(rig)
        stats = rig.tier.stats()
        assert (stats.size_bytes, rig.tier.lifetime_bytes) == (12 * MIB, 0)
        assert 0 < stats.used_bytes < 6 * MIB
        results = [rig.write(rig.block(number, BIG)) for number in range(80)]
        look(rig)
        assert rig.tier.stats().used_bytes > 11 * MIB
        assert results.count(None) > 0 if policy == "noeviction" else set(results) == {DONE}
        assert 10 * MIB < rig.tier.lifetime_bytes <= 12 * MIB, "nobody else writes"
        assert rig.tier.breaker.opened == 0
        assert "full" in rig.kinds if policy == "noeviction" else not rig.kinds
        server.command("FLUSHALL")
        rig.tier.health.fullness._full_until = 0.0  # a minute after the refusal
        look(rig)
        assert rig.tier.lifetime_bytes == 0


@pytest.mark.usefixtures("looks_when_asked")
def test_a_real_server_that_runs_a_script_is_as_full_as_it_was() -> None:
    settings = "--maxmemory", "12mb", "--maxmemory-policy", "noeviction", "--lua-time-limit", "20"
    with RedisServer(*settings) as server:
        rig = SharedRig(server.url).reachable()
        look(rig)
        for number in range(80):
            rig.write(rig.block(number, BIG))
        look(rig)
        lifetime_bytes = rig.tier.lifetime_bytes
        assert lifetime_bytes > 10 * MIB
        with socket.create_connection(("127.0.0.1", server.port), 5.0) as script:
            script.sendall(b"*3\r\n$4\r\nEVAL\r\n$17\r\nwhile true do end\r\n$1\r\n0\r\n")
            rig.until(lambda: server.command("PING").startswith(b"-BUSY"))
            look(rig)
            assert rig.tier.lifetime_bytes == lifetime_bytes
            assert rig.tier.health._look_at <= rig.tier._clock() + LONGER_THAN_A_TEST_S
            server.command("SCRIPT", "KILL")


def test_a_store_is_asked_how_full_it_is_when_much_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.tiers.store_health.LOOK_S", LONGER_THAN_A_TEST_S)
    with RedisServer("--maxmemory", "12mb") as server:
        rig = SharedRig(server.url).reachable()
        look(rig)
        rig.store(*(rig.block(number, BIG) for number in range(20)))
        rig.until(lambda: rig.tier.stats().used_bytes > 20 * BIG[0])


@pytest.mark.usefixtures("looks_when_asked")
def test_what_other_nodes_write_shortens_the_lives_of_blocks() -> None:
    with RedisServer("--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru") as server:
        rig, other = SharedRig(server.url).reachable(), SharedRig(server.url).reachable()
        rig.store(*(rig.block(number, BIG) for number in range(60)))
        look(rig)
        assert rig.tier.lifetime_bytes > 11 * MIB
        for first in range(100, 500, 40):  # three of four are another node's
            other.store(*(other.block(number, BIG) for number in range(first, first + 30)))
            rig.store(*(rig.block(number, BIG) for number in range(first + 30, first + 40)))
            look(rig)
        assert 2 * MIB < rig.tier.lifetime_bytes < 6 * MIB


def test_a_server_that_refuses_is_full_although_it_may_not_say_so() -> None:
    with RedisServer("--maxmemory", "6mb", "--maxmemory-policy", "noeviction") as server:
        rights = [f"+{right}" for right in RIGHTS if right != "cluster|nodes"]
        assert server.command("ACL", "SETUSER", "node", "on", ">s3cret", "~kvoffd/*", *rights) == b"+OK\r\n"
        rig = SharedRig(server.url, "s3cret", user="node").reachable()
        rig.until(lambda: not rig.tier.health._looking)
        numbers = count()
        rig.until(lambda: rig.write(rig.block(next(numbers), BIG)) is None)
        assert rig.tier.stats().size_bytes == 0
        assert list(rig.kinds) == ["full"], "that it may not ask is no error"
        assert rig.tier.lifetime_bytes == SLOTS * SLOT_BYTES, "as much as the pool"


# --- a real server that goes away -------------------------------------------------------------------


def test_a_wrong_password_is_named_and_the_right_one_serves() -> None:
    with RedisServer("--requirepass", "s3cret") as server:
        for password in ("", "wrong", "wr\udcffng"):
            rig = SharedRig(server.url, password)
            rig.until(lambda rig=rig: rig.kinds["credentials"] > 0)
            assert not rig.tier.available()
        rig = SharedRig(server.url, "s3cret").reachable()
        rig.store(block := rig.block(1))
        assert rig.load(block) is DONE


def test_over_tls_the_server_is_verified(certificate: Certificate, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer(certificate=certificate) as server:
        url = server.url
        rig = SharedRig(url)
        rig.until(lambda: rig.kinds["tls"] > 0)
        assert not rig.tier.available()
        for mistaken in (f"redis://localhost:{server.tls_port}", f"rediss://localhost:{server.port}"):
            rig = SharedRig(mistaken)
            rig.until(lambda rig=rig: bool(rig.tier.health.problem))
            assert "name it redis" in rig.tier.health.problem
        monkeypatch.setenv("SSL_CERT_FILE", certificate.authority)
        server.command("CONFIG", "SET", "tls-auth-clients", "yes")
        rig = SharedRig(url)
        rig.until(lambda: bool(rig.tier.health.problem))
        assert "set tls-auth-clients no" in rig.tier.health.problem
        assert "rediss://" not in rig.tier.health.problem
        server.command("CONFIG", "SET", "tls-auth-clients", "no")
        rig = SharedRig(f"rediss://127.0.0.1:{server.tls_port}")
        rig.until(lambda: rig.kinds["tls"] > 0)
        rig, other = SharedRig(url).reachable(), SharedRig(url).reachable()
        block = rig.block(1, (1 << 20, 5000))
        for _ in range(3):
            rig.store(block)
            assert other.ask_anew(block) == [Answer.YES]
            assert other.load(block) is DONE
            rig.remove(block)
            rig.until(lambda: server.objects == 0)
            rig.forget()


def test_all_connections_leave_a_replica_once_its_name_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failover: the old server still answers, and need not have what is written to the new one."""
    known = socket.getaddrinfo
    with RedisServer() as old, RedisServer() as new:
        leads_to = [old.port]

        def look_up(host: str, *rest: Any, **named: Any) -> list[Any]:
            return known("127.0.0.1", leads_to[0], **named) if "example" in host else known(host, *rest, **named)

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        make = open_store("redis://primary.example", Credentials())
        writer, reader, later = make(), make(), time.monotonic() + 60.0
        writer.connect()
        group = make_block_group(ONE, 0, 0, (1,))
        first, second = (Block(group, key_of(number), (0,), (1,)) for number in (1, 2))
        its = [PutRequest(second, [memoryview(b"2")])]
        assert writer.put([PutRequest(first, [memoryview(b"1")])], later) == [True]
        for connection in (writer, reader):
            connection.connect()
            assert connection.touch([first], later) == [True]
        assert old.command("REPLICAOF", "127.0.0.1", str(new.port)) == b"+OK\r\n"
        for _ in range(2):  # the name may move later
            writer.connect()
            with pytest.raises(StoreError, match=r"is a read-only replica .*resolved again before the next write"):
                writer.put(its, later)
        leads_to[0] = new.port
        writer.connect()
        assert writer.put(its, later) == [True]
        old.command("REPLICAOF", "NO", "ONE")
        old.command("FLUSHALL")
        reader.connect()
        assert reader.touch([second], later) == [True]
        assert new.objects == 1
        assert isinstance(reader, Redis)
        place = reader._connection._socket
        reader.connect()
        assert reader._connection._socket is place, "it is not opened anew for each exchange"
        writer.close()
        reader.close()
