"""`areal doctor`: every check of every plugin is asked, and none of them can spoil the others."""

from __future__ import annotations

import json
import time

import pytest

from areal_core.runtime.process_tree import has_ended, identify

pytestmark = pytest.mark.slow

CHECKS = """
@hookimpl
def areal_health_checks():
    names = ["silent", "told", "wrong", "raises", "dies"]
    return [HealthCheck(name, f"what {name} means", target=f"clinic_package.checks:{name}") for name in names]
"""
ANSWERS = """
import os
from areal_core.plugins import Finding

def silent(): return None
def told():
    print("what a library says")
    return Finding(True, "version 3")
def wrong(): return "the disk is nearly full"
def raises(): raise OSError("no such device")
def dies(): os._exit(7)
"""


def test_every_check_is_asked_and_says_what_it_means(box):
    box.plugin("clinic", CHECKS, modules={"checks.py": ANSWERS})
    box.plugin("future", requires=("areal-core>=9",))
    box.plugin("needy", requires=("areal-core>=0.1", "a-library>=2"))
    outcome = box.areal("doctor", "--json")
    assert outcome.code == 1
    found = {one["check"]: one for one in json.loads(outcome.out)}
    answers = {name: (found[f"clinic/{name}"]["is_well"], found[f"clinic/{name}"]["found"]) for name in
               ("silent", "told", "wrong", "raises", "dies")}  # fmt: skip
    assert answers == {
        "silent": (True, "yes"),
        "told": (True, "version 3"),
        "wrong": (False, "the disk is nearly full"),
        "raises": (False, "OSError: no such device"),
        "dies": (False, "ended with exit code 7"),
    }
    assert found["clinic/wrong"]["meaning"] == "what wrong means"
    assert "needs areal-core>=9" in found["plugin future"]["found"]
    assert "requires a-library>=2, and it is not installed" in found["plugin needy"]["found"]
    assert {"core/torch", "core/shared_memory", "core/run_folder"} <= set(found)
    text = box.areal("doctor").out
    assert "WRONG  clinic/wrong: the disk is nearly full\n       (what wrong means)\n" in text
    assert "well   clinic/told: version 3\n" in text


HANGS = """
@hookimpl
def areal_health_checks():
    return [HealthCheck(name, name, target=f"slow_package.checks:{name}") for name in ("hangs", "leaves")]
"""
LEAVES = """
import pathlib, subprocess, time

def hangs(): time.sleep(600)
def leaves():
    pathlib.Path("left").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
"""


def test_a_check_that_hangs_spoils_no_other_and_none_leaves_processes(box):
    box.plugin("slow", HANGS, modules={"checks.py": LEAVES})
    outcome = box.python("""
        from areal_core.checks import doctor
        from areal_core.plugins.catalog import Catalog
        from areal_core.plugins.manager import survey
        doctor.DEADLINE_S = 20
        plugins = [plugin for plugin in survey(Catalog.scan()) if plugin.installed.name == "slow"]
        print([(answer.check, answer.is_well, answer.text) for answer in doctor.ask_health_checks(plugins)])
    """)
    answers = "[('slow/hangs', False, 'no answer within 20 s'), ('slow/leaves', True, 'yes')]\n"
    assert outcome.out == answers, outcome.err
    left, deadline = int((box.work / "left").read_text()), time.monotonic() + 60
    while not has_ended(identify(left)):
        assert time.monotonic() < deadline  # the kill is asynchronous
        time.sleep(0.01)
