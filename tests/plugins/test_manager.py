"""Loading, finding and refusing plugins, with distributions that are really installed as far as Python can tell."""

from __future__ import annotations

import os

import pytest
from packaging.version import Version

from areal_core import __version__ as VERSION
from areal_core.plugins.catalog import Catalog

RANGE = ">={0}.{1},<{0}.{2}".format(*Version(VERSION).release[:2], Version(VERSION).minor + 1)
UNDECLARED = (
    "PluginIncompatibleError 2\nplugin 'dapo' (areal-dapo 1.2.3) does not declare which versions of areal-core "
    f'it works with\n  add to the dependencies of areal-dapo: "areal-core{RANGE}"\n'
    f"  areal-core {VERSION} is installed\n"
)

LIST = """
from areal_core.errors import ArealError
from areal_core.plugins import PluginManager
try:
    manager = PluginManager.load({names!r})
    {then}
except ArealError as error:
    print(type(error).__name__, error.exit_code)
    print(error)
"""

RLOO = """
@hookimpl
def areal_advantages():
    return [Component("rloo", "leave one out", target="{package}.maths:rloo")]
"""


def load(box, *names, then="print('loaded', manager.names)"):
    outcome = box.python(LIST.format(names=list(names), then=then))
    assert not outcome.err, outcome.err
    return outcome.out


def test_a_named_plugin_is_loaded_and_its_records_say_where_they_come_from(box):
    box.plugin("grpo", RLOO.format(package="grpo_package"))
    out = load(
        box, "grpo", then="record = manager.find('advantages', 'grpo/rloo'); print(record.supplier, record.reference)"
    )
    assert out == "plugin grpo (areal-grpo 1.2.3) grpo/rloo\n"


def test_a_dash_in_a_name_is_read_as_an_underscore(box):
    box.plugin("my-plugin", RLOO.format(package="my_plugin_package"))
    assert load(box, "my_plugin") == "loaded ['my_plugin']\n"
    assert (
        load(box, "my-plugin", then="print(manager.find('advantages', 'my-plugin/rloo').reference)")
        == "my_plugin/rloo\n"
    )


def test_plugins_that_supply_nothing_are_loaded_beside_each_other(box):
    box.plugin("one")
    box.plugin("two")
    assert load(box, "one", "two") == "loaded ['one', 'two']\n"


def test_what_nobody_named_is_never_imported(box):
    box.plugin("grpo", RLOO.format(package="grpo_package"))
    box.plugin("other", "raise SystemExit('must not be imported')")
    assert load(box, "grpo") == "loaded ['grpo']\n"
    assert box.imported("grpo")
    assert not box.imported("other")


def test_a_plugin_is_loaded_by_the_prefix_of_a_reference_and_by_a_bare_name_equal_to_its_own(box):
    box.plugin("grpo", RLOO.format(package="grpo_package"))
    box.plugin(
        "fsdp", '@hookimpl\ndef areal_train_engines():\n    return [Component("fsdp", "trains", target="a:b")]\n'
    )
    then = "manager.find('advantages', 'grpo/rloo'); manager.find('train_engines', 'fsdp'); print(manager.names)"
    assert load(box, then=then) == "['grpo', 'fsdp']\n"


def test_missing_plugins_are_told_together_with_one_pip_line(box):
    box.plugin("fsdp")
    out = load(box, "grpo", "fsdp", "hf", "gropo", "acme")
    assert out == (
        "PluginMissingError 2\n"
        "no plugins named 'grpo', 'hf', 'gropo', 'acme' are installed\n"
        "  install them with: pip install ./plugins/areal_grpo ./plugins/areal_hf (in a clone of areal)\n"
        "  'gropo' is not a plugin of areal: install its distribution by name; did you mean 'grpo'?\n"
        "  'acme' is not a plugin of areal: install its distribution by name\n"
        "  installed plugins: fsdp\n"
    )


def test_a_plugin_that_failed_is_reported_each_time(box):
    box.plugin("broken", "raise RuntimeError('boom')")
    attempts = """
    for attempt in range(2):
        for call in (lambda: manager.add(['nosuch', 'broken']), lambda: manager.find('advantages', 'broken/rloo'),
                     lambda: manager.find('advantages', 'broken')):
            try:
                call()
            except ArealError as error:
                print([part.message.partition(' (')[0] for part in error.parts])
    """
    out = load(box, then=attempts.strip())
    absent, broken = "\"no plugin named 'nosuch' is installed\"", "\"plugin 'broken'\""
    assert out == f"[{absent}, {broken}]\n[{broken}]\n[{broken}]\n" * 2


def test_only_first_party_distributions_are_ever_proposed_for_installation(box):
    assert "pip install" not in load(box, "mine")
    assert "pip install ./plugins/areal_grpo (in a clone of areal)\n" in load(box, "grpo")


@pytest.mark.parametrize(
    ("requires", "told"),
    [
        (
            ("areal-core>=9,<10",),
            "PluginIncompatibleError 2\nplugin 'dapo' (areal-dapo 1.2.3) needs areal-core<10,>=9 "
            f"but {VERSION} is installed\n"
            "  upgrade the core with: pip install --upgrade 'areal-core<10,>=9'\n",
        ),
        ((), UNDECLARED),
        (("areal-core",), UNDECLARED),
    ],
)
def test_the_range_on_the_core_is_checked_before_anything_is_imported(box, requires, told):
    box.plugin("dapo", requires=requires)
    assert load(box, "dapo") == told
    assert not box.imported("dapo")


def test_a_missing_library_is_told_with_the_extra_that_brings_it(box):
    box.plugin(
        "fsdp",
        "import torch_like",
        requires=("areal-core>=0.1", "torch-like>=2; extra == 'engine'"),
        metadata="Provides-Extra: engine",
    )
    assert load(box, "fsdp") == (
        "PluginBrokenError 2\n"
        "plugin 'fsdp' (areal-fsdp 1.2.3) is installed but cannot be imported: module 'torch_like' is missing\n"
        "  repair it with: pip install './plugins/areal_fsdp[engine]' (in a clone of areal)\n"
    )


def test_a_missing_library_without_an_extra_is_repaired_by_installing_the_plugin_again(box):
    box.plugin("fsdp", "import torch_like")
    assert "repair it with: pip install ./plugins/areal_fsdp (in a clone of areal)\n" in load(box, "fsdp")


@pytest.mark.parametrize(
    ("records", "cause"),
    [
        ("import broken_package.nowhere", "ModuleNotFoundError: No module named 'broken_package.nowhere'"),
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def (", "SyntaxError"),
    ],
)
def test_a_mistake_in_the_plugin_is_told_with_where_to_report_it(box, records, cause):
    box.plugin("broken", records, metadata="Project-URL: Issues, https://example.org/broken/issues")
    out = load(box, "broken")
    assert out.startswith(
        "PluginBrokenError 2\nplugin 'broken' (areal-broken 1.2.3) is installed but cannot be imported: "
    )
    assert cause in out
    assert "report it to https://example.org/broken/issues\n" in out


def test_several_plugins_that_cannot_be_used_are_told_at_once_and_the_others_are_loaded(box):
    box.plugin("broken", "raise RuntimeError('boom')")
    box.plugin("old", requires=("areal-core<0.1",))
    box.plugin("good")
    out = load(box, "broken", "old", "nix", "good")
    assert out.startswith("PluginError 2\n3 problems with plugins\n  no plugin named 'nix' is installed\n")
    assert "RuntimeError: boom" in out
    assert "needs areal-core<0.1" in out
    assert box.imported("good")


def test_the_error_has_a_part_for_each_plugin_that_cannot_be_used(box):
    box.plugin("broken", "raise RuntimeError('boom')")
    code = """
        from areal_core.errors import PluginError
        from areal_core.plugins import PluginManager
        for names in (["nix", "nada"], ["nix", "broken", "nada"]):
            try:
                PluginManager.load(names)
            except PluginError as error:
                print(*(f"{type(part).__name__} {part.message.split()[3]}" for part in error.parts), sep=", ")
    """
    assert box.python(code).out == (
        "PluginMissingError 'nix', PluginMissingError 'nada'\n"
        "PluginMissingError 'nix', PluginMissingError 'nada', PluginBrokenError 1.2.3)\n"
    )


def test_two_distributions_with_one_plugin_name_are_both_named(box):
    box.plugin("grpo", module="first")
    box.plugin("grpo", module="second", distribution="someones-grpo", version="3.0")
    out = load(box, "grpo")
    assert (
        "PluginConflictError 2\nthe plugin name 'grpo' is claimed by areal-grpo 1.2.3 and by someones-grpo 3.0\n" in out
    )
    assert "pip uninstall someones-grpo" in out


def test_nobody_may_call_a_plugin_core(box):
    box.plugin("core", distribution="pirate")
    assert load(box) == "loaded []\n"
    assert "is claimed by pirate 1.2.3 and by areal-core itself" in load(box, then="manager.catalog.get('core')")


AMBIGUOUS = (
    "PluginConflictError 2\n"
    "the advantage 'rloo' is supplied by plugin grpo (areal-grpo 1.2.3) and by plugin mine (areal-mine 1.2.3)\n"
    "  write its full name: grpo/rloo or mine/rloo\n"
)


@pytest.fixture
def two_of_a_name(box):
    """Two plugins that know nothing of each other and call something of theirs `rloo`."""
    box.plugin("grpo", RLOO.format(package="grpo_package"))
    box.plugin("mine", RLOO.format(package="mine_package"))
    return box


def test_two_plugins_may_use_one_name_and_only_the_bare_name_is_an_error(two_of_a_name):
    assert load(two_of_a_name, "grpo", "mine") == "loaded ['grpo', 'mine']\n"
    assert find(two_of_a_name, "advantages", "mine/rloo", "grpo", "mine") == "mine/rloo\n"
    assert find(two_of_a_name, "advantages", "rloo", "mine") == "mine/rloo\n"
    assert find(two_of_a_name, "advantages", "rloo", "grpo", "mine") == AMBIGUOUS


@pytest.mark.parametrize(
    ("home", "outcome"),
    [("'mine'", "mine/rloo\n"), ("'grpo'", "grpo/rloo\n"), ("'core'", AMBIGUOUS), ("'other'", AMBIGUOUS)],
)
def test_a_bare_name_at_home_means_the_component_of_that_plugin(two_of_a_name, home, outcome):
    then = f"print(manager.find('advantages', 'rloo', home={home}).reference)"
    assert load(two_of_a_name, "grpo", "mine", then=then) == outcome


def test_at_home_the_core_comes_second_and_an_entry_point_of_that_name_last(box):
    local = '@hookimpl\ndef areal_launchers():\n    return [Component("local", "a", target="a:b")]\n'
    box.plugin("other", local)
    box.plugin("local", local)
    box.plugin("mine")
    assert (
        load(box, "other", "mine", then="print(manager.find('launchers', 'local', home='mine').reference)")
        == "core/local\n"
    )
    assert not box.imported("local")
    out = find(box, "launchers", "local", "other")
    assert (
        f"supplied by plugin core (areal-core {VERSION}) and by plugin local (areal-local 1.2.3) and by plugin o" in out
    )
    assert "  write its full name: core/local or local/local or other/local\n" in out


def test_two_presets_of_one_name(box):
    box.plugin("one", '@hookimpl\ndef areal_presets():\n    return [Preset("small", "a", path="one_package:a.yaml")]\n')
    box.plugin("two", '@hookimpl\ndef areal_presets():\n    return [Preset("small", "b", path="two_package:b.yaml")]\n')
    assert load(box, "one", "two", then="print(manager.find_preset('two/small').path)") == "two_package:b.yaml\n"
    out = load(box, "one", "two", then="manager.find_preset('small')")
    assert "the preset 'small' is supplied by plugin one (areal-one 1.2.3) and by plugin two (areal-two 1.2.3)" in out
    assert "  write its full name: one/small or two/small\n" in out


def test_two_health_checks_of_one_name(box):
    check = '@hookimpl\ndef areal_health_checks():\n    return [HealthCheck("disk", "is there room", target="a:b")]\n'
    box.plugin("one", check)
    box.plugin("two", check)
    kept = "kind == 'health_checks' and record.plugin != 'core'"
    then = f"print([record.reference for kind, record in manager.records() if {kept}])"
    assert load(box, "one", "two", then=then) == "['one/disk', 'two/disk']\n"


@pytest.mark.parametrize(
    ("records", "told"),
    [
        (
            "@hookimpl\ndef areal_worklows():\n    return []",
            ["areal_worklows, which is not a hook", "did you mean areal_workflows?"],
        ),
        (
            "def areal_workflows():\n    return []",
            ["'areal_workflows' is named like a hook but is not marked", "@hookimpl"],
        ),
        ("@hookimpl\ndef areal_workflows(config):\n    return []", ["does not fit the hooks", "config"]),
        ("@hookimpl(hookwrapper=True)\ndef areal_workflows():\n    yield", ["old style", "@hookimpl(wrapper=True)"]),
        ("@hookimpl(wrapper=True)\ndef areal_workflows():\n    return []", ["areal_workflows", "has no `yield`"]),
        (
            "@hookimpl(wrapper=True)\ndef areal_workflows():\n    yield\n    return 3",
            ["fails in areal_workflows: TypeE"],
        ),
        ("@hookimpl\ndef areal_step_finished(step=0): ...", ["areal_step_finished has a default for step"]),
        ("@hookimpl\ndef areal_workflows():\n    return None", ["fails in areal_workflows: TypeError"]),
        ("@hookimpl\ndef areal_workflows():\n    return ['a:b']", ["areal_workflows", "returned str, not Component"]),
        (
            "@hookimpl\ndef areal_presets():\n    return [Component('a', 'b', target='c:d')]",
            ["areal_presets", "returned Component, not Preset"],
        ),
        (
            "@hookimpl\ndef areal_workflows():\n    return [Component('A-b', '', target='nowhere', config='c')]",
            [
                "'A-b' is not of the form",
                "'A-b' has no summary",
                "target of 'A-b' is 'nowhere'",
                "config of 'A-b' is 'c'",
            ],
        ),
        (
            "@hookimpl\ndef areal_presets():\n    return [Preset('a', 'b', path='c:d.toml')]",
            ["path of 'a' is 'c:d.toml'; write it \"package.module:file.yaml\""],
        ),
        (
            "@hookimpl\ndef areal_workflows():\n    return [Component('a', 'b', target='c:d')] * 2",
            ["supplies 'a' twice"],
        ),
        ("@hookimpl\ndef areal_workflows():\n    raise ValueError('oh')", ["fails in areal_workflows: ValueError: oh"]),
    ],
)
def test_what_a_plugin_supplies_is_checked_and_the_plugin_is_named(box, records, told):
    box.plugin("wrong", records)
    out = load(box, "wrong", then="print(manager)")
    assert out.startswith("PluginBrokenError 2\nplugin 'wrong' (areal-wrong 1.2.3)"), out
    for text in told:
        assert text in out


WRAPPER = """
@hookimpl(wrapper=True)
def areal_advantages():
    answers = yield
    kept = [[record for record in records if record.name != "rloo"] for records in answers]
    return [*kept, [Component("wrapped", "found " + str(sum(map(len, answers))), target="a:b")]]
"""


@pytest.mark.parametrize("names", [("grpo", "mine", "wrapper"), ("wrapper", "mine", "grpo")])
def test_a_wrapper_around_a_registration_hook_sees_and_changes_what_all_plugins_supply(two_of_a_name, names):
    two_of_a_name.plugin("wrapper", WRAPPER)
    two_of_a_name.plugin("broken-wrapper", WRAPPER.replace("yield", "yield; raise OSError('oh')"))
    then = "print([(record.reference, record.summary, record.supplier) for record in manager.components('advantages')])"
    supplier = "plugin wrapper (areal-wrapper 1.2.3)"
    assert load(two_of_a_name, *names, then=then) == f"[('wrapper/wrapped', 'found 2', '{supplier}')]\n"
    out = load(two_of_a_name, *names, "broken_wrapper", then=then)
    assert "plugin 'broken_wrapper' (areal-broken-wrapper 1.2.3) fails in areal_advantages: OSError: oh" in out


def test_a_bad_plugin_name_is_refused(box):
    box.plugin("Grpo")
    assert "plugin 'Grpo' (areal-Grpo 1.2.3): the name is not of the form [a-z][a-z0-9_]*" in load(box, "Grpo")


def find(box, kind, reference, *names):
    return load(box, *names, then=f"print(manager.find({kind!r}, {reference!r}).reference)")


def test_an_unnamed_plugin_that_supplies_it_is_proposed(box):
    box.plugin("mine", RLOO.format(package="mine_package"))
    box.plugin("broken", "raise RuntimeError('boom')")
    out = find(box, "advantages", "rloo")
    assert out == (
        "ComponentNotFoundError 2\n"
        "the loaded plugins supply no advantage named 'rloo'\n"
        "  'rloo' is supplied by the installed plugin mine: write 'mine/rloo' or add --plugins mine\n"
        "  available for advantages: nothing in the loaded plugins\n"
    )


def test_several_unnamed_plugins_that_supply_it_are_all_named(two_of_a_name):
    out = find(two_of_a_name, "advantages", "rloo")
    assert (
        "  'rloo' is supplied by the installed plugin grpo: write 'grpo/rloo' or add --plugins grpo; "
        "also by the installed plugin mine: write 'mine/rloo' or add --plugins mine\n"
    ) in out


def test_a_misspelt_component_a_wrong_kind_and_a_plugin_that_is_not_installed_are_told_apart(box):
    box.plugin("grpo", RLOO.format(package="grpo_package"))
    assert "plugin grpo (areal-grpo 1.2.3) supplies no advantage named 'rlo'\n  did you mean 'grpo/rloo'?" in find(
        box, "advantages", "grpo/rlo"
    )
    assert "  available for advantages: grpo/rloo\n" in find(box, "advantages", "rlooo", "grpo")
    assert "'grpo/rloo' is an advantage, not a policy loss" in find(box, "policy_losses", "rloo", "grpo")
    assert "install it with: pip install ./plugins/areal_hf" in find(box, "inference_engines", "hf")
    assert "install it with: pip install ./plugins/areal_hf" in find(box, "inference_engines", "hf/engine")


def test_a_target_that_cannot_be_imported_names_component_plugin_and_cure(box):
    box.plugin("grpo", RLOO.format(package="grpo_package"), modules={"maths.py": "import torch_like"})
    then = "record = manager.find('advantages', 'rloo'); manager.import_from(record, record.target)"
    assert load(box, "grpo", then=then) == (
        "PluginBrokenError 2\n"
        "'grpo/rloo' of plugin grpo (areal-grpo 1.2.3) is installed but cannot be imported: "
        "module 'torch_like' is missing\n"
        "  repair it with: pip install ./plugins/areal_grpo (in a clone of areal)\n"
    )


def test_a_target_without_the_attribute_is_a_mistake_of_the_plugin(box):
    box.plugin("grpo", RLOO.format(package="grpo_package"), modules={"maths.py": "def rlo(): ..."})
    then = "record = manager.find('advantages', 'rloo'); manager.import_from(record, record.target)"
    out = load(box, "grpo", then=then)
    assert "names grpo_package.maths:rloo, but grpo_package.maths has no 'rloo'" in out
    assert "grpo_package.maths has: rlo\n" in out


def test_core_records_come_through_the_same_path(box):
    then = (
        "from areal_core.plugins.manager import survey; core = survey(manager.catalog)[0];"
        "print('areal_workflows' in core.hooks, manager.find('launchers', 'core/local').supplier)"
    )
    assert load(box, then=then) == f"True plugin core (areal-core {VERSION})\n"


EXTERNAL = """
@hookimpl
def areal_launchers():
    return [Component("external", "starts processes elsewhere", target="a:b")]

@hookimpl
def areal_commands():
    return [Command("node", "joins a run", target="nodes_package.code:run")]
"""


def test_a_component_with_another_name_than_its_plugin_is_found_or_the_error_names_the_plugin(box):
    install = "install it with: pip install ./plugins/areal_nodes (in a clone of areal)\n"
    assert f"  the plugin 'nodes' is not installed; {install}" in find(box, "launchers", "external")
    assert f"  {install}" in find(box, "launchers", "nodes/external")
    assert "pip install" not in find(box, "datasets", "external")
    box.plugin("nodes", EXTERNAL)
    assert find(box, "launchers", "external") == "nodes/external\n"
    assert "  did you mean 'nodes/external'?\n" in find(box, "launchers", "core/external")


def test_a_command_with_another_name_than_its_plugin_is_found_or_the_error_names_the_plugin(box):
    refused = box.areal("node", "runs/first")
    assert refused.code == 2
    assert refused.err.startswith(
        "areal: error: areal has no command 'node', and no plugin named 'nodes' is installed\n"
        "  install it with: pip install ./plugins/areal_nodes (in a clone of areal)\n"
    )
    box.plugin("nodes", EXTERNAL, modules={"code.py": "def run(words):\n    print('joining', *words)\n    return 3\n"})
    for words in (["node"], ["nodes", "node"]):
        outcome = box.areal(*words, "runs/first")
        assert (outcome.code, outcome.out, outcome.err) == (3, "joining runs/first\n", "")


def test_the_metadata_is_read_once_and_again_after_an_installation(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    before = Catalog.scan()
    assert Catalog.scan() is before
    (installed := tmp_path / "areal_late-1.0.dist-info").mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: areal-late\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[areal.plugins]\nlate = areal_late.plugin\n")
    os.utime(tmp_path, ns=(1, 1))  # the clock of a file system may be coarse
    assert set(Catalog.scan().names()) - set(before.names()) == {"late"}
