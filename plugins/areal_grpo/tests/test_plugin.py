"""The records lead to what exists, configs need no torch, and mistakes are found before anything starts."""

import pytest

from areal_core.cli import main
from areal_core.config import resolve
from areal_core.config.needs import needs_of, roles_of
from areal_core.errors import ConfigError
from areal_core.sdk import ACTOR, ForwardPass
from areal_grpo.loss_settings import ScoreCenteringSettings
from areal_grpo.records import ALGORITHMS
from areal_testing.conformance import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "grpo"


@pytest.mark.parametrize("algorithm", ["grpo", "grpo/rloo", "grpo/reinforce_pp", "grpo/ppo", "grpo/m2po"])
def test_an_algorithm_is_chosen_by_its_name_alone(algorithm, read):
    chosen = read(f"algorithm={algorithm}").algorithm
    assert chosen.target == f"grpo/{algorithm.rpartition('/')[2]}"


@pytest.mark.parametrize(
    "algorithm", ["grpo", "rloo", "dr_grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "lite_ppo", "m2po", "dppo"]
)
def test_a_group_of_one_is_refused(algorithm, read):
    with pytest.raises(ConfigError) as caught:
        read(
            f"algorithm={algorithm}",
            "algorithm.loss_aggregation={type: core/constant_length, length: 8}",
            "rollout.group_size=1",
        )
    assert "compares the answers to one prompt, and rollout.group_size is 1" in str(caught.value)
    assert "set rollout.group_size to 2 or more" in str(caught.value)


def test_a_filter_that_would_drop_every_group_is_refused(read):
    parts = ("algorithm=policy_gradient", "algorithm.advantage=grpo/group_centered", "algorithm.policy_loss=reinforce")
    with pytest.raises(ConfigError, match="zero_variance drops groups whose rewards are all equal"):
        read(*parts, "algorithm.group_filters=[zero_variance]", "rollout.group_size=1")


def test_dr_grpo_asks_for_its_constant(read):
    with pytest.raises(ConfigError, match=r"algorithm\.loss_aggregation\.length: is required"):
        read("algorithm=dr_grpo")
    chosen = read("algorithm=dr_grpo", "algorithm.loss_aggregation.length=256").algorithm.settings
    assert chosen.loss_aggregation.settings.length == 256


def test_a_penalty_brings_the_role_that_it_needs(read):
    """The reference is the run's own model as it began, or the one of `roles.reference.path`; others are unknown."""
    config = read("algorithm=grpo", "algorithm.regularizers=[reference_kl]", "roles.reference.path=other")
    assert list(roles_of(config.algorithm, 1)) == ["actor", "reference"]
    assert list(roles_of(read("algorithm=grpo").algorithm, 1)) == ["actor"]
    with pytest.raises(ConfigError, match=r"roles\.reference: 'grpo/grpo' and its components know no such role"):
        read("algorithm=grpo", "roles.reference.path=other")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.policy_loss.clip_low=-0.1", "policy_loss.clip_low"),
        ("algorithm.policy_loss.dual_clip=0.5", "policy_loss.dual_clip"),
        ("algorithm.corrections=[{type: token_mask, low: 2.0}]", "low must be at most 1 and high at least 1"),
        ("algorithm.corrections=[{type: token_truncate, caps: 2}]", "unknown key"),
    ],
)
def test_settings_out_of_range_are_refused(override, message, read):
    with pytest.raises(ConfigError, match=message):
        read("algorithm=grpo", override)


@pytest.mark.parametrize("algorithm", ["dppo", "m2po"])
def test_a_loss_with_the_whole_ratio_in_it_may_be_masked_and_not_weighed_again(algorithm, read):
    for weighing in ("token_truncate", "kpop"):
        with pytest.raises(ConfigError, match=f"grpo/{weighing} would weigh by it twice"):
            read(f"algorithm={algorithm}", f"algorithm.corrections=[{weighing}]")
    assert read(f"algorithm={algorithm}", "algorithm.corrections=[geometric_mask, veto]")


@pytest.mark.parametrize("algorithm", ["dppo", "m2po"])
def test_a_loss_around_the_policy_that_sampled_needs_no_proximal_one(algorithm, read):
    chosen = read(f"algorithm={algorithm}").algorithm
    assert not [need for need in needs_of(chosen, 4) if isinstance(need, ForwardPass)]


@pytest.mark.parametrize("name", [record.name for record in ALGORITHMS])
def test_every_algorithm_has_a_preset_to_begin_with(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["config", "init", f"grpo/{name}"]) == 0
    assert capsys.readouterr().out == f"wrote {name}.yaml; run it with: areal run {name}.yaml\n"
    config = resolve(f"{name}.yaml", environment={}).config
    assert config.algorithm.target == f"grpo/{name}"
    assert list(config.cross_notes()) == []
    assert (tmp_path / f"{name}.yaml").read_text().count("#") >= 5


def test_an_adaptive_bonus_asks_for_what_leads_it(read):
    with pytest.raises(ConfigError, match=r"add minibatch_transforms: \[entropy_target\]"):
        read("algorithm=grpo", "algorithm.regularizers=[adaptive_entropy]")
    both = read(
        "algorithm=grpo", "algorithm.regularizers=[adaptive_entropy]", "algorithm.minibatch_transforms=[entropy_target]"
    )
    assert list(both.cross_notes()) == []
    (note,) = read("algorithm=grpo", "algorithm.minibatch_transforms=[entropy_target]").cross_notes()
    assert "nothing reads" in note


def test_ppo_brings_its_critic(read):
    assert list(roles_of(read("algorithm=grpo/ppo", "rollout.group_size=1").algorithm, 1)) == ["actor", "critic"]


def test_bounds_are_no_dead_letters_where_the_ratio_is_to_the_policy_that_sampled(read):
    loss = "algorithm={type: grpo/grpo, proximal: behavior, policy_loss: {type: ppo_clip, clip_high: 0.28}}"
    assert list(read(loss).cross_notes()) == []


def test_clip_settings_that_clip_nothing_are_told(read):
    loss = "algorithm={type: grpo/grpo, policy_loss: {type: ppo_clip, clip_high: 0.28}}"
    (note,) = read(loss).cross_notes()
    assert note.startswith("algorithm.policy_loss: clip_high without effect: with one update per batch")
    assert list(read(loss, "training.num_minibatches=2").cross_notes()) == []
    assert list(read("algorithm=grpo/grpo").cross_notes()) == []
    assert main(["config", "check", "run.yaml", loss]) == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["algorithm=ppo", "algorithm.advantage=group_normalized"], "which 'grpo/group_normalized' does not compute"),
        (
            ["algorithm=m2po", "algorithm.regularizers=[adaptive_entropy]"],
            "add minibatch_transforms: \\[entropy_target\\]",
        ),
        (
            [
                "algorithm=grpo",
                "algorithm.advantage=gdpo",
                "algorithm.batch_transforms=[{type: reward_scaling, scale: 2}]",
            ],
            "changes only their sum",
        ),
        (
            [
                "algorithm=dppo",
                "algorithm.regularizers=[reference_kl]",
                "training.num_minibatches=4",
            ],
            "'grpo/dppo' lacks; choose k2",
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(words, told, read):
    with pytest.raises(ConfigError, match=told):
        read(*words)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.corrections=[token_truncate, token_truncate]", "'grpo/token_truncate' occurs twice in corrections"),
        (
            "algorithm.minibatch_transforms=[kl_in_reward]",
            "'grpo/kl_in_reward' is in minibatch_transforms and belongs",
        ),
        (
            "algorithm.batch_transforms=[m2po]",
            "'grpo/m2po' is in batch_transforms and belongs in minibatch_transforms",
        ),
    ],
)
def test_parts_that_stand_where_they_would_count_twice_or_for_nothing_are_refused(override, words, read):
    with pytest.raises(ConfigError, match=words):
        read(override)
    read("algorithm.corrections=[token_truncate, {type: token_truncate, cap: 5.0}]")


def test_a_loss_without_a_ratio_is_for_one_update(read):
    several = ("algorithm=rloo", "training.num_minibatches=4", "rollout.batch_size=16")
    (note,) = read(*several).cross_notes()
    assert note.startswith(
        "algorithm: 'grpo/reinforce' has no importance ratio, and of 4 updates on a batch all but the"
    )
    assert list(read("algorithm=rloo").cross_notes()) == []
    assert ForwardPass(ACTOR, "logprobs", "proximal_logprobs") in needs_of(read(*several).algorithm, 4)


SEVERAL = ("training.num_minibatches=4", "rollout.batch_size=16")
"""Four updates a batch."""


@pytest.mark.parametrize("loss", ["gspo", "gmpo"])
def test_a_loss_of_sequences_that_is_averaged_over_tokens_is_noted(loss, read):
    constant = "algorithm.loss_aggregation={type: core/constant_length, length: 8}"
    for words in ([f"algorithm.policy_loss={loss}"], [f"algorithm={loss}", constant]):
        (note,) = read(*words, *SEVERAL).cross_notes()
        assert note.startswith(f"algorithm: 'grpo/{loss}' is the loss of a whole sequence")
    assert list(read(f"algorithm={loss}", *SEVERAL).cross_notes()) == []
    assert list(read(f"algorithm={loss}", "algorithm.loss_aggregation=episode_mean", *SEVERAL).cross_notes()) == []


@pytest.mark.parametrize("loss", ["gspo", "gmpo", "sapo", "cispo"])
def test_a_loss_that_one_update_makes_equal_to_grpo_is_noted(loss, read):
    (note,) = read(f"algorithm={loss}").cross_notes()
    assert f"policy_loss 'grpo/{loss}' has the gradient of ppo_clip while every ratio is 1" in note
    assert list(read(f"algorithm={loss}", "algorithm.proximal=behavior").cross_notes()) == []
    assert list(read("algorithm=grpo").cross_notes()) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["algorithm.batch_transforms=[kl_in_reward]"], "learn the KL at full strength, whatever its coefficient"),
        (["algorithm.advantage=pass_at_k"], "groups with two right answers have no advantage"),
        (["algorithm.policy_loss={type: dppo, divergence: kl}"], "are for divergence tv: for kl set both"),
    ],
)
def test_settings_that_make_an_estimate_meaningless_or_biased_are_noted(words, text, read):
    common = ["algorithm.corrections=[]", "rollout.max_staleness=1"]
    notes = [note for note in read(*words, *common).cross_notes() if text in note]
    assert len(notes) == 1


def test_score_centering_without_a_cap_is_noted_where_tokens_are_stale(read):
    stale, fresh = read("rollout.max_staleness=1"), read("rollout.max_staleness=0")
    (note,) = ScoreCenteringSettings().notes(stale)
    assert "set policy_loss.cap to 2" in note
    assert not [*ScoreCenteringSettings(cap=2.0).notes(stale), *ScoreCenteringSettings().notes(fresh)]


def test_settings_that_are_sound_are_not_noted(read):
    for words in (
        ["algorithm.batch_transforms=[kl_in_reward]", "algorithm.advantage=group_centered"],
        ["algorithm.advantage={type: pass_at_k, k: 2}"],
    ):
        assert list(read(*words).cross_notes()) == []


def test_a_filter_of_the_sum_beside_an_advantage_of_each_reward_is_noted(read):
    filtered = ("algorithm=grpo", "algorithm.group_filters=[zero_variance]")
    (note,) = read(*filtered, "algorithm.advantage=gdpo").cross_notes()
    assert note.startswith("algorithm.group_filters.0: zero_variance compares the sum of the rewards, but gdpo each")
    assert list(read(*filtered).cross_notes()) == []


def test_two_corrections_that_weigh_are_noted(read):
    (note,) = read("algorithm.corrections=[token_truncate, geometric_mask, kpop]").cross_notes()
    assert note.startswith("algorithm: grpo/token_truncate and grpo/kpop weigh by the ratio of the two policies each")
    assert list(read("algorithm.corrections=[token_truncate, geometric_mask]").cross_notes()) == []


def test_what_is_stale_cannot_be_deterministic(read):
    read("deterministic=true", "rollout.max_staleness=0")
    with pytest.raises(ConfigError, match=r"with rollout\.max_staleness above 0 it depends on time"):
        read("deterministic=true", "rollout.max_staleness=1")


def test_a_part_of_which_one_key_is_set_keeps_what_its_algorithm_sets(read):
    """Else DAPO would lose its upper bound in silence."""
    loss = read("algorithm=dapo", "algorithm.policy_loss.clip_low=0.1").algorithm.settings.policy_loss.settings
    assert (loss.clip_low, loss.clip_high) == (0.1, 0.28)
    other = read("algorithm=dapo", "algorithm.policy_loss={type: ppo_clip, clip_low: 0.1}").algorithm.settings
    assert other.policy_loss.settings.clip_high == 0.2, "a type that is named begins with its own defaults"
