"""`python -m areal_core` is the same program as the `areal` command."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder: `areal` does not search it either
    from areal_core.cli import main

    sys.exit(main())
