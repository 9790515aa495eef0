"""The file format: what is written is read, by the safetensors library too, and no damage goes unseen."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from kvoffd_client import Block, BlockFile, BlockFileError, Geometry, checksum_of
from kvoffd_client.block_file import BlockFileWriter
from kvoffd_proto.admin import BlockInfo, PageSpec, ShardSpec
from kvoffd_proto.messages import READY, GroupSpec, LayerSpec

KEY_BYTES = 16
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

DTYPES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}


@st.composite
def pages(draw: st.DrawFn) -> PageSpec:
    """A layer: described, described wrongly, or not at all."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    nbytes = int(np.prod(shape)) * DTYPES[dtype]
    kind = draw(st.sampled_from(["described", "described", "described", "wrong", "missing"]))
    if kind == "missing":
        return PageSpec(nbytes)
    return PageSpec(nbytes + (kind == "wrong"), LayerSpec(draw(st.text(max_size=5)), dtype, shape, "a b c"))


shards = st.builds(ShardSpec, st.integers(1, 3), st.lists(pages(), max_size=4))


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    groups, world_size = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    return Geometry(
        draw(st.binary(min_size=32, max_size=32)),
        draw(st.text(max_size=8)),
        world_size,
        KEY_BYTES,
        tuple(GroupSpec("full", 16) for _ in range(groups)),
        draw(st.sampled_from(["{}", '{"model":"tiny"}', "no json"])),
        tuple(tuple(draw(shards) for _ in range(groups)) for _ in range(world_size)),
    )


@st.composite
def contents(draw: st.DrawFn) -> tuple[Geometry, list[Block]]:
    geometry = draw(geometries())
    keys = draw(st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=5, unique=True))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    blocks = []
    for key in keys:
        group = draw(st.integers(0, len(geometry.groups) - 1))
        data = [
            rng.integers(0, 256, geometry.shard_bytes(rank, group), dtype=np.uint8)
            for rank in range(geometry.world_size)
        ]
        blocks.append(Block.of_bytes(geometry, group, key, data, draw(st.integers(0, 2))))
    return geometry, blocks


def blank(geometry: Geometry) -> Block:
    zeros = [np.zeros(geometry.shard_bytes(rank, 0), np.uint8) for rank in range(geometry.world_size)]
    return Block.of_bytes(geometry, 0, bytes(KEY_BYTES), zeros)


@contextmanager
def written(geometry: Geometry, blocks: list[Block]) -> Iterator[Path]:
    """A file of these blocks, as an export writes it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "blocks.safetensors"
        with BlockFileWriter(path, geometry, [(block.group, block.key) for block in blocks]) as writer:
            for block in blocks:
                writer.add(block)
            writer.finish()
        yield path


@quick
@given(contents())
def test_blocks_come_back_as_they_were_written(content: tuple[Geometry, list[Block]]) -> None:
    geometry, blocks = content
    with written(geometry, blocks) as path, BlockFile(path) as file:
        assert file.geometry == geometry
        assert [(entry.group, entry.key, entry.first_block) for entry in file.entries] == [
            (block.group, block.key, block.first_block) for block in blocks
        ]
        for number, block in enumerate(blocks):
            found = file.read(number)
            assert all(
                np.array_equal(one.data, other.data) for one, other in zip(found.shards, block.shards, strict=True)
            )


def test_a_file_of_kvoffd_0_1_is_read() -> None:
    """Which an export of that release wrote: two ranks, two groups, a hole, layers of two kinds."""
    with BlockFile(Path(__file__).with_name("blocks-0.1.safetensors")) as file:
        assert (file.geometry.label, file.geometry.fingerprint, file.data_bytes) == ("tiny", bytes(range(32)), 416)
        assert [(entry.group, entry.key[0], entry.first_block) for entry in file.entries] == [
            (0, 1, 0),
            (0, 2, 1),
            (1, 3, 0),
        ]
        for number in range(3):
            block = file.read(number)
            assert [set(shard.data.tolist()) for shard in block.shards] == [{16 * number + 1}, {16 * number + 2}]
        assert [layer.dtype for layer in file.read(0).shards[1].layers] == ["bfloat16", "bfloat16", "uint8"]


def test_an_export_that_ends_early_leaves_nothing(tmp_path: Path) -> None:
    page = PageSpec(64)
    geometry = Geometry(bytes(32), "x", 1, 16, (GroupSpec("full", 2),), "{}", ((ShardSpec(1, [page]),),))
    path, wanted = tmp_path / "x.safetensors", [(0, bytes(16)), (0, bytes([1]) * 16)]
    with BlockFileWriter(path, geometry, wanted) as writer:
        writer.add(blank(geometry))
        with pytest.raises(BlockFileError, match="another export"):
            BlockFileWriter(path, geometry, wanted)
    assert list(tmp_path.iterdir()) == []
    with BlockFileWriter(path, geometry, wanted) as writer:
        writer.add(blank(geometry))  # the other one was evicted
        writer.finish()
    assert list(tmp_path.iterdir()) == [path]
    with BlockFile(path) as file:
        assert len(file.entries) == 1


@quick
@given(contents())
def test_the_safetensors_library_reads_every_layer(content: tuple[Geometry, list[Block]]) -> None:
    geometry, blocks = content
    torch = pytest.importorskip("torch")
    with written(geometry, blocks) as path, safe_open(path, "pt") as file:
        read = dict.fromkeys(file.keys(), 0)
        for block in blocks:
            for shard in block.shards:
                for number, layer in enumerate(shard.layers):
                    (name, first) = next(
                        (name, int(span.split("-")[0]))
                        for name in read
                        for span in [name.rsplit("layers", 1)[1]]
                        if name.startswith(f"group{block.group}/{block.key.hex()}/rank{shard.rank}/")
                        and int(span.split("-")[0]) <= number <= int(span.split("-")[1])
                    )
                    found = file.get_tensor(name)[number - first]
                    read[name] += 1
                    assert tuple(found.shape) == layer.shape
                    assert bytes(found.contiguous().view(-1).view(dtype=torch.uint8).numpy()) == layer.array.tobytes()
        assert all(read.values()), "a tensor of nobody"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(contents(), st.data())
def test_a_flipped_byte_is_found_or_means_nothing(content: tuple[Geometry, list[Block]], data: st.DataObject) -> None:
    geometry, blocks = content
    with written(geometry, blocks) as path:
        raw = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(raw)
        try:
            with BlockFile(path) as file:
                found = [file.read(number) for number in range(len(file.entries))]
        except BlockFileError:
            return
        # As a blank of the padding that became a tab.
        assert file.geometry == geometry
        assert [(block.group, block.key) for block in found] == [(block.group, block.key) for block in blocks]
        for block, before in zip(found, blocks, strict=True):
            assert all(np.array_equal(a.data, b.data) for a, b in zip(block.shards, before.shards, strict=True))


@quick
@given(st.binary(max_size=300))
def test_anything_else_is_refused(raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x"
        path.write_bytes(raw)
        with pytest.raises(BlockFileError):
            BlockFile(path)
        save_file({"weight": np.zeros(4)}, path)
        with pytest.raises(BlockFileError, match="its tensors are not blocks"):
            BlockFile(path)


@pytest.mark.parametrize(
    ("blocks", "changes", "why"),
    [
        (1, {"group": -1}, "do not fit its namespace"),
        (1, {"first_block": -1}, "do not fit its namespace"),
        (1, {"first_block": 10**12}, "do not fit its namespace"),
        (2, {}, "it has a block twice"),
    ],
)
def test_blocks_that_cannot_be_are_refused(tmp_path: Path, blocks: int, changes: dict[str, int], why: str) -> None:
    """Also where the header's checksum fits."""
    page = PageSpec(8)
    geometry = Geometry(bytes(32), "x", 1, 16, (GroupSpec("full", 2),), "{}", ((ShardSpec(1, [page]),),))
    block = blank(geometry)
    with BlockFileWriter(tmp_path / "x", geometry, [(0, block.key)] * 2) as writer:
        for _ in range(blocks):
            writer.add(block)
        writer.entries[0] = writer.entries[0]._replace(**changes)
        writer.finish()
    with pytest.raises(BlockFileError, match=why):
        BlockFile(tmp_path / "x")


def test_a_block_of_one_s_own_is_written_and_checked() -> None:
    page = PageSpec(2 * 3 * 4, LayerSpec("first", "float32", [2, 3], "tokens content"))
    geometry = Geometry(bytes(32), "x", 1, 16, (GroupSpec("full", 2),), "{}", ((ShardSpec(2, [page, page]),),))
    block = blank(geometry)
    for number, layer in enumerate(block.shards[0].layers):
        assert (layer.name, layer.dtype, layer.shape, layer.layout) == ("first", "float32", (2, 2, 3), "tokens content")
        layer.array[...] = number + 1
    assert block.shards[0].data[:48].view(np.float32).tolist() == [1.0] * 12
    pytest.importorskip("torch")
    assert block.shards[0].layers[1].tensor().tolist() == [[[2.0] * 3] * 2] * 2
    for first_block, known, same in (
        (0, 0, True),
        (0, checksum_of(block.shards[0].data), True),
        (0, 7, False),
        (1, 7, True),
    ):
        info = BlockInfo(block.key, READY, 96, 0, first_block, known.to_bytes(8, "big"))
        assert block.matches(info) is same
    for wrong in ([], [np.zeros(95, np.uint8)], [np.zeros(96, np.uint8)] * 2):
        with pytest.raises(ValueError, match="shard"):
            Block.of_bytes(geometry, 0, b"", wrong)
