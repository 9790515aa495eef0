"""A daemon that stops while its helper starts (or hangs in its start)."""
import os, signal, time, tempfile, sys
from pathlib import Path
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_ports
secret = Path(tempfile.mkdtemp()) / "secret"; secret.write_text("a secret for tests\n")
(port,) = free_ports(1)
import tests.kit.peer_node as pn
node = pn.Node(secret, "", f"127.0.0.1:{port}")
d = node.daemon
d.start()
if "hang" in sys.argv:
    while not node.helper: time.sleep(.01)
    os.kill(node.helper, signal.SIGSTOP); time.sleep(2)
began = time.monotonic()
os.kill(d.pid, signal.SIGTERM)
while d.running and time.monotonic() - began < 20: time.sleep(.02)
print("stopped after", round(time.monotonic() - began, 2), "s")
for name in ("log", "output", "stderr", "log_text"):
    if hasattr(d, name):
        v = getattr(d, name); v = v() if callable(v) else v
        print("\n".join(str(v).splitlines()[-12:])); break
