"""One target under atheris: inputs that reach new code of ours are changed further.

`python -m tests.fuzz.guided TARGET [libFuzzer's arguments]`, as `tests.fuzz` starts it. What is written in C (msgspec,
numpy, zlib) shows no coverage; the bent targets are for what lies behind msgspec.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["kvoffd", "kvoffd_client", "kvoffd_proto", "tests.fuzz", "tomllib"]):
    from tests.fuzz.decoders import DECODERS

if __name__ == "__main__":
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, DECODERS[name])
    atheris.Fuzz()
