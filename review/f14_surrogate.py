"""A host that JSON can hold and UTF-8 cannot, in a request's kv_transfer_params: does look_up raise in the scheduler?"""
import json, tempfile
from pathlib import Path
from tests.kit.daemon import DaemonProcess
from kvoffd_client import GroupSpec, NamespaceSpec
from kvoffd_client.testing import FakeEngine
from kvoffd_client.vllm.hints import read_hints
from kvoffd_proto.messages import GroupKeys
class C:
    kv_hints = None
    kv_transfer_params = json.loads('{"remote_kv_source": {"remote_host": "\\ud800"}}')
_, unread, peer = read_hints(C)
print("read_hints:", ascii(peer), unread)
import msgspec
try: print(len(msgspec.msgpack.encode(C.kv_transfer_params)))
except Exception as e: print("vLLM's front end, which sends it by msgpack to another process:", repr(e))
d = DaemonProcess("64MiB"); d.start()
spec = NamespaceSpec.named("x", groups=[GroupSpec("full_attention", 16)], page_bytes=65536)
e = FakeEngine(d.directory, spec, page_bytes=65536, blocks=8)
try: e.scheduler.lookup([GroupKeys(0, bytes(32))], peer=peer); print("looked up")
except Exception as error: print("SchedulerClient.lookup raises:", repr(error))
try: print("then:", e.lookup([bytes(32)]))
except Exception as error: print("then", repr(error))
e.close(); d.close()
