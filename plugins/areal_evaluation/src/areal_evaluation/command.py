"""Evaluate a model: rollouts and scores, no training.

Every prompt of the config's evaluation.dataset (dataset, where there is none) is answered N times. Reported are the
mean reward and pass@k, each with a 95% confidence interval, lengths, failures and speed. With --endpoint the model is
somebody else's behind an address, and the config's agent is evaluated with it. Ctrl-C ends it with what was measured so
far.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.cli.output import print_error, print_out
from areal_core.cli.request import add_request_arguments, read_request, require_place
from areal_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config import Resolved
    from areal_evaluation.address import Address
    from areal_evaluation.evaluation import Measured

AT_ONCE = 32
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
    parser.add_argument(
        "--run", metavar="RUN_DIR", type=Path, help="config and exported model of this run: best/, else model/"
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="a Hugging Face folder instead of that model; with --endpoint, its name there"
    )
    parser.add_argument(
        "--endpoint", metavar="URL", help="evaluate the model behind this address, OpenAI's base_url; none is loaded"
    )
    parser.add_argument(
        "--api-key-variable",
        metavar="NAME",
        help="environment variable with the endpoint's key; by default OPENAI_API_KEY, where that is set",
    )
    parser.add_argument(
        "--request-timeout", metavar="S", type=float, help="seconds for one answer of the endpoint; by default 600"
    )
    parser.add_argument(
        "--concurrency",
        metavar="N",
        type=int,
        help="episodes at a time; by default as many as in a run, with --endpoint 32",
    )
    parser.add_argument("--category", metavar="KEY", help="give the figures for each value of this key of the rows too")
    parser.add_argument("--samples", metavar="N", type=int, help="answers to each prompt; by default the config's")
    parser.add_argument("--k", metavar="K,K", type=numbers, help="of pass@k; by default 1 and N")
    parser.add_argument("--limit", metavar="N", type=int, help="use the first N prompts")
    parser.add_argument("--temperature", metavar="T", type=float, help="of sampling; 0 is greedy")
    parser.add_argument(
        "--threshold", metavar="R", type=reward, default=1.0, help="reward from which an answer passes; by default 1"
    )
    parser.add_argument("--json", action="store_true", help="write the figures as one JSON object")
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        type=Path,
        help="write report.html, evaluation.json, samples.jsonl and logs into a new folder",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Check what is asked, have it measured, and report."""
    if arguments.output is not None:
        other = "name a new folder: --output FOLDER"
        require_place("the folder", arguments.output, other)
        if arguments.output.exists():
            raise UsageError(f"{arguments.output} exists already", hints=(other,))
    address = _address(arguments)
    if address is None and arguments.model is not None and not (Path(arguments.model) / "config.json").is_file():
        raise UsageError(
            f"{arguments.model} is no model folder: it has no config.json",
            hints=("name a Hugging Face folder, such as RUN_DIR/model or RUN_DIR/best",),
        )
    resolved, model = _resolved(arguments, address)
    from areal_evaluation.evaluation import Asked, evaluate, for_evaluation

    asked = Asked(
        model=model,
        address=address,
        samples=arguments.samples,
        limit=arguments.limit,
        temperature=arguments.temperature,
        concurrency=AT_ONCE if address is not None and arguments.concurrency is None else arguments.concurrency,
        category=arguments.category,
        threshold=arguments.threshold,
        output=arguments.output,
    )
    resolved = for_evaluation(resolved, asked)
    section = resolved.config.evaluation
    assert section is not None
    samples = section.samples_per_prompt
    ks = arguments.k or sorted({1, samples})
    if ks[0] < 1 or ks[-1] > samples:
        raise UsageError(
            f"pass@k needs k from 1 to the number of answers to each prompt, {samples}; --k has {ks[0]} to {ks[-1]}",
            hints=(f"ask for more answers: --samples {max(ks[-1], 1)}", "or for another k: --k 1"),
        )
    if address is not None:
        address = replace(address, temperature=section.temperature)
    return _log(evaluate(resolved, replace(asked, ks=ks, address=address)), arguments)


def _log(measured: Measured, arguments: argparse.Namespace) -> int:
    """Show the figures, and say what else there is to say; the exit code."""
    import json

    figures, signal, failure = measured
    if arguments.json:
        print_out(json.dumps(figures))
    else:
        from areal_evaluation.report import report

        print_out(report(figures))
        if arguments.output is not None:
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


def _resolved(arguments: argparse.Namespace, address: Address | None) -> tuple[Resolved, Path | None]:
    """The config, and the folder of the model where it is not the config's."""
    from areal_core.config import load_run, resolve

    request = read_request(arguments)
    named = Path(arguments.model) if arguments.model is not None and address is None else None
    if arguments.run is None:
        return resolve(request.config, request.plugins, request.overrides), named
    if request.config is not None:
        raise UsageError(
            f"--run takes the config from {arguments.run}, so CONFIG ({request.config}) cannot be named as well",
            hints=("leave one of them out",),
        )
    resolved = load_run(arguments.run, request.overrides, request.plugins)
    if address is not None:
        return resolved, None
    exported = [
        folder for folder in (arguments.run / "best", arguments.run / "model") if (folder / "config.json").is_file()
    ]
    if named is None and not exported:
        raise UsageError(
            f"the run {arguments.run} has exported no model yet: it has neither best/ nor model/",
            hints=(f"let it finish: areal run --resume {arguments.run}", "or name a model: --model FOLDER"),
        )
    return resolved, named or exported[0]


def numbers(text: str) -> list[int]:
    """Whole numbers between commas, ascending."""
    return sorted({int(word) for word in text.split(",")})


def reward(text: str) -> float:
    """A number that rewards can be compared with."""
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number
