"""A batch of rollouts as every rank reads it: records in the manifest's order, staleness at consumption, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.data.batch import PackedBatch, join_batches
from areal_core.data.trajectory import FinishReason
from areal_core.ledger.segments import read_record
from areal_core.messages.rollouts import FolderNeeded
from areal_core.runtime.rpc import FrameDecoder
from areal_core.training.source import TrainingBatch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from areal_core.config.sections import RolloutSection
    from areal_core.messages.rollouts import Manifest


def read_batch(run_dir: Path, section: RolloutSection, frame: bytes) -> TrainingBatch | None:
    """Read the records of a manifest; None if the frame is that of `FolderNeeded`.

    Args:
        run_dir: of the run.
        section: settings; `stale` decides about tokens over the bound on staleness.
        frame: of a `Manifest` or `FolderNeeded`, as `RolloutClient.next_batch` returns it.

    Raises:
        RunError: a record is damaged, or this machine does not see its file.
    """
    manifest: Manifest | FolderNeeded = FrameDecoder().feed(frame)[0].message
    if isinstance(manifest, FolderNeeded):
        return None
    parts = [PackedBatch.from_bytes(read_record(run_dir, record)) for _, record in manifest.records]
    groups = [(number, record.digest) for number, record in manifest.records]
    batch = join_batches(parts)
    if batch is None:
        return TrainingBatch(None, groups, dict(manifest.metrics))
    batch, staleness = mask_stale(batch, manifest.synced, manifest.step, section)
    return TrainingBatch(batch, groups, {**manifest.metrics, **staleness, **batch_metrics(batch)})


def token_staleness(
    versions: torch.Tensor, sampled: torch.Tensor, synced: Mapping[int, int], trained: int
) -> torch.Tensor:
    """Return the staleness of each token at consumption.

    Args:
        versions: [T] int32, weight version that sampled each token.
        sampled: [T] bool, whether the token was sampled and has a version.
        synced: for each version the number of batches trained when it was synced.
        trained: batches trained before the batch that consumes the tokens.

    Returns:
        [T] int64; 0 for tokens that were not sampled. Weights that a resume has discarded may have been trained on
        more batches than the trainer now: their tokens have staleness 0.

    Raises:
        KeyError: a token carries a version that was never synced.
    """
    staleness = torch.zeros(len(versions), dtype=torch.int64)
    for version in torch.unique(versions[sampled]).tolist():
        if version not in synced:
            raise KeyError(f"a token was sampled by version {version}, which was never synced")
        staleness[sampled & (versions == version)] = max(0, trained - synced[version])
    return staleness


def mask_stale(
    batch: PackedBatch, synced: Mapping[int, int], trained: int, section: RolloutSection
) -> tuple[PackedBatch, dict[str, float]]:
    """Remove tokens over the bound from the loss if `section.stale` is `mask`, and measure staleness.

    Returns:
        The batch, and metrics of the staleness of tokens that stay in the loss.
    """
    staleness = token_staleness(batch["versions"], batch["loss_mask"], synced, trained)
    over = staleness > section.max_staleness
    if section.stale == "mask" and over.any():
        batch = batch.with_tokens(loss_mask=batch["loss_mask"] & ~over)
    kept = staleness[batch["loss_mask"]].float()
    metrics = {
        "staleness/mean": float(kept.mean()) if len(kept) else 0.0,
        "staleness/max": float(kept.max()) if len(kept) else 0.0,
        "staleness/tokens_over_bound": float(over.sum()),
    }
    shares = torch.bincount(kept.long()) / max(1, len(kept))
    return batch, metrics | {f"staleness/share_{age}": share for age, share in enumerate(shares.tolist())}


def batch_metrics(batch: PackedBatch) -> dict[str, float]:
    """Return metrics of a batch: rewards, lengths, truncation, and the numbers of sequences and tokens."""
    sampled = torch.zeros(len(batch)).index_add(0, batch.tokens.row_index, batch["loss_mask"].float())
    metrics = {
        "reward/mean": float(batch["reward"].mean()),
        "reward/std": float(batch["reward"].std(correction=0)),
        "reward/groups_all_equal": _share_without_spread(batch),
        "batch/sequences": float(len(batch)),
        "batch/tokens": float(batch.token_count),
        "batch/sampled_tokens": float(sampled.sum()),
        "batch/response_length": float(sampled.mean()),
        "batch/truncated": float((batch["finish_reason"] == FinishReason.LENGTH).float().mean()),
    }
    for key in batch.sequences:
        if key.startswith("reward."):  # one term of the reward; NaN where it did not apply
            values = batch[key][~batch[key].isnan()]
            if len(values):
                metrics[key.replace(".", "/", 1)] = float(values.mean())
    return metrics


def _share_without_spread(batch: PackedBatch) -> float:
    """Return the share of groups whose sequences all have the same reward, from which a comparison learns nothing.
    Groups of one sequence are not counted."""
    groups, index = torch.unique(batch["group_id"], return_inverse=True)
    spread = torch.zeros(len(groups)).scatter_reduce(0, index, batch["reward"], "amax", include_self=False)
    spread -= torch.zeros(len(groups)).scatter_reduce(0, index, batch["reward"], "amin", include_self=False)
    has_siblings = torch.bincount(index) > 1
    return float((spread[has_siblings] == 0).float().mean()) if has_siblings.any() else 0.0
