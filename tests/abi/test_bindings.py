"""What our ctypes bindings say of the CUDA driver is so in NVIDIA's headers; a mistake of any kind is seen."""

from __future__ import annotations

import ast
import ctypes
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvoffd_proto import cuda
from tests.kit.cuda_abi import Declarations, differences, header_version
from tests.kit.cuda_calls import MEM_ALLOCATION_TYPE_PINNED, MEMHOSTALLOC_PORTABLE, TEST_PROTOTYPES
from tests.kit.cuda_files import ROOT, VERSIONS, include_directory

CONSTANTS = {
    ("CUDA_" if name.startswith("ERROR_") else "CU_") + name: value
    for name, value in vars(cuda).items()
    if name.isupper() and not name.startswith("_") and isinstance(value, int)
} | {
    "CU_MEMHOSTALLOC_PORTABLE": MEMHOSTALLOC_PORTABLE,
    "CU_MEM_ALLOCATION_TYPE_PINNED": MEM_ALLOCATION_TYPE_PINNED,
}
OURS = Declarations(
    {**cuda.PROTOTYPES, **TEST_PROTOTYPES},
    cuda.TYPES,
    cuda.STRUCTS,
    CONSTANTS,
    cuda.BATCH_FORMS,
    since={
        "CU_MEM_HANDLE_TYPE_FABRIC": 12030,
        "CUmemcpyAttributes": 12080,
        "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": 12080,
        "CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE": 12080,
    },
)


@pytest.mark.parametrize("version", VERSIONS)
def test_our_declarations_are_those_of_the_header(version: str) -> None:
    include = include_directory(version)
    assert version == "newest" or header_version(include) == 1000 * int(version[:2]) + 10 * int(version[3:])
    assert differences(OURS, include) == {}


def test_what_older_headers_are_said_to_lack_they_lack() -> None:
    for version in VERSIONS:
        include = include_directory(version)
        missing = {name for name, since in OURS.since.items() if since > header_version(include)}
        assert set(differences(replace(OURS, since={}), include)) == missing


def test_no_other_calls_of_cuda_are_made() -> None:
    """No code names a call that the tables do not declare, or loads another library of CUDA."""
    known, call = (
        {*OURS.prototypes, cuda.BATCH_SYMBOL},
        re.compile(r"(cu|cuda|nvml)[A-Z][A-Za-z]+\w*|lib(cudart|nvidia-ml).*"),
    )
    strangers = {
        (path.relative_to(ROOT).as_posix(), name)
        for place in ("kvoffd", "client/kvoffd_client", "proto/kvoffd_proto", "tests")
        for path in (ROOT / place).rglob("*.py")
        if path.parent.name != "abi" and call.search(text := path.read_text())
        for name in names_of(ast.parse(text))
        if call.fullmatch(name) and name not in known
    }
    assert strangers == set(), "declare them in kvoffd_proto.cuda.PROTOTYPES, where the headers judge them"


def names_of(tree: ast.Module) -> Iterator[str]:
    """Texts and attributes of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_only_untyped_pointers_are_passed_as_such() -> None:
    pointers = {text for declared in OURS.prototypes.values() for text in declared if text.endswith("*")}
    untyped = {text for text in pointers if cuda.argument_type(text) is ctypes.c_void_p}
    assert untyped == {"void *", "const void *", "const CUDA_MEMCPY2D *"}, "the last is made in C alone"


# What cuda.h says of a value in words, and the C types that are so.
WORDS = {
    "an integer": "int",
    "a boolean": "unsigned int",
    "the starting address": "CUdeviceptr",
    "the size": "size_t",
    "the handle to the mempool": "CUmemoryPool",
}


@pytest.mark.parametrize("version", VERSIONS)
def test_untyped_pointers_get_what_the_header_says(version: str) -> None:
    header = (include_directory(version) / "cuda.h").read_text()
    said = re.findall(r"::(CU_POINTER_ATTRIBUTE_\w+):[\s*]+Returns in \\p \*data (.*)", header)
    found = {name: kind for name, text in said for words, kind in WORDS.items() if text.startswith(words)}
    names = [name for name in CONSTANTS if name.startswith("CU_POINTER_ATTRIBUTE_")]
    assert {name: cuda.POINTER_ATTRIBUTES[CONSTANTS[name]] for name in names} == {name: found[name] for name in names}
    exported = re.search(r"CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR\s*=.*\((\w+)\) \*/", header)
    assert exported is not None
    assert {cuda.MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: exported[1]} == cuda.EXPORTED_HANDLES


@pytest.mark.parametrize("version", ["12.8", "newest"])
def test_the_errors_that_end_a_process_are_those_of_the_header(version: str) -> None:
    include = include_directory(version)
    text = (include / "cuda.h").read_text()
    errors = text[text.index("typedef enum cudaError_enum") : text.index("} CUresult;")]
    ending = {
        int(number)
        for comment, number in re.findall(r"/\*\*(.*?)\*/\s*CUDA_\w+\s*=\s*(\d+)", errors, re.DOTALL)
        if "process must be terminated" in re.sub(r"[\s*]+", " ", comment)
    }
    assert ending == cuda.RELAUNCH_ERRORS
