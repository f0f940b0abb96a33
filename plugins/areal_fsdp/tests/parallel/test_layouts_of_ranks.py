"""Checks of `parallel` before any rank starts."""

import re

import pytest
import torch

from areal_core.errors import RunError
from areal_fsdp.parallel.settings import ParallelSettings


class Mesh:
    """A mesh of which the code under test reads only the size and the rank."""

    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size

    def get_local_rank(self):
        return 0


@pytest.mark.parametrize(
    ("settings", "ranks", "word"),
    [
        ({}, 1, ""),
        ({}, 6, ""),
        ({"tensor": 2}, 6, ""),
        ({"tensor": 2, "context": 2, "data": 2}, 8, ""),
        ({"replicas": 2}, 6, ""),
        ({"tensor": 2}, 3, "does not give the 3 ranks"),
        ({"data": 3}, 4, "does not give the 4 ranks"),
        ({"context": 8}, 4, "does not give the 4 ranks"),
        ({"replicas": 2}, 3, "does not divide the 3 ranks"),
        ({"replicas": 2, "tensor": 4}, 4, "does not divide the 1 ranks"),
        ({"expert": 2}, 4, ""),
        ({"expert": 4, "context": 2, "replicas": 2}, 8, ""),
        ({"expert": 4}, 6, "4 does not divide the 6 ranks that shard parameters .*: set it to 3,"),
        ({"expert": 4, "replicas": 2}, 4, "4 does not divide the 2 ranks .*: set it to 2,"),
        ({"expert": 2, "tensor": 2}, 4, "set one of them to 1"),
    ],
)
def test_degrees_that_do_not_fit_the_number_of_ranks_are_a_problem(settings, ranks, word):
    problem = ParallelSettings.model_validate(settings).problem(ranks)
    assert re.search(word, problem)
    assert bool(word) == bool(problem)


@pytest.mark.parametrize(
    ("tensor", "context", "heads", "key_heads", "wanted"),
    [
        (1, 1, 12, 2, (12, 2)),
        (2, 1, 12, 2, (6, 1)),
        (1, 2, 12, 2, (6, 1)),
        (1, 4, 12, 2, (3, 1)),
        (2, 2, 12, 2, (3, 1)),
        (2, 2, 32, 8, (8, 2)),
    ],
)
def test_heads_of_a_rank(tensor, context, heads, key_heads, wanted):
    settings = ParallelSettings.model_validate({"tensor": tensor, "context": context})
    assert settings.heads(heads, key_heads) == wanted


@pytest.mark.parametrize(
    ("tensor", "context", "heads", "key_heads"), [(4, 1, 12, 2), (1, 8, 12, 2), (1, 3, 12, 2), (1, 4, 24, 6)]
)
def test_heads_that_ranks_do_not_divide_are_refused(tensor, context, heads, key_heads):
    with pytest.raises(RunError, match=f"{heads} heads of attention with {key_heads} key heads"):
        ParallelSettings.model_validate({"tensor": tensor, "context": context}).heads(heads, key_heads)


def test_subclasses_of_linear_and_embedding_are_not_split():
    """Gemma scales its embeddings in a subclass, which the split embedding would replace."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    from areal_fsdp.parallel.tensor import divide_layers, divide_vocabulary

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    model = AutoModelForCausalLM.from_config(
        Gemma3TextConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, layer_types=["full_attention"])
    )
    with pytest.raises(RunError, match="model type gemma3_text has a Gemma3TextScaledWordEmbedding of its own"):
        divide_vocabulary(model, Mesh(2))

    class Scaled(torch.nn.Linear):
        pass

    model.model.layers[0].self_attn.q_proj.__class__ = Scaled
    with pytest.raises(RunError, match="asks for 'colwise' of Scaled in its plan"):
        divide_layers(model, model.model.layers, Mesh(2))


def test_experts_are_divided_or_refused_with_a_hint():
    four = ParallelSettings.model_validate({"expert": 4})
    assert (four.experts(128), ParallelSettings.model_validate({}).experts(0)) == (32, 0)
    with pytest.raises(RunError, match="6 experts cannot be divided among 4 ranks") as caught:
        four.experts(6)
    assert caught.value.hints == ("set train_engine.parallel.expert to 3",)
    with pytest.raises(RunError, match="the model has none"):
        four.experts(0)
