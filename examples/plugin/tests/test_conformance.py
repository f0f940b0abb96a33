"""Everything that areal promises of such components, inherited."""

import json
from typing import ClassVar

import pytest
from areal_core.sdk import CRITIC
from areal_core.servers import ServerFleet
from areal_fsdp.config import FSDPConfig
from areal_testing.conformance import (
    AdvantageSuite,
    AlgorithmSuite,
    AuxiliaryLossSuite,
    BatchTransformSuite,
    CorrectionSuite,
    DatasetSuite,
    EnvironmentSuite,
    ExampleTokenizerSuite,
    GroupFilterSuite,
    InferenceEngineSuite,
    LauncherSuite,
    LossAggregationSuite,
    ModelSourceSuite,
    PluginSuite,
    PolicyLossSuite,
    RegularizerSuite,
    RewardShapingSuite,
    RewardSuite,
    SandboxSuite,
    TrackerSuite,
    TrainEngineSuite,
    WorkflowSuite,
    make_model,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from areal_example.config import RewardRegressionSettings
from areal_example.inference_engines import ToyAdapter, ToyConfig
from areal_example.train_engines import TokenCounting


class TestPlugin(PluginSuite):
    plugin = "example"


class TestBrevity(RewardSuite):
    component = "example/brevity"
    settings: ClassVar = {"free_tokens": 3}
    examples = (("", 1.0), ("abc", 1.0), ("abcdefg", 0.5))

    def test_an_answer_that_was_cut_off_is_worth_nothing(self):
        assert self.score("abc", finish_reason="length") == 0


class TestDoublings(DatasetSuite):
    component = "example/doublings"
    settings: ClassVar = {"count": 20}
    keys = ("prompt", "answer")


class TestSelfCheck(WorkflowSuite):
    component = "example/self_check"
    rows = ({"prompt": "4+4=", "answer": "8"}, {"prompt": "12-7=", "answer": "5"})


class TestSecondChances(EnvironmentSuite):
    component = "example/second_chances"
    rows = ({"prompt": "4+4=", "answer": "8"}, {"prompt": "12-7=", "answer": "5"})
    completions = ("5", "7", "8")


class TestRanked(RewardShapingSuite):
    component = "example/ranked"
    examples = (((0.0, 3.0, 0.5), (0.0, 1.0, 0.5)), ((2.0, 2.0), (0.0, 0.0)))


class TestNotSolved(GroupFilterSuite):
    component = "example/not_solved"
    settings: ClassVar = {"share": 0.5}
    examples = (((1.0, 1.0, 0.0), None), ((1.0, 0.0), (1.0, 0.0)))


class TestMetricLines(TrackerSuite):
    component = "example/metric_lines"

    def logged(self, run_dir):
        lines = map(json.loads, (run_dir / "lines.jsonl").read_text().splitlines())
        return {(line["step"], name): value for line in lines for name, value in line.items()}


class TestBetterOrWorse(AdvantageSuite):
    component = "example/better_or_worse"


class TestCappedReinforce(PolicyLossSuite):
    component = "example/capped_reinforce"


class TestBetter(AlgorithmSuite):
    component = "example/better"


class TestTimedProcess(SandboxSuite):
    component = "example/timed_process"
    isolates = False


class TestSurprisePenalty(BatchTransformSuite):
    component = "example/surprise_penalty"


class TestNearOnly(CorrectionSuite):
    component = "example/near_only"


class TestStayClose(RegularizerSuite):
    component = "example/stay_close"


class TestRewardRegression(AuxiliaryLossSuite):
    component = "example/reward_regression"

    def test_it_needs_a_critic(self):
        assert RewardRegressionSettings().needs(1) == (CRITIC,)


class TestSquareRootLength(LossAggregationSuite):
    component = "example/square_root_length"


class TestCompletionOnly(ExampleTokenizerSuite):
    component = "example/completion_only"
    rows = ({"prompt": "4+4=", "answer": "8"}, {"prompt": "12-7=", "answer": "5"})


class TestLocalCopy(ModelSourceSuite):
    component = "example/local_copy"

    @pytest.fixture(autouse=True)
    def _with_a_model(self, tmp_path_factory):
        folder = make_model(tmp_path_factory.mktemp("shared") / "model")
        words = WordLevel({"?": 0, "2": 1, "4": 2}, unk_token="?")
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="?").save_pretrained(folder)
        self.settings = {"folder": str(folder)}


class TestTokenCounting(TrainEngineSuite):
    def make_engine(self, **settings):
        return TokenCounting(FSDPConfig(**settings))


@pytest.fixture(scope="module")
def addresses(server_of_each_shape):
    """Servers of `toy_adapter`."""
    return server_of_each_shape(ToyAdapter(ToyConfig()))


class TestToyAdapter(InferenceEngineSuite):
    tokens_in_flight = 96  # the server computes the whole sequence for each of them

    @pytest.fixture(autouse=True)
    def _with_servers(self, engine_by_model, addresses):
        self.engine_by_model, self.addresses = engine_by_model, addresses

    def make_engine(self, folder, *, update_mode, slots):
        settings = {"servers": 0, "update_mode": update_mode, "max_concurrent_requests": slots}

        def engine(address):
            return ServerFleet(ToyAdapter(ToyConfig(**settings, addresses=[address])), folder)

        return self.engine_by_model(engine, self.addresses)


class TestVerboseLauncher(LauncherSuite):
    component = "example/verbose_launcher"
