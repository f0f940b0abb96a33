"""GRPO on GSM8K from a script: the reward is a function of this file.

python examples/gsm8k.py
"""

from areal_core.library import train


def correct(completion: str, answer: str) -> float:
    """1 if the last line of the completion holds the answer."""
    return float(answer.strip() in completion.strip().rsplit("\n", 1)[-1])


if __name__ == "__main__":
    run = train(
        {
            "steps": 200,
            "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct", "dtype": "bfloat16"},
            "dataset": {
                "type": "rewards/hub",
                "name": "openai/gsm8k",
                "subset": "main",
                "prompt": "{question} Put the answer into the last line.",
                "answer": "{answer}",
                "answer_after": "####",
            },
            "workflow": {"type": "single_turn", "chat_template": "always"},
            "rewards": [correct],
            "sampling": {"max_new_tokens": 512},
            "rollout": {"batch_size": 32, "group_size": 8, "max_staleness": 2},
            "inference_engine": "hf",
            "train_engine": {"type": "fsdp", "learning_rate": 2e-6},
            "algorithm": "grpo",
        },
        plugins=["grpo", "hf", "fsdp", "rewards", "view"],
    )
    print(run / "report.html")
