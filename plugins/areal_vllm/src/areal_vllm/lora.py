"""Adapters (LoRA) that a vLLM server takes by themselves: `vllm/entrypoints/serve/lora` of vLLM.

vLLM can put new matrices in the place of an adapter's, but requests under way would then read the folder that they
began with, again at every step. So no request is under way while adapters change (`ServerIdentity.reports_spans`): the
old one is dropped, and the new one takes its name; what is left of a request goes on under it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_core.models import describe_adapter
from areal_core.servers import RequestRefusedError, ServerRefusedError, UpdateRefusedError

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.servers import OptionValue, ServerConnection

NAME = "areal"
"""Of the one adapter that a server has."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM reserves room for."""


def options_for(rank: int) -> dict[str, OptionValue]:
    """Of a server that takes adapters of so high a rank."""
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(room for room in _RANKS if room >= rank)}


def check_room(told: dict[str, Any], rank: int) -> None:
    """Raise ServerRefusedError where a server, from its `vllm_config`, takes no adapters of this rank."""
    room = int((told.get("lora_config") or {}).get("max_lora_rank") or 0)
    if room < rank:
        raise ServerRefusedError(
            f"takes adapters of rank {room} at most, and adapter_rank is {rank}: start it with areal serve, or with "
            f"--enable-lora --max-lora-rank {rank} and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        )


async def drop(connection: ServerConnection) -> None:
    """Have a server forget its adapter, where it has one."""
    known = [model["id"] for model in (await connection.get("/v1/models"))["data"]]
    if NAME in known:
        await connection.post("/v1/unload_lora_adapter", {"lora_name": NAME}, is_json=False)


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
        await connection.post("/v1/load_lora_adapter", {"lora_name": NAME, "lora_path": str(folder)}, is_json=False)
    except OSError as error:
        raise UpdateRefusedError(f"the adapter in {folder} cannot be read: {error}") from error
    except RequestRefusedError as error:
        raise UpdateRefusedError(str(error)) from None
    return True
