import random, sys, time, traceback, msgspec
from tests.kit.slot_cache import UNIT, CacheRig, check_invariants, keys_of
from kvoffd_proto.messages import HintAction
R, L, P = HintAction.RETAIN, HintAction.RELEASE, None
def make(rng):
    op = rng.choice(["store"]*4 + ["hint"]*2 + ["lookup", "tick", "bg", "release", "reset", "inval"])
    first = rng.randrange(60); ks = list(range(first, first + rng.randrange(1, 12)))
    dup = rng.random() < DUP
    if dup: ks.append(rng.choice(ks))
    return op, rng.randrange(2), ks, rng.choice([R, L, R]), rng.randrange(3), rng.choice([1.0, 30.0, 300.0]), rng.choice([.1, 1, 40]), rng.random()
def run(policy, ops):
    rig = CacheRig(96, 32, policy=policy); c = rig.cache
    spaces = [rig.open("a"), rig.open("b", world_size=2)]; lease = 0; held = []
    for op, n, ks, act, pr, ttl, dt, r in ops:
        ns = spaces[n]
        if op == "store": rig.store(ns, keys_of(*dict.fromkeys(ks)))
        elif op == "hint": c.hint(ns, act, [(0, keys_of(*ks))], pr, ttl)
        elif op == "lookup": lease += 1; held.append(lease); c.lookup(ns, 1, lease, [(0, keys_of(*ks))]); c.report_requests()
        elif op == "tick": rig.clock.now += dt; c.tick()
        elif op == "bg": c.background()
        elif op == "release" and held: c.release(1, held); held = []
        elif op == "reset" and r < .1: c.reset(ns)
        elif op == "inval" and r < .2: c.invalidate(ns, [(0, keys_of(*dict.fromkeys(ks)))])
        check_invariants(c)
    h = c.order
    assert h.retained_bytes == sum(n.retained_bytes for n in spaces) == sum(x.nbytes for x in h._retentions.values()), "retained_bytes"
def fails(policy, ops):
    try: run(policy, ops)
    except Exception as e: return repr(e)
    return ""
for DUP in (0.0, 0.2):
  for policy in ("lru", "learned"):
    end = time.monotonic() + 12; seed = 0
    while time.monotonic() < end:
        seed += 1; rng = random.Random(seed); ops = [make(rng) for _ in range(160)]
        if why := fails(policy, ops):
            n = len(ops)
            while True:
                for size in (40, 10, 3, 1):
                    at = 0
                    while at < len(ops):
                        less = ops[:at] + ops[at+size:]
                        if fails(policy, less) == why: ops = less
                        else: at += size
                if len(ops) == n: break
                n = len(ops)
            print("DUP", DUP, policy, "seed", seed, why); [print("   ", o) for o in ops]
            try: run(policy, ops)
            except Exception: traceback.print_exc(limit=-4)
            break
    else: print("DUP", DUP, policy, seed, "seeds, nothing")
