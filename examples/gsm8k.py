"""GRPO on GSM8K from a script: the reward is a function of this file.

python examples/gsm8k.py
"""

import areal_core


def correct(completion: str, answer: str) -> float:
    """1 if the last line of the completion holds the answer."""
    return float(answer.strip() in completion.strip().rsplit("\n", 1)[-1])


run = areal_core.train(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    dataset={
        "type": "rewards/hub",
        "name": "openai/gsm8k",
        "subset": "main",
        "prompt": "{question} Put the answer into the last line.",
        "answer": "{answer}",
        "answer_after": "####",
    },
    rewards=[correct],
    algorithm="grpo",
    steps=200,
    workflow={"type": "single_turn", "chat_template": "always"},
    rollout={"batch_size": 32, "max_staleness": 2},
    train_engine={"learning_rate": 2e-6},
)
print(run.metrics)
print(run.folder / "report.html")
