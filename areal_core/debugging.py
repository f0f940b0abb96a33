"""One row of the data from prompt to loss in this process: what `areal debug` does."""

from __future__ import annotations

import asyncio
import itertools
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from areal_core.cli.output import print_error, print_out
from areal_core.config import roles_of
from areal_core.data import PackedBatch, shift_to_predictions
from areal_core.data.packing import pack_group
from areal_core.driver.model_initialization import prepare_model
from areal_core.errors import ArealError, RunError, UsageError, own_lines
from areal_core.interfaces.model import ModelReference
from areal_core.messages.workflows import RunGroup
from areal_core.rewards.worker import build_rewards
from areal_core.rollout.episodes import EpisodeError, EpisodeRunner
from areal_core.rollout.shaping import shape
from areal_core.runs.models import end_tokens, load_tokenizer, model_path, sampling_parameters
from areal_core.runs.trainer import build_engines
from areal_core.runtime.folder import cache_folder
from areal_core.training.context import BatchContext
from areal_core.training.examples import ExampleSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.config import Resolved, RunConfig
    from areal_core.interfaces.algorithm import Algorithm
    from areal_core.interfaces.inference import InferenceClient


def debug_row(resolved: Resolved, number: int, open_client: Callable[[ModelReference, Any], InferenceClient]) -> None:
    """Take one row from prompt to loss in this process, and print its tokens.

    Breakpoints work in the user's code. No run folder is written, no server is started, and the updates are lost.
    `examples/programs/debug_answer.py` is a program that uses it.

    Args:
        resolved: the config. Its inference engine is not used.
        number: of the row, from 0.
        open_client: returns the `InferenceClient` that generates the answers, from the model and its tokenizer.

    Raises:
        UsageError: there is no such row.
        RunError: an episode failed, a group filter drops the group, or the user's code raised, which is the cause. The
            hints have the lines of that code.
    """
    try:
        _debug(resolved, number, open_client)
    except ArealError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        message = str(error).splitlines()[-1] if isinstance(error, EpisodeError) else f"{type(error).__name__}: {error}"
        lines = "".join(traceback.format_list(own_lines(cause))).rstrip()
        hints = [f"your own code (--debug shows all):\n{lines}"] if lines else []
        raise RunError(message, hints=hints) from error


def _debug(resolved: Resolved, number: int, open_client: Callable[[ModelReference, Any], InferenceClient]) -> None:
    config = resolved.config
    dataset, algorithm, source = config.dataset.build(), config.algorithm.build(), config.model.source
    if not 0 <= number < len(dataset):
        raise UsageError(f"--row is {number}, and {config.dataset.reference} has {len(dataset)} rows, from 0")
    print_out(f"row {number}: {dataset[number]}")
    path = config.model.path if source is None else prepare_model(source, cache_folder(), print_error)
    model = ModelReference(model_path(resolved, str(path)), config.model.dtype, config.model.trust_remote_code)
    tokenizer = load_tokenizer(model)
    if algorithm.encode is None:
        batch = asyncio.run(_roll_out(config, open_client(model, tokenizer), model, tokenizer, dataset[number], number))
    else:
        one = config.model_copy(update={"rollout": config.rollout.model_copy(update={"batch_size": 1})})
        encode: Any = partial(algorithm.encode, tokenizer=tokenizer)
        commits: Any = None  # nothing is committed
        batch = PackedBatch.from_bytes(ExampleSource([dataset[number]], encode, one, commits, bool).next_batch(0))
    _learn(resolved, model, tokenizer, algorithm, batch)


async def _roll_out(
    config: RunConfig, client: InferenceClient, model: ModelReference, tokenizer: Any, row: Any, number: int
) -> PackedBatch:
    """Run the episodes of one group one after another, and return them shaped and filtered, as a batch."""
    assert config.workflow is not None
    rewards = build_rewards(config.rewards)
    ends = end_tokens(model, tokenizer)
    workflow = config.workflow.build()
    runner = EpisodeRunner(workflow, client, rewards, tokenizer, seed=config.seed, end_ids=ends)
    sampling, episodes = sampling_parameters(config, ends), []
    try:
        for sample in range(config.rollout.group_size):
            episode = await runner.run(row, RunGroup(0, number, 0, (sample,), sampling), sample)
            print_out(f"sample {sample}: reward {episode.reward:.4g} {episode.rewards}: {episode.text!r}")
            episodes.append(episode)
    finally:
        if hasattr(workflow, "close"):  # it may have started an environment server, which a worker's end would end
            await workflow.close()
    kept = await shape(0, episodes, config.algorithm.build().group_filters, runner.checks, config.rollout)
    if kept is None:
        raise RunError("a group filter drops this group: try another --row, or algorithm.group_filters=[]")
    return PackedBatch.from_columns(pack_group(0, (number, 0), len(kept), dict(enumerate(kept))))


def _learn(resolved: Resolved, model: ModelReference, tokenizer: Any, algorithm: Algorithm, batch: PackedBatch) -> None:
    """Train on the batch as the trainer does, in this process as the only rank."""
    config, samples = resolved.config, algorithm.encode is None
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    roles = roles_of(config.algorithm, config.training.updates)
    engines = build_engines(resolved, model, roles, config.sampling.temperature if samples else 1.0)
    context = BatchContext(config.training, engines, config.seed)
    prepared = algorithm.prepare(shift_to_predictions(batch), context)
    policy, keys = next(iter(roles.values())), {"sampled": "logprobs", "advantage": "advantages"} if samples else {}
    shown = {name: prepared[key] for name, key in keys.items() if key in prepared}
    if policy.head == "vocabulary":
        shown["now"] = context.forward(policy.name, prepared, ["logprobs"])["logprobs"]
    _print_tokens(prepared, {name: values.tolist() for name, values in shown.items()}, tokenizer)
    for number, works in enumerate(algorithm.updates(prepared, context)):
        for role in dict.fromkeys(work.role for work in works):
            print_out(f"\nupdate {number} of {role}")
            for name, metric in engines[role].train([work for work in works if work.role == role]).items():
                print_out("\n".join(f"  {key:28}{value:12.6g}" for key, value in metric.as_numbers(name).items()))
    dist.destroy_process_group()


def _print_tokens(batch: PackedBatch, columns: dict[str, list[float]], tokenizer: Any) -> None:
    """Print the tokens that are trained on, one a line. Print the tokens between them on one line."""
    masks, targets, starts = batch["loss_mask"].tolist(), batch["targets"].tolist(), batch.tokens.offsets.tolist()
    for number, start in enumerate(starts[:-1]):
        reward = f"  reward {float(batch['reward'][number]):.4g}" if "reward" in batch else ""
        print_out(f"\nsequence {number}{reward}\n  {'':24}" + "".join(f"{name:>12}" for name in columns))
        ahead = [batch["input_ids"][start].item()]  # nothing predicts it, and the last place predicts nothing
        for is_learned, places in itertools.groupby(range(start, starts[number + 1] - 1), masks.__getitem__):
            if not is_learned:
                print_out(f"  {tokenizer.decode([*ahead, *(targets[place] for place in places)])!r}")
            for place in places if is_learned else ():
                values = "".join(f"{column[place]:12.4f}" for column in columns.values())
                print_out(f"  {tokenizer.decode([targets[place]])!r:24}{values}")
            ahead = []
