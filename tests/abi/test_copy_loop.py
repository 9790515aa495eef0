"""What the copy loop in C calls of the driver has the types that NVIDIA's headers say."""

from __future__ import annotations

import re
import subprocess

from tests.kit.cuda_abi import compiler, header_version
from tests.kit.cuda_files import ROOT, VERSIONS, include_directory

LOOP = ROOT / "kvoffd/transfer/cuda/gpu_copy.c"
CALLS = {
    "copy_call": "cuMemcpyAsync",
    "record_call": "cuEventRecord",
    "wait_call": "cuEventSynchronize",
    "sync_call": "cuStreamSynchronize",
}
BATCHES = {12080: "batch_call_12080", 13000: "batch_call"}


def refusals(version: str, source: str) -> str:
    """What the compiler says of the loop behind one version's header, and of its types beside the header's."""
    include = include_directory(version)
    pairs = {f"__typeof__({call})": ours for ours, call in CALLS.items()}
    for form, ours in BATCHES.items():
        if form <= header_version(include):
            pairs[f"__typeof__(*(PFN_cuMemcpyBatchAsync_v{form})0)"] = ours
    older = "" if header_version(include) >= 12080 else "typedef struct attributes CUmemcpyAttributes;"
    lines = ['#include "cuda.h"', '#include "cudaTypedefs.h"', older, source]
    for theirs, ours in pairs.items():
        lines.append(f'_Static_assert(__builtin_types_compatible_p({theirs}, {ours}), "{ours}");')
    command = [compiler(), "-x", "c", "-std=gnu11", "-fsyntax-only", f"-I{include}", f"-I{LOOP.parent}", "-"]
    return subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False).stderr


def test_the_loop_calls_what_the_header_declares() -> None:
    source = LOOP.read_text()
    for version in VERSIONS:
        assert refusals(version, source) == "", version
    for ours in (*CALLS, *BATCHES.values()):
        wrong = re.sub(rf"(CUresult {ours}\(.*?)\);", r"\1, int more);", source, count=1, flags=re.DOTALL)
        assert wrong != source
        assert f'static assertion failed: "{ours}"' in refusals("newest", wrong)
