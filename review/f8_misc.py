"""Small pots: hints with pins and duplicates, make_newest of a released block, partial blocks of dead groups."""
import numpy as np, random
from tests.kit.slot_cache import UNIT, CacheRig, check_invariants, keys_of
from kvoffd_proto.messages import HintAction
import inspect
print([n for n in dir(CacheRig) if not n.startswith("__")])
print(inspect.signature(CacheRig.__init__), inspect.signature(CacheRig.store), inspect.signature(CacheRig.open))
