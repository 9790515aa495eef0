exec(open("/tmp/review/f8_shrink.py").read().split("for DUP in")[0])
import random, time
DUP = 0
check_invariants = lambda c: None
from kvoffd.cache import hints, learned
log = []
where = {}
oi, orm = learned.Learned.insert, learned.Learned.remove
def ins(self, group, blocks, keys):
    for i, b in enumerate(blocks.tolist()): log.append(("insert", group.number, b, keys[i*8:i*8+8].hex()[-2:]))
    oi(self, group, blocks, keys)
def rem(self, group, blocks, keys):
    for i, b in enumerate(blocks.tolist()): log.append(("remove", group.number, b, keys[i*8:i*8+8].hex()[-2:], group.dead))
    orm(self, group, blocks, keys)
learned.Learned.insert, learned.Learned.remove = ins, rem
ap = hints.HintedOrder._apply
def apply(self, hint, group, blocks): log.append(("apply", "release" if hint is None else "retain", group.number, blocks.tolist())); ap(self, hint, group, blocks)
hints.HintedOrder._apply = apply
fo = hints.HintedOrder._found
def found(self, group, ready): log.append(("found", group.number, ready.tolist(), list(self._released))); fo(self, group, ready)
hints.HintedOrder._found = found
for seed in range(1, 500):
    rng = random.Random(seed); ops = [make(rng) for _ in range(160)]; ops = [o for o in ops if not (o[0]=="hint" and o[3]==R)]
    log.clear()
    try: run("learned", ops)
    except AssertionError as e:
        print("LAST", log[-12:]); b=[l for l in log if l[0]=="insert"][-1]; print("HIST", [l for l in log if (l[0] in ("insert","remove") and l[1]==b[1] and l[3]==b[3]) or (l[0] in ("apply","found") and b[2] in (l[2] if l[0]=="found" else l[3]))]); import traceback; traceback.print_exc()
        last = [l for l in log if l[0] == "remove"]
        # the batch that failed = trailing removes
        n = len(log)
        tail = []
        while log and log[-1][0] == "remove": tail.append(log.pop())
        print("seed", seed, e, "failed batch", tail[::-1])
        for f in tail:
            hist = [l for l in log if (l[0] in ("insert","remove") and l[1] == f[1] and l[3] == f[3]) or (l[0] in ("apply","found") and f[2] in l[2 if l[0]=="found" else 3])]
            bal = sum(1 if l[0]=="insert" else -1 if l[0]=="remove" else 0 for l in hist)
            if bal != 1: print("  bad", f, "balance", bal, hist[-8:])
        break
