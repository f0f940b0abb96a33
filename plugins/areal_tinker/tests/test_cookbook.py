"""Recipes of tinker-cookbook, unmodified, train the model of an `areal tinker serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from chat_model import make_chat_model
from recipes import Recipes, write_sums_and_guesses
from tinker_server import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from recipes import Finished

KL = "optim/kl_sample_train_v1"
FORMAT = "env/all/format"


@pytest.fixture(scope="module")
def recipes(tinker_cookbook_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recipes]:
    """The recipes against one server."""
    folder = tmp_path_factory.mktemp("tinker")
    model = make_chat_model(folder / "model")
    with serving(folder, model, "--full") as server:
        yield Recipes(tinker_cookbook_python, server.url, model, folder)


@pytest.fixture(scope="module")
def taught(recipes: Recipes, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A model that answers with a sum or, three times of four, with a guess, which is too long for `math_rl`."""
    file = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    write_sums_and_guesses(file, 120 * 32, recipes.guess_number_instructions())
    return recipes.supervised("taught", file, batch_size=32, learning_rate=5e-3, lr_schedule="linear")


def test_the_supervised_recipe_trains_on_a_conversation_file(taught: Finished) -> None:
    losses = taught.column("train_mean_nll")
    assert len(losses) == 120
    assert losses[0] > 4
    assert losses[-1] < 1


def test_the_reward_rises_if_the_trainer_learns_from_the_answers_of_its_own_weights(
    recipes: Recipes, taught: Finished
) -> None:
    sizes = {"group_size": 16, "groups_per_batch": 8, "max_steps": 12}
    done = recipes.math_rl("synchronous", taught.checkpoint, learning_rate=5e-4, **sizes)
    assert len(done.rows) == 12
    assert max(map(abs, done.column(KL))) < 1e-3
    well_formed = done.column(FORMAT)
    # Of 128 answers 0.1 to 0.45 are well formed at first, and 0.8 or more in the second half; the noise is about 0.05.
    assert sum(well_formed[6:]) / 6 > well_formed[0] + 0.2


def test_two_steps_on_one_batch_are_off_policy(recipes: Recipes, taught: Finished) -> None:
    sizes = {"group_size": 8, "groups_per_batch": 4, "max_steps": 3}
    done = recipes.math_rl("substeps", taught.checkpoint, learning_rate=3e-4, num_substeps=2, **sizes)
    assert len(done.rows) == 3
    assert 1e-4 < max(done.column(KL)) < 1  # half of the answers are trained on by weights that have made a step


def test_an_asynchronous_run_learns_from_answers_of_earlier_weights(recipes: Recipes, taught: Finished) -> None:
    sizes = {"group_size": 8, "groups_per_batch": 4, "max_steps": 6}
    done = recipes.math_rl("asynchronous", taught.checkpoint, learning_rate=3e-4, max_steps_off_policy=2, **sizes)
    assert len(done.rows) == 6
    assert max(done.column("async/staleness_max")) == 2


def test_a_game_of_several_turns_is_played_and_trained_on(recipes: Recipes, taught: Finished) -> None:
    sizes = {"group_size": 4, "batch_size": 1, "max_steps": 2}
    done = recipes.guess_number("guess_number", taught.checkpoint, learning_rate=3e-4, **sizes)
    assert len(done.rows) == 2
    assert min(done.column("env/all/turns_per_episode")) > 1
    assert max(map(abs, done.column(KL))) < 1e-3
    # Whether the rewards of a group differ, so that there is something to learn, depends on the samples.
