"""The shared tier over a cluster of Redis servers: one that goes away, is another's, or whose slots move."""

from __future__ import annotations

import re
import signal
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import pytest

from kvoffd.tiers import redis_cluster
from kvoffd.tiers.header import Block
from kvoffd.tiers.redis_cluster import Masters, copies_of, masters_of, slot_of
from kvoffd.tiers.redis_connection import CONNECT_S
from kvoffd.tiers.redis_store import NEEDED_COMMANDS, Redis
from kvoffd.tiers.store import Credentials, Servers, StoreError
from kvoffd.tiers.tier import Result
from tests.kit.redis_server import Certificate, RedisCluster, RedisServer
from tests.kit.waiting import wait_until
from tests.tiers.faulty_store import FaultyStore
from tests.tiers.shared_conformance import SharedConformance
from tests.tiers.shared_rig import ONE, Answer, SharedRig, name_of

pytestmark = pytest.mark.usefixtures("short_pauses")
DONE = Result.DONE


@pytest.mark.nightly
class TestCluster(SharedConformance):
    @pytest.fixture
    def url(self, cluster: RedisCluster) -> str:
        cluster.flush()
        return cluster.url


@pytest.fixture(scope="module")
def tls_cluster(certificate: Certificate) -> Iterator[RedisCluster]:
    with RedisCluster(certificate=certificate) as running:
        yield running


@pytest.fixture
def trusted(certificate: Certificate, monkeypatch: pytest.MonkeyPatch) -> Certificate:
    monkeypatch.setenv("SSL_CERT_FILE", certificate.authority)
    return certificate


@pytest.fixture(params=["plain", "TLS"])
def fault(request: pytest.FixtureRequest) -> signal.Signals:
    """What becomes of a master: without TLS it is killed, with TLS it is stopped."""
    return signal.SIGSTOP if request.param == "TLS" else signal.SIGKILL


@pytest.fixture
def masters(request: pytest.FixtureRequest, fault: signal.Signals) -> Iterator[RedisCluster]:
    """A cluster that a test may break."""
    own = request.getfixturevalue("trusted") if fault == signal.SIGSTOP else None
    with RedisCluster(certificate=own) as running:
        yield running


def home_of(block: Block) -> int:
    """The number of the master that has a block's slot."""
    return slot_of(name_of(block, 0)) * 3 // 16384


def a_block_of(rig: SharedRig, home: int) -> Block:
    """A block whose slot a master has."""
    return next(block for block in map(rig.block, range(99)) if home_of(block) == home)


def test_the_slot_of_a_key_is_that_of_the_specification() -> None:
    assert slot_of(b"123456789") == 0x31C3


Node = tuple[str | None, int]


def slots_reply(*ranges: tuple[int, int, Node]) -> bytes:
    """What CLUSTER SLOTS answers: each range has a master, and a replica."""
    said = [b"*%d\r\n" % len(ranges)]
    for first, last, (host, port) in ranges:
        endpoint = b"$-1" if host is None else b"$%d\r\n%s" % (len(host), host.encode())
        more = b"*2\r\n$2\r\nip\r\n$8\r\n10.9.9.9"  # of Redis 7
        node = b"*4\r\n%s\r\n:%d\r\n$2\r\nid\r\n%s\r\n" % (endpoint, port, more)
        replica = b"*3\r\n$8\r\n10.0.0.3\r\n:7000\r\n$2\r\nid\r\n"
        said.append(b"*4\r\n:%d\r\n:%d\r\n%s%s" % (first, last, node, replica))
    return b"".join(said)


def test_masters_are_where_the_cluster_wants_clients_to_go() -> None:
    name = "valkey-1.example"
    ranges = [
        (0, 5460, "10.0.0.1", 7000),
        (5461, 8998, name, 7000),
        (8999, 8999, name, 0),
        (9000, 9000, "10.0.0.1", 7000),
        (9001, 16383, "", 7003),
    ]
    assert masters_of([[*one[:2], one[2:]] for one in ranges], ("seed", 1)) == {
        ("10.0.0.1", 7000): [range(5461), range(9000, 9001)],
        (name, 7000): [range(5461, 8999)],
        ("seed", 7003): [range(9001, 16384)],
    }


def test_what_else_a_server_says_of_a_master_without_a_name_may_be_anything() -> None:
    reply = [[0, 16383, ["?", 7000, "id", [[], "x", 1, [], "ip", "10.0.0.1"]]]]
    assert masters_of(reply, ("seed", 1)) == {("10.0.0.1", 7000): [range(16384)]}


@pytest.mark.parametrize(
    ("kind", "label", "host"),
    [("ip", "label.invalid", "127.0.0.1"), ("hostname", "localhost", "localhost"), ("hostname", "", "127.0.0.1")],
)
def test_an_announced_name_is_used_where_the_cluster_prefers_it(
    cluster: RedisCluster, kind: str, label: str, host: str
) -> None:
    """Elsewhere it is a label for people, and need not resolve."""

    def configure(label: str, kind: str) -> None:
        for server in cluster.servers:
            settings = "cluster-announce-hostname", label, "cluster-preferred-endpoint-type", kind
            assert server.command("CONFIG", "SET", *settings) == b"+OK\r\n"

    cluster.flush()
    configure(label, kind)
    try:
        said = [partial(server.command, "CLUSTER", "NODES") for server in cluster.servers]
        wait_until(lambda: all(say().count(label.encode() or b"localhost") == 3 * bool(label) for say in said))
        rig = SharedRig(cluster.url).reachable()
        for block in rig.store_some(6):
            assert rig.load(block) is DONE
        assert {server.name.partition(":")[0] for server in rig.tier.servers} == {host}
    finally:
        configure("", "ip")


@pytest.mark.parametrize(
    "odd",
    [
        [(0, 999999999999, "h", 1)],
        [(7, 3, "h", 1)],
        [(-5, 5, "h", 1)],
        [(0, 16383, "h", 99999)],
        [(0, 16383, "h", -1)],
        [(0, 16383, "h\x1b[2J", 1)],
        [(0, 16383, "h..h", 1)],
        [(0, 16383, "h" * 64, 1)],
        [(0, 16383, "?", 1), (5, 5, "h", 2)],
        [(port, port, "h", port) for port in range(1, 400)],
        [(55, 55, "h", 1)] * 16385,
    ],
    ids=lambda odd: str(odd)[:60],
)
def test_impossible_masters_are_refused(odd: Sequence[tuple[int, int, str, int]]) -> None:
    tracemalloc.start()
    with pytest.raises(ValueError, match="master"):
        masters_of([[*one[:2], one[2:]] for one in odd], ("seed", 1))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8 << 20


@pytest.mark.parametrize(
    "said",
    [
        b"*1000000\r\n",
        b"*1\r\n*3\r\n:0\r\n:1\r\n*1\r\n$1\r\nh\r\n:1\r\n",
        b"*1\r\n*2\r\n:0\r\n:1\r\n*3\r\n$1\r\nh\r\n:1\r\n:1\r\n",
        b"*1\r\n*3\r\n:0\r\n:1\r\n*3\r\n$70000\r\n" + b"h" * 70000,
        b"*1\r\n*3\r\n:0\r\n:x\r\n*3\r\n$1\r\nh\r\n:1\r\n",
        b"*1\r\n*3\r\n:0\r\n:1\r\n*3\r\n$1\r\nh\r\n:1\r\n*5000\r\n",
        b"$3\r\nabc\r\n",
        b"\r\n",
    ],
)
def test_slots_that_are_no_such_list_are_refused(store: FaultyStore, said: bytes) -> None:
    store.forced[b"CLUSTER"] = said
    rig = node_of_cluster(store)
    rig.until(lambda: rig.kinds["protocol"] > 0)
    assert not rig.tier.available()


def show_nodes(asked: Sequence[FaultyStore], *owned: tuple[FaultyStore, str]) -> None:
    """Have servers tell which slots each has."""
    ranges = []
    for one, slots in owned:
        for bounds in slots.split():
            first, _, last = bounds.partition("-")
            ranges.append((int(first), int(last), ("127.0.0.1", one.port)))
    for server in asked:
        server.forced[b"CLUSTER"] = slots_reply(*ranges)


def node_of_cluster(store: FaultyStore) -> SharedRig:
    return SharedRig(store.url.replace("redis:", "redis+cluster:"))


def test_a_server_that_is_in_no_cluster_yet_is_reported(store: FaultyStore) -> None:
    show_nodes([store], (store, ""))
    rig = node_of_cluster(store)
    rig.until(lambda: "redis-cli --cluster create" in rig.tier.health.problem)
    cluster = redis_cluster.RedisCluster("127.0.0.1", store.port, Credentials(), Servers(), Masters(), tls=False)
    with pytest.raises(StoreError) as raised:
        cluster.connect()
    assert raised.value.is_lasting, "a retry at once is useless"


def test_silent_servers_are_not_all_asked_for_the_masters_by_one_call(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes its time: the thread would do nothing else for minutes. The next call asks the others."""
    monkeypatch.setattr(redis_cluster, "FIND_S", 0.0)
    monkeypatch.setattr(redis_cluster, "CONNECT_S", 0.05)
    show_nodes([store], (store, " 0-16383"))
    with ExitStack() as servers:
        silent = [servers.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname() for _ in range(5)]
        known = Masters((*silent[1:], ("127.0.0.1", store.port)))
        host, port = silent[0]
        cluster = redis_cluster.RedisCluster(host, port, Credentials(), Servers(), known, tls=False)
        for host, port in silent:
            with pytest.raises(StoreError, match=f"{host}:{port} is closed"):
                cluster.connect()
        cluster.connect()
        cluster.close()


def test_masters_after_silent_ones_have_a_moment_each_to_connect(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultyStore() as second:
        show_nodes([store], (store, " 0-8000"), (second, " 8001-16383"))
        cluster = redis_cluster.RedisCluster("127.0.0.1", store.port, Credentials(), Servers(), Masters(), tls=False)
        limits, connect = list[float](), Redis.connect

        def watched(node: Redis, connect_s: float) -> None:
            limits.append(connect_s)
            connect(node, connect_s)

        monkeypatch.setattr(Redis, "connect", watched)
        monkeypatch.setattr(redis_cluster, "FIND_S", 0.0)
        monkeypatch.setattr(redis_cluster, "AGAIN_FACTOR", 0)
        cluster.ping(time.monotonic() + 1.0)
        cluster.close()
    assert limits == [CONNECT_S, *[redis_cluster.AGAIN_S] * 2], "the first one said who the masters are"


def test_a_silent_master_takes_no_others_time_to_answer_a_ping(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_cluster, "FIND_S", 0.1)
    monkeypatch.setattr(redis_cluster, "CONNECT_S", 0.4)
    with FaultyStore() as second, FaultyStore() as silent:
        masters = (silent, " 0-5460"), (store, " 5461-10921"), (second, " 10922-16383")
        show_nodes([store], *masters)
        servers = Servers()
        cluster = redis_cluster.RedisCluster("127.0.0.1", store.port, Credentials(), servers, Masters(), tls=False)
        store.delay_s = second.delay_s = 2 * redis_cluster.AGAIN_S
        silent.answering.clear()
        cluster.ping(time.monotonic() + 1.0)
        assert [server.answers for server in servers] == [False, True, True]
        cluster.close()


def test_a_master_that_is_far_away_is_used_again_after_a_failure(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread does not wait long for it, but as long as it takes."""
    monkeypatch.setattr(redis_cluster, "DOWN_PAUSE_S", 0.0)
    with FaultyStore() as second:
        show_nodes([store], (store, " 0-5460"), (second, " 5461-16383"))
        for one in (store, second):
            one.forced[b"AUTH"] = b"+OK\r\n"
            one.delay_s = 1.2 * redis_cluster.AGAIN_S
        servers, credentials = Servers(), Credentials("", "x")
        cluster = redis_cluster.RedisCluster("127.0.0.1", store.port, credentials, servers, Masters(), tls=False)
        cluster.connect()
        second.error = "LOADING Redis is loading the dataset in memory"
        with pytest.raises(StoreError):
            cluster.generation(ONE, time.monotonic() + 10.0)
        assert not servers.all_answer
        second.error = ""

        def is_used() -> bool:
            cluster.connect()
            return servers.all_answer

        wait_until(is_used)
        cluster.close()


def test_a_master_that_answers_one_thread_again_is_not_called_down_because_of_another(store: FaultyStore) -> None:
    """As one that has nothing to write since."""
    with FaultyStore() as second:
        show_nodes([store], (store, " 0-5460"), (second, " 5461-16383"))
        servers, masters = Servers(), Masters()
        asker, writer = (
            redis_cluster.RedisCluster("127.0.0.1", store.port, Credentials(), servers, masters, tls=False)
            for _ in range(2)
        )
        for one in (asker, writer):
            one.connect()
        second.error = "LOADING Redis is loading the dataset in memory"
        with pytest.raises(StoreError):
            writer.generation(ONE, time.monotonic() + 10.0)
        assert not servers.all_answer
        second.error = ""
        assert asker.generation(ONE, time.monotonic() + 10.0) == 0
        assert servers.all_answer
        for one in (asker, writer):
            one.close()


def test_slots_of_a_master_that_is_cut_off_are_asked_elsewhere(store: FaultyStore) -> None:
    """It answers PING, and by its own view has its slots; the others have made a replica master."""
    with FaultyStore() as second, FaultyStore() as third:
        masters = store, second, third
        show_nodes(masters, (store, " 0-5460"), (second, " 5461-10921"), (third, " 10922-16383"))
        rig = node_of_cluster(store).reachable()
        rig.store(block := a_block_of(rig, 0))
        second.values |= store.values
        down = b"-CLUSTERDOWN The cluster is down\r\n"
        store.forced |= dict.fromkeys((b"GET", b"EXISTS", b"TOUCH", b"SET"), down)
        show_nodes(masters[1:], (store, ""), (second, " 0-10921"), (third, " 10922-16383"))
        rig.until(lambda: rig.ask_anew(block) == [Answer.YES])
        assert rig.tier.breaker.opened == 0


def test_slots_that_nobody_had_are_asked_for_again(store: FaultyStore) -> None:
    """As others see it, a master that has become a replica has no slots, and its successor not yet."""
    show_nodes([store], (store, " 0-5460 10922-16383"))
    rig = node_of_cluster(store).reachable()
    block = a_block_of(rig, 1)
    assert rig.write(block) is Result.FAILED
    assert rig.ask_anew(block) == [Answer.NO]
    show_nodes([store], (store, " 0-16383"))
    rig.until(lambda: rig.write(block) is DONE)
    rig.until(lambda: rig.ask_anew(block) == [Answer.YES])


def test_without_one_master_the_others_are_read(masters: RedisCluster, fault: signal.Signals) -> None:
    rig = SharedRig(masters.url, ask_deadline_s=0.2).reachable()
    blocks = rig.store_some(12)
    victim = 1
    others = [number for number, block in enumerate(blocks) if home_of(block) != victim]
    assert 0 < len(others) < len(blocks)
    masters.servers[victim].signal(fault)
    wanted = [Answer.YES if number in others else Answer.NO for number in range(12)]
    rig.until(lambda: rig.ask_anew(*blocks) == wanted)
    # A master that waits for a CPU for 0.2 s, the deadline for asking, is left alone for a moment.
    rig.until(lambda: rig.load(blocks[others[0]]) is DONE)
    fresh = range(100, 112)
    there = [home_of(rig.block(number)) != victim for number in fresh]
    assert 0 < sum(there) < len(fresh)

    def is_taken(number: int) -> bool:
        return rig.write(rig.block(number)) in {DONE, Result.EXISTED}

    for number, others_take in zip(fresh, there, strict=True):
        if others_take:
            rig.until(partial(is_taken, number))
        else:
            assert not is_taken(number)

    def reset() -> bool:
        one = rig.raise_generation(ONE)
        return not one.problem

    rig.until(reset)
    if fault is signal.SIGKILL:
        masters.servers[victim].kill()
        masters.servers[victim].start()  # empty
    else:
        masters.servers[victim].signal(signal.SIGCONT)
    masters.servers[(victim + 1) % 3].signal(signal.SIGSTOP)
    late = SharedRig(masters.url, ask_deadline_s=0.2).reachable()
    found: list[Answer] = []
    late.until(lambda: found.extend(late.ask_anew(*blocks)) or late.tier.generations.fleet(ONE) > 0)  # type: ignore[func-returns-value]
    assert Answer.YES not in found, "a reset that one master has not seen"
    masters.servers[(victim + 1) % 3].signal(signal.SIGCONT)


# --- certificates -----------------------------------------------------------------------------------


def test_masters_that_do_not_prove_their_name_are_refused(
    tls_cluster: RedisCluster, trusted: Certificate, sign: Callable[[str], Certificate], monkeypatch: pytest.MonkeyPatch
) -> None:
    other, victim = sign("other.example"), tls_cluster.servers[1]
    tls_cluster.flush()
    rig = SharedRig(tls_cluster.url).reachable()
    blocks = rig.store_some(12)

    def set_certificate(server: RedisServer, shown: Certificate) -> None:
        files = ("tls-cert-file", shown.cert, "tls-key-file", shown.key)
        assert server.command("CONFIG", "SET", *files) == b"+OK\r\n"

    try:
        set_certificate(victim, other)
        late = SharedRig(tls_cluster.url).reachable()
        wanted = [Answer.NO if home_of(block) == 1 else Answer.YES for block in blocks]
        assert len(set(wanted)) == 2
        late.until(lambda: late.ask_anew(*blocks) == wanted)
        late.until(lambda: late.tier.tick() or late.kinds[f"tls {victim.name}"] > 0)  # type: ignore[func-returns-value]
        (lost,) = [server for server in late.tier.servers if not server.answers]
        assert lost.name == victim.name
        assert "is not accepted" in lost.problem
        for server in tls_cluster.servers:
            set_certificate(server, other)
        refused = SharedRig(tls_cluster.url)
        refused.until(lambda: refused.kinds["tls"] > 0)
        assert not refused.tier.available()
    finally:
        for server in tls_cluster.servers:
            set_certificate(server, trusted)
    monkeypatch.delenv("SSL_CERT_FILE")
    stranger = SharedRig(tls_cluster.url)
    stranger.until(lambda: stranger.kinds["tls"] > 0)
    assert not stranger.tier.available()


# --- slots that move --------------------------------------------------------------------------------


def move(cluster: RedisCluster, slot: int, source: int, target: int, *keys: bytes) -> None:
    """Begin to move a slot from one master to another, and move some of its keys."""
    ours, theirs = cluster.servers[source], cluster.servers[target]
    for server, state, other in ((theirs, "IMPORTING", ours), (ours, "MIGRATING", theirs)):
        assert server.command("CLUSTER", "SETSLOT", str(slot), state, other.node_id) == b"+OK\r\n"
    for key in keys:
        assert ours.command("MIGRATE", "127.0.0.1", str(theirs.port), key, "0", "5000") == b"+OK\r\n"


def end_move(cluster: RedisCluster, slot: int, target: int) -> None:
    for number in (target, *{0, 1, 2} - {target}):
        node_id = cluster.servers[target].node_id
        assert cluster.servers[number].command("CLUSTER", "SETSLOT", str(slot), "NODE", node_id) == b"+OK\r\n"


@pytest.mark.usefixtures("servers_may_stall")
def test_keys_of_a_slot_that_moves_are_misses() -> None:
    with RedisCluster() as cluster:
        rig, other = SharedRig(cluster.url).reachable(), SharedRig(cluster.url).reachable()
        blocks = rig.store_some(12)
        moved = next(block for block in blocks if home_of(block) == 0)
        others = [block for block in blocks if block is not moved]
        name = name_of(moved, 0)
        slot = slot_of(name)
        assert slot not in [slot_of(name_of(block, 0)) for block in others]
        move(cluster, slot, 0, 1, name)
        assert other.ask_anew(*others, moved) == [Answer.YES] * 11 + [Answer.NO]
        rig.forget()
        assert rig.write(moved) is Result.FAILED, "it lies at the other master, which does not have the slot yet"
        assert rig.write(rig.block(50)) is DONE, "others are written all the same"
        end_move(cluster, slot, 1)
        for each in (rig, other):
            each.until(lambda each=each: each.ask_anew(moved) == [Answer.YES])
            assert each.load(moved) is DONE
        rig.forget()
        rig.until(lambda: rig.write(moved) is Result.EXISTED)
        for each in (rig, other):
            assert not each.kinds
            assert each.tier.breaker.opened == 0


def test_a_slot_that_moves_with_a_generation_in_it_hides_nothing() -> None:
    with RedisCluster() as cluster:
        rig, other = (SharedRig(cluster.url, generations={ONE: 7}).reachable() for _ in range(2))
        rig.ask(rig.block(0))  # writes what the cluster forgot
        rig.store(block := a_block_of(rig, 0))
        first, second, _ = copies_of(ONE)
        move(cluster, slot_of(first), 0, 1, first)
        other.until(lambda: other.ask_anew(block) == [Answer.YES])
        move(cluster, slot_of(second), 1, 2, second)
        assert other.ask_anew(block) == [Answer.NO], "of two copies the one that is left may be of before a reset"
        end_move(cluster, slot_of(second), 2)
        other.until(lambda: other.ask_anew(block) == [Answer.YES])
        copies = [server.command("KEYS", "*/generation/*")[:2] for server in cluster.servers]
        assert copies == [b"*0", b"*1", b"*2"], "nobody has written one anew"
        end_move(cluster, slot_of(first), 1)


def test_a_copy_of_a_generation_that_is_behind_is_raised() -> None:
    """As after a failover to a replica that was behind: it may be the last that is left."""
    with RedisCluster() as cluster:
        rig = SharedRig(cluster.url, generations={ONE: 7}).reachable()
        rig.ask(rig.block(0))  # writes what the cluster forgot
        copy, *_ = copies_of(ONE)
        name = copy.decode()
        (owner,) = [server for server in cluster.servers if server.command("SET", name, "5") == b"+OK\r\n"]
        rig.until(lambda: rig.ask_anew(rig.block(0)) == [Answer.NO] and owner.command("GET", name) == b"$1\r\n7\r\n")


@pytest.mark.parametrize("number", [0, 1])
def test_a_master_that_is_busy_costs_its_own_keys(number: int) -> None:
    """Also the one that the URL names, to connections that were not made yet."""
    with RedisCluster() as cluster:
        rig = SharedRig(cluster.url).reachable()
        blocks = rig.store_some(12)
        busy = cluster.servers[number]
        busy.command("CONFIG", "SET", "busy-reply-threshold", "1")
        with socket.create_connection(("127.0.0.1", busy.port)) as script:
            script.sendall(b"EVAL 'while true do end' 0\r\n")
            rig.until(lambda: busy.command("PING").startswith(b"-BUSY"))
        ends = [rig.begin_read(block, slot=8 + at) for at, block in enumerate(blocks)]
        rig.until(lambda: all(ends))
        assert [end == [DONE] for end in ends] == [home_of(block) != number for block in blocks]
        assert isinstance(rig.tier._store, redis_cluster.RedisCluster)
        rig.tier._store._down_until.clear()  # as if this connection had not met it yet
        assert [one is Answer.YES for one in rig.ask_anew(*blocks)] == [home_of(block) != number for block in blocks]
        assert rig.tier.breaker.opened == 0
        busy.command("SCRIPT", "KILL")
        rig.until(lambda: rig.ask_anew(*blocks) == [Answer.YES] * 12)


@pytest.mark.parametrize("fault", ["killed", "takes turns"])
def test_a_replica_that_becomes_master_serves_all(fault: str) -> None:
    with RedisCluster() as cluster, RedisServer(*cluster.options) as replica:
        cluster.meet(replica)
        master = cluster.servers[1]
        # What it does not know of its master's slots it does not take over.
        wait_until(lambda: b"5461-10921" in replica.command("CLUSTER", "NODES"))
        wait_until(lambda: replica.command("CLUSTER", "REPLICATE", master.node_id) == b"+OK\r\n")
        rig, other = SharedRig(cluster.url).reachable(), SharedRig(cluster.url).reachable()
        blocks = rig.store_some(12)
        wait_until(lambda: replica.objects == master.objects > 0)
        if fault == "killed":
            master.kill()
        # Without an election, which on a busy machine nobody may win for long.
        assert replica.command("CLUSTER", "FAILOVER", "TAKEOVER") == b"+OK\r\n"
        wait_until(lambda: b"role:master" in replica.command("INFO", "replication"), 20.0)
        for each in (rig, other):
            each.until(
                lambda each=each: (
                    each.ask_anew(*blocks) == [Answer.YES] * 12
                    and replica.name in [server.name for server in each.tier.servers]
                )
            )
        late = next(block for block in map(rig.block, range(50, 99)) if home_of(block) == 1)
        rig.until(lambda: rig.write(late) in (DONE, Result.EXISTED))
        for block in [*blocks, late]:
            other.until(lambda block=block: other.ask_anew(block) == [Answer.YES])
            assert other.load(block) is DONE
        for each in (rig, other):
            assert each.tier.counters.mismatches == 0
            if fault == "takes turns":
                assert each.tier.breaker.opened == 0


# --- how full it is ---------------------------------------------------------------------------------


def test_a_cluster_is_as_large_as_its_masters(cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.tiers.store_health.LOOK_S", 0.02)
    rig = SharedRig(cluster.url).reachable()
    rig.until(lambda: rig.tier.stats().used_bytes > 0)
    assert rig.tier.stats().size_bytes == 0, "without a bound"
    try:
        for server, size in zip(cluster.servers, (32, 64, 128), strict=True):
            server.command("CONFIG", "SET", "maxmemory", f"{size}mb")
        rig.until(lambda: rig.tier.stats().size_bytes == 224 << 20)
    finally:
        for server in cluster.servers:
            server.command("CONFIG", "SET", "maxmemory", "0")


# --- rights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacking", ["", "cluster|slots"])
@pytest.mark.usefixtures("servers_may_stall")
def test_the_rights_that_are_named_suffice(cluster: RedisCluster, lacking: str) -> None:
    rights = re.findall(r"\+[a-z|]+", NEEDED_COMMANDS)
    cluster.flush()
    for server in cluster.servers:
        user = ["node", "reset", "on", ">s3cret", "~kvoffd/*", *(one for one in rights if one != f"+{lacking}")]
        assert server.command("ACL", "SETUSER", *user) == b"+OK\r\n"
    rig = SharedRig(cluster.url, "s3cret", user="node")
    if lacking:
        rig.until(lambda: rig.kinds["forbidden"] > 0)
        assert "'cluster|slots' command" in rig.tier.health.problem
        assert not rig.tier.available()
    else:
        rig.reachable()
        for block in rig.store_some(6):
            assert rig.load(block) is DONE
            rig.remove(block)
        for _ in range(2):
            one = rig.raise_generation(ONE)
            assert not one.problem
        assert not rig.kinds
