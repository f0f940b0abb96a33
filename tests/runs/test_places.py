"""The table of a plan that says which process stands where, and what it refuses."""

import pytest

from areal_core.config import resolve
from areal_core.runs.places import place_rows, spans

RUN = """
plugins: [grpo, sglang, fsdp, rewards, ray]
steps: 1
model: {path: model}
dataset: {type: rewards/jsonl, paths: [rows.jsonl]}
workflow: single_turn
inference_engine: {type: sglang}
train_engine: fsdp
algorithm: grpo
launcher: {type: ray, nodes: 4, gpus_per_node: 8}
"""


@pytest.fixture
def table(tmp_path):
    pytest.importorskip("areal_grpo", reason="the first-party plugins are not installed")
    path = tmp_path / "run.yaml"
    path.write_text(RUN)

    def made(*words):
        problems = []
        rows = [text for _, text in place_rows(resolve(path, [], words).config, problems)]
        return rows, problems

    return made


def test_every_node_is_told_with_its_processes_and_their_gpus(table):
    assert table("placement=train=4x2 generate=tp2x6") == (
        [
            "node    processes                         GPUs",
            "node-0  trainer 0-3                       0-3",
            "node-0  controller, 1 workflow, 1 reward",
            "node-0  server 0-1                        4-5, 6-7",
            "node-1  trainer 4-7                       8-11",
            "node-1  server 2-3                        12-13, 14-15",
            "node-2  server 4-5                        16-17, 18-19",
        ],
        [],
    )


def test_uneven_lists_by_hand_are_told_as_well(table):
    words = ["placement.training=[0,1,9]", "placement.generation=[2,4,31]", "inference_engine.servers=3"]
    rows, problems = table(*words)
    assert problems == []
    assert rows[1:] == [
        "node-0  trainer 0-1                       0-1",
        "node-0  controller, 1 workflow, 1 reward",
        "node-0  server 0-1                        2, 4",
        "node-1  trainer 2                         9",
        "node-3  server 2                          31",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["placement.generation=[6,7,8,9]", "inference_engine.tensor_parallel=4"], "belong together and lie on node-0"),
        (["placement.generation=[6]", "inference_engine.servers=2"], "2 servers on 1 GPUs each need 2"),
        (["placement.generation=[4]", "launcher=core/local", "launcher.nodes=2", "launcher.gpus_per_node=2"],
         "placement names GPU 4, which there is not: node-0 has 0 to 1, node-1 has 2 to 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_is_refused_with_what_there_is(table, words, message):
    rows, problems = table(*words)
    assert rows == []
    assert len(problems) == 1
    assert message in problems[0]


def test_what_a_launcher_does_not_say_is_said(table):
    assert table("launcher=slurm/slurm", "launcher.gpus_per_node=8", "placement=train=8x2 generate=tp8x1")[0][-1] == (
        "launcher has to bring 3 nodes with 8 GPUs each"
    )
    rows, problems = table("launcher=slurm/slurm", "placement.training=[0,1]")
    assert problems == []
    assert rows == ["not known before the start: launcher.gpus_per_node says how many GPUs a node has"]


def test_ranks_without_gpus_stand_in_blocks(table):
    rows, _ = table("launcher=core/local", "launcher.nodes=2", "launcher.trainer_processes=2")
    assert rows == [
        "node    processes                         GPUs",
        "node-0  trainer 0",
        "node-0  controller, 1 workflow, 1 reward",
        "node-1  trainer 1",
        "any     server 0",
    ]


def test_a_thousand_nodes_do_not_make_a_thousand_rows(table):
    rows, _ = table("launcher.nodes=1000", "placement=train=8x500 generate=tp8x500")
    assert len(rows) < 50
    assert rows[-1].endswith("more rows")


def test_numbers_in_words():
    assert [spans([]), spans([3]), spans([0, 1, 2, 5, 7, 8])] == ["", "3", "0-2, 5, 7-8"]
