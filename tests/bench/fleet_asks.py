"""Counts what one node sends to Redis, S3 and its peers: idle, and for each prompt that nobody has.

python -m tests.bench.fleet_asks --peers 8 --namespaces 10 --prompts 50

It has named peers: one real node, over as many links, which has this one as a peer as often. With the fleet's 1,000
addresses tests/daemon/test_fleet.py counts the same. Nothing is timed but how long it counts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from kvoffd_client import GroupSpec, NamespaceSpec
from kvoffd_client.testing import FakeEngine
from tests.kit.counted_link import CountedLink, Sent
from tests.kit.peer_node import DEADLINE_S, PAGE_BYTES, Node
from tests.kit.ports import free_ports
from tests.kit.redis_server import RedisServer
from tests.kit.s3_server import BUCKET, S3Server
from tests.kit.waiting import wait_until
from tests.kit.wire import keys

KEYS = 100
"""Keys of a prompt."""
SETTLE_S = 6.0


class Counts:
    """What was sent over links since it was made, and since when."""

    def __init__(self, links: dict[str, list[Sent]]) -> None:
        self._links, self._began, self._before = links, time.monotonic(), self._now(links)

    @staticmethod
    def _now(links: dict[str, list[Sent]]) -> dict[str, tuple[int, int]]:
        return {name: (sum(one.messages for one in its), sum(one.nbytes for one in its)) for name, its in links.items()}

    def print(self, what: str, per: float = 0.0) -> None:
        """Print messages and bytes a second, or for each of ``per`` things."""
        each = per or time.monotonic() - self._began
        parts = []
        for name, (messages, nbytes) in self._now(self._links).items():
            messages, nbytes = messages - self._before[name][0], nbytes - self._before[name][1]
            parts.append(f"{name} {messages / each:.2f} messages {nbytes / each:.0f} B")
        print(f"{what}: {'; '.join(parts)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--namespaces", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "user", "AWS_SECRET_ACCESS_KEY": "secret", "UCX_TLS": "tcp"}
    with ExitStack() as stack:
        secret = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "secret"
        secret.write_text("a secret for counting\n")
        secret.chmod(0o400)
        redis, bucket = stack.enter_context(RedisServer()), stack.enter_context(S3Server())
        to_redis = stack.enter_context(CountedLink(redis.port))
        to_bucket = stack.enter_context(CountedLink(int(bucket.endpoint.rpartition(":")[2])))
        lends, other_lends = free_ports(2)
        to_node = [stack.enter_context(CountedLink(lends)) for _ in range(given.peers)]
        to_other = [stack.enter_context(CountedLink(other_lends)) for _ in range(given.peers)]
        shared = [
            f"redis://127.0.0.1:{to_redis.port}",
            f"s3://{BUCKET}?endpoint=http://127.0.0.1:{to_bucket.port}&region=us-east-1",
        ]
        at, other_at = ([f"127.0.0.1:{link.port}" for link in links] for links in (to_node, to_other))
        flags = {"shared": ",".join(shared), "shared_write": "never"}
        one = stack.enter_context(Node(secret, f"127.0.0.1:{lends}", *other_at, **flags))
        other = stack.enter_context(Node(secret, f"127.0.0.1:{other_lends}", *at))
        for number in range(given.namespaces - 1):
            spec = NamespaceSpec.named(
                f"fleet-{number}", groups=[GroupSpec("full_attention", 16)], page_bytes=PAGE_BYTES
            )
            for node in (one, other):
                engine = FakeEngine(node.daemon.directory, spec, page_bytes=PAGE_BYTES, blocks=2)
                stack.callback(engine.close)
                assert engine.store(keys(number), [0]).ok
        for node in (one, other):
            wait_until(lambda: all(peer.up for peer in node.peers), DEADLINE_S)  # noqa: B023
        links = {
            "Redis": [to_redis.asked],
            "S3": [to_bucket.asked],
            "peers": [link.asked for link in to_other],
            "answers": [link.answered for link in to_node],
        }
        time.sleep(SETTLE_S)
        print(f"{given.peers} peers, {given.namespaces} namespaces; a prompt of {KEYS} keys", flush=True)
        counts = Counts(links)
        time.sleep(given.seconds)
        counts.print("idle, a second")
        if given.prompts:
            counts, first = Counts(links), 10**6
            for prompt in range(given.prompts):
                wanted = keys(*range(first + KEYS * prompt, first + KEYS * (prompt + 1)))
                assert one.engine.lookup(wanted) == 0
                assert other.engine.lookup(wanted) == 0
            counts.print("busy, a prompt at each end", given.prompts)


if __name__ == "__main__":
    main()
