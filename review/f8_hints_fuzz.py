"""Random hints, leases, stores, resets, lends, ticks over the real cache; the kit's invariants after each."""
import random, sys, msgspec
from tests.kit.slot_cache import UNIT, CacheRig, check_invariants, keys_of
from kvoffd_proto.messages import HintAction
from kvoffd.server.peers import PeerServer, LEASE_S
from kvoffd.tiers.peers import *
from kvoffd.tiers.peers import FIND, PIN, RELEASE
import time
end = time.monotonic() + 40; seed = 0; steps = 0
while time.monotonic() < end:
    seed += 1; rng = random.Random(seed)
    rig = CacheRig(96, 32, policy=rng.choice(["lru", "learned"]) if seed % 2 else "lru")
    c = rig.cache; server = PeerServer(c, rig.clock, lambda f: False)
    spaces = [rig.open("a"), rig.open("b", world_size=2)]
    lease = 0; held = []
    for _ in range(150):
        steps += 1
        ns = rng.choice(spaces); first = rng.randrange(60); ks = list(range(first, first + rng.randrange(1, 12)))
        if rng.random() < .2: ks.append(rng.choice(ks))
        op = rng.randrange(10)
        try:
            if op < 3: rig.store(ns, keys_of(*dict.fromkeys(ks)))
            elif op == 3:
                c.hint(ns, rng.choice([HintAction.RETAIN, HintAction.RELEASE, HintAction.RETAIN]), [(0, keys_of(*ks))], rng.randrange(3), rng.choice([1.0, 30.0, 300.0]))
            elif op == 4:
                lease += 1; c.lookup(ns, 1, lease, [(0, keys_of(*ks))]); held.append(lease)
            elif op == 5 and held:
                (lambda l: c.release(l) if False else None)(held.pop())
            elif op == 6:
                rig.clock.now += rng.choice([.1, 1, 40])
                c.tick(); server.tick()
            elif op == 7:
                find = Find(ns.fingerprint, 0, 8, keys_of(*ks))
                lengths = [UNIT] * ns.world_size
                server.answer(rng.choice([b"x", b"y"]), rng.randrange(5), rng.choice([PIN, RELEASE, FIND]), msgspec.msgpack.encode(rng.choice([find, Pin(find, lengths), Pin(find, lengths)])))
            elif op == 8:
                c.background()
            elif rng.random() < .15: c.reset(ns)
            check_invariants(c)
        except Exception as e:
            print("seed", seed, "op", op, repr(e)); import traceback; traceback.print_exc(); sys.exit(1)
    server.end_all()
    assert server.lent_bytes == 0
    h = c.order
    assert h.retained_bytes == sum(n.retained_bytes for n in spaces) == sum(r.nbytes for r in h._retentions.values()), (h.retained_bytes,)
print("seeds", seed, "steps", steps, "nothing found")
