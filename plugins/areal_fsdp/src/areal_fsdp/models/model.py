"""Load a Hugging Face model, and wrap it in a module that computes a role's outputs."""

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
    """A model that maps packed tokens to outputs for each token.

    This module computes the head's product instead of the model, so that logits exist for one chunk of tokens at a
    time. It is the root FSDP module: the head's parameters are gathered while `forward` runs.

    Args:
        model: a model with packed attention.
        role: the role, which determines the head.
        temperature: logits are divided by it.
        chunk_tokens: tokens whose logits exist at the same time, None for the device's default.
        compiled: True to compile the head's reductions.
        shows_images: True if batches may have images.
        kernel: name of the attention kernel, which also determines the layout; see `Layout.of`.

    Attributes:
        context: context parallelism; None without it.
        vocabulary: tensor parallelism of the head; None without it.
        final: the model's scale and cap of its logits, which `areal_fsdp.models.probe.choose_rung` measures.
        mixers: the layers that mix tokens outside attention.
        shows_boundaries: True to pass the bounds of sequences to the layers; `choose_rung` sets it.
        rotary: names of the rotary embeddings that compute each sequence separately.
        vision: adds images to the model's inputs; None if the model is trained only from text.
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
        """The linear layer that maps a hidden state to logits, or to one value."""
        model: Any = self.model
        head: torch.nn.Linear = model.get_submodule(self.head_name) if self.head_name else model.get_output_embeddings()
        return head

    @property
    def in_rows(self) -> bool:
        """True if the model computes a padded row for each sequence, with transformers' own attention."""
        return self.attention != PACKED

    @property
    def layers_in_parts(self) -> set[int]:
        """Indices of the decoder layers that contain a module which cannot be compiled: they are several graphs."""
        outside = {self.model.get_submodule(name) for name in self.mixers.found} | set(eager_experts(self.model))
        layers = enumerate(decoder_layers(self.model))
        return {number for number, layer in layers if not outside.isdisjoint(layer.modules())}

    def attend_by(self, attention: str) -> None:
        """Set the attention of the model's layers by name: `PACKED`, or an attention of transformers for rows."""
        self.attention = attention
        set_attention(self.model, attention)

    def layout(self, lengths: torch.Tensor | Sequence[int], device: torch.device) -> Layout:
        """Return the layout of a batch for `forward`; see `Layout.of`."""
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
        """Compute outputs for packed tokens.

        Args:
            input_ids: [T] int64.
            layout: the batch's layout.
            targets: [T] int64, the next token of each token; [T, 1 + K] with the tokens of `top_logprobs` behind it.
            outputs: names of the outputs.
            others: heads of the roles that outputs compare with, by role.
            seen: the batch's images, or None.

        Returns:
            The outputs by name, float32 [T] except for `top_logprobs` [T, K] and wide ones (see
            `areal_fsdp.models.wide`), with gradients unless these are disabled.
        """
        hidden = self._states(input_ids, layout, seen)
        if self.context is None:
            return self._outputs(hidden, targets, outputs, others)
        own_targets = self.context.own(targets, len(layout.position_ids))
        values = self._outputs(hidden, own_targets, outputs, others)
        return {name: self.context.whole(value, len(targets)) for name, value in values.items()}

    def _outputs(
        self, hidden: torch.Tensor, targets: torch.Tensor, outputs: Sequence[str], others: Mapping[str, Head]
    ) -> dict[str, torch.Tensor]:
        results: dict[str, torch.Tensor] = {}
        if "values" in outputs:
            results["values"] = self.head(hidden)[:, 0].to(torch.float32, copy=True)  # see "hidden" in `wide_output`
        elif not all(map(is_wide, outputs)):
            results |= self._logprobs(hidden, targets, with_entropy="entropy" in outputs)
        for name in filter(is_wide, outputs):
            results |= wide_output(name, self._head_of(hidden), others, self._chunk_tokens(hidden))
        return results

    def head_state(self, input_ids: torch.Tensor, layout: Layout, seen: Seen | None = None) -> Head:
        """Return the head's inputs and weights for this rank's tokens, for an engine that compares itself with it."""
        head = self._head_of(self._states(input_ids, layout, seen))
        return replace(head, weight=head.weight.detach(), bias=None if head.bias is None else head.bias.detach())

    def _head_of(self, hidden: torch.Tensor) -> Head:
        weight, bias = whole(self.head.weight), getattr(self.head, "bias", None)
        bias = None if bias is None else whole(bias)
        return Head(hidden, weight, bias, self.temperature / self.final.scale, self.final.cap)

    def see(self, batch: PackedBatch, device: torch.device) -> Seen | None:
        """Return the images of a batch for `forward`; None for a model that is trained from text.

        Raises:
            RunError: the batch has images and the model does not use them, or they do not fit the batch's tokens.
        """
        if self.vision is None:
            if "patches" in batch.multimodal:
                kind = self.model.config.model_type
                support = "is trained only from text" if is_vlm(self.model.config) else "supports none"
                raise RunError(f"the batch has images, but the model type '{kind}' {support}")
            return None
        return self.vision.see(batch, device, self.model.dtype)

    def _states(self, input_ids: torch.Tensor, layout: Layout, seen: Seen | None) -> torch.Tensor:
        """Return hidden states [T, hidden size] of this rank's tokens in the head's dtype.

        The cast matters for models with a float32 residual stream.
        """
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
        results = {"logprobs": logprobs} if entropy is None else {"logprobs": logprobs, "entropy": entropy}
        if targets.dim() == 1:
            return results
        # Copies: FSDP puts hooks on the outputs of a module, which must not be views.
        return {**results, "logprobs": logprobs[:, 0].clone(), "top_logprobs": logprobs[:, 1:].clone()}

    def _chunk_tokens(self, hidden: torch.Tensor) -> int:
        tokens = self.chunk_tokens or default_chunk_tokens(len(self.head.weight), hidden.device)
        return tokens if self.final.cap is None else max(1, tokens // 2)  # the cap's slope has the size of the logits

    def unpacked(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, FinalLogits]:
        """Compute tokens [B, T] int64 with the model's own forward, eager attention and eager experts.

        The probe compares `forward` with it on a few tokens.

        Returns:
            Logits [B, T, vocabulary] or values [B, T], float32; and the scale and cap of the logits.

        Raises:
            RunError: the model changes its logits in a way that this engine cannot reproduce.
        """
        self.mixers.layout = None
        input_ids = without_image_tokens(self.model.config, input_ids)
        set_attention(self.model, "eager")
        experts_implementation = self.model.get_experts_implementation()
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
                self.model.set_experts_implementation(experts_implementation)


def _scalar_head_name(model: PreTrainedModel) -> str:
    heads = [
        name
        for name, child in model.named_children()
        if child is not body_of(model) and getattr(child, "out_features", 0) == 1
    ]
    if len(heads) != 1:
        raise RunError(
            f"model type {model.config.model_type} must have one linear head with one output to be a critic or reward "
            f"model, but has {heads}"
        )
    return heads[0]


def load_model(
    reference: ModelReference, role: Role, *, compiled: bool = False, in_parts: bool = False, frozen: bool = False
) -> tuple[PreTrainedModel, ModelFiles | None]:
    """Load a model on the CPU, in eval mode, with packed attention.

    A model whose weights change is loaded in float32, because small updates vanish in bfloat16. A frozen model is
    loaded in `reference.dtype`.

    Args:
        reference: the model's path and dtype.
        role: the model's role.
        compiled: True if its layers will be compiled. Then their norms are not replaced: the compiler fuses them.
        in_parts: True to leave parameters in the files until the ranks have sharded them.
        frozen: True if an adapter learns instead of the model.

    Returns:
        The model, and its files if its parameters are still to be read.

    Raises:
        RunError: the model cannot be read, its weights are quantized, or it lacks weights that the role needs.
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
    """Raise RunError if weights are missing. A critic may lack its head, which loading initializes."""
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
    """Return the sizes that determine memory and FLOPs; None for unknown layers."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return Decoder.of(model.config.to_dict(), shapes, scalar=role.head == "scalar")
