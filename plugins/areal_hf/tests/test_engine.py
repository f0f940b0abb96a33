"""Test the fleet with real servers: one for the whole module, and others that are killed."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_core.data import FinishReason
from areal_core.engines import ModelReference, WeightUpdate
from areal_core.errors import RunError
from areal_core.servers import GenerationRequest, SamplingParameters, ServerFleet
from areal_hf.adapter import HFAdapter
from areal_hf.config import HFConfig

pytestmark = pytest.mark.slow


def request(name, input_ids, seed=0, **sampling):
    return GenerationRequest(str(name), input_ids, SamplingParameters(**sampling), seed)


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(loop, model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    fleet = ServerFleet(HFAdapter(HFConfig(device="cpu", max_concurrent_requests=16, max_sequence_length=80)), folder)
    loop.run(fleet.start(ModelReference(str(model_folder))))
    yield fleet
    loop.run(fleet.close())


def with_timeout(awaitable, seconds=240):
    return asyncio.wait_for(awaitable, seconds)


def test_hundreds_of_concurrent_requests_get_their_own_answers(loop, engine, bench, model_folder):
    async def work():
        requests = [request(i, [5 + i % 40] * (1 + i % 13), i, max_new_tokens=1 + i % 9, stop_token_ids=(3,))
                 for i in range(300)]  # fmt: skip
        return requests, await with_timeout(asyncio.gather(*map(engine.generate, requests)))

    requests, answers = loop.run(work())
    runner = bench(model_folder)
    for number, sent in enumerate(requests):
        runner.add(sent.input_ids, sent.seed, max_new_tokens=1 + number % 9, stop_token_ids=(3,))
    expected = runner.run()
    for number, answer in enumerate(answers):
        tokens, logprobs, versions, stopped = expected[number]
        assert (answer.output_ids, answer.versions) == (tokens, versions)
        assert answer.logprobs == pytest.approx(logprobs, abs=1e-5)
        assert answer.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("input_ids", "sampling", "words"),
    [
        ([5] * 60, {"max_new_tokens": 30}, ["90", "80"]),
        ([], {}, ["no input tokens"]),
        ([48], {}, ["token 48", "vocabulary has 48"]),
        ([-1], {}, ["token -1"]),
        ([5], {"top_p": 0.9, "top_k": 3}, ["top_p, top_k"]),
        ([5], {"temperature": 0.0}, ["temperature"]),
        ([5], {"temperature": float("nan")}, ["temperature"]),
        ([5], {"max_new_tokens": 0}, ["max_new_tokens"]),
        ([5], {"max_new_tokens": 4, "min_new_tokens": 5}, ["min_new_tokens"]),
    ],
)
def test_unsupported_requests_are_refused_immediately(loop, engine, input_ids, sampling, words):
    async def work():
        with pytest.raises(ValueError, match=r".") as caught:
            await with_timeout(engine.generate(request("bad", input_ids, **sampling)))
        return str(caught.value)

    message = loop.run(work())
    assert all(word in message for word in words), message
    assert loop.run(with_timeout(engine.generate(request("good", [5], max_new_tokens=3)))).output_ids


def test_cancelled_tasks_free_their_rows(loop, engine):
    async def work():
        tasks = [asyncio.ensure_future(engine.generate(request(i, [5], i, max_new_tokens=79))) for i in range(60)]
        await asyncio.sleep(0)
        tasks[0].cancel()  # before the request is sent
        await asyncio.sleep(0.02)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await with_timeout(engine.generate(request("after", [6], max_new_tokens=1)))
        return tasks

    tasks = loop.run(work())
    assert all(task.cancelled() or task.done() for task in tasks)
    assert sum(task.cancelled() for task in tasks) > 40
    (connection,) = engine._client._connections.values()
    assert not connection._opening.result()._requests


def test_weights_change_under_load_and_refused_weights_do_not(loop, engine, model_folder, other_folder, tmp_path):
    weights = model_folder / "model.safetensors"

    async def work():
        running = [asyncio.ensure_future(engine.generate(request(i, [7, 8], i, max_new_tokens=70))) for i in range(40)]
        for version in range(1, 9):
            await asyncio.sleep(0.005)
            await with_timeout(engine.update_weights(WeightUpdate(version, (other_folder, model_folder)[version % 2])))
            fresh = await with_timeout(engine.generate(request(f"fresh {version}", [9], max_new_tokens=2)))
            assert min(fresh.versions) >= version
        integers = {name: torch.zeros_like(value, dtype=torch.int64) for name, value in load_file(weights).items()}
        save_file(integers, tmp_path / "model.safetensors")
        with pytest.raises(RunError, match=r"did not take over version 9: .* is int64 .*, the model has float32"):
            await with_timeout(engine.update_weights(WeightUpdate(9, tmp_path)))
        return await with_timeout(asyncio.gather(*running)), await with_timeout(
            engine.generate(request("last", [9], max_new_tokens=2))
        )

    answers, last = loop.run(work())
    assert all(sorted(answer.versions) == answer.versions for answer in answers)
    assert max(len(set(answer.versions)) for answer in answers) > 1
    assert last.versions == [8, 8]


def test_a_killed_server_is_started_again_synced_and_answers(model_folder, other_folder, tmp_path):
    async def work():
        engine = ServerFleet(HFAdapter(HFConfig(device="cpu")), tmp_path)
        await engine.start(ModelReference(str(model_folder)))
        await with_timeout(engine.update_weights(WeightUpdate(1, other_folder)))
        child = engine._local.processes["server-0"].pid
        os.kill(child, signal.SIGSTOP)
        tasks = [asyncio.ensure_future(engine.generate(request(i, [5], max_new_tokens=50))) for i in range(5)]
        update = asyncio.ensure_future(engine.update_weights(WeightUpdate(2, model_folder)))
        await asyncio.sleep(0.05)
        os.kill(child, signal.SIGKILL)
        await with_timeout(update)
        answers = await with_timeout(asyncio.gather(*tasks))
        await engine.close()
        await engine.close()
        return child, engine._local.processes["server-0"].pid, answers

    former, later, answers = asyncio.run(work())
    assert former != later
    assert {version for answer in answers for version in answer.versions} == {2}
    transitions = (tmp_path / "servers.jsonl").read_text()
    assert "lost" in transitions
    assert not any(Path(f"/proc/{child}").exists() for child in (former, later))


@pytest.mark.nightly
def test_servers_share_requests_and_continue_after_one_is_killed(model_folder, other_folder, tmp_path):
    async def work():
        engine = ServerFleet(HFAdapter(HFConfig(device="cpu", servers={"minimum": 2, "maximum": 2})), tmp_path)
        await engine.start(ModelReference(str(model_folder)))
        running = [asyncio.ensure_future(engine.generate(request(i, [7, 8], i, max_new_tokens=90))) for i in range(40)]
        await asyncio.sleep(0)
        shares = {name: server.requests for name, server in engine.pool.servers.items()}
        await with_timeout(engine.update_weights(WeightUpdate(1, other_folder)))
        os.kill(engine._local.processes["server-1"].pid, signal.SIGKILL)
        answers = await with_timeout(asyncio.gather(*running))
        everywhere = await with_timeout(engine.generate_everywhere(request("each", [9], max_new_tokens=2)))
        await engine.close()
        return shares, answers, everywhere

    shares, answers, everywhere = asyncio.run(work())
    assert shares == {"server-0": 20, "server-1": 20}
    assert all(len(answer.output_ids) == 90 for answer in answers)
    assert {version for answer in answers for version in answer.versions} <= {0, 1}
    assert all(set(answer.versions) == {1} for answer in everywhere)


def test_the_error_of_a_broken_model_contains_the_servers_message(model_folder, tmp_path):
    async def work():
        shutil.copy(model_folder / "model.safetensors", tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
        engine = ServerFleet(HFAdapter(HFConfig(device="cpu")), tmp_path)
        with pytest.raises(RunError) as caught:
            await with_timeout(engine.start(ModelReference(str(tmp_path))))
        await engine.close()
        assert "nonsense" in str(caught.value)
        assert "exit code 1" in str(caught.value)

    asyncio.run(work())


def test_a_start_that_times_out_leaves_no_process(model_folder, tmp_path):
    async def work():
        engine = ServerFleet(HFAdapter(HFConfig(device="cpu", start_timeout_s=0.2)), tmp_path)
        with pytest.raises(RunError, match=r"0 of 1 servers are ready") as caught:
            await engine.start(ModelReference(str(model_folder)))
        await engine.close()
        assert "start_timeout_s" in caught.value.hints[0]
        return [process.pid for process in engine._local.processes.values()]

    assert not any(Path(f"/proc/{child}").exists() for child in asyncio.run(work()))


PARENT = """
import asyncio, sys
from pathlib import Path
from areal_hf.adapter import HFAdapter
from areal_hf.config import HFConfig
from areal_core.engines import ModelReference
from areal_core.servers import ServerFleet

async def main():
    engine = ServerFleet(HFAdapter(HFConfig(device="cpu")), Path(sys.argv[2]))
    await engine.start(ModelReference(sys.argv[1]))
    print(engine._local.processes["server-0"].pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_server_ends_when_its_parent_is_killed(model_folder, tmp_path):
    command = [sys.executable, "-c", PARENT, str(model_folder), str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert Path(f"/proc/{child}").exists()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 120
    while Path(f"/proc/{child}").exists() and "zombie" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.nightly
def test_deterministic_answers_do_not_depend_on_the_load(model_folder, tmp_path):
    def answers(others_count):
        async def work():
            engine = ServerFleet(HFAdapter(HFConfig(device="cpu", deterministic=True)), tmp_path)
            assert engine.capabilities.deterministic
            await engine.start(ModelReference(str(model_folder)))
            others = [
                engine.generate(request(f"o{i}", [6] * (i + 1), i, max_new_tokens=40)) for i in range(others_count)
            ]
            mine = [engine.generate(request(i, [5, 9, 7], i, max_new_tokens=20)) for i in range(10)]
            generations = await with_timeout(asyncio.gather(*others, *mine))
            await engine.close()
            return [(own.output_ids, own.logprobs, own.versions) for own in generations[others_count:]]

        return asyncio.run(work())

    assert answers(0) == answers(7)
