"""The helper of a node that lends hangs: who notices? Then the daemon is killed: what stays, and can the next one lend?"""
import os, signal, time, tempfile
from pathlib import Path
from tests.kit.peer_node import Node
from tests.kit.ports import free_ports
from tests.kit.wire import books
secret = Path(tempfile.mkdtemp()) / "secret"; secret.write_text("a secret for tests\n")
at = f"127.0.0.1:{free_ports(1)[0]}"
with Node(secret, at) as node:
    pid = node.wait_helper()
    while not books(node.daemon.directory).said.lent.up: time.sleep(.1)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(15)
    lent = books(node.daemon.directory).said.lent
    print("15 s after it hung: problems", node.problems, "up", lent.up, "starts", lent.helper_starts, "same process", node.helper == pid)
    node.daemon.kill()
    node.daemon.start()
    time.sleep(5)
    print("killed daemon's helper still there:", open(f"/proc/{pid}/stat").read().split()[2])
    print("  maps", [l.split(None, 5)[5].strip() + " " + str((int(l.split()[0].split('-')[1],16)-int(l.split()[0].split('-')[0],16))>>20) + " MiB" for l in open(f"/proc/{pid}/maps") if "memfd" in l])
    print("next daemon: problems", books(node.daemon.directory).problems)
    os.kill(pid, signal.SIGKILL)
    assert node.engine.wait_ready(30)
