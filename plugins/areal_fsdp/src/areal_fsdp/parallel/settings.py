"""The section `parallel` of a training engine. Imports no torch, so that a config is checked anywhere."""

from __future__ import annotations

from pydantic import Field

from areal_core.config import Settings
from areal_core.errors import RunError


class ParallelSettings(Settings):
    """Degrees of parallelism. The number of ranks is data x context x tensor; expert divides data x context."""

    data: int | None = Field(
        None,
        ge=1,
        description="Data-parallel degree: number of ranks, or groups of ranks, with sequences of their own. null: "
        "all ranks / (context x tensor).",
    )
    replicas: int = Field(
        1,
        ge=1,
        description="Hybrid sharding: number of full copies of the parameters among the data-parallel ranks. Only "
        "gradients cross between copies, so put slow links, such as the network between nodes, there.",
    )
    context: int = Field(
        1,
        ge=1,
        description="Context-parallel degree, for long sequences: number of ranks that share a sequence, each with "
        "a part of its tokens.",
    )
    tensor: int = Field(
        1,
        ge=1,
        description="Tensor-parallel degree: number of ranks that share a layer, each with a part of its matrices.",
    )
    expert: int = Field(
        1,
        ge=1,
        description="Expert-parallel degree for MoE models: number of ranks that share the experts. Tokens are sent "
        "to the experts and back, and fewer ranks shard each expert's parameters. Must divide the number of "
        "sharding ranks, data / replicas x context.",
    )

    @property
    def layout(self) -> tuple[int, ...]:
        """Degrees that determine a rank's tokens and parameters; engines that exchange tensors need equal ones."""
        return self.context, self.tensor, self.replicas, self.expert

    @property
    def needs_packing(self) -> str:
        """Name of a setting that requires packed attention, because ranks divide heads or tokens; empty for none."""
        names = [name for name in ("tensor", "context") if getattr(self, name) > 1]
        return f"train_engine.parallel.{names[0]}" if names else ""

    def problem(self, ranks: int) -> str:
        """Return the problem with these settings for a number of ranks; empty if there is none."""
        ranks_per_sequence = self.context * self.tensor
        data = self.data or max(1, ranks // ranks_per_sequence)
        if data * ranks_per_sequence != ranks:
            return (
                f"parallel: data {self.data or 'null'} x context {self.context} x tensor {self.tensor} does not give "
                f"the {ranks} ranks of the trainer (launcher.trainer_processes)"
            )
        if data % self.replicas:
            return f"parallel.replicas: {self.replicas} does not divide the {data} ranks that share a batch"
        if self.expert > 1 and self.tensor > 1:
            return f"parallel: expert {self.expert} and tensor {self.tensor} cannot be combined: set one of them to 1"
        if (shards := data // self.replicas * self.context) % self.expert:
            fitting = max(n for n in range(1, self.expert) if not shards % n)
            return (
                f"parallel.expert: {self.expert} does not divide the {shards} ranks that shard parameters (data / "
                f"replicas x context): set it to {fitting}, or change launcher.trainer_processes"
            )
        return ""

    def require_same_layout(self, other: ParallelSettings, why: str) -> None:
        """Check that two engines have the same tokens and parameters on each rank.

        Args:
            other: settings of the other engine.
            why: names both roles, and why they must match; begins the error.

        Raises:
            RunError: their layouts differ.
        """
        if self.layout != other.layout:
            raise RunError(
                f"{why}, but their ranks are arranged differently: parallel is {self} and {other}",
                hints=["set the same parallel for both, in train_engine and in roles"],
            )

    def experts(self, experts: int) -> int:
        """Return the number of experts on one rank.

        Args:
            experts: experts of a layer; 0 for a model that is no MoE.

        Raises:
            RunError: the ranks do not divide the experts.
        """
        if self.expert == 1:
            return experts
        if not experts:
            raise RunError(
                f"train_engine.parallel.expert {self.expert} divides the experts of MoE models, and the model has none",
                hints=["set train_engine.parallel.expert to 1"],
            )
        if experts % self.expert:
            fitting = max(n for n in range(1, self.expert) if not experts % n)
            raise RunError(
                f"the model's {experts} experts cannot be divided among {self.expert} ranks "
                "(train_engine.parallel.expert)",
                hints=[f"set train_engine.parallel.expert to {fitting}"],
            )
        return experts // self.expert

    def refuse_images(self, kind: str) -> None:
        """Refuse context and tensor parallelism for a VLM.

        Args:
            kind: the model's type, for the message.

        Raises:
            RunError: context or tensor is greater than 1.
        """
        if self.context > 1 or self.tensor > 1:
            raise RunError(
                f"model type '{kind}' sees images, and VLMs support neither context nor tensor parallelism",
                hints=["set train_engine.parallel.context and .tensor to 1; each sequence with images has one rank"],
            )

    def heads(self, heads: int, key_heads: int) -> tuple[int, int]:
        """Return the numbers of attention heads and key heads on one rank.

        Raises:
            RunError: the ranks do not divide the heads.
        """
        together, key_heads_per_rank = self.tensor * self.context, key_heads // self.tensor
        if (
            heads % together
            or key_heads % self.tensor
            or (key_heads_per_rank % self.context and self.context % key_heads_per_rank)
        ):
            raise RunError(
                f"{heads} heads of attention with {key_heads} key heads cannot be divided among tensor {self.tensor} "
                f"x context {self.context} ranks (train_engine.parallel)",
                hints=[
                    "tensor x context must divide the heads, and tensor the key heads; of context and key heads / "
                    "tensor, one must divide the other"
                ],
            )
        return heads // together, max(1, key_heads_per_rank // self.context)
