"""The health check."""

import shutil

from areal_example.health_checks import c_compiler


def test_c_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert c_compiler() == (True, "/usr/bin/cc")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert c_compiler().is_well is False
