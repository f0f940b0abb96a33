"""Loading a Hugging Face model, and the module around it that computes what a role is for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from areal_core.errors import RunError
from areal_core.models import auto_class_of, is_vlm, refuse_quantized, set_attention, without_image_tokens
from areal_core.plugins import extra_module
from areal_fsdp.attention.asked import register_checked_attention
from areal_fsdp.attention.hugging_face import PACKED, Layout, register_packed_attention
from areal_fsdp.models.compiling import eager_experts
from areal_fsdp.models.convolutions import divide_convolutions
from areal_fsdp.models.final_logits import FinalLogits, HeadMeasurement
from areal_fsdp.models.logprobs import default_chunk_tokens, token_logprobs
from areal_fsdp.models.mixers import Mixers
from areal_fsdp.models.norms import speed_up_norms
from areal_fsdp.models.rope import divide_rotary
from areal_fsdp.models.wide import Head, is_wide, wide_output
from areal_fsdp.parallel.experts import moe_blocks
from areal_fsdp.parallel.loading import load
from areal_fsdp.parallel.tensor import beside_text, body_of, decoder_layers, own_part, text_of, whole
from areal_fsdp.planning.decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from areal_core.data import PackedBatch
    from areal_core.engines import ModelReference
    from areal_core.sdk import Role
    from areal_fsdp.parallel.context import Context
    from areal_fsdp.parallel.loading import ModelFiles
    from areal_fsdp.parallel.tensor import Vocabulary
    from areal_vision.places import Seen, VisionTokens


class RoleModule(torch.nn.Module):
    """A model with its head taken apart: packed tokens in, values of each token out.

    The head's product is computed here and not in the model, so that logits exist for a chunk of tokens at a time.
    This module is the root of sharding: the head's parameters are whole while `forward` runs.

    Args:
        model: with packed attention.
        role: what is computed.
        temperature: logits are divided by it.
        chunk_tokens: tokens whose logits exist at once, None for the device's own number.
        compiled: whether the head's reductions are compiled.
        shows_images: whether batches may have images.
        kernel: of attention, and thereby the kind of layout that `forward` takes; see `Layout.of`.

    Attributes:
        context: where ranks have a share of the tokens each.
        vocabulary: where they have a share of the head each.
        final: what the model does to its logits; see `areal_fsdp.models.probe.choose_rung`, which measures it.
        mixers: the layers that mix tokens outside attention.
        shows_boundaries: whether layers are shown where sequences begin; `choose_rung` says so where any could use it.
        rotary: the names of the rotary embeddings that compute each sequence alone.
        vision: how images reach the model; None where it is computed and trained from text alone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        role: Role,
        *,
        temperature: float,
        chunk_tokens: int | None = None,
        compiled: bool = False,
        shows_images: bool = False,
        kernel: str = "",
    ) -> None:
        super().__init__()
        self.context: Context | None = None
        self.vocabulary: Vocabulary | None = None
        self.compiled = compiled
        self.kernel = kernel
        self.model = model
        self.head_name = _scalar_head_name(model) if role.head == "scalar" else ""
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.final = FinalLogits()
        self.attention = PACKED
        self.mixers = Mixers(model)
        self.shows_boundaries = False
        self.rotary = divide_rotary(model, self.mixers)
        self.vision: VisionTokens | None = None
        if shows_images and is_vlm(model.config):
            self.vision = extra_module("areal_vision.places", "fsdp", "vision").VisionTokens(model)
        else:
            for parameter in beside_text(model).values():
                parameter.requires_grad = False

    @property
    def head(self) -> torch.nn.Linear:
        """What turns a hidden state into logits, or into one value."""
        model: Any = self.model
        head: torch.nn.Linear = model.get_submodule(self.head_name) if self.head_name else model.get_output_embeddings()
        return head

    @property
    def in_rows(self) -> bool:
        """Whether the model computes a padded row for each sequence, by transformers' own attention."""
        return self.attention != PACKED

    @property
    def layers_in_parts(self) -> set[int]:
        """The numbers of the decoder layers that are several graphs, around modules that a compiler does not take."""
        outside = {self.model.get_submodule(name) for name in self.mixers.found} | set(eager_experts(self.model))
        layers = enumerate(decoder_layers(self.model))
        return {number for number, layer in layers if not outside.isdisjoint(layer.modules())}

    def attend_by(self, attention: str) -> None:
        """Choose the attention of the model's layers, by its name: `PACKED`, or in rows another one."""
        self.attention = attention
        set_attention(self.model, attention)

    def layout(self, lengths: torch.Tensor | Sequence[int], device: torch.device) -> Layout:
        """What `forward` has to know of sequences of these lengths; see `Layout.of`."""
        multiple = 1 if self.context is None else self.context.size
        return Layout.of(lengths, device, self.kernel, multiple=multiple, in_rows=self.in_rows)

    def forward(
        self,
        input_ids: torch.Tensor,
        layout: Layout,
        targets: torch.Tensor,
        outputs: Sequence[str],
        others: Mapping[str, Head] = MappingProxyType({}),
        seen: Seen | None = None,
    ) -> dict[str, torch.Tensor]:
        """Args: input_ids and targets, [T] int64; outputs, by name; others, of the roles that these compare with;
        seen, the images.

        Returns:
            By name, with gradients unless they are off; float32 [T] but for wide ones.
        """
        hidden = self._states(input_ids, layout, seen)
        if self.context is None:
            return self._outputs(hidden, targets, outputs, others)
        own = self.context.own(targets, len(layout.position_ids))
        found = self._outputs(hidden, own, outputs, others)
        return {name: self.context.whole(value, len(targets)) for name, value in found.items()}

    def _outputs(
        self, hidden: torch.Tensor, targets: torch.Tensor, outputs: Sequence[str], others: Mapping[str, Head]
    ) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        if "values" in outputs:
            found["values"] = self.head(hidden)[:, 0].to(torch.float32, copy=True)  # see "hidden" in `wide_output`
        elif not all(map(is_wide, outputs)):
            found |= self._logprobs(hidden, targets, with_entropy="entropy" in outputs)
        for name in filter(is_wide, outputs):
            found |= wide_output(name, self._head_of(hidden), others, self._chunk_tokens(hidden))
        return found

    def head_state(self, input_ids: torch.Tensor, layout: Layout, seen: Seen | None = None) -> Head:
        """What this model's logits are made from, for another one that is compared with it: of this rank's tokens."""
        own = self._head_of(self._states(input_ids, layout, seen))
        return replace(own, weight=own.weight.detach(), bias=None if own.bias is None else own.bias.detach())

    def _head_of(self, hidden: torch.Tensor) -> Head:
        weight, bias = whole(self.head.weight), getattr(self.head, "bias", None)
        bias = None if bias is None else whole(bias)
        return Head(hidden, weight, bias, self.temperature / self.final.scale, self.final.cap)

    def see(self, batch: PackedBatch, device: torch.device) -> Seen | None:
        """The images of a batch, for `forward`; None for a model of text.

        Raises:
            RunError: the batch has images, and the model sees none; or they do not fit its tokens.
        """
        if self.vision is None:
            if "patches" in batch.multimodal:
                kind = self.model.config.model_type
                sees = "is trained from text alone" if is_vlm(self.model.config) else "sees none"
                raise RunError(f"the batch has images, and the model type '{kind}' {sees}")
            return None
        return self.vision.see(batch, device, self.model.dtype)

    def _states(self, input_ids: torch.Tensor, layout: Layout, seen: Seen | None) -> torch.Tensor:
        """Return [T, hidden size] of this rank's tokens, in the head's dtype: some models keep a float32 residual."""
        return self._hidden(input_ids, layout, seen).to(self.head.weight.dtype)

    def _hidden(self, input_ids: torch.Tensor, layout: Layout, seen: Seen | None) -> torch.Tensor:
        position_ids, context = layout.position_ids, self.context
        self.mixers.layout = layout
        if layout.in_rows:
            return self._hidden_of_rows(without_image_tokens(self.model.config, input_ids), layout)
        named = layout.for_layers(with_boundaries=self.shows_boundaries and context is None)
        named["packed_context"] = None if context is None else (context.size, context.group)
        if seen is not None and self.vision is not None:
            return self.vision.hidden(seen, named)
        input_ids = without_image_tokens(self.model.config, input_ids)
        if context is not None:
            total = len(position_ids)
            input_ids, position_ids = context.own(input_ids, total), context.own(position_ids, total)
        hidden: torch.Tensor = text_of(self.model)(
            input_ids=input_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
            **named,
        )[0][0]
        return hidden

    def _hidden_of_rows(self, input_ids: torch.Tensor, layout: Layout) -> torch.Tensor:
        (rows,) = layout.buckets.rows_of(input_ids)
        output: torch.Tensor = text_of(self.model)(input_ids=rows, use_cache=False)[0]
        return layout.buckets.packed_of([output])

    def _logprobs(self, hidden: torch.Tensor, targets: torch.Tensor, *, with_entropy: bool) -> dict[str, torch.Tensor]:
        bias = getattr(self.head, "bias", None)
        logprobs, entropy = token_logprobs(
            hidden,
            own_part(self.head.weight),
            None if bias is None else own_part(bias),
            targets,
            temperature=self.temperature / self.final.scale,
            chunk_tokens=self._chunk_tokens(hidden),
            with_entropy=with_entropy,
            compiled=self.compiled,
            vocabulary=self.vocabulary,
            cap=self.final.cap,
        )
        return {"logprobs": logprobs, **({} if entropy is None else {"entropy": entropy})}

    def _chunk_tokens(self, hidden: torch.Tensor) -> int:
        tokens = self.chunk_tokens or default_chunk_tokens(len(self.head.weight), hidden.device)
        return tokens if self.final.cap is None else max(1, tokens // 2)  # the cap's slope is as large as the logits

    def unpacked(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, FinalLogits]:
        """Compute [B, T] int64 as transformers does: eager attention, experts one after another, the model's forward.

        Only for checking `forward` on a few tokens.

        Returns:
            Logits [B, T, vocabulary] or values [B, T], float32; and what the model does to its logits.

        Raises:
            RunError: it does something to them that this engine cannot reproduce.
        """
        self.mixers.layout = None
        input_ids = without_image_tokens(self.model.config, input_ids)
        set_attention(self.model, "eager")
        products = self.model.get_experts_implementation()
        if has_experts := next(moe_blocks(self.model), None) is not None:
            self.model.set_experts_implementation("eager")
        try:
            if self.head_name:
                hidden = body_of(self.model)(input_ids=input_ids, use_cache=False)[0]
                return self.head(hidden)[..., 0].float(), FinalLogits()
            with HeadMeasurement(self.model) as measurement:
                logits = self.model(input_ids=input_ids, use_cache=False).logits
            return measurement.read(logits)
        finally:
            set_attention(self.model, self.attention)
            if has_experts:
                self.model.set_experts_implementation(products)


def _scalar_head_name(model: PreTrainedModel) -> str:
    heads = [
        name
        for name, child in model.named_children()
        if child is not body_of(model) and getattr(child, "out_features", 0) == 1
    ]
    if len(heads) != 1:
        raise RunError(
            f"model type {model.config.model_type}: no single linear head of one output was found ({heads}), so it can "
            "be neither critic nor reward model in this engine"
        )
    return heads[0]


def load_model(
    reference: ModelReference, role: Role, *, compiled: bool = False, in_parts: bool = False, frozen: bool = False
) -> tuple[PreTrainedModel, ModelFiles | None]:
    """Load a model on the CPU, in eval mode, with packed attention.

    Norms in layers that will be compiled stay as they are: the compiler merges them with their neighbors.

    A model that learns is held in float32 whatever `reference.dtype` says: small updates vanish in bfloat16. A frozen
    one is held in the dtype that it computes in.

    Args:
        reference: where it is.
        role: what it is for.
        compiled: whether its layers will be.
        in_parts: whether its parameters shall stay in the files until ranks have divided them.
        frozen: whether they stay as they are even in a role that learns, by an adapter.

    Returns:
        The model; and its files where its parameters are still there.

    Raises:
        RunError: it cannot be read, its weights are quantized, or some that the role needs are missing.
    """
    register_packed_attention()
    register_checked_attention()
    path = Path(reference.path)
    if (path.is_absolute() or reference.path.startswith(".")) and not (path / "config.json").is_file():
        raise RunError(
            f"no model in '{reference.path}': the folder has no config.json",
            hints=["name a Hugging Face model folder (config.json, *.safetensors, tokenizer files) or a hub name"],
        )
    config = AutoConfig.from_pretrained(reference.path, trust_remote_code=reference.trust_remote_code)
    refuse_quantized(reference.path, config.to_dict())
    options: dict[str, Any] = {
        "dtype": torch.float32 if role.changes and not frozen else getattr(torch, reference.dtype),
        "trust_remote_code": reference.trust_remote_code,
        "attn_implementation": "eager",
        **({"num_labels": 1} if role.head == "scalar" else {}),
    }
    model, report, files = load(_factory_of(config, role), reference.path, in_parts=in_parts, **options)
    _refuse_missing(reference, role, model, sorted(report["missing_keys"]))
    speed_up_norms(model, except_in=decoder_layers(model) if compiled else None)
    divide_convolutions(model)
    set_attention(model, PACKED)
    model.eval()
    model.requires_grad_(role.changes and not frozen)
    return model, files


def _factory_of(config: Any, role: Role) -> Any:
    return AutoModelForSequenceClassification if role.head == "scalar" else auto_class_of(config)


def _refuse_missing(reference: ModelReference, role: Role, model: PreTrainedModel, missing: list[str]) -> None:
    """A critic may start with a new head, which was drawn in loading; nothing else may be made up."""
    if role.head == "scalar" and role.changes:
        head = _scalar_head_name(model)
        missing = [name for name in missing if not name.startswith(f"{head}.")]
    if missing:
        kind = "scalar head" if role.head == "scalar" else "causal language model"
        raise RunError(
            f"the model '{reference.path}' lacks weights that a {kind} needs: {', '.join(missing[:5])}"
            + (f" and {len(missing) - 5} more" if len(missing) > 5 else ""),
            hints=[f"role '{role.name}' needs the folder of a complete {type(model).__name__}"],
        )


def decoder_of(model: PreTrainedModel, role: Role) -> Decoder | None:
    """The sizes that memory and arithmetic follow from; None where the model's layers are not known."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return Decoder.of(model.config.to_dict(), shapes, scalar=role.head == "scalar")
