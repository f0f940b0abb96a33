"""Words that must not come back: the field has others for them (docs/index.md has those that are ours)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GONE = {
    "warden": "guard",
    "supervisor": "driver",
    "witness": "consumption log",
    "pathology": "diagnostic",
    "verdicts": "diagnostics",
    "publication": "weight sync",
    "published": "synced",
    "roster": "server pool",
    "forsaken": "lost",
    "occurrence": "prompt_id",
    "pipeline_depth": "max_pending_batches",
    "epochs_per_batch": "num_epochs",
    "updates_per_batch": "num_minibatches",
    "verify_every": "logprob_check_every",
    "objectives": "auxiliary losses",
    "group_stage": "reward_shaping, group_filters",
    "update_stage": "minibatch_transforms",
    "encoders": "example_tokenizers",
    "player_rewards": "agent_rewards",
    "picture": "image",
    "LendingEngine": "AdapterEngine",
    "in_turns": "colocated",
    "cache_key": "cache_salt",
    "behaviour": "behavior",
    "regularis": "regulariz",
    "normalis": "normaliz",
    "centred": "centered",
    "centring": "centering",
    "learnt": "learned",
    "colour": "color",
}
"""Each with the word to use."""
ALLOWED = {
    "areal_core/config/problems.py",  # names the keys that were renamed
    "tests/architecture/test_words.py",
}
FILES = [
    path
    for kind in ("*.py", "*.md", "*.yaml", "*.toml")
    for folder in ("areal_core", "plugins", "examples", "benchmarks", "tests", "docs")
    for path in sorted((ROOT / folder).rglob(kind))
    if not any(part.startswith((".", "__")) for part in path.relative_to(ROOT).parts)
]


@pytest.mark.parametrize("word", GONE)
def test_a_word_does_not_come_back(word: str) -> None:
    pattern = re.compile(rf"(?<![a-zA-Z]){word}", re.IGNORECASE)
    found = [
        f"{name}:{number}: {line.strip()[:80]}"
        for path in FILES
        if (name := str(path.relative_to(ROOT))) not in ALLOWED
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == [], f"say {GONE[word]}"
