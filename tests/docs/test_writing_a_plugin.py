"""What the page "writing a plugin" shows and no example file holds."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from areal_core.interfaces import EMA
from areal_core.testing.conformance import RegularizerSuite

PAGE = (Path(__file__).parents[2] / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")


def test_a_part_that_asks_a_model() -> None:
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def pull(" in block)
    names: dict[str, Any] = {}
    exec(code, names)  # our own page
    (need,) = names["PullSettings"]().needs(4)
    assert need.role.ema == EMA("actor", every=1, decay=0.99)

    class Suite(RegularizerSuite):
        needed = (need,)

        def make(self) -> Any:
            return functools.partial(names["pull"], coefficient=0.1)

    for test in (name for name in dir(Suite) if name.startswith("test_")):
        getattr(Suite(), test)()
