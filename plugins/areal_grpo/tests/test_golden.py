"""The golden vectors are what the scalar loops say, and the components give them.

`python plugins/areal_grpo/tests/test_golden.py` writes them anew.
"""

import importlib.util
import json
import math
import random
from dataclasses import replace
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "src/areal_grpo/golden"
LENGTHS = (5, 1, 8, 4)
LOSSES = {
    "ppo_clip": (
        {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
        {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5},
    ),
    "sapo": ({"temperature_positive": 1.0, "temperature_negative": 1.05},),
    "reinforce": ({},),
    "gspo": ({"clip_low": 3e-4, "clip_high": 4e-4}, {"clip_low": 0.2, "clip_high": 0.3}),
    "gmpo": ({"clip_low": 0.4, "clip_high": 0.4},),
    "cispo": ({"clip_low": 1.0, "clip_high": 4.0}, {"clip_low": 0.2, "clip_high": 0.3}),
    "dppo": (
        {"divergence": "tv", "threshold_low": 0.2, "threshold_high": 0.2, "cap": 20.0},
        {"divergence": "kl", "threshold_low": 0.05, "threshold_high": 0.05, "cap": 20.0},
    ),
    "rollout_importance": ({"clip_low": 0.2, "clip_high": 0.28}, {"clip_low": None, "clip_high": None}),
    "vespo": (
        {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0},
        {"k_positive": 0.5, "lambda_positive": 0.1, "k_negative": 1.0, "lambda_negative": 4.0},
    ),
    "score_centering": ({"cap": None}, {"cap": 2.0}, {"cap": 1.02}),
}
WITH_TOPS = {"score_centering"}
"""Losses that read the log-probabilities of the likeliest tokens."""
TOPS = ("top_logprobs", "behavior_top_logprobs")
CORRECTIONS = {
    "token_truncate": ({"cap": 2.0}, {"cap": 1.1}),
    "token_mask": ({"low": 0.5, "high": 5.0}, {"low": 0.8, "high": 1.2}),
    "kpop": ({"threshold": 2.0}, {"threshold": 0.1}),
    "sequence_truncate": ({"cap": 5.0}, {"cap": 1.2}),
    "geometric_mask": ({"low": 0.99, "high": 1.01}, {"low": 0.8, "high": 1.25}),
    "product_mask": ({"low": 0.5, "high": 2.0},),
    "veto": ({"low": 1e-4}, {"low": 0.6}),
    "opsm": ({"threshold": 0.1},),
    "ipo_mask": ({"threshold": 0.3}, {"threshold": 0.05}),
}


def inputs():
    """Four sequences: policies near each other and far apart, both signs of the advantage, some tokens not learned."""
    draw = random.Random(20251122)
    columns = {name: [] for name in ("logprobs", "proximal_logprobs", "behavior_logprobs", "advantages", "mask")}
    for length in LENGTHS:
        advantage = round(draw.uniform(-2, 2), 3)
        for _ in range(length):
            sampled = draw.uniform(-3, -0.2)
            columns["behavior_logprobs"].append(round(sampled, 6))
            for name in ("proximal_logprobs", "logprobs"):
                columns[name].append(round(min(sampled + draw.gauss(0, 0.3), -0.01), 6))
            columns["advantages"].append(advantage)
            columns["mask"].append(draw.random() < 0.85)
    return columns


def tops(columns):
    """Three tokens a position, the sampled one among them in two of three, with a probability below 1 in all."""
    draw = random.Random(20261130)
    found = {name: [] for name in TOPS}
    for place in range(len(columns["mask"])):
        shares = [draw.uniform(0.05, 0.3) for _ in range(3)]
        found["behavior_top_logprobs"].append([round(math.log(share), 6) for share in shares])
        found["top_logprobs"].append([round(math.log(share) + draw.gauss(0, 0.1), 6) for share in shares])
        if place % 3:
            for name, key in zip(TOPS, ("logprobs", "behavior_logprobs"), strict=True):
                found[name][-1][0] = min(columns[key][place], -1.0)
    return found


def expected(loop, settings, columns, token_type):
    """One result for each token in the loss, None elsewhere."""
    results, start = [None] * len(columns["mask"]), 0
    for length in LENGTHS:
        places = [place for place in range(start, start + length) if columns["mask"][place]]
        keys = [
            key for key in ("logprobs", "proximal_logprobs", "behavior_logprobs", "advantages", *TOPS) if key in columns
        ]
        tokens = [token_type(*(columns[key][place] for key in keys)) for place in places]
        for place, result in zip(places, loop(tokens, **settings) if tokens else [], strict=True):
            results[place] = result
        start += length
    return results


def made(loops):
    """All files, by name."""
    plain, files = inputs(), {}
    for name, choices in (LOSSES | CORRECTIONS).items():
        columns = plain | tops(plain) if name in WITH_TOPS else plain
        cases = []
        for settings in choices:
            found = expected(getattr(loops, name), settings, columns, loops.Token)
            if name in CORRECTIONS:
                parts = {"weights": found}
            else:
                keys = ("loss", "gradient", "top_gradient") if name in WITH_TOPS else ("loss", "gradient")
                parts = {key: [f and f[at] for f in found] for at, key in enumerate(keys)}
            cases.append({"settings": settings, **parts})
        files[name] = {"component": f"grpo/{name}", "sequences": list(LENGTHS), **columns, "cases": cases}
    return files


def same(found, wanted):
    """Whether two trees of numbers agree to the last digits that another machine's exponential may round otherwise."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, float) and isinstance(found, float | int):
        return abs(found - wanted) <= 1e-12 * max(1.0, abs(wanted))
    return found == wanted


def test_the_files_are_what_the_loops_say(loops):
    files = made(loops)
    assert {path.stem for path in FOLDER.glob("*.json")} == files.keys()
    for name, content in files.items():
        assert same(json.loads((FOLDER / f"{name}.json").read_text()), content), f"{name}.json: write it anew"


def test_every_loss_and_correction_has_a_file(manager):
    kinds = ("policy_losses", "corrections")
    records = {record.name for kind in kinds for record in manager.components(kind) if record.plugin == "grpo"}
    assert records == (LOSSES | CORRECTIONS).keys()


def test_the_components_give_them(manager, make_sequences):
    """In float64 to 1e-12: values, gradients and weights of what is in the files."""
    import torch

    for path in sorted(FOLDER.glob("*.json")):
        golden = json.loads(path.read_text())
        kind = "corrections" if "weights" in golden["cases"][0] else "policy_losses"
        record = next(each for each in manager.components(kind) if each.reference == golden["component"])
        component = manager.import_from(record, record.target)
        keys = ("mask", "logprobs", "proximal_logprobs", "behavior_logprobs", "advantages")
        tokens = list(zip(*(golden[key] for key in keys), strict=True))
        ends = [sum(golden["sequences"][: number + 1]) for number in range(len(golden["sequences"]))]
        sequences = [tokens[end - length : end] for end, length in zip(ends, golden["sequences"], strict=True)]
        for case in golden["cases"]:
            terms = make_sequences(sequences)
            if "top_logprobs" in golden:
                heads = {key: torch.tensor(golden[key], dtype=torch.float64) for key in TOPS}
                heads["top_logprobs"].requires_grad_()
                terms = replace(terms, **heads)
            found, _ = component(terms, **case["settings"])
            wanted = {key: [value for value in case[key] if value is not None] for key in case if key != "settings"}
            given = {"weights" if kind == "corrections" else "loss": found.detach()[terms.mask].double()}
            if kind == "policy_losses":
                found[terms.mask].sum().backward()
                given["gradient"] = terms.logprobs.grad[terms.mask]
                if terms.top_logprobs is not None:
                    given["top_gradient"] = terms.top_logprobs.grad[terms.mask]
            for key, values in wanted.items():
                exact = torch.tensor(values, dtype=torch.float64)
                torch.testing.assert_close(given[key], exact, rtol=1e-12, atol=1e-12, msg=f"{path.stem} {key}")


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("scalar_loops", Path(__file__).with_name("scalar_loops.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, content in made(module).items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
        (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
