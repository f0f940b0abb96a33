"""The engine as a run uses it: one generating process for the whole module, and others where one has to die."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_core.data import FinishReason
from areal_core.errors import RunError
from areal_core.interfaces import GenerationRequest, ModelReference, SamplingParameters, WeightUpdate
from areal_hf.config import HFConfig
from areal_hf.engine import HFEngine

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
    made = HFEngine(HFConfig(device="cpu", max_concurrent_requests=16, max_sequence_length=80), log_dir=folder)
    loop.run(made.start(ModelReference(str(model_folder))))
    yield made
    loop.run(made.close())


def within(awaitable, seconds=240):
    return asyncio.wait_for(awaitable, seconds)


def test_hundreds_of_requests_at_once_are_answered_each_with_its_own(loop, engine, bench, model_folder):
    async def work():
        asked = [request(i, [5 + i % 40] * (1 + i % 13), i, max_new_tokens=1 + i % 9, stop_token_ids=(3,))
                 for i in range(300)]  # fmt: skip
        return asked, await within(asyncio.gather(*map(engine.generate, asked)))

    asked, answers = loop.run(work())
    here = bench(model_folder)
    for number, question in enumerate(asked):
        here.add(question.input_ids, question.seed, max_new_tokens=1 + number % 9, stop_token_ids=(3,))
    expected = here.run()
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
def test_what_cannot_be_served_is_refused_at_once(loop, engine, input_ids, sampling, words):
    async def work():
        with pytest.raises(ValueError, match=r".") as caught:
            await within(engine.generate(request("bad", input_ids, **sampling)))
        return str(caught.value)

    told = loop.run(work())
    assert all(word in told for word in words), told
    assert loop.run(within(engine.generate(request("good", [5], max_new_tokens=3)))).output_ids


def test_cancelled_tasks_free_their_rows(loop, engine):
    async def work():
        tasks = [asyncio.ensure_future(engine.generate(request(i, [5], i, max_new_tokens=79))) for i in range(60)]
        await asyncio.sleep(0)
        tasks[0].cancel()  # not even sent yet
        await asyncio.sleep(0.02)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await within(engine.generate(request("after", [6], max_new_tokens=1)))
        return tasks

    tasks = loop.run(work())
    assert all(task.cancelled() or task.done() for task in tasks)
    assert sum(task.cancelled() for task in tasks) > 40
    (connection,) = engine._client._asking.values()
    assert not connection.result()._generations


def test_weights_change_under_load_and_refused_ones_do_not(loop, engine, model_folder, other_folder, tmp_path):
    async def work():
        running = [asyncio.ensure_future(engine.generate(request(i, [7, 8], i, max_new_tokens=70))) for i in range(40)]
        for version in range(1, 9):
            await asyncio.sleep(0.005)
            await within(engine.update_weights(WeightUpdate(version, (other_folder, model_folder)[version % 2])))
            fresh = await within(engine.generate(request(f"fresh {version}", [9], max_new_tokens=2)))
            assert min(fresh.versions) >= version
        with pytest.raises(RunError, match=r"version 9 were refused.*cannot be read"):
            await within(engine.update_weights(WeightUpdate(9, tmp_path)))
        return await within(asyncio.gather(*running)), await within(
            engine.generate(request("last", [9], max_new_tokens=2))
        )

    answers, last = loop.run(work())
    assert all(sorted(answer.versions) == answer.versions for answer in answers)
    assert max(len(set(answer.versions)) for answer in answers) > 1
    assert last.versions == [8, 8]


def test_the_death_of_the_process_fails_what_waits(model_folder, tmp_path):
    async def work():
        engine = HFEngine(HFConfig(device="cpu"), tmp_path, log_dir=tmp_path)
        await engine.start(ModelReference(str(model_folder)))
        await within(engine.generate(request("warm", [5], max_new_tokens=2)))
        child = engine._process.pid
        os.kill(child, signal.SIGSTOP)
        tasks = [asyncio.ensure_future(engine.generate(request(i, [5], max_new_tokens=50))) for i in range(5)]
        update = asyncio.ensure_future(engine.update_weights(WeightUpdate(1, model_folder)))
        await asyncio.sleep(0.05)
        os.kill(child, signal.SIGKILL)
        found = await within(asyncio.gather(*tasks, update, return_exceptions=True))
        for error in found:
            assert isinstance(error, RunError)
            assert "has died: it was killed by SIGKILL" in str(error)
        with pytest.raises(RunError, match="has died"):
            await engine.generate(request("late", [5]))
        await engine.close()
        await engine.close()

    asyncio.run(work())


def test_a_model_that_cannot_be_loaded_is_told_with_the_engines_own_words(tmp_path):
    async def work():
        (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
        engine = HFEngine(HFConfig(device="cpu"))
        with pytest.raises(RunError) as caught:
            await within(engine.start(ModelReference(str(tmp_path))))
        assert "nonsense" in str(caught.value)
        assert "exit code 1" in str(caught.value)
        with pytest.raises(RunError, match="not been started"):
            await engine.generate(request("early", [5]))

    asyncio.run(work())


def test_a_start_that_takes_too_long_leaves_no_process(model_folder):
    async def work():
        engine = HFEngine(HFConfig(device="cpu", start_timeout_s=0.2))
        with pytest.raises(RunError, match=r"start_timeout_s = 0\.2"):
            await engine.start(ModelReference(str(model_folder)))
        return [engine._process.pid]

    assert not any(Path(f"/proc/{child}").exists() for child in asyncio.run(work()))


PARENT = """
import asyncio, os, sys
from areal_hf.engine import HFEngine
from areal_hf.config import HFConfig
from areal_core.interfaces import ModelReference

async def main():
    engine = HFEngine(HFConfig(device="cpu"))
    await engine.start(ModelReference(sys.argv[1]))
    print(engine._process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_child_ends_when_its_parent_is_killed(model_folder):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(model_folder)], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert Path(f"/proc/{child}").exists()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 120
    while Path(f"/proc/{child}").exists() and "zombie" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_deterministic_answers_do_not_depend_on_the_load(model_folder):
    def answers(company):
        async def work():
            engine = HFEngine(HFConfig(device="cpu", deterministic=True))
            assert engine.capabilities.deterministic
            await engine.start(ModelReference(str(model_folder)))
            others = [engine.generate(request(f"o{i}", [6] * (i + 1), i, max_new_tokens=40)) for i in range(company)]
            mine = [engine.generate(request(i, [5, 9, 7], i, max_new_tokens=20)) for i in range(10)]
            found = await within(asyncio.gather(*others, *mine))
            await engine.close()
            return found[company:]

        return asyncio.run(work())

    assert answers(0) == answers(7)
