"""`python -m areal_core` is the same program as the `areal` command."""

import sys

from areal_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
