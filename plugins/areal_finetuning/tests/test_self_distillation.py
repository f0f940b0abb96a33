"""The teacher's prompts against texts written by hand, and what is refused before and in a run."""

import asyncio

import numpy as np
import pytest

from areal_core.config import select
from areal_core.data import Episode, FinishReason, Generation, Trajectory
from areal_core.errors import ConfigError
from areal_core.sdk import RewardScore, StepResult, WorkflowContext
from areal_finetuning.self_distillation import Attempt, teacher_prompts

TEXT = {"prompt_template": "{solution}{feedback}{prompt}", "solution_template": "{solution};"}
GENERATES = ("workflow=finetuning/self_distillation", "inference_engine=parts.py:Engine", "algorithm=finetuning/sdpo")
GENERATES = (*GENERATES, "rewards=[finetuning/no_reward]", "plugins=[finetuning,grpo]", "rollout.group_size=2")


class Critic:
    """An environment that names the last letter of an answer, and has nothing to say about answers with a 4."""

    closed = 0

    async def reset(self, row):
        self.row = row
        return []

    async def step(self, completion):
        if "4" in completion:
            return StepResult(terminated=True)
        return StepResult(f"{self.row['prompt'][-1]} {completion[-1]} is {{solution}}", terminated=True)

    async def close(self):
        type(self).closed += 1


class Messages(Critic):
    """The same in messages."""

    async def step(self, completion):
        return StepResult([{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}])


class TwoTurns:
    """A workflow of two turns."""

    from areal_core.chat import PromptSettings as Config

    def __init__(self, settings):
        del settings

    async def run_episode(self, row, context):
        from areal_core.data import TrajectoryBuilder

        builder = TrajectoryBuilder()
        for _ in range(2):
            builder.add_context([7])
            builder.add_generation(await context.generate(builder.input_ids))
        return Episode([builder.build()], 0.0)


def run(workflow, row, answers, tokenizer, rewards=None, *, is_evaluation=False):
    """Return one episode for each answer, whose text ends with the tokenizer's end token."""

    async def play():
        return [await one(text, place) for place, text in enumerate(answers)]

    async def one(text, place):
        async def generate(input_ids, **keys):
            ids = tokenizer.encode(f"{text}<eos>", add_special_tokens=False)
            return Generation(ids, [-0.5] * len(ids), [0] * len(ids), FinishReason.STOP)

        async def score(**arguments):
            return RewardScore((rewards or {}).get(text, 0.0))

        return await workflow.run_episode(
            row, WorkflowContext(tokenizer, generate, score, is_evaluation=is_evaluation, sample_index=place)
        )

    return asyncio.run(play())


def prompts_of(episodes, tokenizer):
    """Return the text of each episode's teacher's prompt."""
    levels = [episode.trajectories[0].multimodal for episode in episodes]
    assert all(level["teacher"]["teacher_prompt_ids"].dtype == np.int64 for level in levels)
    return [tokenizer.decode(level["teacher"]["teacher_prompt_ids"].tolist()) for level in levels]


@pytest.fixture
def make():
    """A function from settings to a workflow."""

    def make(**settings):
        return select("workflows", {"type": "finetuning/self_distillation", **settings}).build()

    return make


@pytest.fixture
def reader(make_tokenizer):
    made = make_tokenizer()
    made.model_max_length = 200
    return made


def test_the_prompt_of_a_conversation_has_the_solution_in_its_last_message(make, reader):
    workflow = make(
        workflow={"type": "single_turn", "system": "Count."},
        prompt_template="{prompt} Hint: {solution}{feedback} {unknown}",
        solution_template="{solution}!",
    )
    row = {"prompt": [{"role": "user", "content": "2+{solution}?"}]}
    episodes = run(workflow, row, ["5", "<think>{prompt}</think> 4", "6"], reader, {"<think>{prompt}</think> 4": 1.0})
    assert [len(episode.trajectories[0].multimodal["teacher"]["teacher_prompt_ids"]) for episode in episodes] == [0] * 3
    found = prompts_of(teacher_prompts(episodes, success_reward=1.0), reader)
    wanted = "<system>Count.<eos>\n<user>2+{solution}? Hint: 4! {unknown}<eos>\n<assistant>"
    assert found == [wanted, "", wanted], "thoughts are not shown; braces of contents and of other names stay"


def test_the_prompt_of_a_text_begins_with_the_solution(make, reader):
    episodes = run(make(**TEXT), {"prompt": "2+2="}, ["<eos>4", "3"], reader, {"<eos>4": 2.0})
    found = teacher_prompts(episodes, success_reward=1.5)
    assert prompts_of(found, reader) == ["", "<eos>4;2+2="]
    ids = found[1].trajectories[0].multimodal["teacher"]["teacher_prompt_ids"].tolist()
    assert reader.eos_token_id not in ids, "an end token that an answer spells is text in a prompt"
    assert [episode.reward for episode in found] == [2.0, 0.0]
    assert found[1].text == episodes[1].text


def test_each_gets_the_next_correct_answer_and_never_its_own():
    def attempt(reward, answer):
        trajectory = Trajectory.from_generation([5], Generation([7], [-0.1], [0], FinishReason.STOP))
        return Attempt([trajectory], reward, answer=answer, write_prompt=lambda solution: [*solution.encode()])

    group = [attempt(*each) for each in [(0.9, "a"), (1, "b"), (0, "c"), (1, ""), (2, "e"), (0, "f")]]
    found = teacher_prompts(group, success_reward=1.0)
    ids = [episode.trajectories[0].multimodal["teacher"]["teacher_prompt_ids"].tolist() for episode in found]
    assert [bytes(each).decode() for each in ids] == ["b", "e", "e", "e", "b", "b"], "an empty answer shows nothing"
    assert all("teacher" not in each.trajectories[0].multimodal for each in group), "they are not changed in place"
    (alone,) = teacher_prompts(group[1:2], success_reward=1.0)
    assert len(alone.trajectories[0].multimodal["teacher"]["teacher_prompt_ids"]) == 0
    with pytest.raises(TypeError, match="set workflow: finetuning/self_distillation"):
        teacher_prompts([Episode(group[0].trajectories, 0.0)], success_reward=1.0)


def test_feedback_is_what_the_environment_returns_after_the_answer(make, reader):
    before = Critic.closed
    workflow = make(**TEXT, feedback=f"{__name__}:Critic", feedback_template="({feedback})")
    episodes = run(workflow, {"prompt": "2+2="}, ["5", "4", "6"], reader, {"4": 1.0})
    assert Critic.closed == before + 3
    found = teacher_prompts(episodes, success_reward=1.0)
    assert prompts_of(found, reader) == ["4;(= 5 is {solution})2+2=", "", "4;(= 6 is {solution})2+2="]
    alone = teacher_prompts(episodes, success_reward=9.0)
    assert prompts_of(alone, reader) == ["(= 5 is {solution})2+2=", "", "(= 6 is {solution})2+2="]
    (evaluated,) = run(workflow, {"prompt": "2+2="}, ["5"], reader, is_evaluation=True)
    assert Critic.closed == before + 3, "an evaluation has no teacher"
    assert evaluated.trajectories[0].multimodal.keys() == episodes[0].trajectories[0].multimodal.keys()
    spoken = make(**TEXT, feedback=f"{__name__}:Messages", feedback_template="({feedback})")
    found = teacher_prompts(run(spoken, {"prompt": "2+2="}, ["5"], reader), success_reward=1.0)
    assert prompts_of(found, reader) == ["(a\nb)2+2="]


def test_a_solution_of_the_row_is_shown_where_no_other_answer_is_correct(make, reader):
    workflow = make(**TEXT, solution_key="answer")
    episodes = run(workflow, {"prompt": "2+2=", "answer": "four"}, ["5", "4"], reader, {"4": 1.0})
    assert prompts_of(teacher_prompts(episodes, success_reward=1.0), reader) == ["4;2+2=", "four;2+2="]


def test_a_prompt_that_leaves_no_room_for_the_answer_is_left_out(make, reader):
    reader.model_max_length = 10
    episodes = run(make(**TEXT), {"prompt": "2+2="}, ["123", "4444"], reader, {"123": 1.0, "4444": 1.0})
    assert prompts_of(teacher_prompts(episodes, success_reward=1.0), reader) == ["", ""], "9 + 4 and 8 + 5 tokens"
    reader.model_max_length = 13
    episodes = run(make(**TEXT), {"prompt": "2+2="}, ["123", "4444"], reader, {"123": 1.0, "4444": 1.0})
    assert prompts_of(teacher_prompts(episodes, success_reward=1.0), reader) == ["4444;2+2=", "123;2+2="]


def test_several_turns_are_refused_in_a_run(make, reader):
    with pytest.raises(ValueError, match="an episode has 2 turns, and self-distillation takes one turn of text"):
        run(make(**TEXT, workflow=f"{__name__}:TwoTurns"), {"prompt": "2+2="}, ["4"], reader)


@pytest.mark.parametrize(
    ("settings", "row", "message"),
    [
        ({}, {"prompt": "2+2="}, "workflow.prompt_template must end with {prompt}"),
        (TEXT, {"prompt": "2+2="}, ""),
        ({}, {"prompt": [{"role": "user", "content": "?"}]}, ""),
        ({}, {"prompt": [{"role": "tool", "content": "?"}]}, "ends with a message of the role tool"),
        ({"solution_key": "answer"}, {"prompt": [{"role": "user", "content": "?"}]}, "has no text 'answer'"),
        (TEXT, {}, ""),
    ],
)
def test_rows_are_checked(settings, row, message):
    chosen = select("workflows", {"type": "finetuning/self_distillation", **settings})
    assert message in chosen.settings.check_row(row)
    assert bool(message) == bool(chosen.settings.check_row(row))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("workflow=single_turn",), "the teacher's prompt is written by workflow: finetuning/self_distillation"),
        (("rollout.group_size=1",), "alone in its group has no other one to learn from"),
        (("workflow.workflow={type: multi_turn, environment: parts.py:Rows}",), "has several turns"),
        (("workflow.prompt_template='{prompt}{solution}'",), r"lacks \{feedback\}"),
        (("algorithm.group_filters=[]",), "group_filters lacks finetuning/teacher_prompts"),
        (("algorithm.batch_transforms=[]",), "batch_transforms lacks finetuning/self_teacher"),
        (("algorithm.batch_transforms=[{type: finetuning/self_teacher, ema_decay: 1}]",), "ema_decay"),
        (("rewards=[]", "steps=2"), ""),
    ],
)
def test_mistakes_are_found(overrides, message, read):
    if not message:  # found by the preflight, which asks `scores_answers`
        assert read(*GENERATES, *overrides).workflow.declared("scores_answers")
        return
    with pytest.raises(ConfigError, match=message):
        read(*GENERATES, *overrides)


def test_images_are_refused(read):
    pytest.importorskip("areal_vision", reason="areal-vision is not installed")
    with pytest.raises(ConfigError, match="'vision/single_turn' has images, and self-distillation takes one turn"):
        read(*GENERATES, "plugins=[finetuning,grpo,vision]", "workflow.workflow=vision/single_turn")


def test_one_row_of_feedback_is_enough_for_one_answer(read):
    config = read(*GENERATES, "rollout.group_size=1", "workflow.solution_key=answer")
    assert config.rollout.group_size == 1
