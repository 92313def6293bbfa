"""What this node and this engine environment are: versions and file hashes without importing vLLM, disk space, and addresses."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import re
import shutil
import socket
import struct
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

_DISTRIBUTIONS = re.compile(r"^(vllm|nixl|ai[-_.]dynamo|torch$|transformers$|ucx)", re.IGNORECASE)
_DIST_INFO = re.compile(r"^(?P<name>[A-Za-z0-9._]+)-(?P<version>[^-]+)\.dist-info$")

ENGINE_NEVER_SEES = re.compile(
    r"^(SLURM_|SBATCH_|SRUN_|PMI|PMIX|OMPI_|DYN_|ETCD_|NATS_|VLLM_NIXL_|VLLM_PORT$|PROMETHEUS_MULTIPROC_DIR$"
    r"|MASTER_ADDR$|MASTER_PORT$|RANK$|WORLD_SIZE$|LOCAL_RANK$)")
"""Inherited variables that would steer an engine from outside its spec: Slurm's and MPI's (an engine that finds them thinks that it is a
task of an MPI job), those of another Dynamo deployment, and another job's rendezvous."""
PYTHON_PATHS = ("PYTHONPATH", "PYTHONHOME")
SHOWN_ENVIRONMENT = re.compile(
    r"^(CUDA|NVIDIA_|NCCL_|UCX_|VLLM_|DYN_|NIXL_|ETCD_|NATS_|OMP_|GLOO_|HF_|TRANSFORMERS_|TORCH|PATH$|LD_LIBRARY_PATH$|HOME$|TMPDIR$)")


def site_packages() -> list[Path]:
    """Folders of this interpreter that hold distributions, first the one that shadows the others."""
    names = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path]
    return list(dict.fromkeys(Path(n) for n in names if n and Path(n).name in ("site-packages", "dist-packages") and Path(n).is_dir()))


def distribution_versions(folders: Iterable[Path]) -> dict[str, str]:
    """Versions of the distributions that decide what serves, from the names of their metadata folders."""
    found: dict[str, str] = {}
    for folder in folders:
        for entry in sorted(folder.iterdir()):
            match = _DIST_INFO.match(entry.name)
            if match and _DISTRIBUTIONS.match(match["name"]):
                found.setdefault(match["name"].replace("_", "-").lower(), match["version"])
    return found


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while piece := f.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def file_hashes(relative: Iterable[str], folders: Iterable[Path]) -> dict[str, str | None]:
    """Relative path -> sha256 of the file in the first folder that has it; None when no folder does."""
    places = list(folders)
    found: dict[str, str | None] = {}
    for name in relative:
        path = next((f / name for f in places if (f / name).is_file()), None)
        found[name] = None if path is None else sha256(path)
    return found


def disk_free_gib(paths: Iterable[Path]) -> dict[str, float]:
    return {str(p): round(shutil.disk_usage(p).free / 2**30, 2) for p in paths if p.exists()}


def interface_address(interface: str) -> str:
    """IPv4 address of a network interface (SIOCGIFADDR); OSError when it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        packed = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))
    return str(ipaddress.ip_address(packed[20:24]))


def engine_environment(
    inherited: Mapping[str, str], own: Mapping[str, str], tmp_dir: Path, in_container: bool = False
) -> tuple[dict[str, str], list[str]]:
    """(environment of an engine, names that were kept from it).

    own: the spec's variables, filled. TMPDIR is the private folder, and HOME too where the inherited one cannot be written to. A PYTHONPATH
    of somebody's shell would put other files before the hashed ones; that of a container image belongs to it.
    """
    removed = sorted(k for k in inherited if ENGINE_NEVER_SEES.match(k) or (k in PYTHON_PATHS and not in_container))
    env = {k: v for k, v in inherited.items() if k not in removed}
    env["TMPDIR"] = str(tmp_dir)
    home = env.get("HOME", "")
    if not home or not os.access(home, os.W_OK):
        env["HOME"] = str(tmp_dir)
    return {**env, **own}, removed
