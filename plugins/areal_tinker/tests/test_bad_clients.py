"""Clients that do what they should not: each gets an error that it can read, and others lose nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

import pytest
import tinker
from tinker import types
from tinker_server import IDS, TinkerServer, adam, datum

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory, tinker_model):
    server = TinkerServer(
        tmp_path_factory.mktemp("server"), tinker_model, "--full", "--name", "tiny", AREAL_TINKER_KEY="tml-secret"
    ).start()
    yield server
    server.stop()


@pytest.fixture
def service(server):
    return server.connect("tml-secret")


@pytest.fixture
def client(service):
    return service.create_lora_training_client(base_model="tiny").result()


def still_works(client):
    """The model of a client learns as before."""
    result = client.forward_backward([datum()], "cross_entropy")
    client.optim_step(adam()).result()
    assert result.result().metrics["loss:sum"] > 0


@pytest.mark.parametrize(
    ("data", "loss", "settings", "message"),
    [
        ([datum([5, 6, 9999])], "cross_entropy", None, r"data\[0\].model_input has the token|has the token 9999"),
        ([datum([5, 6, -1])], "cross_entropy", None, "has the token -1"),
        ([datum(list(IDS) * 600)], "cross_entropy", None, "tokens, and the model's limit is"),
        ([datum(weights=[1.0, 2.0])], "cross_entropy", None, "has 2 values for 7 tokens"),
        ([datum(weights=[float("nan")] * 7)], "cross_entropy", None, "a value that is not finite"),
        ([datum()], "ppo", None, "lacks advantages, logprobs"),
        ([datum()], "stable_reinforce", None, "formula is not published|needs provenance"),
        ([datum(advantages=[1.0] * 7, logprobs=[0.0] * 7)], "ppo", {"epsilon": 0.2}, "no setting epsilon"),
        (
            [datum(advantages=[1.0] * 7, logprobs=[0.0] * 7)],
            "ppo",
            {"clip_low_threshold": 1.5, "clip_high_threshold": 0.5},
            "clip_low_threshold 1.5 above clip_high_threshold 0.5",
        ),
        ([datum(), datum(advantages=[1.0] * 7, weights=[1.0] * 7)], "cross_entropy", None, "the same names"),
    ],
)
def test_wrong_data_fails_its_call_alone(client, data, loss, settings, message):
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError, ValueError), match=message):
        client.forward_backward(data, loss, loss_fn_config=settings).result()
    still_works(client)


def test_a_step_without_a_pass_and_a_checkpoint_that_is_not_there(client):
    with pytest.raises(tinker.RequestFailedError, match="optim_step needs a forward_backward"):
        client.optim_step(adam()).result()
    with pytest.raises(tinker.RequestFailedError, match=r"a checkpoint cannot be called '\.\./\.\./x'"):
        client.save_state("../../x").result()
    still_works(client)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"top_p": 2.0}, "top_p"),
        ({"top_k": -5}, "top_k -5"),
        ({"stop": [""]}, "an empty text"),
        ({"stop": [100000]}, "a token that the model does not have"),
    ],
)
def test_wrong_sampling_settings_are_refused(service, settings, message):
    sampler = service.create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints(IDS)
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError), match=message):
        sampler.sample(prompt, 1, types.SamplingParams(**{"max_tokens": 4, **settings})).result()
    assert sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4)).result().sequences


def test_a_request_that_is_invalid_takes_its_number(server, client):
    """The SDK sends NaN as null, and counts the call."""
    client.forward_backward([datum()], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="learning_rate: Input should be a valid number"):
        client.optim_step(adam(float("nan"))).result()
    for ttl_s in (0, 10**18):
        with pytest.raises(tinker.RequestFailedError, match="ttl_seconds is"):
            client.save_state("short", ttl_seconds=ttl_s).result()
    still_works(client)


def test_other_models_and_keys_are_refused(server, service):
    with pytest.raises(tinker.NotFoundError, match="this server has no model 'large'; it has 'tiny'"):
        service.create_lora_training_client(base_model="large").result()
    stranger = server.connect("tml-guess")
    with pytest.raises(tinker.AuthenticationError, match="the key is wrong: set TINKER_API_KEY"):
        stranger.create_sampling_client(base_model="tiny").result()


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("create_model", b"{", 400, "the body is not JSON"),
        ("create_model", [], 400, "not a JSON object"),
        ("create_model", {}, 422, "session_id: Field required"),
        ("create_model", {"session_id": "x", "model_seq_id": 0, "base_model": "tiny"}, 410, "there is no session x"),
        ("session_heartbeat", {"session_id": "x"}, 410, "there is no session x"),
        ("optim_step", {"model_id": "x", "seq_id": 1, "adam_params": {}}, 404, "there is no model x"),
        ("forward_backward", {"model_id": "x"}, 415, "application/x-protobuf"),
        ("retrieve_future", {"request_id": "nothing"}, 404, "there is no request nothing"),
        ("retrieve_future", {"request_id": "sample:gone"}, 410, "lost with a restart"),
        ("no_such_path", {}, 404, "Not Found"),
    ],
)
def test_requests_that_no_sdk_sends(server, path, body, status, message):
    found, answer = server.post(path, body, **{"X-API-Key": "tml-secret"})
    assert (found, message in answer["detail"]) == (status, True), answer


def test_a_broken_protobuf_and_a_huge_body(server, client):
    form = {"X-API-Key": "tml-secret", "Content-Type": "application/x-protobuf"}
    assert server.post("forward_backward", b"\xff" * 100, **form)[0] == 400
    still_works(client)


def test_a_number_that_was_used_for_something_else_is_refused(server, client):
    client.forward_backward([datum()], "cross_entropy").result()
    body = {"model_id": client.model_id, "seq_id": 1, "adam_params": {}}
    status, answer = server.post("optim_step", body, **{"X-API-Key": "tml-secret"})
    assert (status, "was used for another request, forward_backward" in answer["detail"]) == (400, True)
    client.optim_step(adam()).result()


def test_a_sampler_that_is_asked_for_again_is_the_same_sampler(server, client):
    """The SDK sends the call again if its answer was lost, with a new number of the sampling session."""
    client.forward_backward([datum()], "cross_entropy").result()
    client.optim_step(adam()).result()
    key, found = {"X-API-Key": "tml-secret"}, []
    for attempt in (700, 701):
        body = {"model_id": client.model_id, "seq_id": 3, "sampling_session_seq_id": attempt}
        status, answer = server.post("save_weights_for_sampler", body, **key)
        assert status == 200, answer
        found.append(server.post("retrieve_future", {"request_id": answer["request_id"]}, **key)[1])
    assert found[0] == found[1]
    assert found[0]["sampling_session_id"].endswith(":sample:700")
    body = {"model_id": client.model_id, "seq_id": 3, "sampling_session_seq_id": 702, "ttl_seconds": 60}
    assert server.post("save_weights_for_sampler", body, **key)[0] == 400


def test_a_call_that_comes_too_early_waits_for_those_before_it(server, client):
    """A client sends its third call first, and goes away. Others are served in the meantime."""
    body = {"model_id": client.model_id, "seq_id": 3, "adam_params": {}}
    status, answer = server.post("optim_step", body, **{"X-API-Key": "tml-secret"})
    assert status == 200
    other = server.connect("tml-secret")
    still_works(other.create_lora_training_client(base_model="tiny").result())
    client.forward_backward([datum()], "cross_entropy").result()
    client.forward_backward([datum()], "cross_entropy").result()
    _, result = server.post("retrieve_future", {"request_id": answer["request_id"]}, **{"X-API-Key": "tml-secret"})
    assert result["metrics"]["grad_norm"] > 0


def test_connections_that_end_in_the_middle(server, client):
    head = "POST /api/v1/forward_backward HTTP/1.1\r\nHost: a\r\nX-API-Key: tml-secret\r\n"
    head += "Content-Length: 100000\r\n\r\n"
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + b"half of it")
    still_works(client)


def test_many_clients_at_once(server):
    """Each has a model and a sampler of its own."""
    failures = []

    def work(number):
        try:
            service = server.connect("tml-secret")
            client = service.create_lora_training_client(base_model="tiny").result()
            for _ in range(2):
                still_works(client)
                sampler = client.save_weights_and_get_sampling_client().result()
                assert sampler.sample(types.ModelInput.from_ints(IDS), 2, types.SamplingParams(max_tokens=3)).result()
        except Exception as error:  # noqa: BLE001 - an exception of a thread would be lost
            failures.append((number, error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_server_for_others_needs_a_key(tmp_path, tinker_model):
    words = ["tinker", "serve", "--plugins", "hf", "--model", str(tinker_model), "--host", "0.0.0.0"]
    command = [sys.executable, "-m", "areal_core", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "can be reached by others, and has no key" in done.stderr
    assert not list(tmp_path.iterdir()), "nothing is written"
