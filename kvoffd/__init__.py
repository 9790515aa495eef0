"""The kvoffd daemon: owns the pool and keeps the KV cache blocks of the node's engines."""

__version__ = "0.2.0"
