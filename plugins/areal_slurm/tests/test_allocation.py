"""What `scontrol show job --details` says, in the words of several versions and kinds of jobs."""

import pytest

from areal_core.errors import RunError
from areal_slurm.allocation import lost_nodes, own_address, parse_jobs, read_job, read_nodes
from areal_slurm.commands import slurm

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
    first, second = parse_jobs(SEVERAL)
    assert first.parts == [("n[1-2]", "gpu:a100:2"), ("n9", "gpu:a100:1,gpu:h200:3")]
    assert second.parts == [("cpu3", "none")]
    assert [job.fields["HetJobOffset"] for job in (first, second)] == ["0", "1"]


def test_whether_it_runs_and_is_preempted():
    first, second = parse_jobs(SEVERAL)
    assert (first.is_running, first.is_preempted) == (True, False)
    assert second.is_preempted
    assert not parse_jobs(SEVERAL.replace("JobState=RUNNING", "JobState=CANCELLED"))[0].is_running


def test_a_missing_program_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RunError, match="there is no scontrol on this machine"):
        slurm("scontrol", "ping")


@pytest.mark.slow
def test_the_true_ones(cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    words = ("--nodes=2", "--gres=gpu:1", "--output=/dev/null", "--wrap=sleep 600")
    job = cluster.run("sbatch", "--parsable", *words).strip()
    cluster.wait_for_job(job, ["RUNNING"], tmp_path / "none")
    nodes = read_nodes(job)
    assert [(node.name, node.gpus, node.group) for node in nodes] == [("n1", "gpu:1", None), ("n2", "gpu:1", None)]
    assert read_job(job)[0].is_running
    assert own_address(nodes) == "127.0.0.1"
    assert lost_nodes(["n1", "n3"]) == {}
    assert lost_nodes(["n1", "n7"]) == {"n7": "SLURM says that it is unknown"}
    with pytest.raises(RunError, match=r"scontrol show job --details 99999: .*Invalid job id"):
        read_job("99999")
