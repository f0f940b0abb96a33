"""The section `parallel` of a training engine. Imports no torch, so that a config is checked anywhere."""

from __future__ import annotations

from pydantic import Field

from areal_core.config import Settings
from areal_core.errors import RunError


class ParallelSettings(Settings):
    """How ranks divide the work; their number is data x context x tensor."""

    data: int | None = Field(
        None, ge=1, description="ranks, or groups of them, with sequences of their own; null: as many as there can be"
    )
    replicas: int = Field(
        1,
        ge=1,
        description="of these, how many times parameters are kept whole (hybrid sharding); what is between two such "
        "groups, as the network of two nodes, carries gradients only",
    )
    context: int = Field(
        1, ge=1, description="ranks that have a sequence together, for long ones: each has a share of its tokens"
    )
    tensor: int = Field(1, ge=1, description="ranks that have a layer together: each has a share of its matrices")

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
        return ""

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
