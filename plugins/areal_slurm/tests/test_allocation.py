"""What `scontrol show job --details` says, in the words of several versions and kinds of jobs."""

import time

import pytest

from areal_core.errors import RunError
from areal_slurm.allocation import NodeState, Share, own_address, parse_job, reach, read_job, read_nodes, slurm

SEVERAL = """\
JobId=7 HetJobId=7 HetJobOffset=0 JobName=run
   JobState=RUNNING Reason=None Dependency=(null)
   PreemptEligibleTime=2026-11-23T00:47:00 PreemptTime=None
   NumNodes=2 NumCPUs=20 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   JOB_GRES=gpu:a100:5
     Nodes=n[1-2] CPU_IDs=0-9 Mem=0 GRES=gpu:a100:2(IDX:0-1)
     Nodes=n9 CPU_IDs=0 Mem=0 GRES=gpu:a100:1(IDX:0),gpu:h200:3(IDX:1,3-4),shard:2(0/2)
JobId=8 HetJobId=7 HetJobOffset=1 JobName=run
   JobState=RUNNING Reason=None Dependency=(null)
   PreemptEligibleTime=2026-11-23T00:47:00 PreemptTime=2026-11-23T00:49:00
     Nodes=cpu3 CPU_IDs=0-63 Mem=0 GRES=
"""


def test_nodes_and_what_the_job_has_of_them():
    fields, parts = parse_job("7", SEVERAL)
    assert parts == [
        ("n[1-2]", Share("gpu:a100:2", "0")),
        ("n9", Share("gpu:a100:1,gpu:h200:3", "0")),
        ("cpu3", Share("none", "1")),
    ]
    assert [share.gpus for _, share in parts] == [2, 4, 0]
    assert (fields["JobId"], fields["JobState"], fields["PreemptTime"]) == ("7", "RUNNING", "None")


def test_of_an_array_only_the_own_job_counts():
    """SLURM tells of all of them where it is asked for the one whose number is the array's."""
    array = SEVERAL.replace("HetJobId", "ArrayJobId").replace("HetJobOffset=", "ArrayTaskId=")
    assert [nodes for nodes, _ in parse_job("7", array)[1]] == ["n[1-2]", "n9"]
    assert [nodes for nodes, _ in parse_job("8", array)[1]] == ["cpu3"]


@pytest.mark.parametrize("state", ["DOWN", "DOWN*+DRAIN", "MIXED*", "IDLE+NOT_RESPONDING"])
def test_nodes_that_are_lost(state):
    assert NodeState("h", 1, state).is_lost
    assert not NodeState("h", 1, "MIXED+DRAIN").is_lost


def test_a_missing_program_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RunError, match="the command scontrol was not found on this machine"):
        slurm("scontrol", "ping")


@pytest.mark.slow
def test_the_true_ones(cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    words = ("--nodes=2", "--gres=gpu:1", "--output=/dev/null", "--wrap=sleep 600")
    job = cluster.run("sbatch", "--parsable", *words).strip()
    cluster.wait_for_job(job, ["RUNNING"], tmp_path / "none")
    fields, shares = read_job(job)
    assert shares == {"n1": Share("gpu:1", ""), "n2": Share("gpu:1", "")}
    assert fields["JobState"] == "RUNNING"
    nodes = read_nodes(["n1", "n3"])
    assert [(node.address, node.is_lost) for node in nodes.values()] == [("127.0.0.1", False)] * 2
    assert own_address(["n1", "n3"]) == reach(nodes["n1"]) == "127.0.0.1"
    cluster.kill("n3")
    deadline = time.monotonic() + 60
    while reach(nodes["n3"]):  # the kernel ends the rest of the node after its first process
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with pytest.raises(RunError, match="Node n7 not found"):
        read_nodes(["n1", "n7"])
    with pytest.raises(RunError, match=r"scontrol show job --details 99999: .*Invalid job id"):
        read_job("99999")
