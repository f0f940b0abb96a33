"""Which processes a config makes of its servers, and on which GPUs."""

from __future__ import annotations

import pytest

from areal_core.config.sections import PlacementSection
from areal_core.driver.groups import split_optional
from areal_core.inference.settings import FleetSettings
from areal_core.interfaces.launcher import OnExit


class Config:
    """What is read of a config."""

    has_elastic_servers = True

    def __init__(self, settings, **placement):
        self.placement = PlacementSection(**placement)
        self.inference_engine = self
        self.settings = settings

    def keywords(self):
        return {"servers": self.settings.servers, "addresses": self.settings.addresses}


def groups_of(tmp_path, placement=None, **settings):
    settings = FleetSettings(**settings)
    config = Config(settings, **(placement or {}))
    return config, settings.process_groups(config, tmp_path)


def test_each_server_is_started_by_itself_and_again_so_often(tmp_path):
    _, groups = groups_of(tmp_path, servers=2, restarts=7)
    assert [group.name for group in groups] == ["server-0", "server-1"]
    assert {(one.role, one.count, one.gpus_each, one.cores_each, one.on_exit, one.restarts) for one in groups} == {
        ("server", 1, 0, 0, OnExit.RESTART, 7)
    }
    assert [*groups[0].command][1:] == ["-m", "areal_core.runs", "server", str(tmp_path)]


@pytest.mark.parametrize(
    ("placement", "settings", "gpus", "shares"),
    [
        ({"generation": [4, 5, 6, 7]}, {"servers": 2, "tensor_parallel": 2}, [(4, 5), (6, 7)], False),
        ({"generation": [0, 1], "training": [0, 1]}, {"servers": 2}, [(0,), (1,)], True),
        ({"training": [0]}, {"servers": {"minimum": 1, "maximum": 2}, "data_parallel": 2}, [None, None], False),
        ({"generation": [1, 2]}, {"servers": {"minimum": 1, "maximum": 9}}, [(1,), (2,)], False),
    ],
)
def test_gpus_are_divided_among_servers(tmp_path, placement, settings, gpus, shares):
    _, groups = groups_of(tmp_path, placement, **settings)
    assert [group.gpus for group in groups] == gpus
    each = settings.get("tensor_parallel", 1) * settings.get("data_parallel", 1)
    assert {(group.gpus_each, group.shares_gpus) for group in groups} == {(each, shares)}


def test_of_bounds_the_minimum_must_have_room_less_those_that_run_already(tmp_path):
    config, groups = groups_of(tmp_path, servers={"minimum": 3, "maximum": 5}, addresses=["http://a:1"])
    required, optional = split_optional(config, groups)
    assert ([one.name for one in required], len(optional)) == (["server-0", "server-1"], 3)
