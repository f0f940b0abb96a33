"""What trainers, servers and checks must know of a model, from its config and its files: each module has one subject.

The names that this package exports are public. No module imports torch or transformers before a function needs them,
except `shown_masks`.
"""

from areal_core.exports import from_stub

__all__, __dir__, __getattr__ = from_stub(__name__, __file__)
