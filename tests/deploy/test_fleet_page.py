"""The sums of deploy/FLEET.md, recomputed from its first table and the constants that this names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvoffd.config import PEER_PLACES, ServerLimits
from kvoffd.server.peer_places import EXCHANGE_S
from kvoffd.tiering.tier_lookups import PEERS_AT_ONCE
from kvoffd.tiers import peer_caller, peer_helper
from kvoffd.tiers.peer_store import PeerStore
from kvoffd.tiers.redis_store import Redis
from kvoffd.tiers.shared import READERS
from kvoffd.tiers.store_health import LOOK_S

s3_store = pytest.importorskip("kvoffd.tiers.s3_store")
PAGE = (Path(__file__).parents[2] / "deploy/FLEET.md").read_text()
NODES = (3, 30, 300, 1000)
NAMESPACES, PROMPTS_PER_S, KEYS = 10, 10, 100
"""Of each node, as the page says."""
IDLE_MESSAGES_PER_S = 20
CONSTANTS = {
    "PeerStore.poll_s": PeerStore.poll_s,
    "HEARTBEAT_MS": peer_helper.HEARTBEAT_MS / 1000,
    "Redis.poll_s": Redis.poll_s,
    "LOOK_S": LOOK_S,
    "S3.poll_s": s3_store.S3.poll_s,
    "resolve_s": ServerLimits().resolve_s,
    "GENERATION_S": s3_store.GENERATION_S,
}


def rows_below(heading: str) -> list[list[str]]:
    """Return the cells of the rows of the first table below a heading."""
    (_, text) = PAGE.split(f"\n## {heading}\n")
    lines = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def sent(place: str, *, busy: bool, connected: int) -> tuple[float, float]:
    """Return messages and bytes a second that a node sends to places of this name; to all for an empty one."""
    messages = nbytes = 0.0
    for _, to, when, count, size in rows_below("One message"):
        if place and not to.startswith(place):
            continue
        if every := re.search(r"every ([0-9]+) s \(`(.+)`\)", when):
            assert float(every[1]) == CONSTANTS[every[2]], when
            rate = (busy if "while busy" in when else 1) / float(every[1])
        else:
            assert "each prompt" in when
            rate = PROMPTS_PER_S * busy
        each = rate * number(count) * (connected if to.startswith("peers") else 1)
        messages, nbytes = messages + each, nbytes + each * number(size)
    return messages, nbytes


def test_what_a_node_sends_is_the_sum() -> None:
    rows = rows_below("One node")
    assert [number(row[0]) for row in rows] == list(NODES)
    for nodes, *cells in (map(number, row) for row in rows):
        connected = min(PEER_PLACES, int(nodes) - 1)
        idle, busy = sent("", busy=False, connected=connected), sent("", busy=True, connected=connected)
        expected = [connected, round(idle[0], 1), round(idle[1], -1), round(busy[0]), round(busy[1], -3)]
        assert cells == pytest.approx(expected), expected
        assert idle[0] <= IDLE_MESSAGES_PER_S


def test_what_arrives_at_the_servers_is_the_sum_of_all_nodes() -> None:
    rows = rows_below("The servers")
    assert [number(row[0]) for row in rows] == list(NODES)
    connections = 1 + READERS + Redis.writers
    for nodes, *cells in (map(number, row) for row in rows):
        redis, bucket, dns = (
            [nodes * sent(place, busy=busy, connected=0)[0] for busy in (False, True)]
            for place in ("Redis", "S3", "DNS")
        )
        keys = nodes * PROMPTS_PER_S * KEYS
        expected = [*redis, keys, nodes * connections, *bucket, dns[0]]
        assert cells == pytest.approx(expected, abs=0.5), expected


def test_the_bounds_that_the_page_names_are_those_of_the_code() -> None:
    bounds = re.findall(r"([0-9][0-9,]*)[^(|0-9]{0,60}\(`([A-Z_a-z0-9.]+)`\)", PAGE.replace("\n", " "))
    found = {name: number(value) for value, name in bounds}
    known = {
        "PEERS_AT_ONCE": PEERS_AT_ONCE,
        "PEER_PLACES": PEER_PLACES,
        "peer_helper.MAX_ASKERS": peer_helper.MAX_ASKERS,
        "peer_caller.CALLED_AT_ONCE": peer_caller.CALLED_AT_ONCE,
        "LISTED_FROM": s3_store.LISTED_FROM,
        "EXCHANGE_S": EXCHANGE_S,
    }
    for name, value in known.items():
        assert found[name] == value, name
