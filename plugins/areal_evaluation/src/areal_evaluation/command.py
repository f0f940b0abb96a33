"""Evaluate a model: generate and score answers, without training.

The model answers every prompt of the config's evaluation.dataset N times (or of its dataset, if there is no
evaluation). The report has the mean reward and pass@k, each with a 95% confidence interval, and lengths, failures and
speed. With --endpoint, the config's agent is evaluated with a model behind that URL. Ctrl-C ends the evaluation and
reports the results so far.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.errors import UsageError
from areal_core.programs import add_request_arguments, print_error, print_out, read_request, require_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config import Resolved
    from areal_evaluation.address import Address
    from areal_evaluation.evaluation import Measured

MAX_CONCURRENCY = 32
"""Episodes with somebody else's model, where nothing is said of it: an address has its limits."""


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
    add = parser.add_argument
    add(
        "--run",
        metavar="RUN_DIR",
        type=Path,
        help="use the config and the exported model of this run: best/, or else model/",
    )
    add("--model", help="evaluate this Hugging Face folder instead; with --endpoint: name of the model there")
    add(
        "--endpoint",
        metavar="URL",
        help="evaluate the model at this URL, an OpenAI-compatible base_url; no model is loaded",
    )
    key = "environment variable that holds the endpoint's API key (default: OPENAI_API_KEY, if it is set)"
    add("--api-key-variable", metavar="NAME", help=key)
    add(
        "--request-timeout",
        metavar="S",
        type=float,
        help="timeout in seconds for one answer of the endpoint (default: 600)",
    )
    width = "maximum number of concurrent episodes (default: as many as in a run; with --endpoint: 32)"
    add("--concurrency", metavar="N", type=int, help=width)
    add("--category", metavar="KEY", help="also report the results for each value of this key of the rows")
    add("--samples", metavar="N", type=int, help="answers sampled for each prompt (default: the config's)")
    add("--k", metavar="K,K", type=numbers, help="values of k for pass@k (default: 1 and N)")
    add("--limit", metavar="N", type=int, help="evaluate only the first N prompts")
    add("--temperature", metavar="T", type=float, help="sampling temperature; 0 is greedy (default: the config's)")
    passes = "minimum reward of an answer that passes (default: 1)"
    add("--threshold", metavar="R", type=reward, default=1.0, help=passes)
    add("--json", action="store_true", help="print the results as one JSON object")
    files = "write report.html, evaluation.json, samples.jsonl and logs to this new folder"
    add("--output", metavar="FOLDER", type=Path, help=files)


def execute(arguments: argparse.Namespace) -> int:
    """Check what is asked, have it measured, and report."""
    if arguments.output is not None:
        other = "name a new folder: --output FOLDER"
        require_place("the folder", arguments.output, other)
        if arguments.output.exists():
            raise UsageError(f"{arguments.output} exists already", hints=(other,))
    address = _address(arguments)
    resolved, model = _resolved(arguments)
    from areal_evaluation.evaluation import Asked, evaluate, for_evaluation

    given = {"samples_per_prompt": arguments.samples, "limit": arguments.limit, "temperature": arguments.temperature}
    resolved = for_evaluation(resolved, model, **given)
    section, concurrency = resolved.config.evaluation, arguments.concurrency
    assert section is not None
    ks = arguments.k or sorted({1, section.samples_per_prompt})
    if ks[0] < 1 or ks[-1] > section.samples_per_prompt:
        message = f"pass@k needs k from 1 to the number of answers to each prompt, {section.samples_per_prompt}"
        hints = f"ask for more answers: --samples {max(ks[-1], 1)}", "or for another k: --k 1"
        raise UsageError(f"{message}; --k has {ks[0]} to {ks[-1]}", hints=hints)
    if concurrency is not None and concurrency < 1:
        raise UsageError(f"--concurrency is {concurrency}; it must be at least 1")
    if address is not None and concurrency is None:
        concurrency = MAX_CONCURRENCY
    asked = Asked(address, concurrency, arguments.category, ks, arguments.threshold, arguments.output)
    return _log(evaluate(resolved, asked), arguments)


def _log(measured: Measured, arguments: argparse.Namespace) -> int:
    """Show the figures, and say what else there is to say; the exit code."""
    import json

    from areal_evaluation.report import report

    figures, signal, failure = measured
    print_out(json.dumps(figures) if arguments.json else report(figures))
    if arguments.output is not None and not arguments.json:
        print_out(f"written to {arguments.output}")
    if signal or failure is not None:
        print_error(
            f"{'interrupted' if signal else 'not complete'}: these are the figures of {figures['finished']} of "
            f"{figures['episodes']} episodes; short answers end first and weigh too much in them"
        )
    if failure is not None:
        raise failure
    return 128 + signal if signal else 0


def _address(arguments: argparse.Namespace) -> Address | None:
    """Where the model is that is asked, where it is somebody else's."""
    if arguments.endpoint is None:
        for word in ("api_key_variable", "request_timeout"):
            if getattr(arguments, word) is not None:
                raise UsageError(f"--{word.replace('_', '-')} says something of an endpoint, and none is named")
        return None
    if arguments.model is None:
        raise UsageError(f"--endpoint {arguments.endpoint} needs the model's name there", hints=("add --model NAME",))
    from areal_evaluation.address import DEFAULT_VARIABLE, Address

    variable = arguments.api_key_variable or (DEFAULT_VARIABLE if os.environ.get(DEFAULT_VARIABLE) else "")
    timeout_s = 600.0 if arguments.request_timeout is None else arguments.request_timeout
    address = Address(arguments.endpoint.rstrip("/"), arguments.model, variable, request_timeout_s=timeout_s)
    _ = address.headers  # before anything is started
    return address


def _resolved(arguments: argparse.Namespace) -> tuple[Resolved, Path | None]:
    """The config, and the folder of the model that takes the place of the config's."""
    from areal_core.config import load_run, resolve

    request, run = read_request(arguments), arguments.run
    named = Path(arguments.model) if arguments.model is not None and arguments.endpoint is None else None
    if named is not None and not (named / "config.json").is_file():
        hint = "name a Hugging Face folder, such as RUN_DIR/model or RUN_DIR/best"
        raise UsageError(f"{named} is not a model folder: it has no config.json", hints=(hint,))
    if run is None:
        return resolve(request.config, request.plugins, request.overrides, imports=True), named
    if request.config is not None:
        message = f"--run takes the config from {run}, so CONFIG ({request.config}) cannot be named as well"
        raise UsageError(message, hints=("leave one of them out",))
    resolved = load_run(run, request.overrides, request.plugins, imports=True)
    if named is None and arguments.endpoint is None:
        named = next((folder for folder in (run / "best", run / "model") if (folder / "config.json").is_file()), None)
        if named is None:
            hints = f"let it finish: areal run --resume {run}", "or name a model: --model FOLDER"
            raise UsageError(f"the run {run} has exported no model yet: it has neither best/ nor model/", hints=hints)
    return resolved, named


def numbers(text: str) -> list[int]:
    """Whole numbers between commas, ascending."""
    return sorted({int(word) for word in text.split(",")})


def reward(text: str) -> float:
    """A number that rewards can be compared with."""
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number
