"""Adapters (LoRA) that an SGLang server takes by themselves: `sglang/srt/lora` of SGLang.

A request keeps the adapter that it began with. So none is under way while adapters change
(`ServerIdentity.reports_spans`): the old one is dropped, and the new one takes its name; what is left of a request goes
on under it. SGLang keeps cached prefixes of two adapters apart, also where they had one name.
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
"""Of the one adapter that a server has."""

_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Of which a server has room for A and B; `options: {lora_target_modules: [...]}` names others."""


def options_for(rank: int) -> dict[str, OptionValue]:
    """Of a server that takes adapters of so high a rank; one place more is for its base."""
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras_per_batch": 2, "lora_target_modules": [*_MATRICES]}


def check_room(told: dict[str, Any], rank: int) -> None:
    """Raise ServerRefusedError where a server, from its `/server_info`, takes no adapters of this rank."""
    room = int(told.get("max_lora_rank") or 0) if told.get("enable_lora") else 0
    if room < rank:
        raise ServerRefusedError(
            f"takes adapters of rank {room} at most, and adapter_rank is {rank}: start it with areal serve, or with "
            f"--enable-lora --max-lora-rank {rank} --lora-target-modules {' '.join(_MATRICES)}"
        )


async def drop(connection: ServerConnection) -> None:
    """Have a server forget its adapter, where it has one."""
    with suppress(RequestRefusedError):
        await connection.post("/unload_lora_adapter", {"lora_name": NAME})


async def load(connection: ServerConnection, folder: Path) -> bool:
    """Have a server take the adapter of a folder, in place of any other; no request may be under way.

    Returns:
        Whether the folder holds an adapter; nothing is done with one that holds a model.

    Raises:
        UpdateRefusedError: it cannot be read, or the server says that it did not take it.
    """
    try:
        if not describe_adapter(folder):
            return False
        await drop(connection)
        told = await connection.post("/load_lora_adapter", {"lora_name": NAME, "lora_path": str(folder)})
    except OSError as error:
        raise UpdateRefusedError(f"the adapter in {folder} cannot be read: {error}") from error
    except RequestRefusedError as error:
        raise UpdateRefusedError(str(error)) from None
    if not told.get("success"):
        raise UpdateRefusedError(f"/load_lora_adapter: {str(told.get('error_message'))[:300]}")
    return True
