"""`kvoffd-cli clear NAME --all-nodes` with a Redis and peers: what node A finds before node B has followed, and after."""
import tempfile, os, time
from pathlib import Path
from kvoffd_client import AdminClient
from tests.kit.peer_node import BLOCKS, Node
from tests.kit.ports import free_ports
from tests.kit.redis_server import RedisServer
from tests.kit.wire import keys, books
secret = Path(tempfile.mkdtemp()) / "secret"; secret.write_text("a secret for tests\n")
redis = RedisServer().start()
one, other = (f"127.0.0.1:{p}" for p in free_ports(2))
left, right = Node(secret, one, other), Node(secret, other, one)
for n in (left, right): n.daemon.flags["shared"] = redis.url
def find(node):
    until = time.monotonic() + 3; best = 0
    while time.monotonic() < until and best < BLOCKS: best = max(best, node.engine.lookup(keys(*range(BLOCKS)))); time.sleep(.05)
    return best
with left, right:
    for n in (left, right): n.wait_up()
    stale = left.store(0, 1)
    assert right.load(0) == stale
    time.sleep(1)
    with AdminClient(left.daemon.directory) as admin:     # what the command does
        print("reset_fleet: stores", admin.reset_fleet(left.spec.fingerprint)); print("clear: dropped", admin.clear(left.spec.fingerprint))
    n = find(left)
    print("left finds at once after clear --all-nodes:", n, "of 8;", "cleared bytes:", n == BLOCKS and left.load(0) == stale, flush=True)
    print("  from:", {one.url: one.read_blocks for one in left.peers})
    time.sleep(12)   # Redis is polled every 5 s
    print("invalidated on right:", [x.invalidated_blocks if hasattr(x, 'invalidated_blocks') else '?' for x in books(right.daemon.directory).said.namespaces])
    for name, node in (("left", left), ("right", right)):
        n = find(node)
        print(f"12 s later {name} finds", n, "of 8; cleared bytes:", n == BLOCKS and node.load(0) == stale, flush=True)
    print("  left read", {one.url: (one.read_blocks, one.written_blocks) for one in left.peers}, "right", {one.url: (one.read_blocks, one.written_blocks) for one in right.peers})
redis.stop() if hasattr(redis, "stop") else redis.close() if hasattr(redis, "close") else None
