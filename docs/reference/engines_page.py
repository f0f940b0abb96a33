"""`engines.md`: what the inference engines can do, asked of their settings, their checks and their capabilities.

A row is a config that asks for something. A cell is `yes` if areal accepts the config with an engine, the settings that
it needs besides, or `no`. So a cell changes with the check that refuses it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from areal_core.config import resolve
from areal_core.errors import ConfigError, RunError
from areal_core.runs import RunFolder
from areal_core.runs.engines import build_engine
from areal_sglang.adapter import KNOWN as SGLANG
from areal_vllm.adapter import KNOWN as VLLM

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from areal_core.config import RunConfig
    from areal_core.servers import InferenceCapabilities

ENGINES: Final = {
    "hf": ["inference_engine=hf"],
    "vllm": ["inference_engine=vllm", "inference_engine.program=[python]"],
    "sglang": ["inference_engine=sglang", "inference_engine.program=[python]"],
}
TITLES: Final = {"hf": "`hf`, embedded", "vllm": f"vLLM {VLLM}", "sglang": f"SGLang {SGLANG}"}
TURNS: Final = {"vllm": ["sleep_mode=true"], "sglang": ["memory_saver=true"]}
ADAPTER: Final = ("train_engine.adapter.rank=8", "train_engine.adapter.sync=alone", "inference_engine.adapter_rank=8")
ONE: Final = "placement={generation: [0], training: [0]}"
TWO: Final = "placement={generation: [0], training: [1]}"
SEVERAL: Final = "placement={generation: [0, 0], training: [1]}"
SEVERAL_ON_ONE: Final = "placement={generation: [0, 0], training: [0]}"
VISION: Final = Path(__file__).parents[2] / "examples" / "vision.yaml"


@dataclass(frozen=True)
class Row:
    """Something that a config may ask for.

    Attributes:
        title: of the row.
        words: of the config, as on the command line.
        needs: settings of `inference_engine` that engines need besides; tried where they refuse the config without.
        holds: whether the config then does what the row says.
        path: a config that the words change; None for the demonstration.
    """

    title: str
    words: Sequence[str] = ()
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    holds: Callable[[RunConfig, InferenceCapabilities], bool] = lambda *_: True
    path: Path | None = None


ROWS: Final = {
    "Where servers run": [
        Row("GPUs of their own", [TWO]),
        Row("on the trainer's GPUs, in turns", [ONE], TURNS, lambda config, _: config.takes_turns),
        Row("on the trainer's GPUs, both keep their memory", [ONE], holds=lambda config, _: not config.takes_turns),
        Row("several on a GPU of their own", [SEVERAL, "inference_engine.servers=2"]),
        Row("several on the trainer's GPU", [SEVERAL_ON_ONE, "inference_engine.servers=2"]),
        Row(
            "one on several GPUs",
            ["placement={generation: [0, 1], training: [2]}", "inference_engine.tensor_parallel=2"],
        ),
        Row("come and go", ["placement={training: [0]}", "inference_engine.servers={minimum: 1, maximum: 2}"]),
        Row("run already", ["inference_engine.servers=0", "inference_engine.addresses=['http://localhost:30000']"]),
    ],
    "How weights reach them": [
        Row("`memory`", ["weight_sync.transport=memory"]),
        Row("`disk`", ["weight_sync.transport=disk"]),
        Row("`broadcast`", [TWO, "weight_sync.transport=broadcast"]),
        Row("`ipc`, servers take turns with the trainer", [ONE, "weight_sync.transport=ipc"], TURNS),
        Row(
            "`ipc`, both keep their memory",
            [ONE, "weight_sync.transport=ipc"],
            holds=lambda config, _: not config.takes_turns,
        ),
        Row("adapters alone, GPUs of their own", [TWO, *ADAPTER]),
        Row("adapters alone, both keep their memory", [ONE, *ADAPTER], holds=lambda config, _: not config.takes_turns),
        Row("adapters alone, in turns", [ONE, *ADAPTER], TURNS, lambda config, _: config.takes_turns),
        Row("live requests keep their cache", ["inference_engine.update_mode=keep_cache"]),
        Row("live requests are recomputed", ["inference_engine.update_mode=recompute"]),
    ],
    "What they generate": [
        Row("images", path=VISION),
        Row("experts of an MoE, for replay", ["inference_engine.routed_experts=true"]),
        Row(
            "stop texts",
            ["sampling.stop=[END]"],
            {"vllm": ["detokenize=true"], "sglang": ["detokenize=true"]},
        ),
        *[
            Row(f"`{name}`", [], {}, lambda _, capabilities, name=name: name in capabilities.sampling)
            for name in ("top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
        ],
        Row(
            "seeds",
            [],
            {"sglang": ["options.enable_deterministic_inference=true"]},
            lambda _, capabilities: capabilities.seeded,
        ),
        Row("the same bits again", ["deterministic=true", "rollout.max_staleness=0"]),
    ],
}
INTRODUCTION: Final = """# What inference engines can do

`yes`: areal accepts a config that asks for it. Settings in a cell belong to `inference_engine` and are needed besides;
their values are examples. `no`: areal refuses the config before the run starts and gives the reason.

What depends on the model, or on the version of a running server, is checked when servers start: VLMs need SGLang
0.5.23, and no server takes the adapter of a VLM alone. [Servers](../guides/servers.md) has examples,
[versions](versions.md) what ran on GPUs."""


def accepts(row: Row, engine: str, needs: Sequence[str] = ()) -> bool:
    """Return whether areal accepts what a row asks for with an engine and these settings of it."""
    words = [*ENGINES[engine], *row.words, *(f"inference_engine.{need}" for need in needs)]
    try:
        config = resolve(row.path, ["grpo", engine], words).config
        with tempfile.TemporaryDirectory() as folder:
            built = build_engine(config, RunFolder(Path(folder)), Path(folder), None)
    except (ConfigError, RunError):
        return False
    return row.holds(config, built.capabilities)


def cell(row: Row, engine: str) -> str:
    """Return `yes`, the settings that the engine needs, or `no`."""
    if accepts(row, engine):
        return "yes"
    needs = row.needs.get(engine, ())
    if needs and accepts(row, engine, needs):
        return ", ".join(f"`{need.replace('=', ': ')}`" for need in needs)
    return "no"


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for title, rows in ROWS.items():
        head = "| " + " | ".join(["", *TITLES.values()]) + " |"
        lines = [head, "|" + "---|" * (1 + len(ENGINES))]
        lines += ["| " + " | ".join([row.title, *(cell(row, engine) for engine in ENGINES)]) + " |" for row in rows]
        parts += [f"## {title}", "\n".join(lines)]
    return "\n\n".join(parts)
