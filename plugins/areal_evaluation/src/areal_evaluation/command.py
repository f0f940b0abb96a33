"""Evaluate a model: rollouts and scores, no training.

Every prompt of the config's evaluation.dataset (dataset, where there is none) is answered N times. Reported are the
mean reward and pass@k, each with a 95% confidence interval, lengths, failures and speed. Ctrl-C ends it with what was
measured so far.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.cli.output import complain, say
from areal_core.cli.request import add_request_arguments, read_request, require_place
from areal_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config import Resolved


def main(words: Sequence[str]) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="areal eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return execute(parser.parse_intermixed_args(words))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of `areal eval`."""
    add_request_arguments(parser)
    parser.add_argument(
        "--run", metavar="RUN_DIR", type=Path, help="config and exported model of this run: best/, else model/"
    )
    parser.add_argument("--model", metavar="FOLDER", type=Path, help="a Hugging Face folder instead of that model")
    parser.add_argument("--samples", metavar="N", type=int, help="answers to each prompt; by default the config's")
    parser.add_argument("--k", metavar="K,K", type=numbers, help="of pass@k; by default 1 and N")
    parser.add_argument("--limit", metavar="N", type=int, help="use the first N prompts")
    parser.add_argument("--temperature", metavar="T", type=float, help="of sampling; 0 is greedy")
    parser.add_argument(
        "--threshold", metavar="R", type=reward, default=1.0, help="reward from which an answer passes; by default 1"
    )
    parser.add_argument("--json", action="store_true", help="write the figures as one JSON object")
    parser.add_argument(
        "--output", metavar="FOLDER", type=Path, help="write evaluation.json, samples.jsonl and logs into a new folder"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Check what is asked, have it measured, and report."""
    if arguments.output is not None:
        other = "name a new folder: --output FOLDER"
        require_place("the folder", arguments.output, other)
        if arguments.output.exists():
            raise UsageError(f"{arguments.output} exists already", hints=(other,))
    if arguments.model is not None and not (arguments.model / "config.json").is_file():
        raise UsageError(
            f"{arguments.model} is no model folder: it has no config.json",
            hints=("name a Hugging Face folder, such as RUN_DIR/model or RUN_DIR/best",),
        )
    resolved, model = _resolved(arguments)
    from areal_evaluation.evaluation import evaluate, for_evaluation

    resolved = for_evaluation(resolved, model, arguments.samples, arguments.limit, arguments.temperature)
    section = resolved.config.evaluation
    assert section is not None
    samples = section.samples_per_prompt
    ks = arguments.k or sorted({1, samples})
    if ks[0] < 1 or ks[-1] > samples:
        raise UsageError(
            f"pass@k needs k from 1 to the number of answers to each prompt, {samples}; --k has {ks[0]} to {ks[-1]}",
            hints=(f"ask for more answers: --samples {max(ks[-1], 1)}", "or for another k: --k 1"),
        )
    import json

    figures, signal = evaluate(resolved, ks, arguments.threshold, arguments.output)
    say(json.dumps(figures) if arguments.json else _report(figures))
    if arguments.output is not None and not arguments.json:
        say(f"written to {arguments.output}")
    if signal:
        complain(
            f"interrupted: these are the figures of {figures['finished']} of {figures['episodes']} episodes; "
            "short answers end first and weigh too much in them"
        )
    return 128 + signal if signal else 0


def _resolved(arguments: argparse.Namespace) -> tuple[Resolved, Path | None]:
    """The config, and the folder of the model where it is not the config's."""
    from areal_core.config import load_run, resolve

    request = read_request(arguments)
    if arguments.run is None:
        return resolve(request.config, request.plugins, request.overrides), arguments.model
    if request.config is not None:
        raise UsageError(
            f"--run takes the config from {arguments.run}, so CONFIG ({request.config}) cannot be named as well",
            hints=("leave one of them out",),
        )
    resolved = load_run(arguments.run, request.overrides, request.plugins)
    exported = [
        folder for folder in (arguments.run / "best", arguments.run / "model") if (folder / "config.json").is_file()
    ]
    if arguments.model is None and not exported:
        raise UsageError(
            f"the run {arguments.run} has exported no model yet: it has neither best/ nor model/",
            hints=(f"let it finish: areal run --resume {arguments.run}", "or name a model: --model FOLDER"),
        )
    return resolved, arguments.model or exported[0]


def _report(figures: dict[str, Any]) -> str:
    evaluation, sampling = figures["config"]["evaluation"], figures["config"]["sampling"]
    temperature = sampling["temperature"] if evaluation["temperature"] is None else evaluation["temperature"]
    samples = f"{evaluation['samples_per_prompt']} answers to each at temperature {temperature:g}"
    rows = {
        "model": figures["model"],
        "data": f"{evaluation['dataset']['type']}: {figures['reward']['prompts']} prompts, {samples}",
        "mean reward": _interval(figures["reward"]),
        **{f"pass@{k}": _interval(estimate) for k, estimate in figures["pass_at_k"].items()},
        **{f"reward {name}": f"{value:.3f}" for name, value in figures["rewards"].items()},
        "response length": f"{figures['response_length']:.1f} tokens; {figures['truncated']:.1%} truncated",
        "episodes": f"{figures['finished']} of {figures['episodes']}, {figures['failed']} failed",
        "speed": f"{figures['tokens_per_s']:,.0f} tokens/s, {figures['episodes_per_s']:,.1f} episodes/s",
    }
    width = max(len(label) for label in rows)
    return "\n".join([figures["name"], *(f"  {label:<{width}}  {text}" for label, text in rows.items())])


def _interval(estimate: dict[str, float] | None) -> str:
    if estimate is None:
        return "no prompt has so many answers"
    if estimate["low"] is None:
        return f"{estimate['value']:.3f}  (one prompt: no interval)"
    return f"{estimate['value']:.3f}  (95%: {estimate['low']:.3f} to {estimate['high']:.3f})"


def numbers(text: str) -> list[int]:
    """Whole numbers between commas, ascending."""
    return sorted({int(word) for word in text.split(",")})


def reward(text: str) -> float:
    """A number that rewards can be compared with."""
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number
