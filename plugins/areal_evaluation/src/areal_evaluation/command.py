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
"""Default maximum of concurrent episodes with --endpoint, because hosted models limit the rate of requests."""


def main(arguments: Sequence[str]) -> int:
    """Run `areal eval` with these arguments and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="areal eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return execute(parser.parse_intermixed_args(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `areal eval` to a parser."""
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
    """Check the arguments, run the evaluation, and print the report. Return the exit code.

    Raises:
        UsageError: an argument is invalid.
        ConfigError: the model or the data cannot be read.
        RunError: the evaluation failed.
    """
    if arguments.output is not None:
        hint = "name a new folder: --output FOLDER"
        require_place("the folder", arguments.output, hint)
        if arguments.output.exists():
            raise UsageError(f"{arguments.output} already exists", hints=(hint,))
    address = _address(arguments)
    resolved, model = _resolved(arguments)
    from areal_evaluation.evaluation import EvaluationOptions, evaluate, for_evaluation

    resolved = for_evaluation(
        resolved,
        model,
        samples_per_prompt=arguments.samples,
        limit=arguments.limit,
        temperature=arguments.temperature,
    )
    evaluation, concurrency = resolved.config.evaluation, arguments.concurrency
    assert evaluation is not None
    ks = arguments.k or sorted({1, evaluation.samples_per_prompt})
    if ks[0] < 1 or ks[-1] > evaluation.samples_per_prompt:
        message = f"pass@k needs k from 1 to the number of answers per prompt, {evaluation.samples_per_prompt}"
        hints = f"sample more answers: --samples {max(ks[-1], 1)}", "or choose another k: --k 1"
        raise UsageError(f"{message}; --k has {ks[0]} to {ks[-1]}", hints=hints)
    if concurrency is not None and concurrency < 1:
        raise UsageError(f"--concurrency is {concurrency}; it must be at least 1")
    if address is not None and concurrency is None:
        concurrency = MAX_CONCURRENCY
    options = EvaluationOptions(address, concurrency, arguments.category, ks, arguments.threshold, arguments.output)
    return _report(evaluate(resolved, options), arguments)


def _report(measured: Measured, arguments: argparse.Namespace) -> int:
    """Print the figures and return the exit code. Raise the failure that ended the evaluation early."""
    import json

    from areal_evaluation.report import report

    figures, signal, failure = measured
    print_out(json.dumps(figures) if arguments.json else report(figures))
    if arguments.output is not None and not arguments.json:
        print_out(f"written to {arguments.output}")
    if signal or failure is not None:
        print_error(
            f"{'interrupted' if signal else 'not complete'}: the figures cover {figures['finished']} of "
            f"{figures['episodes']} episodes; short answers finish first, so they are over-represented"
        )
    if failure is not None:
        raise failure
    return 128 + signal if signal else 0


def _address(arguments: argparse.Namespace) -> Address | None:
    """Return the address of the model with --endpoint, else None."""
    if arguments.endpoint is None:
        for option in ("api_key_variable", "request_timeout"):
            if getattr(arguments, option) is not None:
                raise UsageError(f"--{option.replace('_', '-')} needs --endpoint URL")
        return None
    if arguments.model is None:
        raise UsageError(
            f"--endpoint {arguments.endpoint} needs the name of the model there", hints=("add --model NAME",)
        )
    from areal_evaluation.address import DEFAULT_VARIABLE, Address

    variable = arguments.api_key_variable or (DEFAULT_VARIABLE if os.environ.get(DEFAULT_VARIABLE) else "")
    timeout_s = 600.0 if arguments.request_timeout is None else arguments.request_timeout
    address = Address(arguments.endpoint.rstrip("/"), arguments.model, variable, request_timeout_s=timeout_s)
    _ = address.headers  # raises if the key's variable is not set, before anything starts
    return address


def _resolved(arguments: argparse.Namespace) -> tuple[Resolved, Path | None]:
    """Return the config, and the folder of the model that replaces the config's, or None."""
    from areal_core.config import load_run, resolve

    request, run = read_request(arguments), arguments.run
    folder = Path(arguments.model) if arguments.model is not None and arguments.endpoint is None else None
    if folder is not None and not (folder / "config.json").is_file():
        hint = "name a Hugging Face folder, such as RUN_DIR/model or RUN_DIR/best"
        raise UsageError(f"{folder} is not a model folder: it has no config.json", hints=(hint,))
    if run is None:
        return resolve(request.config, request.plugins, request.overrides, imports=True), folder
    if request.config is not None:
        message = f"--run uses the config of {run}, so CONFIG ({request.config}) cannot be named as well"
        raise UsageError(message, hints=("leave one of them out",))
    resolved = load_run(run, request.overrides, request.plugins, imports=True)
    if folder is None and arguments.endpoint is None:
        folder = next((folder for folder in (run / "best", run / "model") if (folder / "config.json").is_file()), None)
        if folder is None:
            hints = f"let the run finish: areal run --resume {run}", "or name a model: --model FOLDER"
            raise UsageError(f"the run {run} has exported no model yet: it has neither best/ nor model/", hints=hints)
    return resolved, folder


def numbers(text: str) -> list[int]:
    """Parse integers separated by commas; return them in ascending order."""
    return sorted({int(number) for number in text.split(",")})


def reward(text: str) -> float:
    """Parse a finite number.

    Raises:
        ValueError: the text is not a number, or not finite.
    """
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number
