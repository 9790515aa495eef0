from kvoffd_client.vllm.hints import read_hints
from kvoffd.config import parse_address
class C: 
    kv_hints=None
    def __init__(s,p): s.kv_transfer_params=p
def fetch(ep): return read_hints(C({"kv_hints":{"protocol_version":"1.0","actions":[{"action_type":"kv.fetch","action_version":"1.0","payload":{"source_control_endpoint":ep}}]}}))
for ep, peer in (("tcp://Node-B:7400","Node-B:7400"),("tcp://[fd00::1]:7400","[fd00::1]:7400")):
    print(ep, "->", repr(fetch(ep)), "; peers has host", repr(parse_address(peer)[0]))
print(read_hints(C({"remote_kv_source":{"remote_host":"[fd00::1]"}})))
bad = read_hints(C({"remote_kv_source":{"remote_host":"\ud800"}}))[2]
print(ascii(bad))
import msgspec
from kvoffd_proto import messages as m
try: msgspec.msgpack.encode(m.Lookup(1, b"f"*32, 1, [], False, True, bad)); print("encodes")
except Exception as e: print("encode:", repr(e))
for bad in ("tcp://[::", "tcp://[v1.x]:1", 5, None, {"a":1}):
    try: print(bad, fetch(bad))
    except Exception as e: print(bad, "RAISES", repr(e))
for src in (5, [], "x", {"remote_host": None}, {"remote_host":"x"*254}):
    try: print(src if not isinstance(src, dict) else "dict", read_hints(C({"remote_kv_source":src})))
    except Exception as e: print("RAISES", repr(e))
