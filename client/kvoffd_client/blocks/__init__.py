"""Blocks as things one can hold: read them in the pool itself, write and pin them."""

from __future__ import annotations

from kvoffd_client.blocks.block import Block, Layer, Shard, checksum_of
from kvoffd_client.blocks.client import BlockClient
from kvoffd_client.blocks.export import Exported, export_blocks
from kvoffd_client.blocks.file import BlockFile, BlockFileError
from kvoffd_client.blocks.geometry import Geometry
from kvoffd_client.blocks.restore import Imported, import_blocks

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
