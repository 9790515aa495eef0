"""Where the pages of a group's blocks lie in an engine's memory, checked once so that copies need no checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffd.errors import BadBlockIds, BadGeometry, OutOfBounds
from kvoffd_proto.handles import PageRef, TensorLayout

_MAX_SHARD_BYTES = 2**62


@dataclass(frozen=True, slots=True, eq=False)
class GroupLayout:
    """One KV cache group of one worker; arrays have one element per layer, in slot order (L layers).

    A slot is layer-major: sub-block ``s`` (engine block ``s`` of a key) of layer ``l`` lies at
    ``slot_page_offset[l] + s * page_bytes[l]``, where ``slot_page_offset[l]`` is the sum of ``blocks_per_key *
    page_bytes`` over the layers before. So neighbouring engine blocks of a layer are neighbours in the slot too.
    """

    tensor_address: npt.NDArray[np.uint64]  # [L] address of engine block 0
    stride: npt.NDArray[np.uint64]  # [L] bytes between engine blocks
    num_blocks: npt.NDArray[np.int64]  # [L] engine blocks in the tensor
    page_bytes: npt.NDArray[np.uint64]  # [L] bytes of an engine block that belong to the layer
    slot_page_offset: npt.NDArray[np.uint64]  # [L] offset of the layer in a slot
    blocks_per_key: int
    block_limit: int  # block ids lie below it: the least of num_blocks
    shard_bytes: int  # bytes of a whole shard


def build_layouts(
    segments: Sequence[tuple[int, int]],
    tensors: Sequence[TensorLayout],
    groups: Sequence[Sequence[PageRef]],
    blocks_per_key: int,
) -> list[GroupLayout]:
    """Turns a registration into layouts; ``segments`` are (address, size in bytes) of the mapped memory.

    Raises:
        OutOfBounds: a tensor or a page reaches outside its segment, or names a segment or tensor that is not there.
        BadGeometry: pages overlap their neighbours, a group has no layers, or a shard is absurdly large.
    """
    if blocks_per_key < 1:
        raise BadGeometry(f"A key cannot cover {blocks_per_key} engine blocks; it must cover at least one.")
    for index, tensor in enumerate(tensors):
        _check_tensor(segments, index, tensor, page_bytes=1)
    return [_build_layout(segments, tensors, index, pages, blocks_per_key) for index, pages in enumerate(groups)]


def _build_layout(
    segments: Sequence[tuple[int, int]],
    tensors: Sequence[TensorLayout],
    group: int,
    pages: Sequence[PageRef],
    blocks_per_key: int,
) -> GroupLayout:
    if not pages:
        raise BadGeometry(
            f"Group {group} has no layers; register the page of every layer that the group has on this rank."
        )
    for page in pages:
        if not 0 <= page.tensor < len(tensors):
            raise OutOfBounds(
                f"Group {group} names tensor {page.tensor}, but only {len(tensors)} tensors were registered."
            )
        _check_tensor(segments, page.tensor, tensors[page.tensor], page.page_bytes)
    used = [tensors[page.tensor] for page in pages]
    page_bytes = [page.page_bytes for page in pages]
    shard_bytes = blocks_per_key * sum(page_bytes)
    if shard_bytes > _MAX_SHARD_BYTES:
        raise BadGeometry(f"A shard of group {group} would have {shard_bytes} bytes; register fewer blocks per key.")
    ends = np.cumsum(np.array(page_bytes, dtype=np.uint64) * np.uint64(blocks_per_key), dtype=np.uint64)
    return GroupLayout(
        tensor_address=np.array([segments[t.segment][0] + t.offset_bytes for t in used], dtype=np.uint64),
        stride=np.array([t.stride_bytes for t in used], dtype=np.uint64),
        num_blocks=np.array([t.num_blocks for t in used], dtype=np.int64),
        page_bytes=np.array(page_bytes, dtype=np.uint64),
        slot_page_offset=np.concatenate((np.zeros(1, dtype=np.uint64), ends[:-1])),
        blocks_per_key=blocks_per_key,
        block_limit=min(t.num_blocks for t in used),
        shard_bytes=shard_bytes,
    )


def _check_tensor(segments: Sequence[tuple[int, int]], index: int, tensor: TensorLayout, page_bytes: int) -> None:
    """Python ints throughout: numpy's would wrap around where a hostile client wants them to."""
    if not 0 <= tensor.segment < len(segments):
        raise OutOfBounds(
            f"Tensor {index} names segment {tensor.segment}, but only {len(segments)} segments were registered."
        )
    if page_bytes < 1 or tensor.num_blocks < 1 or tensor.stride_bytes < 1 or tensor.offset_bytes < 0:
        raise BadGeometry(
            f"Tensor {index} has {tensor.num_blocks} blocks at a stride of {tensor.stride_bytes} bytes from offset "
            f"{tensor.offset_bytes}, with pages of {page_bytes} bytes; all but the offset must be positive."
        )
    if tensor.num_blocks > 1 and page_bytes > tensor.stride_bytes:
        raise BadGeometry(
            f"Pages of {page_bytes} bytes overlap in tensor {index}, whose stride is {tensor.stride_bytes} bytes; "
            "register pages no larger than the stride."
        )
    end = tensor.offset_bytes + (tensor.num_blocks - 1) * tensor.stride_bytes + page_bytes
    size = segments[tensor.segment][1]
    if end > size:
        raise OutOfBounds(
            f"Tensor {index} ends at byte {end} of segment {tensor.segment}, which has only {size} bytes."
        )


def check_blocks(
    layout: GroupLayout, block_ids: npt.NDArray[np.int32], keys: int, first_block: int, exact: bool
) -> None:
    """Checks the block ids (int32, [m]) of a job over ``keys`` keys before the first byte moves.

    A store (``exact``) must end with its last key: ``first_block + m == keys * blocks_per_key``. A load may end
    inside it: ``(keys - 1) * blocks_per_key < first_block + m <= keys * blocks_per_key``. In both ``first_block`` lies
    inside key 0.

    Raises:
        BadBlockIds: too many or too few ids, or one that lies outside the registered tensors.
    """
    per_key = layout.blocks_per_key
    if not 0 <= first_block < per_key:
        raise BadBlockIds(f"The first block is {first_block}, but a key covers blocks 0 to {per_key - 1}.")
    end = first_block + block_ids.size
    fits = end == keys * per_key if exact else (keys - 1) * per_key < end <= keys * per_key
    if keys < 1 or block_ids.size < 1 or not fits:
        raise BadBlockIds(
            f"{block_ids.size} block ids from block {first_block} on do not fit {keys} keys of {per_key} blocks each."
        )
    lowest, highest = int(block_ids.min()), int(block_ids.max())
    if lowest < 0 or highest >= layout.block_limit:
        wrong = lowest if lowest < 0 else highest
        raise BadBlockIds(
            f"Block id {wrong} lies outside the registered tensors, whose ids run to {layout.block_limit - 1}."
        )
