"""What `labels.py` makes of the answers that it has collected: each token beside plain forward passes, and a table."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING

import torch

from areal_core.data import PackedBatch
from areal_testing.conformance.models import load_reference

if TYPE_CHECKING:
    from pathlib import Path

    from labels import Audited

MAX_CONCURRENCY = 4
"""Sequences in one forward pass."""


@torch.no_grad()
def logprobs_by(folder: Path, batch: PackedBatch, rows: torch.Tensor, device: str) -> torch.Tensor:
    """[sum(T)] of the tokens of some sequences, from a plain forward pass; not a number where there is none."""
    model, sequences = load_reference(folder).to(device), torch.split(batch["input_ids"], batch.lengths.tolist())
    found = [torch.full(ids.shape, torch.nan, dtype=torch.float64) for ids in sequences]
    chosen = torch.nonzero(rows)[:, 0].tolist()
    for some in (chosen[start : start + MAX_CONCURRENCY] for start in range(0, len(chosen), MAX_CONCURRENCY)):
        # Causal attention sees no padding that stands behind.
        part = [sequences[row] for row in some]
        ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).to(device)
        table = torch.log_softmax(model(input_ids=ids).logits[:, :-1].double(), -1)
        values = table.gather(2, ids[:, 1:, None])[..., 0].cpu()
        for row, told in zip(some, values, strict=True):
            found[row][1:] = told[: len(found[row]) - 1]
    return torch.cat(found)


class Comparison:
    """Each token beside forward passes under its label, under the next version, and, where it is wrong, under all.

    Args:
        audited: what was generated.
    """

    def __init__(self, audited: Audited) -> None:
        arguments, batch = audited.arguments, PackedBatch.concatenate(audited.batches)
        count, mask = arguments.updates + 1, batch["loss_mask"]
        self.labels, told = batch["versions"][mask].long(), batch["logprobs"][mask].double()
        self.answers = batch.tokens.row_index[mask] * audited.turns + batch["turn_ids"][mask]
        rows, following = batch.tokens.row_index[mask], (self.labels + 1) % count

        def differences(wanted: torch.Tensor) -> torch.Tensor:
            """[versions, tokens], of the sequences for which a version is wanted; `wanted` is [versions, tokens]."""
            found = []
            for version, places in enumerate(wanted):
                asked = torch.zeros(len(batch), dtype=torch.bool).index_fill_(0, rows[places], value=True)
                folder = audited.folder / f"model{version}"
                found.append((logprobs_by(folder, batch, asked, arguments.device)[mask] - told).abs())
            return torch.stack(found)

        versions = torch.arange(count)[:, None]
        near = differences((versions == self.labels) | (versions == following))
        self.own = near.gather(0, self.labels[None])[0]
        self.wrong = ~(self.own <= arguments.tolerance)
        self.shifted = ~(near.gather(0, following[None])[0] <= arguments.tolerance)
        agrees = differences(self.wrong.expand(count, -1)) <= arguments.tolerance
        self.others = agrees & self.wrong
        """[versions, tokens] versions that explain a token which its label does not explain."""

    @property
    def spread(self) -> torch.Tensor:
        """[answers] how many versions are in each."""
        pairs = torch.unique(torch.stack([self.answers, self.labels]), dim=1)
        return torch.unique(pairs[0], return_counts=True)[1]


def judge(audited: Audited, version: str) -> bool:
    """Print what was found; whether all labels are right."""
    arguments, found = audited.arguments, Comparison(audited)
    labels, spread, wrong = found.labels, found.spread, int(found.wrong.sum())
    print(f"tokens of each version: {torch.bincount(labels, minlength=arguments.updates + 1).tolist()}")
    print(f"versions in an answer: {dict(sorted(Counter(spread.tolist()).items()))}; {dict(audited.counts)}")
    print(f"difference from the label's forward pass: mean {found.own.mean():.1e}, largest {found.own.max():.1e}")
    if arguments.freeze:
        print(f"synced while a worker was stopped: {audited.stopped}")
    for place in torch.nonzero(found.wrong)[:10, 0].tolist():
        others = torch.nonzero(found.others[:, place])[:, 0].tolist()
        message = f"label {labels[place]}, off by {found.own[place]:.4f}, explained by {others}"
        print(f"wrong: answer {found.answers[place]}, {message}")
    row = {
        "engine": f"{arguments.engine} {version}{', by partials' * arguments.partial_generations}",
        "mode": arguments.mode,
        "live, median at updates": f"{arguments.live}, {statistics.median(audited.live):g}",
        "slots": arguments.slots,
        "updates": arguments.updates,
        "workers": arguments.workers,
        "stopped": f"{arguments.freeze:g} s",
        "answers": len(spread),
        "tokens": len(labels),
        "answers of several versions": int((spread > 1).sum()),
        "wrong labels": wrong,
        "another version's": int(found.others.any(0).sum()),
        "wrong if shifted": f"{100 * float(found.shifted.double().mean()):.2f} %",
    }
    for line in (row, ["---"] * len(row), row.values()):
        print(f"| {' | '.join(map(str, line))} |", flush=True)
    return not wrong
