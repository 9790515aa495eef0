"""The tier that many nodes share: blocks as objects in a store that the operator runs, such as Redis or Valkey."""

from kvoffd.tiers.shared.shared_tier import SharedTier
from kvoffd.tiers.shared.store import Credentials, open_store

__all__ = ["Credentials", "SharedTier", "open_store"]
