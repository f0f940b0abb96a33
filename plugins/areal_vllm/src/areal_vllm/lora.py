"""LoRA adapters that vLLM servers load without the base model's weights (`vllm/entrypoints/serve/lora` of vLLM).

vLLM can replace the matrices of an adapter in place, but then requests in flight read the folder of their old adapter
again at every step. So no request may be in flight while adapters change (`ServerIdentity.reports_spans` is False): the
server unloads the old adapter, and the new one gets its name. Requests continue with the new one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_core.models import describe_adapter
from areal_core.servers import RequestRefusedError, ServerRefusedError, UpdateRefusedError

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.servers import OptionValue, ServerConnection

NAME = "areal"
"""Name of the one adapter of a server."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of max_lora_rank that vLLM accepts."""


def options_for(rank: int) -> dict[str, OptionValue]:
    """Return the options of a server for adapters of this rank."""
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(size for size in _RANKS if size >= rank)}


def check_rank(config: dict[str, Any], rank: int) -> None:
    """Check by `vllm_config` that a server loads adapters of this rank.

    Raises:
        ServerRefusedError: its maximum rank is lower, or it loads no adapters.
    """
    largest = int((config.get("lora_config") or {}).get("max_lora_rank") or 0)
    if largest < rank:
        raise ServerRefusedError(
            f"takes adapters of rank {largest} at most, but adapter_rank is {rank}: start it with areal serve, or with "
            f"--enable-lora --max-lora-rank {rank} and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        )


async def drop(connection: ServerConnection) -> None:
    """Unload the server's adapter, if it has one."""
    models = [model["id"] for model in (await connection.get("/v1/models"))["data"]]
    if NAME in models:
        await connection.post("/v1/unload_lora_adapter", {"lora_name": NAME}, is_json=False)


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
        await connection.post("/v1/load_lora_adapter", {"lora_name": NAME, "lora_path": str(folder)}, is_json=False)
    except OSError as error:
        raise UpdateRefusedError(f"the adapter in {folder} cannot be read: {error}") from error
    except RequestRefusedError as error:
        raise UpdateRefusedError(str(error)) from None
    return True
