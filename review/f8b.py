import sys, random, time, traceback
exec(open("/tmp/review/f8_shrink.py").read().split("for DUP in")[0])
mode = sys.argv[1]
if "noinv" in mode: check_invariants = lambda c: None
DUP = 0.0
def shrinkall(ops, why, policy):
    changed = True
    until = time.monotonic() + 25
    while changed and time.monotonic() < until:
        changed = False
        for size in (40, 10, 3, 1):
            at = 0
            while at < len(ops):
                less = ops[:at] + ops[at+size:]
                if fails(policy, less) == why: ops = less; changed = True
                else: at += size
        for i in range(len(ops)):
            o = ops[i]
            for ks in (o[2][:len(o[2])//2], o[2][len(o[2])//2:], o[2][1:], o[2][:-1]):
                if ks and len(ks) < len(o[2]):
                    less = ops[:i] + [(*o[:2], ks, *o[3:])] + ops[i+1:]
                    if fails(policy, less) == why: ops = less; changed = True; break
    return ops
end = time.monotonic() + 15; seed = 0; found = 0
while time.monotonic() < end:
    seed += 1; rng = random.Random(seed); ops = [make(rng) for _ in range(160)]
    if "nohint" in mode: ops = [o for o in ops if o[0] != "hint"]
    if "noretain" in mode: ops = [o for o in ops if not (o[0] == "hint" and o[3] == R)]
    if "norelease" in mode: ops = [o for o in ops if not (o[0] == "hint" and o[3] == L)]
    if why := fails("learned", ops):
        found += 1
        if "shrink" in mode:
            ops = shrinkall(ops, why, "learned")
            print(seed, why); [print("   ", *o) for o in ops]
            try: run("learned", ops)
            except Exception: traceback.print_exc()
            break
print(mode, "seeds", seed, "failed", found)
