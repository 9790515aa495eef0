"""A helper that can never work (its port is taken): what that costs, for ever."""
import os, resource, socket, time
from tests.tiers.test_peers import Lender
from tests.kit.ports import free_port
port = free_port(); s = socket.socket(); s.bind(("127.0.0.1", port)); s.listen()
lender = Lender(port); began = time.monotonic(); time.sleep(20)
r = resource.getrusage(resource.RUSAGE_CHILDREN)
took = time.monotonic() - began
print(f"{lender.helper.starts} starts in {took:.0f} s, {(r.ru_utime + r.ru_stime)/took:.0%} of a CPU; problem: {lender.helper.problem}")
os._exit(0)
