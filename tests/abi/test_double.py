"""The double of the driver wants a context where NVIDIA's header says that the driver does."""

from __future__ import annotations

import re

from tests.kit.cuda_files import include_directory
from tests.kit.stub_cuda import SOURCE

# These make or choose a context, or only tell of devices; cuda.h lists INVALID_CONTEXT for them all the same.
WITHOUT_CONTEXT = {"cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2", "cuCtxSetCurrent"} | {
    f"cuDeviceGet{what}" for what in ("", "Count", "Name", "Attribute")
}
# cuda.h does not list it for these; their streams have one.
WITH_CONTEXT = {"cuMemcpyBatchAsync", "cuCtxGetStreamPriorityRange"}


def test_it_wants_a_context_where_the_header_says_so() -> None:
    header = (include_directory("newest") / "cuda.h").read_text()
    entered = dict(re.findall(r'ENTER\("(\w+)"\)(.*?)(?:\n\}|\}\n)', SOURCE.read_text(), re.DOTALL))
    assert len(entered) > 50
    for symbol, body in entered.items():
        name = re.sub(r"_v\d+$", "", symbol)
        documented = re.search(rf"/\*\*((?:(?!\*/).)*)\*/\s*CUresult CUDAAPI {name}\(", header, re.DOTALL)
        assert documented is not None, name
        listed = "CUDA_ERROR_INVALID_CONTEXT" in documented[1].partition("\\return")[2]
        wanted = (listed and symbol not in WITHOUT_CONTEXT) or symbol in WITH_CONTEXT
        assert ("NEED_CONTEXT" in body) == wanted, symbol
