"""The commands of `areal`, one file each: `SUMMARY`, `add_arguments(parser)` and `execute(arguments) -> exit code`.

At its top, a file imports only small modules. A command imports everything else when it runs.
"""
