"""Engine Reset on a node that only lends, whose state file is in memory (/dev/shm): the daemon says OK where with peers= it says NOT_KEPT."""
import tempfile
from pathlib import Path
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_ports
from kvoffd_client import GroupSpec, NamespaceSpec
from kvoffd_client.testing import FakeEngine
secret = Path(tempfile.mkdtemp()) / "secret"; secret.write_text("a secret for tests\n")
for flags in ({"peer_listen": f"127.0.0.1:{free_ports(1)[0]}"}, {"peers": "127.0.0.1:1"}):
    d = DaemonProcess("64MiB", directory=Path(tempfile.mkdtemp(dir="/dev/shm")), peer_secret_file=str(secret), **flags); d.start()
    spec = NamespaceSpec.named("x", groups=[GroupSpec("full_attention", 16)], page_bytes=65536)
    e = FakeEngine(d.directory, spec, page_bytes=65536, blocks=8)
    try: print(list(flags), "reset ->", e.scheduler.reset())
    except Exception as error: print(list(flags), "reset raises", repr(error)[:160])
    e.close(); d.close()
