"""The engine of served models against true SGLang and vLLM servers."""

import os
import subprocess
import time
import urllib.request
from contextlib import suppress

import pytest
import torch

from areal_core.config import select
from areal_core.data import PackedBatch, Ragged, shift_to_predictions
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.processes import free_port, kill_tree
from areal_core.sdk import REFERENCE
from areal_finetuning.config import TEACHER
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig
from areal_testing.conformance import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SETTINGS = OptimizerSettings(10, 1.0)


def check(address, protocol, folder, tolerance):
    """Compare the scores of a server with those of the fsdp engine, and check that a refusal names the server."""
    generator = torch.Generator().manual_seed(0)
    # Without the last id of the vocabulary, 60: SGLang 0.5.23 reports token 0 in its place, which is refused.
    tokens = {"input_ids": torch.randint(50, (46,), generator=generator), "loss_mask": torch.ones(46, dtype=torch.bool)}
    batch = shift_to_predictions(PackedBatch(Ragged(torch.tensor([4, 1, 39, 2]), tokens)))
    own = select("train_engines", {"type": "fsdp/fsdp"}).build()
    own.setup(ModelReference(str(folder), "float32"), REFERENCE, SETTINGS)
    wanted = own.forward(batch, ["logprobs"])["logprobs"]
    own.close()
    settings = {"type": "finetuning/served", "addresses": [address], "protocol": protocol}
    engine = select("train_engines", settings).build()
    engine.setup(ModelReference("nowhere"), TEACHER, SETTINGS)
    found = engine.forward(batch, ["logprobs"])["logprobs"]
    inside = batch["loss_mask"]
    assert float((found[inside] - wanted[inside]).abs().max()) < tolerance


def test_sglang_scores_tokens(
    server_of_each_shape, sglang_program, sglang_options, server_environment, server_tolerance, tmp_path
):
    settings = SGLangConfig(program=sglang_program, options=sglang_options, environment=server_environment)
    folder = make_model(tmp_path / "qwen3")
    check(server_of_each_shape(SGLangAdapter(settings))(folder), "sglang", folder, server_tolerance)


def test_vllm_scores_tokens(vllm_program, server_environment, server_tolerance, tmp_path):
    """A server that somebody else has started, with a tokenizer: the ones that areal starts for a policy have none."""
    from areal_grpo.demonstration.model import make_model as make_demonstration

    folder, port = make_demonstration(tmp_path / "model"), free_port()
    options = ["--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "8", "--enforce-eager"]
    words = [*vllm_program, "--model", str(folder), "--host", "127.0.0.1", "--port", str(port), *options]
    log = tmp_path / "vllm.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            words, env={**os.environ, **server_environment}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert server.poll() is None, log.read_text()[-3000:]
            with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            time.sleep(0.5)
        check(address, "openai", folder, server_tolerance)
    finally:
        kill_tree(server.pid)
        server.wait()
