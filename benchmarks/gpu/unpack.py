"""Unpack on the GPU machine what pack.py made, and build the environments that the recipes name.

`add` takes one carried piece: its parts are kept, and every unit whose parts are all there is checked and unpacked at once, so most of the
work is done while the next piece travels. `finish` makes ROOT/gpu-stock and one environment per patch set (hard links, then the
project's own patching), ROOT/aiperf, links them under PROJECT/.envs as clusters/local-gpu.yaml names them, and imports what will be
served from each of them.
Nothing is installed into the machine's own Python: the environments see its packages behind theirs.
"""

from __future__ import annotations

import argparse
import compileall
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SMOKE = """
import importlib.metadata as m, json, torch, vllm, nixl._api, dynamo.llm, dynamo.vllm.main, vllm.entrypoints.openai.api_server
from vllm.distributed.nixl_utils import NixlWrapper
from vllm.vllm_flash_attn import is_fa_version_supported
print(json.dumps({"python": __import__("sys").version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda,
  "gpus": torch.cuda.device_count(), "nixl_wrapper": NixlWrapper is not None,
  "fa3": is_fa_version_supported(3), "fa4": is_fa_version_supported(4),
  **{n: m.version(n) for n in ("vllm", "nixl", "nixl-cu13", "ai-dynamo", "ai-dynamo-runtime", "transformers", "triton")}}))
"""


def add(pieces: Path, root: Path) -> list[str]:
    """Names of the units that this piece completed. Stops the program when an archive is not what index.json says."""
    parts = root / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    index = json.loads((pieces / "index.json").read_text(encoding="utf-8"))
    for part in pieces.iterdir():
        shutil.copyfile(part, parts / f".{part.name}")
        (parts / f".{part.name}").replace(parts / part.name)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        complete = [
            name for name, unit in index.items() if not (root / "done" / name).exists() and all((parts / p).exists() for p in unit["parts"])
        ]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: unpack(name, index[name], root), complete))
    missing = [name for name in index if not (root / "done" / name).exists()]
    print(f"unpacked {complete or 'nothing yet'}; still missing {missing or 'nothing'}")
    return complete


def unpack(name: str, unit: dict[str, object], root: Path) -> None:
    parts = [root / "parts" / str(p) for p in unit["parts"]]  # type: ignore[attr-defined]
    content = b"".join(p.read_bytes() for p in parts)
    found = hashlib.sha256(content).hexdigest()
    if found != unit["sha256"]:
        raise SystemExit(f"{name}: sha256 {found}, index.json says {unit['sha256']}")
    target = root / str(unit["target"])
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:xz") as tar:
        tar.extractall(target, filter="tar")
    (root / "done").mkdir(exist_ok=True)
    (root / "done" / name).touch()
    for part in parts:
        part.unlink()


def behind() -> str:
    """The line of a .pth file that puts this interpreter's packages (the machine's own) behind an environment's."""
    places = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    return "import site; " + "; ".join(f"site.addsitedir({p!r})" for p in places) + "\n"


def make_env(env: Path, packages: list[Path]) -> Path:
    """A virtual environment whose site-packages hold hard links to `packages`, later ones on top. Returns its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    site = env / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for source in packages:
        subprocess.run(["cp", "-rlf", f"{source}/.", str(site)], check=True)
    (site / "zz-machine.pth").write_text(behind(), encoding="utf-8")
    return site


def link(project: Path, name: str, env: Path) -> None:
    (project / ".envs").mkdir(exist_ok=True)
    place = project / ".envs" / name
    if place.is_symlink():
        place.unlink()
    place.symlink_to(env)


def wait_for_units(root: Path, deadline_s: float = 120.0) -> None:
    """`add` may still be at work in the background; stops the program when a unit is still missing at the deadline."""
    index = json.loads((root / "parts" / "index.json").read_text(encoding="utf-8"))
    end = time.monotonic() + deadline_s
    while missing := [name for name in index if not (root / "done" / name).exists()]:
        if time.monotonic() > end:
            raise SystemExit(f"still missing after {deadline_s:g} s: {missing}; was every piece added?")
        time.sleep(0.2)


def finish(root: Path, project: Path, sets: list[str]) -> int:
    began = time.monotonic()
    wait_for_units(root)
    print(f"unpacked after {time.monotonic() - began:.1f} s")
    compileall.compile_dir(str(root / "site"), quiet=2, workers=min(32, os.cpu_count() or 1))
    print(f"byte code after {time.monotonic() - began:.1f} s")
    names = ["gpu-stock"]
    make_env(root / "gpu-stock", [root / "site"])
    for entry in sets:
        name, _, patches = entry.partition("=")
        site = make_env(root / name, [root / "site"])
        command = [sys.executable, "-m", "pdlaunch.patching", "apply", *patches.split(","), "--site-packages", str(site)]
        subprocess.run(command, check=True, cwd=project)
        names.append(name)
    if (root / "aiperf-site").exists():
        make_env(root / "aiperf", [root / "site", root / "aiperf-site"])
        script = root / "aiperf" / "bin" / "aiperf"
        script.write_text(
            f"#!{root / 'aiperf' / 'bin' / 'python'}\nimport sys\nfrom aiperf.cli import app\nsys.exit(app())\n", encoding="utf-8"
        )
        script.chmod(0o755)
        link(project, "aiperf", root / "aiperf")
    for name in names:
        link(project, name, root / name)
    link(project, "control-plane", root)
    print(f"environments after {time.monotonic() - began:.1f} s")
    commands = {name: [str(root / name / "bin" / "python"), "-c", SMOKE] for name in names}
    commands |= {"aiperf": [str(root / "aiperf" / "bin" / "aiperf"), "--version"]} if (root / "aiperf").exists() else {}
    commands |= {name: [str(root / "bin" / name), "--version"] for name in ("etcd", "nats-server")}
    failed = 0
    with ThreadPoolExecutor(len(commands)) as pool:
        for name, (code, text) in zip(commands, pool.map(attempt, commands.values()), strict=True):
            print(f"{name}: {text}")
            failed += code != 0
    print(f"imports after {time.monotonic() - began:.1f} s")
    return 1 if failed else 0


def attempt(argv: list[str], limit_s: float = 150.0) -> tuple[int, str]:
    """(exit code, end of the output) of a program that should end soon; 124 when it did not."""
    try:
        run = subprocess.run(argv, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return 124, f"no end after {limit_s:g} s"
    return run.returncode, run.stdout.strip()[-600:] if run.returncode == 0 else run.stderr[-1500:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    verbs = parser.add_subparsers(dest="verb", required=True)
    adding = verbs.add_parser("add", help="take one piece")
    adding.add_argument("piece", type=Path)
    finishing = verbs.add_parser("finish", help="make the environments")
    finishing.add_argument("--project", type=Path, default=Path(__file__).resolve().parents[2])
    finishing.add_argument("--patched", action="append", default=[], metavar="ENV=PATCH[,PATCH]")
    for sub in (adding, finishing):
        sub.add_argument("--root", type=Path, required=True)
    args = parser.parse_args()
    if args.verb == "add":
        add(args.piece, args.root)
        return 0
    return finish(args.root, args.project, args.patched)


if __name__ == "__main__":
    sys.exit(main())
