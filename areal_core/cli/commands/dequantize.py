"""Write a copy of a quantized model (FP8 or MXFP4) with weights in bfloat16.

One file is converted at a time, so the command needs only the memory of one file's weights in bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.cli.output import print_error
from areal_core.errors import RunError, UsageError

if TYPE_CHECKING:
    import argparse

SUMMARY = "write a quantized model in bfloat16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `areal dequantize`."""
    parser.add_argument("source", metavar="SOURCE", help="the quantized model: a folder, or a name on the hub")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a new folder for the bfloat16 weights")


def execute(arguments: argparse.Namespace) -> int:
    """Find or download a model, and write it with weights in bfloat16. Return the exit code."""
    if arguments.folder.exists():
        raise UsageError(f"{arguments.folder} exists already", hints=["name a new folder"])
    from areal_core.models.dequantize import dequantize
    from areal_core.runs.models import MODEL_FILES

    source = Path(arguments.source)
    if not source.is_dir():
        from huggingface_hub import snapshot_download

        try:
            source = Path(snapshot_download(arguments.source, allow_patterns=[*MODEL_FILES]))
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RunError(
                f"there is no folder '{arguments.source}', and the hub does not give it: {reason}"
            ) from error
    dequantize(source, arguments.folder)
    print_error(f"{arguments.folder} holds the weights of {arguments.source} in bfloat16")
    return 0
