"""A peer that sends requests that are none takes all of the helper's 16 slots for a second each: others get no answer."""
import socket, threading, time, os, msgspec, zmq
from zmq.utils import z85
from kvoffd.tiers import peer_helper as h
from kvoffd.tiers.peers import *
from kvoffd.tiers.peers import FIND, PIN, REPLY, REQUEST
from tests.kit.ports import free_port

class NoNixl:
    def get_new_notifs(self): return {}
class Helper(h.Helper):
    def _start_nixl(self): self._nixl, self._metadata, self._pool_at = NoNixl(), b"", 0

port = free_port()
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
made = []
def run():
    one = Helper(theirs, HelperSettings([], f"127.0.0.1:{port}", b"s" * 32)); made.append(one); one.run()
threading.Thread(target=run, daemon=True).start()

# The daemon's end, with the real PeerServer.
from tests.server.test_peer_server import Rig
rig = Rig(); ns = rig.rig.open(); 
from tests.kit.slot_cache import keys_of
rig.rig.store(ns, keys_of(1, 2))
rig.server._clock = time.monotonic
def daemon():
    while data := ours.recv(MOST_MESSAGE_BYTES):
        kind, n, ident, payload = parsed(data)
        if kind == REQUEST:
            reply = rig.server.answer(payload[:n], ident, payload[n], payload[n + 1:])
            if payload[n] != 2:  # RELEASE
                reply = reply or b""
                ours.send(frame(REPLY, n, ident, payload[:n] + reply))
threading.Thread(target=daemon, daemon=True).start()
while not made: time.sleep(.05)
keys = made[0]._keys
def peer():
    s = zmq.Context.instance().socket(zmq.DEALER)
    s.curve_publickey, s.curve_secretkey = keys; s.curve_serverkey = keys[0]
    s.connect(f"tcp://127.0.0.1:{port}"); return s
good, bad = peer(), peer()
find = msgspec.msgpack.encode(Find(ns.fingerprint, 0, 8, keys_of(1, 2)))
def asks(n):
    late, took = 0, []
    for i in range(n):
        began = time.monotonic()
        good.send_multipart([bytes([FIND]), (10_000 + asks.n).to_bytes(8, "little"), find]); want = 10_000 + asks.n; asks.n += 1
        while good.poll(3000):
            if int.from_bytes(good.recv_multipart()[0], "little") == want: break
        took.append(time.monotonic() - began)
    return [round(one, 3) for one in took]
asks.n = 0
print("good peer alone:            ", asks(8))
stop = False
def flood():
    i = 0
    while not stop:
        for _ in range(20):
            bad.send_multipart([bytes([PIN]), i.to_bytes(8, "little"), b"\xc1"]); i += 1
        time.sleep(.5)    # 40 requests a second, a fiftieth of what a peer may send
threading.Thread(target=flood, daemon=True).start(); time.sleep(.3)
print("40 bad requests a second:   ", asks(8)); stop = True
print("(shared_ask_deadline is 20 ms by default:)", __import__("kvoffd.config").config.Config().shared_ask_deadline_s)
os._exit(0)
