"""Lets the tests here import the modules beside them, which the page of models is made with too."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "docs" / "reference")]
