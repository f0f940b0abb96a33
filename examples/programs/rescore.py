"""Score answers in a file with the rewards of a run, and count their tokens.

    python rescore.py RUN_DIR answers.jsonl

Each line of the file is a row of the data with the model's answer: {"prompt": ..., "completion": ..., "answer": ...}.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from areal_core.config import load_run
from areal_core.programs import RunFolder, load_tokenizer, model_reference, open_rewards, print_error, print_out


async def main(run: RunFolder, answers: Path) -> None:
    """Print the reward and the length of each answer, in the order of the file."""
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    resolved = load_run(run.path)
    tokenizer = load_tokenizer(model_reference(resolved, run))
    arguments = [arguments_of(row, tokenizer) for row in rows]
    async with open_rewards(resolved.config, run, print_error) as score:
        scores = await asyncio.gather(*map(score, arguments))
    for reward, given in zip(scores, arguments, strict=True):
        print_out(f"reward {reward.value:g}  {len(given['completion_ids'])} tokens  {given['completion']!r}")


def arguments_of(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The arguments that a reward function may name; see `areal_core.sdk.Reward`."""
    ids = {f"{key}_ids": tokenizer.encode(row[key], add_special_tokens=False) for key in ("prompt", "completion")}
    return {**row, **ids, "finish_reason": "stop", "row": row}


if __name__ == "__main__":
    asyncio.run(main(RunFolder(Path(sys.argv[1])), Path(sys.argv[2])))
