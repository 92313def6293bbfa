"""Reading many archived runs: list 1,000 in under 1 s, compare 1,000 in under 3 s, a page over 200 in under 5 s, all of user time and end
to end.

The runs are synthetic (tests/runfactory.py) with the files of a real one; memory is the peak of the process, which must not grow with the
runs' sizes.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pdlaunch.node.spec import LoadPhase  # noqa: E402
from tests.runfactory import Shape, seal, write_run  # noqa: E402

RUNS, PAGE_RUNS = 1000, 200
SHAPE = Shape(loads=(LoadPhase("c16", 8192, 1024, 12, concurrency=4), LoadPhase("c64", 8192, 1024, 12, concurrency=8)))


def archive(results: Path, count: int) -> None:
    """`count` runs of ten configurations: copies that differ in a flag and in their id."""
    first = write_run(results, SHAPE)
    for i in range(1, count):
        run = shutil.copytree(first, results / f"recipe-{i % 10}" / f"20261019T{i:06d}Z-{i}")
        spec = run / "spec.json"
        spec.write_text(
            spec.read_text().replace('"64"', f'"{64 + i % 10}"').replace('"recipe": "gemma4-p4d8"', f'"recipe": "recipe-{i % 10}"')
        )
        seal(run)


def measure(*arguments: str) -> tuple[float, float]:
    """(user seconds, peak MiB) of one call of launch.py."""
    probe = (
        "import resource, subprocess, sys; r = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL); u = "
        "resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(u.ru_utime, u.ru_maxrss / 1024, r.returncode)"
    )
    said = subprocess.run(
        [sys.executable, "-c", probe, sys.executable, "launch.py", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    )
    user, peak, code = said.stdout.split()
    if int(code) != 0:
        raise RuntimeError(f"launch.py {' '.join(arguments)} left with {code}")
    return float(user), float(peak)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        results, some = Path(folder) / "all", Path(folder) / "some"
        archive(results, RUNS)
        archive(some, PAGE_RUNS)
        page = Path(folder) / "page.html"
        rows = [
            (f"list {RUNS} runs", 1.0, measure("runs", "--results", str(results))),
            (f"compare {RUNS} runs", 3.0, measure("compare", "--results", str(results), "*")),
            (f"page over {PAGE_RUNS} runs", 5.0, measure("report", "--results", str(some), "*", "--out", str(page))),
        ]
        size = page.stat().st_size
    print(f"{'':<22}{'user s':>8}{'goal s':>8}{'peak MiB':>10}")
    for name, goal, (user, peak) in rows:
        print(f"{name:<22}{user:>8.2f}{goal:>8.1f}{peak:>10.0f}{'' if user < goal else '  TOO SLOW'}")
    print(f"page size {size / 1e6:.2f} MB (goal under 1.5)")
    mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"this benchmark itself {mine:.0f} MiB")
    return 0 if all(user < goal for _, goal, (user, _) in rows) and size < 1_500_000 else 1


if __name__ == "__main__":
    sys.exit(main())
