"""The page of model families, from what became of each on this machine."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import transformers

if TYPE_CHECKING:
    from collections.abc import Mapping

Row = tuple[str, str]
"""The rung of a family, and why it takes no higher one."""

_LINE = re.compile(r"^`(?P<family>\w+)` \| (?P<rung>\w+) \| (?P<why>.*)$", re.MULTILINE)

_TEXT = f"""# Models that the FSDP engine trains

The train engine `fsdp/fsdp` trains any causal language model that transformers loads, if it computes what transformers
computes. At setup it tries three ways on a few tokens, takes the first that is exact, and logs which one it took and
why. Where none is exact, it refuses the model and names the reason.

way | what happens | cost
---|---|---
`packed` | Sequences are packed one behind another. Layers are compiled, attention has its own kernels. | the fastest
`mixers` | The same, but layers that mix tokens outside attention (convolutions, recurrences) compute a padded row for \
each sequence. | Such layers are not compiled.
`rows` | The whole model computes a padded row for each sequence, with transformers' masks and attention (`sdpa`, or \
`eager` where a model needs it). | No layer is compiled. Padding counts in `max_tokens_per_microbatch`. `eager` \
attention holds all scores of a sequence.
`refused` | The run ends at setup with the reason. |

`mixers` and `rows` work on any number of ranks; `parallel.tensor` and `parallel.context` need `packed`.
Models that see images need `packed` or `mixers`.

Scaled, shifted and soft-capped logits are computed exactly, with their gradients. Rotary embeddings whose frequencies
follow the length of a sequence (`longrope`, `dynamic`) get those of each sequence alone.

Each line below is a tiny random model of the family, with windows, chunks and sparse indexers shorter than its
sequences. Its log-probabilities and gradients agree with transformers {transformers.__version__} to 1e-5 in float32,
and its export loads again with the same weights. Other families may work too: setup decides.
"""


def page(rows: Mapping[str, Row]) -> str:
    """Return the page's text for these families."""
    lines = [f"`{family}` | {rung} | {why.replace('|', '/')}" for family, (rung, why) in sorted(rows.items())]
    return "\n".join([_TEXT, "model type | way | why it is not packed", "---|---|---", *lines])


def rows_of(text: str) -> dict[str, Row]:
    """Return the families of a page."""
    return {found["family"]: (found["rung"], found["why"]) for found in _LINE.finditer(text)}
