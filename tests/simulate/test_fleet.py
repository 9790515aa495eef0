"""``kvoffd-cli trace replay --nodes``: where the tokens of a fleet's prompts come from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice, product
from math import inf
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvoffd.simulate.command import main
from kvoffd.simulate.fleet import FleetPlan, FleetReplayed, Route, Shares, Speeds, replay_fleet
from kvoffd.simulate.replay import Node, replay
from kvoffd.simulate.shared import BlockPlaces, NodeEvents, SimulatedStore, StoreObjects
from kvoffd.simulate.tiers import DiskPlan
from kvoffd.simulate.trace import KEY_BYTES, RequestTrace, read_trace
from kvoffd.tiering import WriteMode
from kvoffd.tiers.tier import ABSENT
from kvoffd_client.cli import main as console
from kvoffd_proto.messages import KeyState
from kvoffd_proto.units import parse_size
from tests.kit.cases import case
from tests.kit.made_up_loads import Traffic, trace_of

SPEEDS = Speeds(512.0, 100.0, 50.0, 20.0)
"""A block of 512 tokens takes 1 s to compute; one of 100 bytes 1 s to load, 2 s more from a disk, and 5 s from afar."""
BLOCK_BYTES = 100
CHAT = trace_of([*islice(Traffic(1).chat(20), 50)])


def plan(nodes: int, route: Route = Route.ROUND_ROBIN) -> FleetPlan:
    return FleetPlan(nodes, SPEEDS, BLOCK_BYTES, route)


def timed(requests: Sequence[tuple[float, list[int]]]) -> RequestTrace:
    return trace_of([keys for _, keys in requests])._replace(seconds=[at for at, _ in requests])


def blocks_by_source(found: FleetReplayed) -> dict[str, int]:
    """Blocks by source, without zeros."""
    return {source: tokens // 512 for source, tokens in found.tokens.items() if tokens}


def blocks_by_link(found: FleetReplayed) -> dict[str, int]:
    return {link: nbytes // BLOCK_BYTES for link, nbytes in found.links.items() if nbytes}


def documents(count: int, blocks: int, requests: int) -> RequestTrace:
    """Questions about documents in an order without pattern, each behind its whole document."""
    traffic = Traffic(3)
    known = traffic.documents(count, blocks)
    return trace_of([traffic.chance.choice(known) + traffic.text(1) for _ in range(requests)])


@pytest.mark.parametrize("route", Route)
def test_sources_add_up_to_all_tokens(route: Route) -> None:
    small = DiskPlan(48, WriteMode.ALWAYS)
    given = plan(3, route)._replace(peers=2, store_blocks=300, store_write=WriteMode.ALWAYS, disk=small)
    for shares in Shares:
        found = replay_fleet(CHAT, "learned", 16, given, shares)
        with case(shares):
            assert sum(found.tokens.values()) == 512 * CHAT.accesses
            assert all(count >= 0 for count in found.tokens.values())
            sources, links = blocks_by_source(found), blocks_by_link(found)
            assert sources.get("peer", 0) == links.get("peer", 0)
            assert sources.get("store", 0) == links.get("store_read", 0)
            assert sources.get("disk", 0) <= links.get("disk_read", 0), "some lie behind what a full store just evicted"
            assert ("peer" in sources) <= (shares is Shares.GIVEN)
            assert ("store" in sources) == (shares is not Shares.NOTHING)


def test_the_same_input_gives_the_same_output() -> None:
    given = plan(3, Route.RANDOM)._replace(peers=2, store_blocks=300, disk=DiskPlan(48))
    first, second = (replay_fleet(CHAT, "learned", 16, given) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("disk", [None, DiskPlan(64)])
def test_one_node_is_the_replay_of_one_pool(disk: DiskPlan | None) -> None:
    for policy, route in product(("learned", "lru"), (Route.PREFIX, Route.RANDOM)):
        one, found = replay(CHAT, policy, 40, disk), replay_fleet(CHAT, policy, 40, plan(1, route)._replace(disk=disk))
        with case(policy, route):
            sources = blocks_by_source(found)
            assert sources["computed"] == CHAT.accesses - one.hits
            assert sources["pool"] + sources.get("disk", 0) == one.hits > 0
            assert (found.stored, blocks_by_link(found).get("disk_written", 0)) == (one.written, one.disk_written)
            assert (found.copies, found.repeated_blocks) == (found.pooled_blocks, 0)


def test_what_nodes_share_lies_between_nothing_and_one_pool() -> None:
    """Eight documents of four blocks: a pool holds some of them, and one of four times the size all."""
    trace = documents(8, 4, 200)
    for route in (Route.ROUND_ROBIN, Route.RANDOM, Route.SESSION, Route.PREFIX):
        given = plan(4, route)._replace(peers=3, store_blocks=0, store_write=WriteMode.ALWAYS)
        floor, found, bound = (
            blocks_by_source(replay_fleet(trace, "lru", 20, given, shares))["computed"]
            for shares in (Shares.NOTHING, Shares.GIVEN, Shares.ONE_POOL)
        )
        with case(route):
            assert bound == 8 * 4 + 200, "each document and each question once"
            assert floor >= found >= bound


def test_a_router_that_follows_events_finds_shared_documents() -> None:
    trace = documents(8, 4, 200)
    computed = {
        route: blocks_by_source(replay_fleet(trace, "lru", 20, plan(4, route)))["computed"]
        for route in (Route.PREFIX, Route.RANDOM)
    }
    assert computed[Route.PREFIX] == 8 * 4 + 200, "nothing is computed twice"
    assert computed[Route.RANDOM] > 1.5 * computed[Route.PREFIX]


def test_two_nodes_by_hand() -> None:
    """The first node gets [1, 2] twice, the second [1, 3] and [9]."""
    trace = trace_of([[1, 2], [1, 3], [1, 2], [9]])
    alone = replay_fleet(trace, "lru", 8, plan(2))
    assert blocks_by_source(alone) == {"computed": 5, "pool": 2}
    assert (alone.pooled_blocks, alone.repeated_blocks, alone.copies, alone.stored) == (4, 1, 5, 5)
    assert alone.first_token_s == pytest.approx((5 + 2) / 4)
    assert alone.wait_s is None, "the trace has no times"

    peers = replay_fleet(trace, "lru", 8, plan(2)._replace(peers=1))
    assert blocks_by_source(peers) == {"computed": 4, "pool": 2, "peer": 1}
    assert blocks_by_link(peers) == {"peer": 1}
    assert (peers.pooled_blocks, peers.repeated_blocks, peers.copies, peers.stored) == (4, 1, 5, 4)
    assert peers.first_token_s == pytest.approx((4 + 2 + 1 + 5) / 4)

    stored = plan(2)._replace(store_blocks=0, store_write=WriteMode.ALWAYS)
    store = replay_fleet(trace, "lru", 8, stored)
    assert blocks_by_source(store) == {"computed": 4, "pool": 2, "store": 1}
    assert blocks_by_link(store) == {"store_read": 1, "store_written": 4}
    never = replay_fleet(trace, "lru", 8, stored._replace(store_write=WriteMode.NEVER))
    assert blocks_by_source(never) == blocks_by_source(alone)

    bound = replay_fleet(trace, "lru", 8, plan(2), Shares.ONE_POOL)
    assert blocks_by_source(bound) == {"computed": 4, "pool": 3}
    assert (bound.pooled_blocks, bound.repeated_blocks, bound.copies) == (4, 0, 4)


def test_peers_are_the_next_nodes_or_the_one_that_the_router_names() -> None:
    """The second of three nodes asks for what the first one has, and the third for what both have a part of."""
    trace = trace_of([[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]])
    for given, found in (
        (plan(3)._replace(peers=1), {"computed": 3 + 4 + 1, "peer": 3}),
        (plan(3)._replace(peers=2), {"computed": 3 + 1, "peer": 3 + 4}),
        (plan(3)._replace(named_peer=True), {"computed": 3 + 1, "peer": 3 + 4}),
    ):
        with case(given):
            assert blocks_by_source(replay_fleet(trace, "lru", 8, given)) == found


def test_the_router_names_a_peer_by_what_is_in_its_pool() -> None:
    """The first node has all of the last prompt, but on its disk, which no other node can read."""
    trace = trace_of([[1, 2, 3, 4], [1, 2], [9], [5, 6, 7, 8], [10], [1, 2, 3, 4]])
    given = plan(3)._replace(named_peer=True, disk=DiskPlan(64, WriteMode.ALWAYS))
    assert blocks_by_source(replay_fleet(trace, "lru", 4, given)) == {"computed": 12, "peer": 4}


def test_a_busy_node_gets_no_prompt_for_its_prefix() -> None:
    """The second prompt comes while its node has 4 s to compute, the third after that."""
    trace = timed([(0, [1, 2, 3, 4]), (0.5, [1, 2, 3, 4]), (9, [1, 2, 3, 4])])
    for limit, computed, wait_s in ((inf, 4, 3.5 / 3), (3.6, 4, 3.5 / 3), (3.4, 8, 0.0)):
        found = replay_fleet(trace, "lru", 8, plan(2, Route.PREFIX)._replace(busy_s=limit))
        with case(limit):
            assert blocks_by_source(found)["computed"] == computed
            assert found.wait_s == pytest.approx(wait_s)


def test_a_router_knows_what_is_as_old_as_its_index() -> None:
    trace = timed([(0, [1, 2]), (10, [1, 2]), (30, [1, 2])])
    for age_s, computed in ((0, 2), (10, 2), (11, 4), (60, 4)):
        found = replay_fleet(trace, "lru", 8, plan(2, Route.PREFIX)._replace(staleness_s=age_s))
        with case(age_s):
            assert blocks_by_source(found)["computed"] == computed, "the other node computes it too"


def test_a_prefix_may_be_too_short_to_count() -> None:
    """Prompts that have a system prompt of one block, and nothing else, in common."""
    trace = trace_of([[1, *range(10 * number, 10 * number + 4)] for number in range(1, 9)])
    for least, nodes in ((0.0, 1), (0.2, 1), (0.21, 4)):
        found = replay_fleet(trace, "lru", 100, plan(4, Route.PREFIX)._replace(least_prefix=least))
        with case(least):
            assert found.copies - found.pooled_blocks == nodes - 1, "as many nodes have the system prompt"


def test_sessions_are_the_traces_or_the_first_blocks(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    lines = [{"hash_ids": [1, 2, 3], "session_id": name} for name in "abcabc"]
    file.write_text("\n".join(map(json.dumps, lines)))
    trace = read_trace(file)
    assert trace.sessions == [0, 1, 2, 0, 1, 2]
    found = replay_fleet(trace, "lru", 8, plan(64, Route.SESSION))
    assert found.copies == 9, "three of 64 nodes"
    file.write_text("\n".join(map(json.dumps, [*lines, {"hash_ids": [1, 2, 3]}])))
    trace = read_trace(file)
    assert not trace.sessions, "a request has none"
    assert replay_fleet(trace, "lru", 8, plan(64, Route.SESSION)).copies == 3
    session = {"requests": [{"hash_ids": [1], "t": 5}, {"hash_ids": [1], "t": 1}], "hash_id_scope": "global"}
    file.write_text("\n".join(map(json.dumps, [session, session])))
    assert read_trace(file).sessions == [0, 1, 0, 1], "by time"


def test_the_index_is_what_the_caches_have() -> None:
    """Blocks that left a pool are not in it, nor are those that left a disk."""
    places = BlockPlaces(lambda: 0.0)
    events = [NodeEvents(at, [places]) for at in range(2)]
    nodes = [Node(CHAT, "lru", 24, lambda: 0.0, events[at], DiskPlan(40, WriteMode.ALWAYS)) for at in range(2)]
    for number, keys in enumerate(CHAT.requests):
        nodes[number % 2].serve(keys)
    every = {packed[at : at + KEY_BYTES] for packed in CHAT.requests for at in range(0, len(packed), KEY_BYTES)}
    for at, node in enumerate(nodes):
        having = {key for key in every if node.cache.describe_block(node.namespace, 0, key)[0] is KeyState.READY}
        assert having == {key for key, holders in places.pools.items() if holders >> at & 1}
        assert 0 < len(having) <= 24
        known = {key for key in every if places.longest_prefix([key], 0b11) in (1 << at, 0b11)}
        assert having < known, "the disk has more"
        node.close()


def test_a_store_evicts_what_is_unused_for_longest() -> None:
    store = StoreObjects(2)
    store.put(b"1")
    store.put(b"2")
    assert store.use(b"1")
    store.put(b"3")
    assert not store.use(b"2")
    assert (b"1" in store, b"3" in store, len(store), store.evicted) == (True, True, 2, 1)


def test_a_store_is_not_offered_what_a_lookup_found_behind_a_hole() -> None:
    """A daemon asks about all keys, also with ``prefix``, and believes what it hears of those after the gap."""
    objects = StoreObjects(0)
    objects.put(b"2")
    store, group = SimulatedStore(objects, 100, 800, lambda: 0.0, lambda call: call(), Mock()), Mock()
    assert store.wants(group, [b"1", b"2"]) == [True, True]
    assert store.find(group, [b"1", b"2"], prefix=True).states == bytes([ABSENT, ABSENT])
    assert store.wants(group, [b"1", b"2"]) == [True, False]


@pytest.mark.parametrize("every_s", [0, 10])
def test_a_block_that_a_full_store_evicted_is_written_again(every_s: int) -> None:
    """The lookup before said that the store lacks it, as in a daemon. Three blocks in turn never fit in two."""
    cycle = timed([(at * every_s, [1 + at % 3]) for at in range(30)])
    trace = cycle if every_s else cycle._replace(seconds=[])
    found = replay_fleet(trace, "lru", 1, plan(1)._replace(store_blocks=2, store_write=WriteMode.ALWAYS))
    assert blocks_by_source(found) == {"computed": 30}
    assert blocks_by_link(found) == {"store_written": 30}


def test_a_full_store_is_written_less_in_auto() -> None:
    """Prompts that never come back, from two nodes."""
    trace = trace_of([*islice(Traffic(1).once(), 150)])
    trace = trace._replace(seconds=[float(number) for number in range(150)])
    given = plan(2)._replace(store_blocks=200)
    auto, always = (
        blocks_by_link(replay_fleet(trace, "learned", 32, given._replace(store_write=mode)))["store_written"]
        for mode in (WriteMode.AUTO, WriteMode.ALWAYS)
    )
    assert 200 <= auto < always <= trace.accesses


def test_it_prints_json_and_a_table_as_documented(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.jsonl"
    file.write_text("".join(json.dumps({"hash_ids": keys}) + "\n" for keys in ([1, 2], [1, 3], [1, 2], [9])))
    words = [str(file), "--nodes", "2", "--blocks", "8", "--block-size", "100", "--policy", "lru"]
    words += ["--route", "round_robin", "--peers", "all", "--speeds", "compute=512,memory=100,network=20"]
    assert console(["trace", "replay", *words, "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert (printed["trace"], printed["accesses"], printed["nodes"]) == ("small", 7, 2)
    assert [(one["route"], one["shares"]) for one in printed["results"]] == [
        ("least_busy", "one pool"),
        ("round_robin", "nothing"),
        ("round_robin", "given"),
    ]
    assert printed["results"][2] == {
        "policy": "lru",
        "size": "8 blocks",
        "blocks": 8,
        "route": "round_robin",
        "shares": "given",
        "tokens": {"computed": 2048, "pool": 1024, "disk": 0, "store": 0, "peer": 512},
        "bytes": {"peer": 100, "store_read": 0, "store_written": 0, "disk_read": 0, "disk_written": 0},
        "pooled_blocks": 4,
        "repeated_blocks": 1,
        "copies": 5,
        "stored_blocks": 4,
        "first_token_s": 3.0,
        "wait_s": None,
    }
    assert main(words) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "small: 4 requests, 7 blocks of 512 tokens and 100 B, 2 nodes"
    assert lines[1] == "If all tokens were computed, that would take 1.750 s for each prompt on average."
    assert lines[2].split("  ")[-1].strip() == "from peers"
    assert " ".join(lines[5].split()) == "8 blocks lru round_robin given 57.14 28.57 14.29 25.00 1.250 3.000 100 B"
    assert len(lines) == 6


def test_sizes_of_a_store_and_requests_without_blocks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.jsonl"
    file.write_text("".join(json.dumps({"hash_ids": keys}) + "\n" for keys in ([], [1], [2], [3], [1], [2])))
    words = [str(file), "--nodes=2", "--blocks=1", "--block-size=1KiB", "--route=round_robin", "--policy=lru", "--json"]
    for size, read in (("1KiB", 0), ("1x", 0), ("3KiB", 2), ("2x", 2), ("unlimited", 2)):
        assert main([*words, f"--shared={size}", "--shared-write=always"]) == 0
        found = json.loads(capfd.readouterr().out)["results"][-1]
        with case(size):
            assert sum(found["tokens"].values()) == 5 * 512
            assert found["bytes"]["store_read"] == 1024 * read


def test_what_is_wrong_is_said_in_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.jsonl"
    file.write_text('{"hash_ids": [1]}\n')
    for arguments, sentence in (
        ("--peers 1", "--peers is for several nodes; give --nodes too"),
        ("--nodes 0 --block-size 1MiB", "--nodes 0: give a number from 1 to 1000"),
        ("--nodes 1001 --block-size 1MiB", "from 1 to 1000"),
        ("--nodes 2", "give --block-size"),
        ("--nodes 2 --block-size 1MiB --route near", "--route near: choose from random, round_robin, prefix, session"),
        ("--nodes 2 --block-size 1MiB --peers 2", "give a number up to 1, the other nodes, or all, or named"),
        ("--nodes 2 --block-size 1MiB --shared 1KiB", "A store of 1KiB does not hold one block"),
        ("--nodes 2 --block-size 1MiB --shared much", "--shared: 'much' is not a size"),
        ("--nodes 2 --block-size 1MiB --shared 1x --shared-write some", "choose from auto, always, never"),
        ("--nodes 2 --block-size 1MiB --shared-write always", "--shared-write needs a store; give --shared too"),
        ("--nodes 2 --block-size 1MiB --speeds light=1", "--speeds light=1: write some of compute=10000"),
        ("--nodes 2 --block-size 1MiB --speeds disk=0", "a speed is more than nothing"),
        ("--nodes 2 --block-size 1MiB --least-prefix 101", "'101' is not a whole number of percent"),
        ("--nodes 2 --block-size 1MiB --staleness 1s", "--staleness needs the times of all requests"),
        ("--nodes 2 --block-size 1MiB --route session --least-prefix 10", "--least-prefix is for --route prefix; add"),
        ("--nodes 2 --block-size 1MiB --busy-limit soon", "--busy-limit needs the times of all requests"),
    ):
        with case(arguments):
            assert main([str(file), *arguments.split()]) == 2
            assert sentence in capfd.readouterr().err
    file.write_text('{"hash_ids": [1], "timestamp": 0}\n')
    assert main([str(file), "--nodes=2", "--block-size=1MiB", "--busy-limit=soon"]) == 2
    assert "--busy-limit: 'soon' is not a duration" in capfd.readouterr().err


def test_options_that_no_router_uses_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.jsonl"
    file.write_text('{"hash_ids": [1], "timestamp": 0}\n')
    words = [str(file), "--nodes=2", "--block-size=1MiB", "--route=random,session", "--blocks=1", "--policy=lru"]
    for option in ("--busy-limit=1s", "--busy-limit=none", "--least-prefix=10", "--staleness=1s"):
        with case(option):
            assert main([*words, option]) == 2
            name = option.partition("=")[0]
            assert f"{name} is for --route prefix" in capfd.readouterr().err
            assert main([*words, "--route=random,prefix", option]) == 0
    assert main([*words, "--peers=named", "--staleness=1s"]) == 0, "the router names a peer by its index"
    assert main([*words, "--peers=named", "--least-prefix=1"]) == 2


MEASURE = """
import sys
from pathlib import Path
from kvoffd.simulate import command, fleet
from kvoffd.simulate.trace import read_trace
command._map_sparsely()
trace = read_trace(Path(sys.argv[1]))
plan = fleet.FleetPlan(40, fleet.Speeds(1, 1, 1, 1), 1, fleet.Route.ROUND_ROBIN)._replace(peers=39)
before = fleet._resident_bytes()
every = fleet._Fleet(trace, "learned", 100, plan, fleet.Shares.GIVEN)
for number in range(len(trace.requests)):
    every.serve(number)
taken = fleet._resident_bytes() - before
kept = [bytes(size) for size in (200, 1000) * 9_000][::1001]  # most of it is free: so it is after a trace was read
print(fleet.expected_bytes(trace, "learned", 100, plan), taken)
"""


def test_the_memory_of_many_nodes_is_said_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.jsonl"
    requests = islice(Traffic(1).chat(20), 400)
    file.write_text("".join(json.dumps({"hash_ids": keys}) + "\n" for keys in requests))
    done = subprocess.run([sys.executable, "-c", MEASURE, str(file)], capture_output=True, text=True, check=True)
    expected, taken = map(int, done.stdout.split())
    assert taken > 40 << 20, "40 nodes have a MiB each at least"
    assert 0.9 * taken < expected < 1.8 * taken
    file.write_text("".join(json.dumps({"hash_ids": keys}) + "\n" for keys in islice(Traffic(1).chat(20), 20)))
    for nodes, is_said in ((31, False), (32, True)):
        words = [str(file), f"--nodes={nodes}", "--blocks=1,2", "--block-size=1MiB", "--route=session"]
        assert main(words) == 0
        assert capfd.readouterr().err.count(f"A replay over {nodes} nodes takes about ") == is_said


CONSOLE = """
import resource
import sys
from kvoffd_client.cli import main
status = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
sys.exit(status)
"""


def test_later_replays_take_no_more_memory_than_was_said(tmp_path: Path) -> None:
    file = tmp_path / "small.jsonl"
    requests = islice(Traffic(1).chat(20), 400)
    file.write_text("".join(json.dumps({"hash_ids": keys}) + "\n" for keys in requests))
    words = ["trace", "replay", str(file), "--nodes=40", "--blocks=100", "--block-size=1MiB", "--route=random,session"]
    done = subprocess.run([sys.executable, "-c", CONSOLE, *words], capture_output=True, text=True, check=True)
    said = re.search(r"takes about ([0-9.]+ MiB) of memory", done.stderr)
    assert said is not None, done.stderr
    process_bytes, nodes_bytes = 128 << 20, parse_size(said[1].replace(" ", ""))
    assert int(done.stdout.splitlines()[-1]) - process_bytes < 1.5 * nodes_bytes
    assert nodes_bytes < 40 * 4 << 20, "no huge page for a table of which few pages are touched"


def test_hints_are_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hints.jsonl"
    file.write_text('{"hash_ids": [1]}\n{"hash_ids": [1], "hint": "retain", "priority": 1, "ttl_s": 1}\n')
    assert main([str(file), "--nodes", "2", "--block-size", "1MiB"]) == 0
    assert "The 1 hints in " in capsys.readouterr().err
