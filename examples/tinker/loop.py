"""Train a model with a loop of your own: each character of an answer that is a digit raises the reward.

    areal tinker serve --model MODEL               # in one shell
    TINKER_API_KEY=tml-any python loop.py MODEL    # in another one

The second argument is the learning rate. Set TINKER_BASE_URL if the server is not at http://127.0.0.1:8000.
"""

import os
import sys
from statistics import mean
from typing import Any

import tinker
from tinker import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams

UPDATES, ANSWERS = 20, 32
sampling = SamplingParams(max_tokens=8, temperature=1.0)


def datum(prompt: list[int], answer: SampledSequence, advantage: float) -> Datum:
    """Return an answer with its advantage. Position i of the input predicts token i + 1; the prompt does not count."""
    before = [0.0] * (len(prompt) - 1)
    inputs: dict[str, Any] = {
        "target_tokens": [*prompt[1:], *answer.tokens],
        "logprobs": [*before, *(answer.logprobs or [])],
        "advantages": [*before, *[advantage] * len(answer.tokens)],
    }
    return Datum(model_input=ModelInput.from_ints([*prompt, *answer.tokens[:-1]]), loss_fn_inputs=inputs)


def main(model: str, learning_rate: float = 3e-4) -> None:
    """Make updates, and print the mean reward before each."""
    service = tinker.ServiceClient(base_url=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    client = service.create_lora_training_client(base_model=model, rank=16).result()
    tokenizer = client.get_tokenizer()
    prompt = tokenizer.encode("My phone number is ")
    for step in range(UPDATES):
        sampler = client.save_weights_and_get_sampling_client().result()
        answers = sampler.sample(ModelInput.from_ints(prompt), ANSWERS, sampling).result().sequences
        texts = [tokenizer.decode(answer.tokens) for answer in answers]
        rewards = [mean([character.isdigit() for character in text] or [0]) for text in texts]
        print(f"step {step}  reward {mean(rewards):.3f}  {texts[0]!r}", flush=True)
        advantages = [reward - mean(rewards) for reward in rewards]
        data = [datum(prompt, answer, advantage) for answer, advantage in zip(answers, advantages, strict=True)]
        # Send both before waiting: the server executes the calls of a client in their order.
        gradient = client.forward_backward(data, "importance_sampling")
        update = client.optim_step(AdamParams(learning_rate=learning_rate))
        gradient.result()
        update.result()
    print(client.save_state("trained").result().path)


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
