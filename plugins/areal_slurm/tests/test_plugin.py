"""The records lead to what exists; outside of an allocation that is said."""

import pytest

from areal_core.errors import UsageError
from areal_slurm.config import SlurmSettings
from areal_slurm.launcher import SlurmLauncher
from areal_testing.conformance import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "slurm"


def test_outside_of_an_allocation_the_way_to_one_is_told(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UsageError, match="not inside an allocation") as caught:
        _ = SlurmLauncher(SlurmSettings()).host
    assert "areal slurm submit CONFIG" in str(caught.value)
