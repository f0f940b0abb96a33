"""Small random copies of a model, with which `areal doctor MODEL` tries how engines compute it without its weights."""

from __future__ import annotations

import json
import logging
import math
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from areal_core.disk import weight_files
from areal_core.errors import RunError
from areal_core.models.experts import EXPERTS
from areal_core.models.images import auto_class_of
from areal_core.models.quantization import refuse_quantized
from areal_core.models.sizes import HEADS, LAYERS, first_size
from areal_core.plugins import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WHOLE_BYTES = 2 << 30
"""Size of the weight files up to which a model itself is tried."""
_LARGEST_COPY = 300_000_000
"""Largest number of parameters of a copy."""
_WORDS = 256
"""Vocabulary of a copy."""
_TOKENS = ("_token_id", "_token_index")
_WIDTHS = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("hidden_size_per_layer_input", "mamba_dt_rank", "qk_rope_head_dim", "rotary_dim"), 8),
    "linear_num_key_heads": 2,
    "mamba_headdim": 16,
    "lru_width": 64,
}
"""Sizes of a copy, which fit one another in most families: mixers are twice as wide as the residual stream."""
_DENSE = ("first_k_dense_replace", "num_dense_layers")
"""Keys for the number of layers before the first with experts."""
_PLACES = ("hybrid_layer_ids", "attn_layer_indices")
"""Keys for the indices of layers of one kind."""
_TOWER_LAYERS = ("depth", *LAYERS)
_TOWER_PLACES = ("deepstack_visual_indexes", "fullatt_block_indexes")
"""Keys for indices of a vision tower's layers."""
_CHOICES = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


Dtype = Literal["float32", "bfloat16"]
"""The dtypes in which a small copy is computed, by their names in PyTorch."""
_DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")


class NotTriedError(Exception):
    """`areal doctor MODEL` cannot try a model, for the reason in the message. A run may still take it."""


@contextmanager
def small_copy_of(source: Path) -> Iterator[tuple[Path, str]]:
    """Yield a folder with the model itself or a small copy, which loads in seconds, and a description of a copy.

    Args:
        source: the model's folder.

    Raises:
        RunError: the weights are quantized, transformers does not know the model, or it needs code of its own.
        NotTriedError: no small copy of it computes.
    """
    from transformers import AutoConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    refuse_quantized(str(source), json.loads((source / "config.json").read_text(encoding="utf-8")))
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise RunError(f"transformers {_version()} cannot read its config: {first[:300]}") from error
    weights = [file.stat().st_size for file in _weight_files(source)]
    if weights and sum(weights) <= _WHOLE_BYTES:
        yield source, ""
        return
    with tempfile.TemporaryDirectory(prefix="areal-doctor-") as folder:
        what = _write_copy(config, Path(folder))
        yield Path(folder), f"tried on a random copy {what}: "


def try_dtypes(source: Path, attempt: Callable[[Path, Dtype], tuple[bool, str]]) -> Finding:
    """Try a model in float32 and bfloat16, and report both answers, or one if they are the same.

    Args:
        source: the model's folder.
        attempt: called with the folder of `small_copy_of` and a dtype. It returns whether a run would take the model,
            and the answer, or raises `RunError` as a refusal.

    Raises:
        NotTriedError: see `small_copy_of`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from areal_core.models import Dtype, small_copy_of, try_dtypes
        >>> from safetensors.torch import save_file
        >>> from transformers import AutoModelForCausalLM, GPT2Config
        >>> def attempt(folder: Path, dtype: Dtype) -> tuple[bool, str]:
        ...     model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        ...     return True, f"trains {type(model).__name__}"
        >>> config = GPT2Config(vocab_size=9, n_positions=4, n_embd=8, n_layer=1, n_head=2)
        >>> weights = AutoModelForCausalLM.from_config(config).transformer.state_dict()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     config.save_pretrained(folder)
        ...     save_file(weights, Path(folder, "model.safetensors"))
        ...     with small_copy_of(Path(folder)) as (path, description):
        ...         print(path == Path(folder), description or "small enough to be tried itself")
        ...     print(try_dtypes(Path(folder), attempt).text)
        True small enough to be tried itself
        in float32 and bfloat16: trains GPT2LMHeadModel
    """
    answers: dict[Dtype, tuple[bool, str]] = {}
    try:
        with small_copy_of(source) as (path, how):
            for dtype in _DTYPES:
                try:
                    answers[dtype] = attempt(path, dtype)
                except RunError as error:
                    answers[dtype] = False, _refusal(error)
    except RunError as error:
        return Finding(False, _refusal(error))
    dtypes_by_text: dict[str, list[str]] = {}
    for dtype, (_, text) in answers.items():
        dtypes_by_text.setdefault(text, []).append(dtype)
    parts = [f"in {' and '.join(dtypes)}: {text}" for text, dtypes in dtypes_by_text.items()]
    return Finding(any(is_taken for is_taken, _ in answers.values()), how + "; ".join(parts))


def _refusal(error: RunError) -> str:
    return f"refused: {'; '.join([error.message, *error.hints])}"


def _weight_files(source: Path) -> list[Path]:
    """Return the files of the weights; none if some are missing, as for a model on the hub."""
    try:
        return [file for file in weight_files(source) if file.is_file()]
    except RunError:
        return []


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def _write_copy(config: Any, folder: Path) -> str:
    """Write the first copy that computes five tokens, and return its description.

    Copies with small widths are tried first, then those with few layers. If no copy of a composite model computes, its
    language model alone is tried.
    """
    failures = []
    text = config.get_text_config(decoder=True)
    for source in (config,) if text is config else (config, text):
        for narrow, most in ((True, 8), (False, 8), (False, 2)):
            try:
                small = _small(source, narrow=narrow, most=most)
                _write(small, folder)
            except Exception as error:  # noqa: BLE001 - sizes that do not fit one another fail in many ways
                failures.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:150]}")
                logging.getLogger(__name__).info("a small copy fails: %s", failures[-1])
            else:
                sizes = f"of {small.get_text_config(decoder=True).num_hidden_layers} layers and small sizes"
                return sizes if source is config else f"of its language model, {sizes}"
    reasons = "; ".join(dict.fromkeys(failures))
    raise NotTriedError(f"no small copy of model type {config.model_type!r} computes ({reasons})")


def _write(small: Any, folder: Path) -> None:
    """Write a random model with a config, and check that it computes five tokens."""
    import torch

    with torch.device("meta"):
        size = sum(p.numel() for p in auto_class_of(small).from_config(small).parameters())
    if size > _LARGEST_COPY:
        raise ValueError(f"it would have {size:,} parameters")
    torch.manual_seed(0)
    model = auto_class_of(small).from_config(small, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))
        model(input_ids=torch.arange(5)[None], use_cache=False)
    model.save_pretrained(folder)


def _small(config: Any, *, narrow: bool, most: int) -> Any:
    """Return the config of a small copy. The towers of a composite model get one layer of their own width."""
    text = config.get_text_config(decoder=True)
    if text is config:
        return type(config)(**shrunk(_values(config), narrow=narrow, most=most))
    values = _values(config)
    parts = {name: part for name in values if (part := getattr(config, name)) is not None and hasattr(part, "to_dict")}
    small_text = shrunk(_values(text), narrow=narrow, most=most)
    for name, part in parts.items():
        small_part = small_text if part is text else _small_tower(_values(part), small_text.get("hidden_size"))
        values[name] = {**small_part, "model_type": part.model_type}
    tokens = [name for name, token in values.items() if name.endswith(_TOKENS) and isinstance(token, int)]
    values |= {name: _WORDS - 1 - number for number, name in enumerate(tokens)}
    return type(config)(**values)


def _small_tower(values: dict[str, Any], width: int | None) -> dict[str, Any]:
    """Return a tower's values for one layer, with outputs as wide as the language model."""
    small = {**values, **{name: 1 for name in _TOWER_LAYERS if isinstance(values.get(name), int)}}
    small |= {name: [0] for name in _TOWER_PLACES if isinstance(values.get(name), list)}
    layers = next((values[name] for name in _TOWER_LAYERS if isinstance(values.get(name), int)), None)
    small |= {name: value[:1] for name, value in values.items() if isinstance(value, list) and len(value) == layers}
    return small | ({"out_hidden_size": width} if "out_hidden_size" in values else {})


def _values(config: Any) -> dict[str, Any]:
    """Return the values with which a config can be constructed again."""
    not_passed = {
        "architectures",
        "auto_map",
        "dtype",
        "model_type",
        "per_layer_config",
        "torch_dtype",
    }
    values = config.to_dict()
    return {
        key: value
        for key, value in values.items()
        if key not in not_passed and not key.startswith(("_", "transformers"))
    }


def shrunk(values: dict[str, Any], *, narrow: bool, most: int) -> dict[str, Any]:
    """Return a config's values for fewer layers, tokens and experts. One layer of each kind stays.

    Args:
        values: the config's values.
        narrow: whether layers get small widths too.
        most: number of layers that stay if the config names no kinds of layers.
    """
    small = {**values, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 1}
    small |= {name: _WORDS for name in values if name.startswith("vocab_size") and isinstance(values[name], int)}
    names = [name for name in LAYERS if isinstance(values.get(name), int)]
    if names:
        count = values[names[0]]
        lists = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == count}
        places = {name: values[name] for name in _PLACES if values.get(name)}
        kept = _kept(count, [*lists.values(), *([i in place for i in range(count)] for place in places.values())], most)
        small |= {name: [value[index] for index in kept] for name, value in lists.items()}
        small |= {name: [i for i, index in enumerate(kept) if index in place] for name, place in places.items()}
        small |= {name: min(values[name], 1) for name in ("num_kv_shared_layers",) if values.get(name)}
        small |= dict.fromkeys(names, len(kept))
    for name in EXPERTS:
        if isinstance(values.get(name), int) and values[name] > 4:
            small[name] = 4
            small |= {key: min(2, values[key]) for key in _CHOICES if isinstance(values.get(key), int)}
            small |= {key: 1 for key in ("n_group", "topk_group", "num_expert_group") if values.get(key)}
    small |= {name: 1 for name in _DENSE if values.get(name)}
    return {**small, **_narrow(values)} if narrow else small


def _kept(count: int, lists: list[list[Any]], most: int) -> list[int]:
    """Return the indices of the layers that stay: the first of each kind, and at least two."""
    if not lists:
        return list(range(min(count, most)))
    kinds = [repr([value[index] for value in lists]) for index in range(count)]
    first = [index for index in range(count) if kinds[index] not in kinds[:index]]
    more = [index for index in range(count) if index not in first]
    return sorted([*first[:most], *more[: max(0, 2 - len(first))]])


def _narrow(values: dict[str, Any]) -> dict[str, Any]:
    small = {name: min(size, values[name]) for name, size in _WIDTHS.items() if isinstance(values.get(name), int)}
    if "qk_rope_head_dim" in small:  # some configs have the rotary part's size as that of a head
        small["qk_head_dim"] = small.get("qk_nope_head_dim", 0) + small["qk_rope_head_dim"]
        if values.get("head_dim") == values["qk_rope_head_dim"]:
            small["head_dim"] = small["qk_rope_head_dim"]
    if isinstance(values.get("mamba_d_ssm"), int):
        small["mamba_d_ssm"] = small["mamba_n_heads"] * small["mamba_d_head"]
    heads = first_size(values, HEADS)
    small |= {name: 4 for name in HEADS if isinstance(values.get(name), int)}
    for name in ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"):
        if isinstance(keys := values.get(name), int):
            small[name] = 4 if keys == heads else 1 if keys == 1 else 2
    inner = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")
    small |= {name: 64 for name, size in values.items() if name.endswith(inner) and isinstance(size, int)}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := values.get(name), dict) and any(isinstance(value, list) for value in rope.values()):
            turned = int(16 * (rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1)) // 2
            small[name] = {key: value[:turned] if isinstance(value, list) else value for key, value in rope.items()}
            if isinstance(sections := rope.get("mrope_section"), list):  # which sum to the frequencies that turn
                parts = [size * turned // sum(sections) for size in sections[1:]]
                small[name]["mrope_section"] = [turned - sum(parts), *parts]
    return small
