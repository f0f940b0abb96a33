"""The process that serves: `python -m areal_tinker.service RUN_DIR OPTIONS`, once for each rank of the trainer.

Rank 0 answers HTTP requests and generates in its event loop, and trains in a thread. The other ranks train alone.
OPTIONS is a JSON object with the fields of `Options`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_core.config import load_run
from areal_core.errors import LostError, RunError
from areal_core.processes import run_role, start_task
from areal_core.programs import RunFolder
from areal_tinker.messages import Listening

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from areal_core.config import Resolved
    from areal_core.processes import Member
    from areal_tinker.ranks import Rank, Ranks

ASKED_TO_STOP: Final = 75
"""Exit code of a process that has stopped because it was asked to."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a server beside its config.

    Attributes:
        host, port: where it listens.
        name: name of the model for clients; empty: the config's `model.path`.
        key_variable: environment variable with the key of clients; empty: no key.
        save_every_s: seconds of training after which the state of a model is saved.
    """

    host: str
    port: int
    name: str
    key_variable: str
    save_every_s: float


def main(run_dir: str, options: str) -> int:
    """Serve until the driver asks to stop. Return the exit code."""
    return run_role(lambda member: _play(RunFolder(Path(run_dir)), member, Options(**json.loads(options))))


def _play(run: RunFolder, member: Member, options: Options) -> int:
    resolved = load_run(run.path)
    member.enter_loading("starting", resolved.config.training.phase_timeout_s)
    from areal_core.programs import model_reference, trainer_rank  # torch takes long to import
    from areal_tinker.ranks import Rank, Ranks

    with trainer_rank(member, resolved.config):
        rank = Rank(resolved.config, model_reference(resolved, run))
        ranks = Ranks(rank, shares_gpu=resolved.config.takes_turns)
        try:
            if int(os.environ["RANK"]):
                member.enter("serving")
                ranks.follow()
            else:
                member.run(_serve(resolved, run, member, options, ranks))
        finally:
            rank.close()
    return ASKED_TO_STOP


async def _serve(resolved: Resolved, run: RunFolder, member: Member, options: Options, ranks: Ranks) -> None:
    """Answer requests until the driver asks to stop."""
    from aiohttp import web

    from areal_core.programs import build_engine, model_reference
    from areal_tinker.api import API
    from areal_tinker.checkpoints import Checkpoints
    from areal_tinker.journal import Journal
    from areal_tinker.sampling import Sampling
    from areal_tinker.training import Training

    config, model = resolved.config, model_reference(resolved, run)
    loop = asyncio.get_running_loop()
    folder = run.path / "tinker"
    journal = Journal(folder / "journal.sqlite")
    engine = build_engine(config, run, member.scratch, member)
    thread = ThreadPoolExecutor(1, "training")

    async def work(function: Callable[[], Any]) -> Any:
        """Run a function in the training thread, with the GPU's memory."""
        if config.takes_turns:
            await _or_lost(sampling.rest())
        try:
            return await loop.run_in_executor(thread, function)
        finally:
            if config.takes_turns:
                await _or_lost(sampling.wake())

    checkpoints = Checkpoints(journal, ranks, folder / "checkpoints", work)
    sampling = Sampling(engine, checkpoints.base, folder / "loaded")
    training = Training(journal, ranks, checkpoints, folder / "states", work, options.save_every_s)
    await engine.start(model)
    await checkpoints.publish_base()
    served = describe_model(resolved, options.name, model, ranks.rank)
    api = API(served, journal, training, checkpoints, sampling, engine, os.environ.get(options.key_variable, ""))
    runner = web.AppRunner(api.application(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, options.host, options.port)
    await site.start()
    executing = start_task(training.run(), "executing training calls")
    member.notify(Listening(f"http://{options.host}:{options.port}", served.names[0]))
    member.enter("serving")
    try:
        await executing  # until the driver asks to stop, which cancels it
    finally:
        await runner.cleanup()
        await loop.run_in_executor(thread, ranks.end)
        await engine.close()
        journal.close()


async def _or_lost(turn: Awaitable[None]) -> None:
    """Let the inference engine sleep or wake. A failure is not that of the training call, which may have succeeded.

    Raises:
        LostError: the engine failed. The driver starts the server again.
    """
    try:
        await turn
    except (RunError, OSError) as error:
        raise LostError(f"the inference engine cannot release or take the GPU's memory: {error}") from error


def describe_model(resolved: Resolved, name: str, model: Any, rank: Rank) -> Any:
    """Return the base model as clients know it."""
    from areal_core.programs import end_tokens, load_tokenizer
    from areal_tinker.api import Model

    path = str(resolved.config.model.path or model.path)
    names = list(dict.fromkeys(filter(None, (name, path, model.path))))
    ends = end_tokens(model, load_tokenizer(model))
    has_adapters = getattr(resolved.config.train_engine.settings, "adapter", None) is not None
    tokenized_as = name if "/" in name else path  # a name with a slash is one of the hub
    return Model(names, tokenized_as, rank.longest, rank.vocabulary, tuple(sorted(ends)), has_adapters=has_adapters)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
