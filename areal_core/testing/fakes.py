"""The old names of the fakes, which are in `areal_testing.fakes`."""

from areal_core.exports import deprecated_names

_MOVED = (
    "GRANT",
    "CountingDataset",
    "FakeClient",
    "FakeEngine",
    "FakeTokenizer",
    "FakeWorkflow",
)

__getattr__ = deprecated_names(__name__, {name: f"areal_testing.fakes.{name}" for name in _MOVED})
