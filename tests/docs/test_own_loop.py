"""docs/extend/own-loop.md: the loop of the page learns, without a config and without a run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "extend" / "own-loop.md"


def test_the_loop_of_the_page_learns() -> None:
    (code,) = re.findall(r"```python\n# my_loop.py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "my_loop"}
    exec(compile(code, "my_loop.py", "exec"), names)
    before = set(sys.modules)
    rewards = names["train"](40)
    assert max(rewards[:3]) < 0.3
    assert min(rewards[-3:]) > 0.7
    assert not [name for name in set(sys.modules) - before if name.startswith(("areal_core.driver", "areal_core.runs"))]
