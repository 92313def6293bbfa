"""A small copy of an archived run for results/reference: the same verdict from the same evidence, without what only fills disks.

    python3 -m benchmarks.gpu.reduce_run RUN OUT --replace /home/me/project=PROJECT --replace /scratch/x=RESULTS

Left out: AIPerf's server metrics, per-phase duplicates, logs of its own and inputs, histogram buckets of /metrics, and lines of logs that
neither name a level nor carry a transfer, a plan or a failure. Paths of the machine are replaced as told. The copy is then judged from its
own files; the program fails, and leaves no copy, when verdict, checks or any number of the evidence differ from those of the whole run.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

from pdlaunch.node import evidence, finish
from pdlaunch.node.contracts import Evidence, Verdict
from pdlaunch.node.spec import load_spec

LEFT_OUT = (
    re.compile(r"load/[^/]+/aiperf/(phases/|logs/|inputs\.json|server_metrics_export|profile_export_console|.*\.csv$)"),
    re.compile(r"load/[^/]+/aiperf\.log$"),
)
KEPT_LOG_LINE = re.compile(
    r"ERROR|WARN|Error|per-region KV|KV Transfer|KV cache size|Available KV|Using .* backend|Failing|NIXL|ready|model loading", re.I
)


def shorter(name: str, text: str) -> str:
    """The part of a file that is kept."""
    if name.endswith(".prom"):
        return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#") and "_bucket{" not in line)
    if name.startswith("logs/"):
        return "".join(line for line in text.splitlines(keepends=True) if KEPT_LOG_LINE.search(line))
    return text


def reduce(run: Path, out: Path, replaced: list[tuple[str, str]]) -> Verdict:
    """Copy, judge, compare; ValueError says what the copy lost. out must not exist."""
    ended = json.loads((run / "manifest.json").read_text(encoding="utf-8"))["ended"]
    for source in sorted(run.rglob("*")):
        name = str(source.relative_to(run))
        if source.is_dir() or name == "manifest.json" or any(pattern.match(name) for pattern in LEFT_OUT):
            continue
        text = shorter(name, source.read_text(encoding="utf-8"))
        for old, new in replaced:
            text = text.replace(old, new)
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")
    # Both are judged by the code of today: checks may have been added since the run.
    whole = finish.judge(run, ended, write=False)
    judged = finish.judge(out, ended)
    lost = differences(evidence.collect(load_spec(run / "spec.json"), run), Evidence.read(out / "evidence.json"))
    if judged.verdict != whole.verdict or [(c.name, c.passed) for c in judged.checks] != [(c.name, c.passed) for c in whole.checks]:
        lost.append(f"verdict: {whole.line!r} became {judged.line!r}")
    if lost:
        raise ValueError("; ".join(lost[:8]))
    finish.write_manifest(load_spec(out / "spec.json"), out, ended)
    return judged


def differences(whole: Evidence, small: Evidence) -> list[str]:
    """Names whose number or truth differs; texts may hold replaced paths and other line numbers."""
    out = []
    for name in sorted(set(whole.values) | set(small.values)):
        before, after = whole.get(name), small.get(name)
        if before != after and not (isinstance(before, str | list | dict) and type(before) is type(after)):
            out.append(f"{name}: {before!r} became {after!r}"[:200])
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--replace", action="append", default=[], metavar="OLD=NEW")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists")
    pairs = [(old, new) for old, _, new in (text.partition("=") for text in args.replace)]
    try:
        print(reduce(args.run, args.out, pairs).line)
    except ValueError as e:
        shutil.rmtree(args.out)
        print(f"not reduced: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
