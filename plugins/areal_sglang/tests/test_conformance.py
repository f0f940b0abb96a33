"""Run the conformance suite of inference engines with SGLang servers; with AREAL_SERVERS_ON_GPU=1, on a GPU."""

import subprocess
from functools import partial

import pytest

from areal_core.engines import ModelReference
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig
from areal_sglang.graphs import TOKENS
from areal_testing.conformance import InferenceEngineSuite
from areal_testing.conformance.models import without_tensor

# The first run creates the server's environment, and two servers start in a minute. The suite has its own timeouts.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class TestSGLang(InferenceEngineSuite):
    @pytest.fixture(autouse=True)
    def _with_servers(self, sglang_engine, server_tolerance):
        self.make, self.tolerance = sglang_engine, server_tolerance

    def make_engine(self, folder, *, update_mode, slots):
        return self.make(folder, update_mode, slots)


class DroppingAdapter(SGLangAdapter):
    """Does not load one tensor, a norm with 64 numbers."""

    async def load(self, connection, folder, label, mode):
        await super().load(connection, without_tensor(folder, "model.norm.weight"), label, mode)


def test_an_adapter_that_drops_a_parameter_fails_the_suite(sglang_engine, tmp_path):
    suite = TestSGLang()
    suite.make = partial(sglang_engine, adapter=DroppingAdapter)
    with pytest.raises(AssertionError, match="a plain forward pass"):
        suite.test_every_tensor_is_taken_over(tmp_path)


PREFILL_GRAPHS = """
import runpy, sys
runpy.run_path(sys.argv[1], run_name="prepare")
from sglang.srt.arg_groups.cuda_graph_hook import parse_cuda_graph_config
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import prepare_server_args
arguments = prepare_server_args(sys.argv[2:])
parse_cuda_graph_config(arguments)
print(*resolving_view(arguments).cuda_graph_config.prefill.bs)
"""


def test_sglang_accepts_the_bound_on_prefill_graphs(sglang_program, tmp_path):
    python, *launcher = sglang_program
    if launcher[:1] == ["-m"]:
        pytest.skip("only the server on a CPU is tested")
    adapter = SGLangAdapter(SGLangConfig(program=[python], options={"device": "cpu"}))
    arguments = adapter.command(ModelReference(str(tmp_path)), "127.0.0.1", 8000, tmp_path).arguments[1:]
    done = subprocess.run(
        [python, "-c", PREFILL_GRAPHS, *launcher, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == [str(tokens) for tokens in TOKENS]
