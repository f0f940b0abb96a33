"""The old names of the conformance suites and fakes. They are in `areal_testing`, a distribution of its own.

Only the two modules that were public are here. The next minor version removes them.
"""

from importlib.util import find_spec

from areal_core.plugins.catalog import TESTING, install_command

if find_spec("areal_testing") is None:
    raise ModuleNotFoundError(
        f"areal_core.testing is areal_testing now, a distribution of its own. {install_command(TESTING)}",
        name="areal_testing",
    )
