"""Records of a run's plugins, and the differences that a resume reports."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint

import pytest

from areal_core.checks.fingerprints import compare
from areal_core.plugins.catalog import Installed
from areal_core.plugins.provenance import Provenance, describe


def provenance(box, *names):
    outcome = box.python(
        "import json; from areal_core.plugins import PluginManager\n"
        f"print(json.dumps([record.as_dict() for record in PluginManager.load({list(names)!r}).provenance()]))"
    )
    assert outcome.code == 0, outcome.err
    return [Provenance(**each) for each in json.loads(outcome.out)]


def make_editable(box, name):
    folder = next(box.site.glob(f"areal_{name}-*.dist-info"))
    folder.joinpath("direct_url.json").write_text('{"url": "file:///somewhere", "dir_info": {"editable": true}}')


@pytest.mark.parametrize("is_editable", [False, True])
def test_a_plugin_is_recorded_by_version_and_by_its_source(box, is_editable):
    """Its author installs it again and again under one version."""
    box.plugin("grpo")
    core, grpo = provenance(box, "grpo")
    assert (core.name, core.distribution) == ("core", "areal-core")
    assert (grpo.distribution, grpo.version) == ("areal-grpo", "1.2.3")
    assert grpo.location.endswith("grpo_package")
    if is_editable:
        make_editable(box, "grpo")
    before = provenance(box, "grpo")
    assert before[1].source_hash
    assert compare(before, provenance(box, "grpo")) == []
    (box.site / "grpo_package" / "more.py").write_text("x = 1\n")
    assert compare(before, provenance(box, "grpo")) == [
        "grpo: the content of areal-grpo 1.2.3 has changed since the run was saved"
    ]


def record(name="grpo", version="1", **changes):
    return Provenance(**{"name": name, "distribution": "areal-grpo", "version": version, "location": "/a", **changes})


@pytest.mark.parametrize(
    ("current", "lines"),
    [
        ([record()], []),
        ([record(location="/elsewhere")], []),
        ([record(version="2")], ["grpo: was areal-grpo 1, is now areal-grpo 2"]),
        ([record(distribution="someones")], ["grpo: was areal-grpo 1, is now someones 1"]),
        ([], ["grpo: areal-grpo 1 was part of the saved run and is not loaded now"]),
        ([record(), record("hf")], ["hf: was not part of the saved run"]),
        ([record(source_hash="x")], ["grpo: the content of areal-grpo 1 has changed since the run was saved"]),
    ],
)
def test_each_difference_is_one_line(current, lines):
    assert compare([record()], current) == lines


def test_the_hash_of_a_namespace_package_covers_its_files_and_not_the_current_folder(tmp_path, monkeypatch):
    (module := tmp_path / "areal_without_init" / "plugin.py").parent.mkdir()
    module.write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    point = EntryPoint("bare", "areal_without_init.plugin", "areal.plugins")
    bare = Installed("bare", "areal-bare", "1", point, None)
    before = describe(bare)
    (tmp_path / "other.py").write_text("y = 1")
    assert (describe(bare), before.location) == (before, str(module.parent))
    module.write_text("x = 2")
    assert describe(bare).source_hash != before.source_hash
