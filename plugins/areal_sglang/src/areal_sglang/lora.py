"""LoRA adapters that SGLang servers load without the base model's weights (`sglang/srt/lora` of SGLang).

A request keeps the adapter with which it started. So no request may be in flight while adapters change
(`ServerIdentity.reports_spans` is False): the server unloads the old adapter, and the new one gets its name. Requests
continue with the new one. SGLang does not share cached prefixes between two adapters, even if they have one name.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from areal_core.models import describe_adapter
from areal_core.servers import RequestRefusedError, ServerRefusedError, UpdateRefusedError

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.servers import OptionValue, ServerConnection

NAME = "areal"
"""Name of the one adapter of a server."""

_TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Modules for which a server allocates A and B; `options: {lora_target_modules: [...]}` replaces them."""


def options_for(rank: int) -> dict[str, OptionValue]:
    """Return the options of a server for adapters of this rank. It needs a second adapter slot for the base model."""
    return {
        "enable_lora": True,
        "max_lora_rank": rank,
        "max_loras_per_batch": 2,
        "lora_target_modules": [*_TARGET_MODULES],
    }


def check_rank(info: dict[str, Any], rank: int) -> None:
    """Check by `/server_info` that a server loads adapters of this rank.

    Raises:
        ServerRefusedError: its maximum rank is lower, or it loads no adapters.
    """
    largest = int(info.get("max_lora_rank") or 0) if info.get("enable_lora") else 0
    if largest < rank:
        raise ServerRefusedError(
            f"takes adapters of rank {largest} at most, but adapter_rank is {rank}: start it with areal serve, or with "
            f"--enable-lora --max-lora-rank {rank} --lora-target-modules {' '.join(_TARGET_MODULES)}"
        )


async def drop(connection: ServerConnection) -> None:
    """Unload the server's adapter, if it has one."""
    with suppress(RequestRefusedError):
        await connection.post("/unload_lora_adapter", {"lora_name": NAME})


async def load(connection: ServerConnection, folder: Path) -> bool:
    """Replace the server's adapter by that of a folder. No request may be in flight.

    Returns:
        True if the folder has an adapter. False if it has a whole model: then nothing is done.

    Raises:
        UpdateRefusedError: the folder cannot be read, or the server refuses the adapter.
    """
    try:
        if not describe_adapter(folder):
            return False
        await drop(connection)
        answer = await connection.post("/load_lora_adapter", {"lora_name": NAME, "lora_path": str(folder)})
    except OSError as error:
        raise UpdateRefusedError(f"the adapter in {folder} cannot be read: {error}") from error
    except RequestRefusedError as error:
        raise UpdateRefusedError(str(error)) from None
    if not answer.get("success"):
        raise UpdateRefusedError(f"/load_lora_adapter: {str(answer.get('error_message'))[:300]}")
    return True
