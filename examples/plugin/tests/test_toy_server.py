"""What the toy server refuses, and that it gets the run's key."""

import json
import threading
from http.server import ThreadingHTTPServer
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from areal_core.engines import ModelReference
from areal_testing.conformance import make_model
from safetensors.torch import load_file, save_file

from areal_example.inference_engines import ToyAdapter, ToyConfig
from areal_example.toy_server import Handler, Model


@pytest.fixture
def post(tmp_path):
    """Return a function that sends a request to a server with the key `secret`, and returns the status."""
    make_model(tmp_path / "model")
    served = type("Served", (Handler,), {"model": Model(str(tmp_path / "model")), "key": "secret"})
    with ThreadingHTTPServer(("127.0.0.1", 0), served) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def send(path, key="secret", **body):
            url, headers = f"http://127.0.0.1:{server.server_port}{path}", {"Authorization": f"Bearer {key}"}
            try:
                with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=60) as reply:
                    return reply.status
            except HTTPError as error:
                return error.code

        send.model = served.model
        yield send
        server.shutdown()


def test_a_wrong_key_is_refused(post):
    assert [post("/pause", key="guess"), post("/generate", key=""), post("/pause")] == [401, 401, 200]
    assert post.model.is_paused


def test_foreign_weights_are_refused_and_change_nothing(post, tmp_path):
    weights = load_file(tmp_path / "model/model.safetensors")
    name = next(iter(weights))
    before = post.model.model.state_dict()[name].clone()
    for version, changed in enumerate(({**weights, "stranger": torch.zeros(1)}, {name: torch.zeros(1)})):
        folder = tmp_path / f"version-{version}"
        folder.mkdir()
        save_file(changed, folder / "model.safetensors")
        assert post("/load", folder=str(folder), label="1") == 400
    assert post.model.label == "0"
    assert torch.equal(post.model.model.state_dict()[name], before)
    assert post("/load", folder=str(tmp_path / "model"), label="1") == 200
    assert post.model.label == "1"


def test_a_server_gets_the_key_of_the_run(tmp_path):
    settings = ToyConfig().with_key(tmp_path, "10.0.0.5")
    command = ToyAdapter(settings).command(ModelReference("model"), "10.0.0.5", 8000, tmp_path)
    assert command.environment["TOY_API_KEY"] == settings.key != ""
    assert settings.key not in " ".join(command.arguments)
