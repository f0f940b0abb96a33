"""A key of the run's own, where its servers can be reached by others and the config names none."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor

from areal_core.inference.settings import FleetSettings

ABROAD, AT_HOME = "10.0.0.7", "127.0.0.1"


def test_it_is_made_once_for_the_user_alone_and_is_never_shown(tmp_path):
    settings = FleetSettings().with_key(tmp_path, ABROAD)
    assert len(settings.key) > 30
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "servers", tmp_path / "servers/key")] == [0o700, 0o600]
    assert FleetSettings().with_key(tmp_path, ABROAD).key == settings.key, "servers outlive whoever made it"
    assert FleetSettings().with_key(tmp_path).key == settings.key, "who joins the run uses it too"
    assert settings.key not in f"{settings!r} {settings.model_dump()} {settings.model_dump_json()}"
    assert [path.name for path in tmp_path.iterdir()] == ["servers"]


def test_file_systems_without_hard_links_do(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    assert FleetSettings().with_key(tmp_path, ABROAD).key == (tmp_path / "servers/key").read_text()


def test_all_who_come_at_once_use_the_same(tmp_path):
    """The controller and each server; whoever comes first makes it."""
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        with ThreadPoolExecutor(8) as several:
            made = list(several.map(lambda _, f=folder: FleetSettings().with_key(f, ABROAD).key, range(8)))
        assert len({*made}) == 1 < len(made[0])
        assert [path.name for path in folder.iterdir()] == ["servers"]


def test_none_is_made_where_nobody_else_can_reach_them_or_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY", "mine")
    assert FleetSettings().with_key(tmp_path, AT_HOME).key == ""
    assert FleetSettings(servers=0, addresses=["http://a:1"]).with_key(tmp_path, ABROAD).key == ""
    assert FleetSettings(api_key="env:KEY").with_key(tmp_path, ABROAD).key == "mine"
    assert FleetSettings().with_key(tmp_path).key == ""
    assert not list(tmp_path.iterdir())
