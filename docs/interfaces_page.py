"""Writes `docs/interfaces.md`: what each kind of component must do, what it is given, and what a batch holds.

python docs/interfaces_page.py > docs/interfaces.md
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any, Final

from areal_core import data, interfaces
from areal_core.data.trajectory import TOKEN_DTYPES
from areal_core.plugins import KINDS
from areal_core.servers import interface as servers

if TYPE_CHECKING:
    from collections.abc import Iterator

PROTOCOLS: Final = {
    "train_engines": (
        interfaces.TrainEngine, interfaces.Role, interfaces.EMA, interfaces.LossSpec,
        interfaces.OptimizerSettings, interfaces.ComparingEngine, interfaces.AdapterEngine, interfaces.MeasuringEngine,
        interfaces.SnapshotEngine, interfaces.Estimate,
    ),
    "inference_engines": (
        interfaces.InferenceEngine, interfaces.InferenceClient, interfaces.Slots, interfaces.SlotHolder,
        interfaces.Grant, interfaces.Want, interfaces.InferenceCapabilities, interfaces.GenerationRequest,
        interfaces.SamplingParameters, interfaces.WeightUpdate, interfaces.BroadcastReceiver, interfaces.MemorySharer,
        interfaces.TensorReader, interfaces.SharedTensor, interfaces.SharedMemory,
        interfaces.Questioned, servers.GenerationAdapter, servers.ServerAdapter, servers.Piece, servers.Chunk,
        servers.ServerIdentity,
    ),
    "workflows": (interfaces.RolloutWorkflow, interfaces.WorkflowContext, interfaces.RewardScore),
    "environments": (interfaces.Environment,),
    "agents": (interfaces.Agent, interfaces.Endpoint),
    "tools": (interfaces.Tool,),
    "sandboxes": (interfaces.Sandbox, interfaces.SandboxResult),
    "reward_functions": (interfaces.Reward,),
    "datasets": (interfaces.Dataset,),
    "algorithms": (interfaces.Algorithm, interfaces.Context, interfaces.ForwardPass, interfaces.LossResult),
    "reward_shaping": (interfaces.RewardShaping,),
    "group_filters": (interfaces.GroupFilter,),
    "batch_transforms": (interfaces.BatchTransform,),
    "advantages": (interfaces.Advantage,),
    "policy_losses": (interfaces.PolicyLoss, interfaces.PolicyTerms),
    "corrections": (interfaces.Correction,),
    "loss_aggregations": (interfaces.LossAggregation,),
    "regularizers": (interfaces.Regularizer,),
    "auxiliary_losses": (interfaces.AuxiliaryLoss,),
    "example_tokenizers": (interfaces.ExampleTokenizer,),
    "models": (interfaces.ModelSource, interfaces.FindsModel, interfaces.ModelReference),
    "weight_transports": (interfaces.WeightTransport,),
    "launchers": (
        interfaces.Launcher, interfaces.ProcessGroup, interfaces.Node, interfaces.Place, interfaces.RunningGroup,
    ),
    "trackers": (interfaces.Tracker,),
}  # fmt: skip
"""By kind, the Protocol that a target satisfies, and the records that it meets."""

INTRODUCTION: Final = """<!-- Made by `python docs/interfaces_page.py > docs/interfaces.md`. -->
# Interfaces

What the target of each kind of component must do. A target is a class or a function. A class with a settings model is
called with the settings, one that is named by import with the keys beside `type:` as keyword arguments; an inference
engine is given more, as is said there, and no other kind is given anything. A function is the component itself, with
its settings bound by name; reward functions and the parts of algorithms are mostly functions. Everything here is
exported by `areal_core.interfaces`, what a batch is made of by `areal_core.data`, and what speaks to servers of a kind
by `areal_core.servers.interface`.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION.strip()]
    for kind, types in PROTOCOLS.items():
        parts.append(f"## `{kind}`: {KINDS[kind]}")
        for described in types:
            parts += _described(described)
    parts.append("## What a batch holds")
    parts.append(_columns())
    for described in (
        data.PackedBatch, data.Trajectory, data.TrajectoryBuilder, data.TokenIds, data.Episode, data.Generation,
        data.FinishReason, data.Metric,
    ):  # fmt: skip
        parts += _described(described)
    return "\n\n".join(parts) + "\n"


def _columns() -> str:
    rows = ["| column by token, of every trajectory | dtype |", "|---|---|"]
    rows += [f"| `{name}` | {str(dtype).removeprefix('torch.')} |" for name, dtype in TOKEN_DTYPES.items()]
    return "\n".join(rows)


def _described(described: Any) -> Iterator[str]:
    """A class: its docstring, then its public methods with theirs."""
    yield f"### `{described.__name__}`\n\n{_text(described)}"
    for name, member in vars(described).items():
        function = getattr(member, "__func__", member.fget if isinstance(member, property) else member)
        is_public = not name.startswith("_") or name in {"__call__", "__len__", "__getitem__"}
        if is_public and inspect.isfunction(function):
            words = f"async {name}" if inspect.iscoroutinefunction(function) else name
            signature = "" if isinstance(member, property) else str(inspect.signature(function)).replace("'", "")
            documentation = _text(function)
            yield f"**`{words}{signature}`**" + (f"\n\n{documentation}" if documentation else "")


def _text(documented: Any) -> str:
    """A docstring as Markdown: its sections and their items become lists."""
    written, section = [], ""
    for line in (inspect.getdoc(documented) or "").splitlines():
        if line in {"Attributes:", "Args:", "Returns:", "Raises:"}:
            section = line.removesuffix(":")
            written += [f"*{section}*", ""]
        elif line.startswith("    ") and section != "Returns":
            is_item = not line.startswith("     ")
            written.append(f"- {line.strip()}" if is_item else f"  {line.strip()}")
        else:
            written.append(line.strip())
    return "\n".join(written)


if __name__ == "__main__":
    sys.stdout.write(page())
