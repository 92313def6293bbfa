from __future__ import annotations

import pytest

from pdlaunch.node.allocation import Host, job_id, local_hosts, node_address, run_command, slurm_hosts, step_argv
from pdlaunch.node.process import StageFailed
from pdlaunch.node.spec import NodeSlot, SlurmSpec
from tests.fakes.specs import spec

NODES = {"gpu[07-08]": "gpu07\ngpu08\n", "gpu07": "gpu07\n", "gpu[11,09]": "gpu11\ngpu09\n"}
ADDRESS = {"gpu07": "10.0.0.7", "gpu08": "10.0.0.8", "gpu11": "10.0.0.11", "gpu09": "10.0.0.9"}


def scontrol(argv):
    if argv[2] == "hostnames":
        return NODES[argv[3]]
    return f"NodeName={argv[3]} Arch=x86_64 NodeAddr={ADDRESS[argv[3]]} NodeHostName={argv[3]} Port=6818"


def slots(*pairs):
    return tuple(NodeSlot(component, index, 8) for component, index in pairs)


def test_a_plain_job_takes_its_nodes_in_order(tmp_path):
    made = spec(tmp_path, (), (), nodes=slots((0, 0), (0, 1)), network_interface="")
    hosts = slurm_hosts(made, {"SLURM_JOB_NODELIST": "gpu[07-08]"}, scontrol)
    assert [(h.name, h.address) for h in hosts] == [("gpu07", "10.0.0.7"), ("gpu08", "10.0.0.8")]


def test_a_heterogeneous_job_takes_each_component_from_its_own_list(tmp_path):
    made = spec(tmp_path, (), (), nodes=slots((0, 0), (1, 0), (1, 1)), network_interface="")
    environment = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST": "wrong",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu07",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu[11,09]",
    }
    assert [h.name for h in slurm_hosts(made, environment, scontrol)] == ["gpu07", "gpu11", "gpu09"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [({}, "SLURM_JOB_NODELIST is not set"), ({"SLURM_JOB_NODELIST": "gpu07"}, "has 1 nodes; the spec places engines on 2")],
)
def test_another_allocation_than_the_spec_is_refused(tmp_path, environment, message):
    made = spec(tmp_path, (), (), nodes=slots((0, 0), (0, 1)), network_interface="")
    with pytest.raises(StageFailed, match=message):
        slurm_hosts(made, environment, scontrol)


def test_standard_error_is_never_part_of_an_address(monkeypatch, tmp_path):
    noise = "echo 'srun: Step created for StepId=1.0' >&2"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{noise}\necho 'NodeName=n1 NodeAddr=10.1.2.3 Port=1'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert node_address("n1") == "10.1.2.3"


def test_an_address_must_be_one():
    with pytest.raises(StageFailed, match="cannot be resolved"):
        node_address("n1", lambda argv: "NodeName=n1 NodeAddr=srun:.Step.created.invalid")
    with pytest.raises(StageFailed, match="names no NodeAddr"):
        node_address("n1", lambda argv: "NodeName=n1")
    assert node_address("n1", lambda argv: "NodeAddr=localhost") == "127.0.0.1"


def test_a_failing_or_missing_command_is_said(monkeypatch, tmp_path):
    with pytest.raises(StageFailed, match=r"false x ended with 1"):
        run_command(["false", "x"])
    with pytest.raises(StageFailed, match="No such file"):
        run_command([str(tmp_path / "scontrol"), "show"])


def test_local_hosts_and_job_ids(tmp_path):
    (host,) = local_hosts(spec(tmp_path, (), ()))
    assert host.address == "127.0.0.1"
    assert job_id({"SLURM_JOB_ID": "77"}) == "77"
    assert job_id({}).startswith("local-")
    assert job_id({}) != job_id({})


def test_an_engine_step_gets_its_own_share():
    slurm = SlurmSpec("gpu:b300", ("--mpi=none",), ("--container-image=x",), "100G", 16)
    argv = step_argv(slurm, Host(NodeSlot(1, 0, 8), "gpu11", "10.0.0.11"), True, 4, ["python3"])
    assert argv == [
        "srun",
        "--het-group=1",
        "--nodes=1",
        "--ntasks=1",
        "--nodelist=gpu11",
        "--kill-on-bad-exit=1",
        "--exact",
        "--mem=100G",
        "--cpus-per-task=16",
        "--gres=gpu:b300:4",
        "--mpi=none",
        "--container-image=x",
        "python3",
    ]


def test_a_service_step_shares_the_node_and_has_no_gpu():
    argv = step_argv(SlurmSpec("gpu"), Host(NodeSlot(0, 0, 8), "gpu07", "10.0.0.7"), False, 0, ["etcd"], service=True)
    assert argv == ["srun", "--nodes=1", "--ntasks=1", "--nodelist=gpu07", "--kill-on-bad-exit=1", "--overlap", "--gres=none", "etcd"]
