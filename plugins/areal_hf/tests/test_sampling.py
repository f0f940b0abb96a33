import pytest
import torch

from areal_hf.sampling import draw, signed_seed, uniform


def test_uniform_numbers_match_a_plain_splitmix64():
    def mixed(state):
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        return state ^ (state >> 31)

    gamma = 0x9E3779B97F4A7C15
    seeds = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 123456789, -5]
    positions = [0, 1, 2, 1000, 5, 7, 2**40]
    values = uniform(torch.tensor([signed_seed(s) for s in seeds]), torch.tensor(positions))
    for value, seed, position in zip(values.tolist(), seeds, positions, strict=True):
        state = mixed((mixed((seed + gamma) % 2**64) + (position + 1) * gamma) % 2**64)
        assert value == (state >> 11) / 2**53
        assert 0 <= value < 1


def test_neighboring_seeds_and_positions_are_unrelated():
    grid = uniform(torch.arange(400).repeat_interleave(400), torch.arange(400).repeat(400)).view(400, 400)
    assert abs(float(grid.mean()) - 0.5) < 0.005
    for values, neighbors in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])):
        assert abs(float(torch.corrcoef(torch.stack((values.flatten(), neighbors.flatten())))[0, 1])) < 0.01
    histogram = torch.histc(grid.float(), 16, 0, 1) / grid.numel()
    assert (histogram - 1 / 16).abs().max() < 0.002


def test_frequencies_are_those_of_the_tempered_distribution():
    torch.manual_seed(0)
    logits = torch.randn(1, 20) * 2
    count = 200_000
    for temperature in (0.5, 1.0, 2.0):
        tokens, logprobs, *_ = draw(
            logits.expand(count, -1),
            torch.full((count, 1), temperature),
            uniform(torch.arange(count), torch.ones(count).long()),
        )
        expected = torch.softmax(logits[0] / temperature, -1)
        actual = torch.bincount(tokens, minlength=20) / count
        assert (actual - expected).abs().max() < 0.005
        torch.testing.assert_close(logprobs, expected.log()[tokens])


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_forbidden_and_impossible_tokens_are_never_drawn(number):
    logits = torch.tensor([[0.0, 1.0, 2.0, -float("inf")], [5.0, 1.0, 0.0, 3.0]])
    forbidden = torch.tensor([[True, False, False, False], [True, False, False, True]])
    numbers = torch.tensor([number, number], dtype=torch.float64)
    tokens, logprobs, *_ = draw(logits, torch.ones(2, 1), numbers, forbidden=forbidden)
    assert set(tokens.tolist()) <= {1, 2}
    full = torch.log_softmax(logits, -1)
    torch.testing.assert_close(logprobs, full.gather(1, tokens[:, None])[:, 0])
    greedy, *_ = draw(logits, torch.ones(2, 1), numbers, greedy=torch.tensor([True, True]), forbidden=forbidden)
    assert greedy.tolist() == [2, 1]
