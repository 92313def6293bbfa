"""Pack what a GPU machine without a package registry lacks: archives small enough to carry, with their hashes.

Each distribution becomes one `tar.xz` unit; a unit above the limit is cut into parts; units and parts are laid into folders
piece-00, piece-01, ... of at most --max-mib each. index.json names every unit with the sha256 of its archive and where its files go.
Large extensions that these runs never load are left out (DROPPED); what is left out is printed.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import io
import json
import lzma
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent

DROPPED = {
    # FlashAttention 2 is for other chips; on Hopper vLLM picks FlashAttention 3, and `import vllm.vllm_flash_attn` needs one of the two.
    "vllm": (
        "vllm/vllm_flash_attn/_vllm_fa2_C*",
        "vllm/_flashkda*",
        "vllm/_flashmla_C*",
        "vllm/_qutlass*",
        "vllm/_deepselect*",
        "vllm/third_party/*/_C.cpython-*",
        "vllm/third_party/*/include/*",
        "vllm/vllm-rs",
        "vllm/**/swagger-ui-bundle.js",
    ),
    "nixl_cu13": ("nixl_ep_cu13/*", "nixl_cu13.libs/ucx/libucx_perftest*"),
}
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (5, 12, 14, 17, 24, 26, 27, 28, 31, 34, 35)]
PLATFORMS += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]
DEBIAN = {"etcd-server": "./usr/bin/etcd", "nats-server": "./usr/sbin/nats-server"}


@dataclass(frozen=True)
class Unit:
    """name: file stem of the archive. target: folder under the root that receives it (site, aiperf-site or bin)."""

    name: str
    target: str
    sources: tuple[Path, ...]


def download(requirements: Path, into: Path, python: str) -> list[Path]:
    """Wheels of the pinned list, from the ordinary package index; nothing is fetched for a wheel that is already there."""
    into.mkdir(parents=True, exist_ok=True)
    pins = [line.strip() for line in requirements.read_text(encoding="utf-8").splitlines() if line.strip() and not line.startswith("#")]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        python,
        "--implementation",
        "cp",
        "--dest",
        str(into),
        "--find-links",
        str(into),
    ]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, *pins], check=True)
    wheels = sorted(into.glob("*.whl"))
    if len(wheels) != len(pins):
        raise SystemExit(f"{into}: {len(wheels)} wheels for {len(pins)} pins of {requirements.name}; remove the folder and run again")
    return wheels


def download_debian(into: Path) -> dict[str, Path]:
    into.mkdir(parents=True, exist_ok=True)
    found = {}
    for package, member in DEBIAN.items():
        if not list(into.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", "-qq", package], cwd=into, check=True)
        (deb,) = into.glob(f"{package}_*.deb")
        contents = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(deb)], check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(contents)) as tar:
            source = tar.extractfile(member)
            if source is None:
                raise SystemExit(f"{deb}: no {member}")
            binary = into / Path(member).name
            binary.write_bytes(source.read())
        binary.chmod(0o755)
        found[binary.name] = binary
    return found


def tar_of(unit: Unit) -> tuple[bytes, int]:
    """The unit's files as an uncompressed tar with fixed times and owners, and the bytes left out of it."""
    out, left_out = io.BytesIO(), 0
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for source in unit.sources:
            if source.suffix != ".whl":
                add(tar, source.name, source.read_bytes(), executable=True)
                continue
            dropped = DROPPED.get(source.name.split("-")[0], ())
            with zipfile.ZipFile(source) as wheel:
                for info in sorted(wheel.infolist(), key=lambda i: i.filename):
                    if info.is_dir():
                        continue
                    if any(fnmatch.fnmatch(info.filename, pattern) for pattern in dropped):
                        left_out += info.file_size
                        continue
                    name = info.filename
                    head, _, rest = name.partition("/")
                    if head.endswith(".data"):
                        kind, _, rest = rest.partition("/")
                        if kind not in ("purelib", "platlib"):
                            continue
                        name = rest
                    add(tar, name, wheel.read(info), executable=bool(info.external_attr >> 16 & 0o100))
    return out.getvalue(), left_out


def add(tar: tarfile.TarFile, name: str, content: bytes, executable: bool) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(content), 0o755 if executable else 0o644, 1_700_000_000
    tar.addfile(info, io.BytesIO(content))


def compressed(unit: Unit, store: Path) -> Path:
    """The unit's archive; the name carries a hash of its sources, so an unchanged unit is not compressed again."""
    key = hashlib.sha256(repr((unit.target, [(s.name, s.stat().st_size) for s in unit.sources], DROPPED)).encode()).hexdigest()[:12]
    archive = store / f"{unit.name}.{key}.tar.xz"
    if not archive.exists():
        content, left_out = tar_of(unit)
        temporary = archive.with_suffix(".partial")
        temporary.write_bytes(lzma.compress(content, preset=6, check=lzma.CHECK_CRC64))
        temporary.replace(archive)
        print(
            f"{unit.name}: {len(content) / 2**20:.1f} MiB, left out {left_out / 2**20:.1f}, packed {archive.stat().st_size / 2**20:.1f}",
            flush=True,
        )
    return archive


def lay(units: list[tuple[Unit, Path]], out: Path, limit: int) -> None:
    """Largest first into the first piece with room; an archive above the limit is cut into parts of at most the limit."""
    parts: list[tuple[str, bytes]] = []
    index: dict[str, dict[str, object]] = {}
    for unit, archive in units:
        content = archive.read_bytes()
        names = []
        for number, start in enumerate(range(0, len(content), limit)):
            name = f"{unit.name}.tar.xz.{number:02d}"
            parts.append((name, content[start : start + limit]))
            names.append(name)
        index[unit.name] = {"target": unit.target, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), "parts": names}
    pieces: list[tuple[int, list[tuple[str, bytes]]]] = []
    for name, content in sorted(parts, key=lambda p: -len(p[1])):
        for i, (used, members) in enumerate(pieces):
            if used + len(content) <= limit:
                members.append((name, content))
                pieces[i] = (used + len(content), members)
                break
        else:
            pieces.append((len(content), [(name, content)]))
    text = json.dumps(index, indent=1, sort_keys=True) + "\n"
    for number, (used, members) in enumerate(pieces):
        folder = out / f"piece-{number:02d}"
        folder.mkdir(parents=True)
        for name, content in members:
            (folder / name).write_bytes(content)
        (folder / "index.json").write_text(text, encoding="utf-8")
        print(f"{folder.name}: {used / 2**20:.1f} MiB, {len(members)} files")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for piece-NN/ (must not hold any yet)")
    parser.add_argument("--cache", type=Path, required=True, help="downloads and compressed units")
    parser.add_argument("--max-mib", type=float, default=36.0, help="limit of one piece")
    parser.add_argument("--python", default="3.12", help="Python of the GPU machine")
    parser.add_argument("--without-aiperf", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    if list(args.out.glob("piece-*")):
        raise SystemExit(f"{args.out} holds pieces already; remove them first")
    units = [Unit("services", "bin", tuple(download_debian(args.cache / "debian").values()))]
    lists = [("site", HERE / "engine-wheels.txt")] + ([] if args.without_aiperf else [("aiperf-site", HERE / "aiperf-wheels.txt")])
    for target, requirements in lists:
        wheels = download(requirements, args.cache / target, args.python)
        large = [w for w in wheels if w.stat().st_size > 20 * 2**20]
        units += [Unit(w.name.split("-")[0], target, (w,)) for w in large]
        units.append(Unit(f"{target}-small", target, tuple(w for w in wheels if w not in large)))
    store = args.cache / "units"
    store.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        archives = list(pool.map(lambda unit: compressed(unit, store), units))
    lay(list(zip(units, archives, strict=True)), args.out, int(args.max_mib * 2**20))
    return 0


if __name__ == "__main__":
    sys.exit(main())
