from __future__ import annotations

import hashlib

import pytest

from pdlaunch.node import gpus
from pdlaunch.node.fabric import read_counters
from pdlaunch.node.node_facts import disk_free_gib, distribution_versions, engine_environment, file_hashes, interface_address
from tests.fakes.raw_server import answering, raw_server, respond

SMI_GPU = "0, NVIDIA B300, GPU-aa, 3, 275040\n1, NVIDIA B300, GPU-bb, 41234, 275040\n"
SMI_APPS = "GPU-bb, 4711, 41200\n"
DCGM = """\
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-aa",modelName="B300"} 22.5
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-aa",modelName="B300"} 1024
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-bb"} 7
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-aa"} 400
"""


def smi(argv):
    return SMI_APPS if "compute-apps" in argv[1] else SMI_GPU


def test_fabric_counters_of_every_port(tmp_path):
    for device, folder, name, text in (
        ("mlx5_0", "counters", "port_xmit_data", "123\n"),
        ("mlx5_0", "hw_counters", "out_of_sequence", "4\n"),
        ("mlx5_1", "counters", "port_xmit_data", "9\n"),
        ("mlx5_1", "counters", "link_layer", "Ethernet\n"),
    ):
        path = tmp_path / device / "ports" / "1" / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    found, error = read_counters(tmp_path)
    assert found == {"mlx5_0/1/port_xmit_data": 123, "mlx5_0/1/out_of_sequence": 4, "mlx5_1/1/port_xmit_data": 9}
    assert error == ""


def test_no_fabric_is_said(tmp_path):
    assert read_counters(tmp_path / "none") == ({}, f"no {tmp_path / 'none'}: no RDMA device on this node")
    assert "no readable counter" in read_counters(tmp_path)[1]


def test_versions_come_from_metadata_folders(tmp_path):
    for name in ("vllm-0.31.0+cpu", "nixl_cu12-1.4.1", "ai_dynamo_runtime-1.6.1", "torch-2.13.0", "torchvision-0.28.0", "requests-2.0"):
        (tmp_path / f"{name}.dist-info").mkdir()
    assert distribution_versions([tmp_path]) == {
        "ai-dynamo-runtime": "1.6.1",
        "nixl-cu12": "1.4.1",
        "torch": "2.13.0",
        "vllm": "0.31.0+cpu",
    }


def test_file_hashes_use_the_folder_that_shadows_and_say_what_is_missing(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text(folder)
    found = file_hashes(["x.py", "y.py"], [tmp_path / "a", tmp_path / "b"])
    assert found == {"x.py": hashlib.sha256(b"a").hexdigest(), "y.py": None}


def test_an_engine_sees_neither_slurm_nor_another_deployment(tmp_path):
    inherited = {
        "PATH": "/bin",
        "SLURM_JOB_ID": "1",
        "PMI_RANK": "0",
        "PMIX_RANK": "0",
        "DYN_NAMESPACE": "production",
        "NATS_SERVER": "x",
        "PROMETHEUS_MULTIPROC_DIR": "/x",
        "PYTHONPATH": "/x",
        "HOME": "/no/such",
        "CUDA_VISIBLE_DEVICES": "4,5",
    }
    env, removed = engine_environment(inherited, {"DYN_NAMESPACE": "mine"}, tmp_path)
    assert env == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "4,5", "TMPDIR": str(tmp_path), "HOME": str(tmp_path), "DYN_NAMESPACE": "mine"}
    boxed, _ = engine_environment(inherited, {}, tmp_path, in_container=True)
    assert boxed["PYTHONPATH"] == "/x"
    assert removed == ["DYN_NAMESPACE", "NATS_SERVER", "PMIX_RANK", "PMI_RANK", "PROMETHEUS_MULTIPROC_DIR", "PYTHONPATH", "SLURM_JOB_ID"]


def test_addresses_and_disk(tmp_path):
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(OSError, match="No such device"):
        interface_address("nosuch0")
    assert disk_free_gib([tmp_path, tmp_path / "none"])[str(tmp_path)] > 0


def test_gpu_inventory_and_leftovers_name_memory_and_processes():
    found, processes, error = gpus.inventory(smi)
    assert (error, [g["index"] for g in found], processes[0]["pid"]) == ("", [0, 1], 4711)
    assert gpus.leftovers(found[:1], processes) == []
    assert gpus.leftovers(found, processes) == ["GPU 1 (GPU-bb) has 41234 MiB in use, processes: [4711]"]
    assert "none visible" in gpus.leftovers(found, [])[0]


@pytest.mark.parametrize(("visible", "indices"), [(None, [0, 1]), ("1", [1]), ("1,0", [0, 1]), ("GPU-aa", [0]), ("", []), ("7", [])])
def test_assigned_gpus_by_index_or_uuid(visible, indices):
    found, _, _ = gpus.inventory(smi)
    assert [g["index"] for g in gpus.assigned(found, visible)] == indices


def test_no_nvidia_smi_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.inventory() == ([], [], "no nvidia-smi: no GPU on this node")


def test_a_failing_nvidia_smi_is_said(monkeypatch, tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate' >&2\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert gpus.inventory()[2] == "nvidia-smi ended with 9: NVIDIA-SMI has failed because it could not communicate"


def test_dcgm_samples():
    with raw_server(answering(respond(200, DCGM, "text/plain"))) as url:
        found = gpus.sample_dcgm(f"{url}/metrics")
    assert found == [gpus.GpuSample("0", "GPU-aa", 22.5, 1024.0), gpus.GpuSample("1", "GPU-bb", 7.0, 0.0)]
    with raw_server(answering(respond(500, ""))) as url, pytest.raises(gpus.NoGpu, match="answered 500"):
        gpus.sample_dcgm(url)


def test_samples_of_the_assigned_gpus_become_rows(tmp_path):
    found, _, _ = gpus.inventory(smi)
    path = tmp_path / "gpu" / "decode-0.csv"
    sampler = gpus.Sampler(path, lambda: gpus.parse_dcgm(DCGM), found[:1], every_s=3600)
    sampler.start()
    sampler.once()
    sampler.once()
    sampler.stop()
    header, *rows = path.read_text().splitlines()
    assert header == "utc,gpu,utilisation_pct,memory_used_mib"
    assert [r.split(",")[1:] for r in rows] == [["0", "22.5", "1024"]] * 2
