"""Where the processes of a run will stand, as far as the config says how many nodes there are and what they have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.config.launching import ServerBounds
from areal_core.errors import RunError
from areal_core.launchers.nodes import Nodes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from areal_core.config import RunConfig

MOST_ROWS = 40
"""Of the table; a run on a thousand nodes has many that are like one another."""


def place_rows(config: RunConfig, problems: list[str]) -> Iterator[tuple[str, str]]:
    """A table of nodes, processes and GPUs; `problems` gets what cannot be placed.

    GPUs are counted through all nodes. A number of nodes or of GPUs that the launcher's settings do not say is the
    smallest that the placement needs, where that is known, and the table says so.
    """
    launcher, placement = config.launcher.keywords(), config.placement
    named = [*(placement.training or ()), *(placement.generation or ())]
    count, each = launcher.get("nodes"), launcher.get("gpus_per_node")
    if count == 1 and not each:
        each = max(named, default=-1) + 1
    if named and not each:
        yield "places", "not known before the start: launcher.gpus_per_node says how many GPUs a node has"
        return
    if count is None and not named:
        return
    nodes, needed = Nodes(), -(-(max(named, default=-1) + 1) // (each or 1))
    for number in range(count or needed):
        nodes.add(f"node-{number}", each or 0)  # as the local launcher calls them
    try:
        rows = [*_trainer(config, nodes), *_generation(config, nodes)]
    except RunError as error:
        problems.append(": ".join((f"placement: {error.message}", *error.hints)))
        return
    if len(nodes.gpus) == 1 and not named:
        return
    order = {name: number for number, name in enumerate(nodes.gpus)}
    rows.sort(key=lambda row: order.get(row[0], len(order)))
    rows = [("node", "processes", "GPUs"), *rows]
    wide = [max(len(row[column]) for row in rows) for column in range(2)]
    for number, (node, who, gpus) in enumerate(rows[: MOST_ROWS + 1]):
        yield "" if number else "places", f"{node:{wide[0]}}  {who:{wide[1]}}  {gpus}".rstrip()
    if len(rows) > MOST_ROWS + 1:
        yield "", f"and {len(rows) - MOST_ROWS - 1} more rows"
    if count is None:
        yield "", f"launcher has to bring {needed} nodes with {each} GPUs each"


def leaves_nodes(config: RunConfig) -> bool:
    """Whether the placement puts trainer and servers on different nodes; False where it does not say so."""
    launcher, placement = config.launcher.keywords(), config.placement
    each, training = launcher.get("gpus_per_node"), placement.training
    if launcher.get("nodes") == 1 or not each or not training or not placement.generation:
        return False
    return len({gpu // each for gpu in (*training, *placement.generation)}) > 1


def _trainer(config: RunConfig, nodes: Nodes) -> Iterator[tuple[str, str, str]]:
    """The ranks of each node, and what stands beside rank 0."""
    gpus = config.placement.training
    if gpus is not None and config.trainer_processes > len(gpus):
        raise RunError(f"{config.trainer_processes} ranks do not fit on {len(gpus)} GPUs in placement.training")
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(nodes.spread(config.trainer_processes, gpus)):
        ranks.setdefault(name, []).append(rank)
    for name, own in ranks.items():
        yield name, f"trainer {spans(own)}", spans([gpus[rank] for rank in own] if gpus else [])
    if config.inference_engine is not None:
        embedded = "" if config.has_servers else ", the inference engine"
        rewards = config.rollout.reward_processes
        yield next(iter(ranks)), f"controller, {config.rollout.workers} workflow, {rewards} reward{embedded}", ""


def _generation(config: RunConfig, nodes: Nodes) -> Iterator[tuple[str, str, str]]:
    """The servers of each node."""
    if config.inference_engine is None or not config.has_servers:
        return
    settings, gpus = config.inference_engine.keywords(), config.placement.generation
    if isinstance(bounds := settings["servers"], ServerBounds):
        room = "" if gpus is None else f"of {spans(gpus)}"
        yield "any with room", f"{bounds.minimum} to {bounds.maximum} servers", room
        return
    if gpus is None:
        yield "any", f"server {spans(range(settings['servers']))}", ""
        return
    per_server = settings.get("tensor_parallel", 1) * settings.get("data_parallel", 1)
    if settings["servers"] * per_server > len(gpus):
        raise RunError(
            f"{settings['servers']} servers on {per_server} GPUs each need {settings['servers'] * per_server}",
            hints=[f"placement.generation names {len(gpus)}"],
        )
    servers: dict[str, list[int]] = {}
    for number in range(settings["servers"]):
        own = gpus[number * per_server : (number + 1) * per_server]
        servers.setdefault(nodes.choose(own, lambda _: 0), []).append(number)
    for name, numbers in servers.items():
        taken = [gpus[n * per_server : (n + 1) * per_server] for n in numbers]
        apart = ", ".join(map(spans, taken)) if per_server > 1 else spans([gpu for own in taken for gpu in own])
        yield name, f"server {spans(numbers)}", apart


def spans(numbers: Sequence[int]) -> str:
    """Numbers in words: `0-3, 6`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in found)
