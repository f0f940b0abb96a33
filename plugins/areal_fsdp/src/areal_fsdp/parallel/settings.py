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
        """Equal for engines whose ranks have the same tokens and the same parameters."""
        return self.context, self.tensor, self.replicas, self.expert

    @property
    def needs_packing(self) -> str:
        """The setting by which ranks divide heads or tokens, which is made for packed attention; empty for none."""
        names = [name for name in ("tensor", "context") if getattr(self, name) > 1]
        return f"train_engine.parallel.{names[0]}" if names else ""

    def problem(self, ranks: int) -> str:
        """What is wrong for so many ranks; empty where nothing is."""
        together = self.context * self.tensor
        data = self.data or max(1, ranks // together)
        if data * together != ranks:
            return (
                f"parallel: data {self.data or 'null'} x context {self.context} x tensor {self.tensor} does not give "
                f"the {ranks} ranks that the trainer has (launcher.trainer_processes)"
            )
        if data % self.replicas:
            return f"parallel.replicas: {self.replicas} does not divide the {data} ranks that share a batch"
        if self.expert > 1 and self.tensor > 1:
            return f"parallel: expert {self.expert} and tensor {self.tensor} do not go together: set one of them to 1"
        if (shards := data // self.replicas * self.context) % self.expert:
            fitting = max(n for n in range(1, self.expert) if not shards % n)
            return (
                f"parallel.expert: {self.expert} does not divide the {shards} ranks that shard parameters (data / "
                f"replicas x context): set it to {fitting}, or change launcher.trainer_processes"
            )
        return ""

    def must_stand_as(self, other: ParallelSettings, why: str) -> None:
        """Two engines have the same share of tokens and parameters on each rank.

        Args:
            other: the other one's.
            why: they must, and who they are.

        Raises:
            RunError: they do not.
        """
        if self.layout != other.layout:
            raise RunError(
                f"{why}, and their ranks stand differently: parallel is {self} and {other}",
                hints=["give both the same parallel, in train_engine and in roles"],
            )

    def experts(self, experts: int) -> int:
        """Of so many experts, 0 for a model without, those that one rank has.

        Raises:
            RunError: they cannot be divided.
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
        """Of a VLM, ranks divide neither sequences nor layers.

        Args:
            kind: its type.

        Raises:
            RunError: they would.
        """
        if self.context > 1 or self.tensor > 1:
            raise RunError(
                f"model type '{kind}' sees images, and is not divided over ranks of context or tensor",
                hints=["set train_engine.parallel to data alone; sequences with images go to one rank each"],
            )

    def heads(self, heads: int, key_heads: int) -> tuple[int, int]:
        """Of so many heads and key heads of attention, those that one rank has.

        Raises:
            RunError: they cannot be divided.
        """
        together, own = self.tensor * self.context, key_heads // self.tensor
        if heads % together or key_heads % self.tensor or (own % self.context and self.context % own):
            raise RunError(
                f"{heads} heads of attention with {key_heads} key heads cannot be divided among tensor {self.tensor} "
                f"x context {self.context} ranks (train_engine.parallel)",
                hints=[
                    "tensor must divide both, tensor x context the heads; and context the key heads that are left to "
                    "a rank of tensor, or these it"
                ],
            )
        return heads // together, max(1, own // self.context)
