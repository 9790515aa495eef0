"""All reads of a peer hang: does the helper end, and does another start?"""
import os, signal, threading, time, numpy as np, subprocess
from tests.tiers.test_peers import Lender, Reader, _works, SIZE
from kvoffd.tiers.peers import READ, SLICES
from kvoffd.tiers.store import StoreError
lender = Lender(); reader = Reader(lender.port).reachable(); reader.right(lender, 1)
pid = reader.helper.pid
os.kill(lender.helper.pid, signal.SIGSTOP)
where = np.array([[0, SIZE]], np.uint64).tobytes()
began = time.monotonic()
for _ in range(SLICES):
    try: reader.helper.call(READ, 0, where, time.monotonic() + 0.05)
    except StoreError as e: print(e.kind, e.sentence)
while time.monotonic() < began + 25 and reader.helper.starts == 1:
    time.sleep(.1)
print("starts", reader.helper.starts, "after", round(time.monotonic() - began, 1), "s; old helper alive:", os.path.exists(f"/proc/{pid}") and open(f"/proc/{pid}/stat").read().split()[2])
os.kill(lender.helper.pid, signal.SIGCONT)
end = time.monotonic() + 15
while time.monotonic() < end and not _works(reader, lender): time.sleep(.2)
print("works:", _works(reader, lender), "starts", reader.helper.starts)
reader.close(); lender.close(); os._exit(0)
