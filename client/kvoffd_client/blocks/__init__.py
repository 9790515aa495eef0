"""Blocks as things one can hold: read them in the pool itself, write and pin them."""

from __future__ import annotations

from kvoffd_client.blocks.block import Block, Layer, Shard, checksum_of
from kvoffd_client.blocks.block_client import BlockClient
from kvoffd_client.blocks.block_file import BlockFile, BlockFileError
from kvoffd_client.blocks.block_transfer import Exported, Imported, export_blocks, import_blocks
from kvoffd_client.namespace_spec import Geometry

__all__ = [
    "Block",
    "BlockClient",
    "BlockFile",
    "BlockFileError",
    "Exported",
    "Geometry",
    "Imported",
    "Layer",
    "Shard",
    "checksum_of",
    "export_blocks",
    "import_blocks",
]
