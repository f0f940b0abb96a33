"""Synthetic data of a run, in the form that the page of `areal view` reads, and the page filled with it."""

from __future__ import annotations

import json
import math
import random
from typing import Any

from areal_view.rollouts import COLUMNS as DESCRIBED
from areal_view.rollouts import RATIOS

BEGAN = 1_764_160_000.0
EVIL = '<img src=x onerror="window.evil = 1"></script><script>window.evil = 2</script>'
NAMED = [
    {"title": "Reward", "text": "mean of all finished episodes", "keys": ["reward/all_episodes", "evaluation/reward"]},
    {
        "title": "Staleness histogram",
        "text": "share of tokens by the age of their weights, in batches",
        "keys": ["staleness/0", "staleness/1", "staleness/2", "staleness/3"],
        "stacked": True,
    },
    {"title": "Entropy", "text": "of the policy at the tokens it sampled, in nats", "keys": ["train/entropy"]},
    {"title": "Gradient norm", "text": "before clipping", "keys": ["train/gradient_norm"]},
    {"title": "Not there", "text": "a chart whose key has no value", "keys": ["train/nothing"]},
]
COLUMNS = (
    "loss_mask",
    "versions",
    "advantages",
    "logprobs",
    "proximal_logprobs",
    "behavior_logprobs",
    "entropy",
    "correction_weights",
    "loss_weights",
    "loss",
    "teacher_kl",
)


def empty_data() -> dict[str, Any]:
    """Of a run that has done nothing yet."""
    return {
        "name": "empty",
        "made_at": BEGAN,
        "steps": 100,
        "facts": [],
        "notes": [],
        "others": [],
        "diagnostics": [],
        "config": "",
        "charts": NAMED,
        "metrics": {"step": [], "time": [], "columns": {}},
        "sequences": {name: [] for name in sequence_table([])},
        "rollouts": {},
        "rollout_steps": [],
        "columns": DESCRIBED,
        "missing": "areal view RUN_DIR --serve shows every step",
        "samples": [],
        "in_flight": {"time": [], "versions": [], "counts": []},
        "timeline": {"tracks": []},
    }


def metrics(points: int, every: int, keys: int, rng: random.Random) -> dict[str, Any]:
    """So many points of a run whose every so many-th step is kept, with at least so many keys."""
    steps = [1 + every * i for i in range(points)]
    share = [i / max(1, points - 1) for i in range(points)]
    columns: dict[str, list[float | None]] = {
        "reward/all_episodes": [0.15 + 0.7 * (1 - math.exp(-3 * s)) + rng.gauss(0, 0.05) for s in share],
        "evaluation/reward": [0.2 + 0.65 * s if i % 10 == 0 else None for i, s in enumerate(share)],
        "train/entropy": [0.9 * math.exp(-2 * s) + 0.1 + rng.gauss(0, 0.02) for s in share],
        "train/gradient_norm": [None if 0.4 < s < 0.5 else abs(rng.gauss(0.6, 0.2)) for s in share],
        "train/learning_rate": [1e-6 * min(1, 10 * s) for s in share],
        "time/step_s": [rng.uniform(20, 40) for _ in share],
        "tokens/total": [1_000_000.0 * i for i in range(points)],
        "agents/turns": [2 + s for s in share],
    }
    for age in range(4):
        columns[f"staleness/{age}"] = [(0.1 + abs(math.sin(age + 3 * s))) / 3 for s in share]
    for other in range(keys - len(columns)):
        kind = ("train", "reward", "server", "time")[other % 4]
        columns[f"{kind}/metric_{other}"] = [math.sin(other + 5 * s) + rng.gauss(0, 0.1) for s in share]
    return {"step": steps, "time": [BEGAN + 60 + 30.0 * step for step in steps], "columns": columns}


def tokens_of(text: str) -> list[str]:
    """Some tokens: words with their space, special ones whole, newlines alone, <tool_call> in three."""
    found, at = [], 0
    while at < len(text):
        end = at + 1
        if text.startswith("<|", at):
            end = text.index("|>", at) + 2
        elif text[at].isalnum() or text[at] == " ":
            while end < len(text) and (text[end].isalnum() or text[end] == "_"):
                end += 1
        found.append(text[at:end])
        at = end
    return found


def sequence(step: int, group: int, sample: int, rng: random.Random, *, words: int = 30) -> dict[str, Any]:
    """A conversation of two turns with a tool between them."""
    question = f"What is {group} + {step}? Think step by step."
    start = f"<|im_start|>system\nYou add.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    thought = " ".join(rng.choice(["so", "we", "add", "the", "digits", "of", "both", "numbers"]) for _ in range(words))
    arguments = json.dumps({"name": "add", "arguments": {"a": group, "b": step}})
    call = f"<tool_call>\n{arguments}\n</tool_call><|im_end|>"
    result = f"\n<|im_start|>user\n<tool_response>\n{group + step}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    right = rng.random() < 0.6
    answer = f"The answer is {group + step + (0 if right else 1)}.<|im_end|>"
    text: list[str] = []
    turn: list[int] = []
    for part, number in ((start, -1), (f"{thought}.\n{call}", 0), (result, -1), (answer, 1)):
        text += tokens_of(part)
        turn += [number] * (len(text) - len(turn))
    columns: dict[str, list[float | None]] = {name: [] for name in COLUMNS}
    advantage = 0.7 if right else -1.1
    for k in turn:
        trained = k >= 0
        behavior = -rng.expovariate(2)
        proximal = behavior + rng.gauss(0, 0.05)
        values = {
            "loss_mask": int(trained),
            "versions": step - 2 + k if trained else -1,
            "advantages": advantage if trained else None,
            "logprobs": proximal + rng.gauss(0, 0.02),
            "proximal_logprobs": proximal,
            "behavior_logprobs": behavior,
            "entropy": rng.expovariate(2),
            "correction_weights": min(2.0, math.exp(proximal - behavior)),
            "loss_weights": 1 / 512,
            "loss": -advantage * math.exp(rng.gauss(0, 0.1)),
            "teacher_kl": rng.expovariate(10),
        }
        for name in COLUMNS:
            columns[name].append(values[name] if trained or name in ("loss_mask", "versions", "advantages") else None)
    for name, (above, below) in RATIOS.items():
        both = zip(columns[above], columns[below], strict=True)
        columns[name] = [None if a is None or b is None else a - b for a, b in both]
    return {
        "step": step,
        "group_id": group,
        "sample_index": sample,
        "part_index": 0,
        "agent": "",
        "reward": float(right),
        "finish_reason": "stop" if rng.random() < 0.9 else "length",
        "text": text,
        "turn": turn,
        "columns": columns,
    }


def sequence_table(sequences: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The table of all sequences."""
    kept = ("step", "group_id", "sample_index", "part_index", "agent", "reward", "finish_reason")
    table: dict[str, list[Any]] = {name: [one[name] for one in sequences] for name in kept}
    table["turns"] = [len({k for k in one["turn"] if k >= 0}) for one in sequences]
    table["length"] = [sum(k >= 0 for k in one["turn"]) for one in sequences]
    table["advantage"] = [next((a for a in one["columns"]["advantages"] if a is not None), None) for one in sequences]
    for name, context in (("prompt", True), ("answer", False)):
        table[name] = [
            "".join(t for t, k in zip(one["text"], one["turn"], strict=True) if (k < 0) == context)[:300]
            for one in sequences
        ]
    return table


def in_flight(points: int, versions: int, end: float) -> dict[str, Any]:
    """Three weight versions under way at any time."""
    times = [BEGAN + end * i / points for i in range(points)]
    now = [i * versions // points for i in range(points)]
    counts = [[max(0, 24 - 8 * (n - v)) if 0 <= n - v < 3 else 0 for n in now] for v in range(versions)]
    return {"time": times, "versions": list(range(versions)), "counts": counts}


def timeline(spans: int, end: float, workers: int, rng: random.Random) -> dict[str, Any]:
    """A trainer's phases, a server's weight syncs, and the groups of rollout workers."""
    each = max(1, spans // (workers + 2))
    width = end / each
    phases = ("wait", "train", "weight_sync")

    def track(process: str, name: str, names: tuple[str, ...]) -> dict[str, Any]:
        begins = [BEGAN + i * width for i in range(each)]
        made = [[b, b + width * rng.uniform(0.4, 0.95), names[i % len(names)]] for i, b in enumerate(begins)]
        return {"process": process, "name": name, "spans": made}

    tracks = [track("trainer-0", "phases", phases), track("server-0", "weights", ("weight_sync", "paused"))]
    for worker in range(workers):
        tracks.append(track(f"rollout_worker-{worker // 4}", f"groups {worker % 4}", ("group", "reward")))
    return {"tracks": tracks}


def run_data(
    *,
    points: int = 60,
    every: int = 1,
    keys: int = 24,
    logged_steps: int = 8,
    groups: int = 3,
    samples: int = 4,
    spans: int = 900,
    workers: int = 6,
    inline: int = 2,
) -> dict[str, Any]:
    """A run of some steps; the tokens of the last `inline` logged ones are in the page."""
    rng = random.Random(0)
    made = metrics(points, every, keys, rng)
    logged = [1 + points * every * i // logged_steps for i in range(logged_steps)]
    everything = [
        sequence(step, 100 * i + g, s, rng)
        for i, step in enumerate(logged)
        for g in range(groups)
        for s in range(samples)
    ]
    end = made["time"][-1] - BEGAN
    shown = logged[-inline:]
    return {
        **empty_data(),
        "name": "gsm8k-1",
        "steps": points * every,
        "facts": [
            ["model", "Qwen/Qwen3-0.6B"],
            ["algorithm", "grpo/grpo"],
            ["data", "gsm8k, 7,473 prompts, 8 samples each"],
            ["hardware", "8 NVIDIA H100 80GB HBM3: 4 for generation, 4 for training"],
            ["max_staleness", "2"],
        ],
        "notes": ["3 lines of metrics.jsonl cannot be read and are left out"],
        "diagnostics": [
            {"step": 12, "text": "Half of the groups have one reward only: the batch has little signal."},
            {"step": 31, "text": "The entropy has halved within 20 steps."},
        ],
        "config": "model: Qwen/Qwen3-0.6B\ntraining:\n  logged_groups: 4\n  steps: 100\n",
        "metrics": made,
        "sequences": sequence_table(everything),
        "rollouts": {str(step): [one for one in everything if one["step"] == step] for step in shown},
        "rollout_steps": logged,
        "samples": [
            {
                "version": version,
                "episodes": [
                    {"text": f"2 + 2 = {a}", "reward": float(a == 4), "rewards": {"digits": 1.0}} for a in (4, 5)
                ],
            }
            for version in range(3)
        ],
        "in_flight": in_flight(min(600, 10 * points), points, end),
        "timeline": timeline(spans, end, workers, rng),
    }


def large_data() -> dict[str, Any]:
    """10,000 steps thinned to 2,000 points of 120 keys, 20,000 sequences, 50,000 spans."""
    return run_data(
        points=2000, every=5, keys=120, logged_steps=625, groups=4, samples=8, spans=50_000, workers=30, inline=4
    )
