"""The page of model families, from what became of each on this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NO_EXPERTS = "the model has none"
"""The end of the reason for which a model without experts is not divided by them."""


class Cell(NamedTuple):
    """An entry of the table.

    Attributes:
        text: in the table.
        note: below it; empty where there is nothing to add.
    """

    text: str
    note: str = ""


class Row(NamedTuple):
    """What became of a family: one entry for each column."""

    train: Cell
    adapter: Cell
    embedded: Cell
    sglang: Cell
    vllm: Cell
    tensor: Cell
    expert: Cell


_LINE = re.compile(r"^`(?P<family>\w+)` \| (?P<cells>.*)$", re.MULTILINE)
_NOTE = re.compile(r"^`(?P<family>\w+)`, (?P<column>\w+) \| (?P<note>.*)$", re.MULTILINE)
_VERSIONS = re.compile(r"transformers (?P<transformers>\S+), SGLang (?P<sglang>\S+) and vLLM (?P<vllm>\S+)\.\s")

_TEXT = """# Models

The train engine `fsdp/fsdp` trains any causal language model that transformers loads, if it computes what transformers
computes. At setup it tries three ways on a few tokens, takes the first that is exact, and logs which one it took and
why. Where none is exact, it refuses the model and names the reason. `areal doctor MODEL` prints this page's line for a
model of yours.

train | what happens | cost
---|---|---
`packed` | Sequences are packed one behind another. Layers are compiled, attention has its own kernels. Layers that \
mix tokens outside attention (convolutions, recurrences) see where sequences begin. | the fastest
`mixers` | The same, but layers that mix tokens outside attention and do not know where sequences begin compute a \
padded row for each. | The rest of such a layer is compiled, the mixer is not.
`rows` | The whole model computes a padded row for each sequence, with transformers' masks and attention (`sdpa`, or \
`eager` where a model needs it). | No layer is compiled. Padding counts in `max_tokens_per_microbatch`. `eager` \
attention holds all scores of a sequence.
`refused` | The run ends at setup with the reason. |

The embedded engine `hf/hf` tries its ways likewise: `rows` is the fastest, `cohorts` runs requests of one length
together, and `whole` computes all tokens again at every step.

`mixers` and `rows` work on any number of ranks; `parallel.tensor` and `parallel.context` need `packed`.
Workflows that show images need `packed` or `mixers`.

## Which folders can be trained

folder | what happens
---|---
text (`...ForCausalLM`) | It is trained as a whole.
text and images, sound or video (`...ForConditionalGeneration`: Qwen3.5, Gemma 3 and 4, Mistral 3, Llama 4 and others) \
| Its language model is trained from text; no extra package is needed. The vision tower and whatever text does not go \
through stay as they are. The workflow `vision/single_turn` shows images and trains the tower too, for \
[some families](../guides/vision.md).
weights that transformers does not read (`mtp.*`) | They stay in the export as they are. They are not synced: a server \
that decodes speculatively by them keeps those of the folder.
quantized weights in FP8 (DeepSeek) or MXFP4 (gpt-oss) | A training run refuses them. Write them in bfloat16 once, \
`areal dequantize SOURCE FOLDER`, and name that folder in `model.path`: trainer and servers then hold the same tensors.
other quantized weights (bitsandbytes, AWQ, GPTQ) | A training run refuses them. Name the folder that was quantized.

An export is a folder of the same class with the same names, and weights go to servers under these names. In bfloat16
each tensor has the dtype that transformers gives it: some routers and their biases stay float32.

## Families

On a GPU, install `flash-linear-attention` (`pip install -c constraints.txt "./plugins/areal_fsdp[mixers]"` in a clone)
for Qwen3.5, Qwen3-Next, Olmo-Hybrid and Kimi-Linear: transformers then computes their gated delta rules by kernels that
know where packed sequences begin, and the models are `packed`. Without it they take `mixers`, which is exact, several
times slower, and needs several times the memory: a step of Qwen3.5-2B with 32,768 tokens did not fit an H200. The
table below is of a CPU, where these kernels do not run. Mamba layers are packed by `mamba-ssm` and `causal-conv1d` in
the same way; both have to be built on the machine.

With the widths of gpt-oss-20b and random weights in bfloat16, SGLang samples from another distribution than
transformers computes, for a reason that is not known; vLLM does not: see
[Models that are not plain decoders](../benchmarks.md#models-that-are-not-plain-decoders).

The memory plan of `areal run --dry-run` counts packed sequences. For layers without attention it is an estimate that is
right with flash-linear-attention, and for `rows` it counts neither padding nor the scores of `eager` attention.

Scaled, shifted and soft-capped logits are computed exactly, with their gradients. Rotary embeddings whose frequencies
follow the length of a sequence (`longrope`, `dynamic`) get those of each sequence alone. An answer that crosses the
original length of a `longrope` is sampled with one set of frequencies and trained with another, as the model defines
it: `train/behavior_difference` shows it. Keep prompt and answer below that length, or the prompt above it.

## What was tried

Each line is a tiny random model of the family, with windows, chunks and sparse indexers shorter than its sequences,
under transformers {transformers}, SGLang {sglang} and vLLM {vllm}. Doge is the exception: its sequences are
shorter than its `keep_window_size`.

column | `yes`, or a way, means
---|---
train | In float32, log-probabilities agree with transformers to 1e-5 and gradients to 5e-5. The export loads \
again with the same weights. Where the way is not `packed`, three updates give the parameters of a plain loop with \
AdamW to 5e-6.
adapter | With `adapter: {{}}`, values, gradients and files are PEFT's. `part`: some matrices stay frozen.
embedded | Sampled tokens have the log-probabilities of a plain forward.
SGLang, vLLM | That version has registered the architecture. `by transformers`: it runs transformers' code. Nothing \
was generated.
tensor, expert | Two ranks of `parallel.tensor` or `parallel.expert` have the values and gradients of one, likewise. \
`-`: the model has no experts.

Other families may work too: setup decides. transformers 5.24.0 was tried likewise: all of these families are trained
there too, GPT-J in packed sequences, and the embedded engine computes Mamba's whole sequences again.

"""
_HEADER = "model type | train | adapter | embedded | SGLang | vLLM | tensor | expert\n---|---|---|---|---|---|---|---\n"
_NOTES = """
## Reasons and parts

model type, column | reason, or what an adapter leaves frozen
---|---
"""


def adapter_cell(kinds: Sequence[str], note: str) -> Cell:
    """Return the entry of an adapter that is on matrices of these names."""
    return Cell("no" if not kinds else "part" if note else "yes", plain(note))


def rank_cell(result: str) -> Cell:
    """Return the entry of ranks whose result is `yes`, or the reason of a refusal."""
    if result == "yes":
        return Cell("yes")
    return Cell("-") if result.endswith(NO_EXPERTS) else Cell("no", plain(result))


def plain(note: str) -> str:
    """Return a note that can stand in a table."""
    return " ".join(note.replace("|", "/").split())


def page(rows: Mapping[str, Row], versions: Mapping[str, str]) -> str:
    """Return the page's text for these families."""
    lines = [f"`{family}` | {' | '.join(cell.text for cell in row)}" for family, row in sorted(rows.items())]
    notes = [
        f"`{family}`, {column} | {cell.note}"
        for family, row in sorted(rows.items())
        for column, cell in zip(Row._fields, row, strict=True)
        if cell.note
    ]
    text = _TEXT.format(**versions)
    return text + _HEADER + "\n".join(lines) + "\n" + _NOTES + "\n".join(notes)


def read(text: str | None = None) -> dict[str, Row]:
    """Return the families of a page; by default of the one beside this file."""
    text = _own() if text is None else text
    notes = {(found["family"], found["column"]): found["note"] for found in _NOTE.finditer(text)}
    return {
        found["family"]: Row(
            *(
                Cell(cell.strip(), notes.get((found["family"], column), ""))
                for column, cell in zip(Row._fields, found["cells"].split("|"), strict=True)
            )
        )
        for found in _LINE.finditer(text[text.index(_HEADER) : text.index(_NOTES)])
    }


def versions() -> dict[str, str]:
    """Return the versions that the page beside this file was made with."""
    found = _VERSIONS.search(_own())
    assert found is not None
    return found.groupdict()


def _own() -> str:
    return (Path(__file__).parent / "models.md").read_text(encoding="utf-8")
