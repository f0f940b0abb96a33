"""Defaults that follow from other values."""

import pytest

from areal_core.config import resolve
from areal_core.errors import ConfigError

pytest.importorskip("areal_grpo", reason="the first-party plugins are not installed")

RUN = """
plugins: [grpo, sglang, fsdp, rewards]
steps: 1
model: {path: model}
dataset: {type: rewards/jsonl, paths: [rows.jsonl]}
workflow: single_turn
inference_engine: {type: sglang, servers: 1}
train_engine: fsdp
algorithm: grpo
"""


@pytest.mark.parametrize(
    ("words", "dtype", "transport"),
    [
        ([], "float32", "memory"),
        (["placement.training=[1]"], "bfloat16", "memory"),
        (["placement.generation=[0]", "placement.training=[1]"], "bfloat16", "broadcast"),
        (["placement.generation=[0]", "placement.training=[1]", "model.dtype=float32"], "float32", "broadcast"),
        (["placement.generation=[0]", "placement.training=[1]", "weight_sync.transport=disk"], "bfloat16", "disk"),
        (["placement.generation=[0]", "placement.training=[0]"], "bfloat16", "ipc"),
    ],
)
def test_where_gpus_are_named_what_is_right_on_them_holds(tmp_path, words, dtype, transport):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    turns = ["inference_engine.memory_saver=true"] if "placement.training=[0]" in words else []
    config = resolve(path, [], [*words, *turns]).config
    assert (config.model.dtype, config.weight_sync.transport.target) == (dtype, f"core/{transport}")


def test_on_the_trainers_gpus_servers_take_turns_with_it_or_keep_their_memory(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    same = ["placement.generation=[0]", "placement.training=[0]"]
    alone = ["inference_engine.adapter_rank=8", "train_engine.adapter={rank: 8, sync: alone}"]
    with pytest.raises(ConfigError, match="lose an adapter's base"):
        resolve(path, [], [*same, *alone, "inference_engine.memory_saver=true"])
    assert not resolve(path, [], same).config.takes_turns
    stale = ["rollout.max_staleness=1", "evaluation={dataset: grpo/additions}"]
    turns = resolve(path, [], [*same, *stale, "inference_engine.memory_saver=true"]).config
    assert turns.takes_turns
    assert not list(turns.inference_engine.settings.notes(turns))
    assert not turns.evaluates_beside_training
    bounded = [*same, *stale, "inference_engine.options={max-total-tokens: 4096}"]
    resolve(path, [], [*bounded, *alone])
    beside = resolve(path, [], bounded).config
    assert not beside.takes_turns
    (note,) = beside.inference_engine.settings.notes(beside)
    assert "keep their memory beside the trainer's" in note
    assert beside.evaluates_beside_training
    assert beside.weight_sync.transport.target == "core/memory"


def test_what_a_resume_says_of_the_training_engine_holds_for_roles_that_had_the_same(tmp_path):
    """A saved config is complete: what roles share with the training engine is written in each of them."""
    from areal_core.cli.commands.run import _for_roles, _is_safe

    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    words = [
        "algorithm=finetuning/gkd",
        "roles.teacher.path=other",
        "plugins=[grpo, sglang, fsdp, rewards, finetuning]",
    ]
    saved = resolve(path, [], [*words, "roles.teacher.max_tokens_per_microbatch=512"])
    assert _for_roles(saved, ["train_engine.parallel.tensor=2", "steps=3"]) == ["roles.teacher.parallel.tensor=2"]
    assert _for_roles(saved, ["train_engine.max_tokens_per_microbatch=64"]) == [], "the teacher has its own"
    assert _is_safe("roles.teacher.parallel.tensor")
    assert not _is_safe("roles.teacher.learning_rate")
    assert not _is_safe("roles.teacher.path")
