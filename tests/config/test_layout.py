"""A placement in words: what it means, that every GPU does one thing on one node, and what is said of wrong ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_core.config import resolve
from areal_core.config.layout import MOST_GPUS, Layout, LayoutError
from areal_core.driver.groups import process_groups
from areal_core.errors import ConfigError
from areal_core.interfaces.launcher import Node
from areal_core.runtime.placement import place_groups

SMALL = st.integers(1, 9)


def attempt(call, *arguments):
    """What a call returns, or the error that says why not."""
    try:
        return call(*arguments), None
    except LayoutError as error:
        return None, error


@given(SMALL, SMALL, SMALL, st.booleans())
def test_what_is_written_is_read_again(gpus, tensor, servers, colocated):
    layout = Layout(gpus, tensor, servers, colocated)
    assert Layout.parse(str(layout)) == layout


@given(st.text(alphabet="traingeo=tpx0123456789 ", max_size=40))
def test_any_text_is_a_placement_or_is_told_what_would_be_one(text):
    layout, error = attempt(Layout.parse, text)
    if error is not None:
        assert str(error)
        assert error.hint
    else:
        assert layout.trainer_gpus >= 1
        assert Layout.parse(str(layout)) == layout


@given(SMALL, SMALL, SMALL)
def test_every_gpu_does_one_thing(gpus, tensor, servers):
    training, generation = Layout(gpus, tensor, servers).number(tensor)
    assert generation is not None
    assert training + generation == list(range(gpus + tensor * servers))
    assert len(training) == gpus


@given(SMALL, SMALL, SMALL)
def test_colocated_servers_take_the_trainers_gpus_and_all_of_them(gpus, tensor, servers):
    found, error = attempt(Layout(gpus, tensor, servers, colocated=True).number, tensor)
    assert (error is not None) == (gpus != tensor * servers)
    if error is not None and gpus % tensor == 0:
        assert f"tp{tensor}x{gpus // tensor} takes all of them" in error.hint
        assert "placement.generation=[0, 0, 1, 1]" in error.hint
    if found is not None:
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "does not say how many GPUs train", "train=8"),
        ("generate=tp2x8", "does not say how many GPUs train", "train=8"),
        ("trian=8", "'trian=8' is not a part", "train=GPUS"),
        ("train", "'train' is not a part", "train=GPUS"),
        ("train=8,generate=tp1x8", "'train=8,generate=tp1x8' is not a number", "train=8"),
        ("train=8x2", "'train=8x2' is not a number of GPUs", "on however many nodes"),
        ("train=8 train=4", "'train' occurs twice", "generate=tp"),
        ("train=8 generate=8", "'generate=8' is not", "generate=tp1x8 is 8 servers with a GPU each"),
        ("train=8 generate=tp2", "'generate=tp2' is not", "generate=tp8x1 one server on 8"),
        ("train=8 generate=tp1x8 colocatd", "'colocatd' is not a part", "'colocated' behind it"),
        ("train=8 colocated", "without servers", "generate=tp1x8 colocated"),
        ("train=999999", "more than 100,000", "as many as there are"),
    ],
)
def test_a_wrong_placement_is_told_what_would_be_right(text, message, hint):
    with pytest.raises(LayoutError, match=message) as told:
        Layout.parse(text)
    assert hint in told.value.hint


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("train=8 generate=tp3x2 colocated", "train=8, and generate=tp3x2 names 6", "that 3 divides"),
        ("train=8 generate=tp2x3 colocated", "train=8, and generate=tp2x3 names 6", "tp2x4 takes all"),
    ],
)
def test_what_is_missing_is_said_with_what_would_do(text, message, hint):
    layout = Layout.parse(text)
    with pytest.raises(LayoutError, match=message) as told:
        layout.number(layout.tensor_parallel)
    assert hint in told.value.hint


RUN = """
plugins: [grpo, sglang, vllm, fsdp, rewards]
steps: 1
model: {path: model}
dataset: {type: rewards/jsonl, paths: [rows.jsonl]}
workflow: single_turn
inference_engine: {type: sglang, data_parallel: 2}
train_engine: fsdp
algorithm: grpo
launcher: nodes/external
"""


@pytest.fixture
def config(tmp_path):
    pytest.importorskip("areal_grpo", reason="the first-party plugins are not installed")
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def test_the_words_become_gpus_servers_and_ranks_and_are_read_again_as_such(config, tmp_path):
    resolved = resolve(config, [], ["placement=train=16 generate=tp2x2", "inference_engine.servers=2"])
    read = resolved.config
    assert read.placement.training == list(range(16))
    assert read.placement.generation == list(range(16, 24)), "a server has tensor_parallel x data_parallel GPUs"
    assert read.inference_engine is not None
    assert {"servers": 2, "tensor_parallel": 2}.items() <= read.inference_engine.keywords().items()
    assert (read.trainer_processes, read.weight_sync.transport.target, read.model.dtype) == (
        16,
        "core/memory",
        "bfloat16",
    )
    places = {"placement.layout", "inference_engine.servers", "inference_engine.tensor_parallel"}
    assert {resolved.origins[name] for name in places} == {"command line"}
    assert resolved.origins["inference_engine.restarts"] == "default"
    saved = tmp_path / "saved.yaml"
    saved.write_text(resolved.to_yaml())
    assert resolve(saved).config == read


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_servers_with_several_copies_of_the_weights_take_part_in_no_broadcast(config, engine):
    words = [f"inference_engine.type={engine}", "placement=train=2 generate=tp1x2"]
    chosen = {
        copies: resolve(config, [], [*words, f"inference_engine.data_parallel={copies}"]).config.weight_sync.transport
        for copies in (1, 2)
    }
    assert {copies: one.target for copies, one in chosen.items()} == {1: "core/broadcast", 2: "core/memory"}
    with pytest.raises(ConfigError, match="transport is broadcast, which needs data_parallel 1, not 2"):
        resolve(config, [], [*words, "inference_engine.data_parallel=2", "weight_sync.transport=broadcast"])


@pytest.mark.parametrize(("tensor", "gpus", "servers"), [(1, 2, 1), (1, 8, 4), (2, 8, 2)])
def test_a_server_for_every_share_of_the_gpus_that_are_named(config, tensor, gpus, servers):
    words = [f"inference_engine.tensor_parallel={tensor}"]
    words.append(f"placement={{generation: {list(range(gpus))}, training: [{gpus}]}}")
    resolved = resolve(config, [], words)
    assert resolved.config.inference_engine is not None
    assert resolved.config.inference_engine.keywords()["servers"] == servers
    assert resolved.origins["inference_engine.servers"] == "command line"
    with pytest.raises(ConfigError, match=r"which names \d+: set servers"):
        resolve(config, [], [*words, f"placement={{generation: {list(range(gpus + 1))}, training: [9]}}"])


@pytest.mark.parametrize("words", ["placement=train=8 generate=tp2x2", "placement.layout=train=8 generate=tp2x2"])
def test_a_plan_for_other_gpus_goes_with_words(config, words):
    config.write_text(f"{RUN}placement: train=4 generate=tp2x2\n")
    for more in (["placement.gpu_memory_gib=80"], [words, "placement.gpu_memory_gib=80"]):
        placement = resolve(config, [], more).config.placement
        assert (placement.gpu_memory_gib, len(placement.training)) == (80, 4 if len(more) == 1 else 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inference_engine.servers=3"], "means inference_engine.servers=2, but inference_engine.servers=3 is set"),
        (["inference_engine.tensor_parallel=1"], "means inference_engine.tensor_parallel=2, but .*=1 is set"),
        (["launcher.trainer_processes=4"], "means launcher.trainer_processes=16, but .*=4 is set"),
        (["inference_engine=hf/hf"], "a server of 'hf/hf' has one GPU"),
    ],
)
def test_what_contradicts_the_words_is_refused_with_both(config, words, message):
    with pytest.raises(ConfigError, match=message):
        resolve(config, [], ["placement=train=16 generate=tp2x2", *words])


def test_servers_that_the_words_forget_and_lists_beside_words_are_refused(config):
    with pytest.raises(ConfigError, match="does not mention the inference engine's servers"):
        resolve(config, [], ["placement=train=16"])
    with pytest.raises(ConfigError, match=r"in words .* and in lists"):
        resolve(config, [], ["placement.layout=train=8", "placement.training=[0]"])
    config.write_text(f"{RUN}placement: train=8\n")
    with pytest.raises(
        ConfigError, match=r"placement: GPUs are named in words \('train=8'\) and in training: write pl"
    ):
        resolve(config, [], ["placement.training=[0]"])
    assert resolve(config, [], ["placement=null", "placement.training=[0]"]).config.placement.training == [0]
    assert resolve(config, [], ["placement=null"]).config.placement.layout is None


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ("{training: [0, 0], generation: [1]}", "GPU 0 is named twice in training"),
        ("{training: [0, 0], generation: [0]}", "GPU 0 is named twice in training"),
    ],
)
def test_a_gpu_that_is_named_twice_is_refused(config, lists, message):
    with pytest.raises(ConfigError, match=message):
        resolve(config, [], [f"placement={lists}"])


def test_a_gpu_may_have_several_servers_whose_weights_then_go_through_a_folder(config, tmp_path):
    """Of a small model: one server leaves most of a GPU idle, and a broadcast has no group in which a GPU is twice."""
    words = ["placement={generation: [0, 0, 1, 1], training: [2]}"]
    words += ["inference_engine={data_parallel: 1, options: {max_total_tokens: 4096}}"]
    shared = resolve(config, [], [*words, "inference_engine.servers=4"]).config
    groups = [group for group in process_groups(shared, tmp_path) if group.role == "server"]
    places = place_groups(groups, [Node("here", "127.0.0.1", gpus=3)], {})
    assert [places[f"server-{number}", 0].gpus for number in range(4)] == [(0,), (0,), (1,), (1,)]
    assert shared.weight_sync.transport.target == "core/memory"
    with pytest.raises(ConfigError, match="a broadcast has no group in which a GPU is twice"):
        resolve(config, [], [*words, "weight_sync.transport=broadcast"])
    with pytest.raises(ConfigError, match=r"gives one server GPUs \[0, 0\]: name each of them once"):
        resolve(config, [], [*words, "inference_engine.tensor_parallel=2", "inference_engine.servers=2"])
    with pytest.raises(
        ConfigError, match=r"1 servers with 1 GPU\(s\) each do not fit placement\.generation, which names 4"
    ):
        resolve(config, [], [*words, "inference_engine.servers=1"])
    assert resolve(config, [], words).config == shared, "as many as there are numbers, where nothing else is written"
    for bounds in ("{minimum: 5, maximum: 9}", "{minimum: 1, maximum: 3}"):
        with pytest.raises(ConfigError, match=r" to \d servers with 1 GPU\(s\) each do not fit"):
            resolve(config, [], [*words, f"inference_engine.servers={bounds}"])
    resolve(config, [], [*words, "inference_engine.servers=0", "inference_engine.addresses=['http://10.0.0.5:30000']"])


def test_ranks_and_servers_of_a_colocated_placement_stand_on_the_same_gpus(config, tmp_path):
    words = ["placement=train=4 generate=tp2x2 colocated", "inference_engine={data_parallel: 1, memory_saver: true}"]
    groups = process_groups(resolve(config, [], words).config, tmp_path)
    places = place_groups(groups, [Node("here", "127.0.0.1", gpus=4)], {})
    assert [places["trainer", rank].gpus for rank in range(4)] == [(0,), (1,), (2,), (3,)]
    assert [places[f"server-{number}", 0].gpus for number in range(2)] == [(0, 1), (2, 3)]


def test_a_placement_may_use_the_largest_number_of_gpus_and_not_one_more():
    assert Layout.parse(f"train={MOST_GPUS - 6} generate=tp2x3").trainer_gpus == MOST_GPUS - 6
    with pytest.raises(LayoutError, match="asks for more than"):
        Layout.parse(f"train={MOST_GPUS - 5} generate=tp2x3")
