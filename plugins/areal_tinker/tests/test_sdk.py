"""The official SDK against a server."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import tinker
import torch
from tinker import types
from tinker_server import IDS, TinkerServer, adam, datum
from transformers import AutoModelForCausalLM

from areal_tinker.losses import LOSSES, Terms, total

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROMPT = types.ModelInput.from_ints(IDS[:4])


@pytest.fixture(scope="module")
def server(tmp_path_factory, tinker_model):
    server = TinkerServer(tmp_path_factory.mktemp("server"), tinker_model, "--full", "--name", "tiny").start()
    yield server
    assert server.stop() == 130, server.log()


@pytest.fixture
def service(server):
    return server.connect()


def train(client, data, loss="cross_entropy", rate=1e-2, **settings):
    """Make one update. Return the log-probabilities before it, of each datum."""
    result = client.forward_backward(data, loss, loss_fn_config=settings or None)
    client.optim_step(adam(rate)).result()
    return [output["logprobs"].to_torch() for output in result.result().loss_fn_outputs]


def test_steps_are_those_of_transformers_and_torch(service, tinker_model):
    """Values, gradients and AdamW with the client's settings, over several steps with two passes each."""
    client = service.create_lora_training_client(base_model="tiny").result()
    model = AutoModelForCausalLM.from_pretrained(tinker_model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0)
    others = [[7, 3, 9, 9, 4], [11, 5, 6]]
    for rate, clip in ((1e-2, 0.0), (3e-3, 0.5), (1e-2, 0.1)):
        sampled = [-1.5 - 0.1 * n for n in range(7)]
        advantages = [0.5, -1.0, 1.0, 0.0, 2.0, -0.5, 1.5]
        first = client.forward_backward([datum(ids) for ids in others], "cross_entropy")
        second = client.forward_backward([datum(logprobs=sampled, advantages=advantages)], "ppo")
        step = client.optim_step(
            types.AdamParams(learning_rate=rate, beta1=0.8, beta2=0.9, eps=1e-6, grad_clip_norm=clip)
        )
        losses = []
        for ids in others:
            losses.append(-logprobs_of(model, ids).sum())
        inputs = {"logprobs": torch.tensor(sampled), "advantages": torch.tensor(advantages)}
        terms = Terms(logprobs_of(model, IDS), inputs, {}, torch.zeros(7, dtype=torch.int64), 1)
        policy = total(LOSSES["ppo"], terms)
        assert first.result().metrics["loss:sum"] == pytest.approx(float(sum(losses)), abs=1e-4)
        assert second.result().metrics["loss:sum"] == pytest.approx(float(policy), abs=1e-4)
        (sum(losses) + policy).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        assert step.result().metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    found = client.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    torch.testing.assert_close(found, logprobs_of(model, IDS).detach(), atol=1e-4, rtol=0)


def logprobs_of(model, ids):
    tokens = torch.tensor([ids])
    return model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


def test_two_ranks_train_as_one(tmp_path, tinker_model, service):
    """An adapter and checkpoints included."""
    words = ["launcher.trainer_processes=2", "train_engine.parallel.data=2", "--name", "tiny"]
    (tmp_path / "one").mkdir()
    other = TinkerServer(tmp_path, tinker_model, *words).start()
    one = TinkerServer(tmp_path / "one", tinker_model, "--name", "tiny").start()
    try:
        found = []
        for server in (other, one):
            client = server.connect().create_lora_training_client(base_model="tiny", rank=4, seed=3)
            client = client.result()
            data = [datum(), datum([7, 3, 9]), datum([4, 8, 15, 16, 23, 42])]
            seen = [train(client, data) for _ in range(3)]
            saved = client.save_state("a").result().path
            train(client, data)
            client.load_state_with_optimizer(saved).result()
            sampler = client.save_weights_and_get_sampling_client().result()
            logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(IDS)).result()[1:]
            assert logprobs == pytest.approx(train(client, data)[0].tolist(), abs=1e-5)
            found.append(torch.cat([each for step in seen for each in step]))
        torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=0)
    finally:
        other.stop()
        one.stop()


def test_samplers_have_the_weights_that_were_saved_for_them(service):
    """An older sampler, a newer one and the base model are asked at the same time."""
    client = service.create_lora_training_client(base_model="tiny").result()
    data = [datum()]
    samplers = [service.create_sampling_client(base_model="tiny").result()]
    wanted = [train(client, data)[0]]
    for _ in range(2):
        samplers.append(client.save_weights_and_get_sampling_client().result())
        wanted.append(train(client, data)[0])
    asked = [sampler.compute_logprobs(types.ModelInput.from_ints(IDS)) for _ in range(3) for sampler in samplers]
    for number, answer in enumerate(asked):
        logprobs = answer.result()
        assert logprobs[0] is None
        assert logprobs[1:] == pytest.approx(wanted[number % 3].tolist(), abs=1e-5)


def test_samples_have_the_log_probabilities_of_the_trainer(service):
    client = service.create_lora_training_client(base_model="tiny").result()
    train(client, [datum()])
    sampler = client.save_weights_and_get_sampling_client().result()
    settings = types.SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    answer = sampler.sample(PROMPT, num_samples=3, sampling_params=settings, topk_sample_logprobs=2).result()
    assert len({tuple(sequence.tokens) for sequence in answer.sequences}) > 1
    for sequence in answer.sequences:
        whole = [*IDS[:4], *sequence.tokens]
        found = client.forward([datum(whole)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
        torch.testing.assert_close(torch.tensor(sequence.logprobs), found[3:], atol=1e-5, rtol=0)
        assert sequence.stop_reason == ("length" if len(sequence.tokens) == 12 else "stop")
        assert len(sequence.topk_logprobs) == len(sequence.tokens)
    again = sampler.sample(PROMPT, num_samples=3, sampling_params=settings).result()
    assert [sequence.tokens for sequence in again.sequences] == [sequence.tokens for sequence in answer.sequences]


def test_sampling_settings_and_ends(service, tinker_model):
    sampler = service.create_sampling_client(base_model="tiny").result()
    greedy = [
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=9, temperature=0.0, stop=[])).result().sequences[0]
        for _ in range(2)
    ]
    assert greedy[0].tokens == greedy[1].tokens
    assert len(greedy[0].tokens) == 9
    end = greedy[0].tokens[2]
    count = greedy[0].tokens.index(end) + 1
    cut = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=9, temperature=0.0, stop=[end])).result()
    assert (cut.sequences[0].tokens, cut.sequences[0].stop_reason) == (greedy[0].tokens[:count], "stop")


def test_checkpoints_are_saved_loaded_listed_and_deleted(server, service):
    client = service.create_lora_training_client(base_model="tiny", user_metadata={"purpose": "test"}).result()
    data = [datum()]
    for _ in range(2):
        train(client, data)
    saved = client.save_state("before").result().path
    named = client.save_weights_for_sampler("named").result().path
    wanted = [train(client, data)[0] for _ in range(3)]
    resumed = service.create_training_client_from_state_with_optimizer(saved).result()
    assert [train(resumed, data)[0].tolist() for _ in range(3)] == [each.tolist() for each in wanted]
    fresh = service.create_training_client_from_state(saved).result()
    found = [train(fresh, data)[0] for _ in range(2)]
    assert found[0].tolist() == wanted[0].tolist()
    assert found[1].tolist() != wanted[1].tolist(), "the moments are new"
    rest = tinker.RestClient(base_url=server.url, api_key="tml-test")
    runs = {run.training_run_id: run for run in rest.list_training_runs().result().training_runs}
    assert runs[client.model_id].user_metadata == {"purpose": "test"}
    assert runs[client.model_id].last_checkpoint.tinker_path == saved
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert {each.tinker_path for each in listed} == {saved, named}
    sampler = service.create_sampling_client(model_path=named).result()
    assert sampler.compute_logprobs(types.ModelInput.from_ints(IDS)).result()[1:] == pytest.approx(
        wanted[0].tolist(), abs=1e-5
    )
    rest.delete_checkpoint_from_tinker_path(named).result()
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        service.create_sampling_client(model_path=named).result()
    assert [each.tinker_path for each in rest.list_checkpoints(client.model_id).result().checkpoints] == [saved]


def test_a_checkpoint_that_is_replaced_or_deleted_after_its_load_changes_nothing(start_server):
    """The state of a model is that at its load, when it is brought back after a switch or a restart."""
    server = start_server("--full")
    service = server.connect()
    client = service.create_lora_training_client(base_model=server.model).result()
    train(client, [datum()])
    path = client.save_state("latest").result().path
    train(client, [datum()])
    client.load_state_with_optimizer(path).result()
    train(client, [datum()])
    assert client.save_state("latest").result().path == path
    wanted = client.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    tinker.RestClient(base_url=server.url, api_key="tml-test").delete_checkpoint_from_tinker_path(path).result()
    server.kill()
    server.start()
    assert client.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist() == wanted
    other = service.create_lora_training_client(base_model=server.model).result()
    train(other, [datum()])
    assert client.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist() == wanted


def test_a_sampler_of_a_name_that_is_used_again_has_the_new_weights(service):
    client = service.create_lora_training_client(base_model="tiny").result()
    tokens = types.ModelInput.from_ints(IDS)
    for _ in range(2):
        path = client.save_weights_for_sampler("latest").result().path
        found = service.create_sampling_client(model_path=path).result().compute_logprobs(tokens).result()[1:]
        assert found == pytest.approx(train(client, [datum()])[0].tolist(), abs=1e-5)


def test_a_refused_client_leaves_the_model_of_another_as_it_is(start_server):
    server = start_server()
    service = server.connect()
    client = service.create_lora_training_client(base_model=server.model, rank=4).result()
    first = train(client, [datum()])[0]
    with pytest.raises(tinker.RequestFailedError, match="train_attn or train_mlp"):
        service.create_lora_training_client(base_model=server.model, rank=4, train_attn=False, train_mlp=False).result()
    with pytest.raises(tinker.RequestFailedError, match="lora_config: rank"):
        service.create_lora_training_client(base_model=server.model, rank=0).result()
    assert train(client, [datum()])[0].tolist() != first.tolist()
    saved = client.save_state("rank-4").result().path
    other = service.create_lora_training_client(base_model=server.model, rank=2).result()
    with pytest.raises(tinker.RequestFailedError, match="another adapter than the model: rank differs"):
        other.load_state(saved).result()
    with pytest.raises(tinker.RequestFailedError, match="names that begin with unnamed- are the server's"):
        client.save_state("unnamed-best").result()


def test_a_learning_rate_of_0_moves_nothing_and_settings_out_of_range_are_refused(service):
    client = service.create_lora_training_client(base_model="tiny").result()
    first = train(client, [datum()], rate=0.0)[0].tolist()
    for settings in ({"beta1": 1.0}, {"eps": 0.0}, {"learning_rate": -1.0}, {"weight_decay": -0.1}):
        client.forward_backward([datum()], "cross_entropy")
        with pytest.raises(tinker.RequestFailedError, match="adam_params"):
            client.optim_step(types.AdamParams(**settings)).result()
    assert train(client, [datum()])[0].tolist() == first


def test_two_models_take_turns_and_do_not_mix(service):
    """Their calls are interleaved, passes and steps."""
    clients = [service.create_lora_training_client(base_model="tiny").result() for _ in range(2)]
    data = [[datum()], [datum([4, 8, 15, 16, 23, 42])]]
    alone = service.create_lora_training_client(base_model="tiny").result()
    wanted = [train(alone, data[0])[0].tolist() for _ in range(4)]
    found = [[], []]
    for _ in range(4):
        passes = [client.forward_backward(own, "cross_entropy") for client, own in zip(clients, data, strict=True)]
        steps = [client.optim_step(adam()) for client in clients]
        for number, result in enumerate(passes):
            found[number].append(result.result().loss_fn_outputs[0]["logprobs"].tolist())
            steps[number].result()
    assert found[0] == wanted
    alone = service.create_lora_training_client(base_model="tiny").result()
    assert found[1] == [train(alone, data[1])[0].tolist() for _ in range(4)]


def test_a_client_that_finishes_leaves_its_named_checkpoints_alone(server):
    service = server.connect()
    client = service.create_lora_training_client(base_model="tiny").result()
    train(client, [datum()])
    saved, model = client.save_state("kept").result().path, client.model_id
    client.save_weights_and_get_sampling_client().result()
    session = model.partition(":")[0]
    assert server.post(f"sessions/{session}/finish", {})[0] == 200
    assert server.post("session_heartbeat", {"session_id": session})[0] == 410
    rest = tinker.RestClient(base_url=server.url, api_key="tml-test")
    assert [each.tinker_path for each in rest.list_checkpoints(model).result().checkpoints] == [saved]
    other = server.connect()
    train(other.create_training_client_from_state(saved).result(), [datum()])


def test_a_call_that_ends_the_server_each_time_fails_in_the_end(start_server, tmp_path):
    """An unexpected error, as if memory were too small for a step."""
    (tmp_path / "site").mkdir()
    source = "import sys\nsys.path.insert(0, {!r})\nimport killed_at\nsys.meta_path.insert(0, killed_at.Hook(True))\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(source.format(str(Path(__file__).parent)))
    server = start_server(PYTHONPATH=os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    service = server.connect()
    client = service.create_lora_training_client(base_model=server.model, rank=4).result()
    first = train(client, [datum()], rate=1e-2)[0].tolist()
    client.forward_backward([datum()], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="has ended the server 3 times: MemoryError: too large"):
        client.optim_step(adam(77.0)).result()
    assert train(client, [datum()])[0].tolist() != first, "the step before has happened, and the model continues"


def test_a_custom_loss_of_the_client(service):
    client = service.create_lora_training_client(base_model="tiny").result()
    reference = service.create_lora_training_client(base_model="tiny").result()

    def mine(data, logprobs):
        loss = -sum(each.sum() for each in logprobs)
        return loss, {"tokens": float(sum(map(len, logprobs)))}

    result = client.forward_backward_custom([datum()], mine)
    client.optim_step(adam()).result()
    assert result.result().metrics["tokens"] == 7
    train(reference, [datum()])
    losses = [each.forward([datum()], "cross_entropy").result().metrics["loss:sum"] for each in (client, reference)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
