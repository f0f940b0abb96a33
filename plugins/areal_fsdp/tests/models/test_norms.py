import pytest
import torch
from transformers import AutoModel, Gemma2Config, GPT2Config, Qwen3Config

from areal_fsdp.models.norms import _FusedNorm, speed_up_norms


@pytest.mark.parametrize("shape", [(1, 7, 6), (1, 5, 3, 6)])
def test_values_and_gradients(shape):
    torch.manual_seed(0)
    hidden = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: _FusedNorm.apply(x, w, 1e-3), (hidden, weight))
    torch.testing.assert_close(
        _FusedNorm.apply(hidden, weight, 1e-3), torch.nn.functional.rms_norm(hidden, (6,), weight, 1e-3)
    )


def test_only_plain_norms_are_replaced():
    sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    assert speed_up_norms(AutoModel.from_config(Qwen3Config(**sizes, **heads))) == 9
    assert speed_up_norms(AutoModel.from_config(Gemma2Config(**sizes, **heads))) == 0
    assert speed_up_norms(AutoModel.from_config(GPT2Config(vocab_size=11, n_embd=16, n_layer=1, n_head=2))) == 0
