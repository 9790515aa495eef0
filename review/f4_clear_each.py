"""`kvoffd-cli clear` on each node, as deploy/peers.md and the refusal of --all-nodes say, while engines go on asking."""
import tempfile, os
from pathlib import Path
from kvoffd_client import AdminClient
from tests.kit.peer_node import BLOCKS, Node
from tests.kit.ports import free_ports
from tests.kit.wire import keys
secret = Path(tempfile.mkdtemp()) / "secret"; secret.write_text("a secret for tests\n")
one, other = (f"127.0.0.1:{p}" for p in free_ports(2))
with Node(secret, one, other) as left, Node(secret, other, one) as right:
    for n in (left, right): n.wait_up()
    stale = left.store(0, 1)
    assert right.load(0) == stale
    for turn in range(3):
        for name, node in (("left", left), ("right", right)):
            with AdminClient(node.daemon.directory) as admin:
                print(f"clear on {name}: dropped", admin.clear(node.spec.fingerprint))
            print(f"  a request on {name} loads the cleared bytes again:", node.load(0) == stale, flush=True)
