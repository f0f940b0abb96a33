"""One file for each command: SUMMARY, `add_arguments(parser)` and `execute(arguments) -> exit code`.

A file imports only argparse at its top; what the command needs is imported when it runs.
"""
