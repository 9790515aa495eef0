"""Runs a command under what kvoffd.service's RestrictAddressFamilies= and MemoryDenyWriteExecute= do (seccomp)."""
import ctypes, os, struct, sys
LD, JEQ, JSET, RET = 0x20, 0x15, 0x45, 0x06
def ins(code, jt, jf, k): return struct.pack("HBBI", code, jt, jf, k)
ALLOW, ERR = 0x7fff0000, 0x00050000
prog = []
which = sys.argv[1]
p = [ins(LD,0,0,0)]
# socket = 41, mmap = 9, mprotect = 10, pkey_mprotect=329
if "a" in which:
    p += [ins(JEQ,0,5,41), ins(LD,0,0,16), ins(JEQ,3,0,1), ins(JEQ,2,0,2), ins(JEQ,1,0,10), ins(RET,0,0,ERR|97)]
    # falls: family ok -> need nr again
    p += [ins(LD,0,0,0)]
if "m" in which:
    p += [ins(JEQ,0,3,10), ins(LD,0,0,32), ins(JSET,0,1,4), ins(RET,0,0,ERR|1), ins(LD,0,0,0)]
    p += [ins(JEQ,0,4,9), ins(LD,0,0,32), ins(JSET,0,2,4), ins(JSET,0,1,2), ins(RET,0,0,ERR|1), ins(LD,0,0,0)]
p += [ins(RET,0,0,ALLOW)]
code = b"".join(p)
libc = ctypes.CDLL(None, use_errno=True)
buf = ctypes.create_string_buffer(code)
fprog = struct.pack("HxxxxxxP", len(p), ctypes.addressof(buf)); fb = ctypes.create_string_buffer(fprog)
assert libc.prctl(38, 1, 0, 0, 0) == 0
r = libc.prctl(22, 2, ctypes.byref(fb), 0, 0)
assert r == 0, os.strerror(ctypes.get_errno())
os.execvp(sys.argv[2], sys.argv[2:])
