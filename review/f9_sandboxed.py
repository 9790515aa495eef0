import os, time, socket
try: socket.socket(16, 2); print("netlink allowed")
except OSError as e: print("netlink:", e)
from tests.tiers.test_peers import Lender, Reader
lender = Lender()
try:
    reader = Reader(lender.port).reachable(); reader.right(lender, 1, 2); print("works")
except BaseException as e: print("FAILS", repr(e)[:300]); 
print("problem:", lender.helper.problem, "|", reader.helper.problem if "reader" in dir() else "")
os._exit(0)
