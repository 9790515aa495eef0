"""FREE is given up after 0.5 s if the helper does not read: the slice is never free again, and the helper is not restarted."""
import os, signal, threading, time, numpy as np
from contextlib import suppress
from tests.tiers.test_peers import Lender, Reader, _works, SIZE, PeerStore
from kvoffd.tiers.peers import *
from kvoffd.tiers.peers import READ
from kvoffd.tiers.header import make_block_group
from kvoffd.tiers.store import StoreError, object_key
import kvoffd.tiers.peers as p
def end(self, call):
    with self._lock: self._calls.pop(call.ident, None)
    if call.kind == READ and not self.send(frame(FREE, call.peer, call.ident), SEND_S) and self.up and self.life == call.life: self._end()
p.PeerHelper.end = end
lender = Lender(); reader = Reader(lender.port).reachable(); reader.right(lender, 1)
group = make_block_group(b"f" * 32, 0, 0, (SIZE,))
names = [object_key(group, n.to_bytes(32, "big")) for n in range(2048)]   # keys of 32 bytes, as vLLM's
def ask(store):
    with suppress(StoreError): store.ask(b"", names, time.monotonic() + 0.5, prefix=True)
for turn in range(6):
    os.kill(lender.helper.pid, signal.SIGSTOP)   # so that reads are under way
    result = []
    def get():
        try: reader.get(1, 2, 3, patience_s=0.6); result.append("read")
        except StoreError as e: result.append(f"{e.kind}: {e.sentence}")
    # a read whose descriptors are known, under way
    where = np.array([[0, SIZE]], np.uint64).tobytes()
    call = None
    try: call = reader.helper.begin(READ, 0, where)
    except StoreError as e: print("begin", e)
    time.sleep(.05)
    os.kill(reader.helper.pid, signal.SIGSTOP)   # this node's helper gets no CPU for a second
    asks = [threading.Thread(target=ask, args=(PeerStore(reader.helper, 0),)) for _ in range(4)]
    for one in asks: one.start()
    time.sleep(.1)
    with suppress(StoreError): reader.helper.wait(call, time.monotonic() + .2)
    reader.helper.end(call)
    os.kill(reader.helper.pid, signal.SIGCONT); os.kill(lender.helper.pid, signal.SIGCONT)
    for one in asks: one.join()
    time.sleep(3.0)
    try: reader.get(1, patience_s=3.0); how = "works"
    except StoreError as e: how = f"{e.kind}: {e.sentence}"
    print("after stall", turn + 1, "->", how, "; helper starts", reader.helper.starts, flush=True)
time.sleep(1)
try: reader.get(1, patience_s=3.0); how = "works"
except StoreError as e: how = f"{e.kind}: {e.sentence}"
print("13 s later ->", how, "; helper starts", reader.helper.starts, "problem", repr(reader.helper.problem))
reader.close(); lender.close(); os._exit(0)
