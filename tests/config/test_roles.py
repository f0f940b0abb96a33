"""Roles in a config: what they share with the training engine, and which cannot be; and names of rewards."""

from __future__ import annotations

import pytest


def test_a_role_is_the_training_engine_but_for_what_is_said_of_it(kit):
    """By the keys of that engine, in the file and on the command line; a role that nobody needs is a mistake."""
    needed = ["algorithm.kl=0.1", "evaluation={dataset: kit/rows}"]
    changed = ["roles.reference.path=other", "roles.reference.betas=[0.5, 0.5]"]
    shown = kit.shown("resolved.to_tree()['roles']['reference']", *needed, *changed)
    assert shown == "{'type': 'kit/engine', 'path': 'other', 'learning_rate': 0.0003, 'betas': [0.5, 0.5]}"
    by_plugin = kit.shown("resolved.to_tree()['roles']['reference']", *needed, "roles.reference.type=engine")
    assert "'learning_rate': 0.0003" in by_plugin, "the same engine, written without its plugin"
    assert "must be" in kit.resolve(*needed, "roles.reference.type=[x]") or "type" in kit.resolve(
        *needed, "roles.reference.type=[x]"
    )
    assert "roles.reference.bets: unknown key" in kit.resolve(*needed, "roles.reference.bets=1")
    told = kit.resolve("roles.reference.path=other")
    assert "roles.reference: 'kit/policy' and its components know no such role" in told
    assert "roles of this algorithm: actor" in told


ODD = """
from areal_core.config import Settings
from areal_core.interfaces import ACTOR, EMA, Role

class Odd:
    class Config(Settings):
        kind: str
        def needs(self, updates):
            return {
                "frozen": [Role("actor")],
                "two": [ACTOR, Role("actor", head="scalar")],
                "nobody": [ACTOR, Role("ema", ema=EMA("aktor"))],
                "teacher": [ACTOR, Role("teacher", needs_path=True)],
                "never": [ACTOR, Role("ema", ema=EMA("actor", every=0))],
            }[self.kind]
    def __init__(self, settings): ...

class Method:
    def __init__(self): ...
    def needs(self, updates): return []
"""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("frozen", "the first role that is needed, 'actor', does not learn"),
        (
            "two",
            "two components mean different roles by 'actor': head is vocabulary and scalar, trains",
        ),
        ("nobody", "the role 'ema' is an EMA of 'aktor', which is not a role of the same head that learns"),
        ("never", "every must be at least 1"),
    ],
)
def test_roles_that_cannot_be_are_told_before_anything_starts(kit, kind, words):
    kit.file("odd.py", ODD)
    assert words in kit.resolve(f"algorithm={{type: 'odd.py:Odd', kind: {kind}}}", imports=True)
    assert "must be a function of the number of updates" in kit.resolve("algorithm=odd.py:Method", imports=True)


def test_a_role_that_needs_a_model_of_its_own_is_refused_without_one(kit):
    """It would be a copy of the run's model, from which nothing is learned, and nothing would say so."""
    kit.file("odd.py", ODD)
    words = "algorithm={type: 'odd.py:Odd', kind: teacher}"
    assert "roles.teacher.path: is required: without a model of its own the role would be a copy" in kit.resolve(
        words, imports=True
    )
    assert kit.resolve(words, "roles.teacher.path=other", imports=True) == "valid\n"


def test_two_rewards_of_one_name_are_refused(kit):
    two = "rewards=[kit/exact, {type: kit/exact, weight: 2}]"
    assert "rewards.1: two rewards are called 'exact'" in kit.resolve(two)
    assert kit.resolve("rewards=[kit/exact, {type: kit/exact, weight: 2, name: other}]") == "valid\n"
    assert "rewards.0: a reward is called 'mean', as" in kit.resolve("rewards=[{type: kit/exact, name: mean}]")
