"""What runs on the nodes, stage by stage: serve (etcd, NATS, frontend, engines), gate, check, load, prove, judge, archive.

    python3 -m node run --spec spec.json [--run-dir DIR]   the supervisor, on the head node
    python3 -m node worker ...                             the wrapper of one engine rank, started by the supervisor
    python3 -m node judge RUN                              evidence and verdict of an archived run again, from its files alone
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .spec import SpecError


def _run(argv: list[str]) -> int:
    from .supervisor import supervise

    parser = argparse.ArgumentParser(prog="node run", allow_abbrev=False)
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, help="the run folder, which must not exist; default: results_dir/<recipe>/<utc>-<jobid>")
    parser.add_argument("--launcher", type=int, default=0, metavar="PID", help="the parent process; the run is stopped when it is gone")
    args = parser.parse_args(argv)
    return supervise(args.spec, args.run_dir, args.launcher)


def _judge(argv: list[str]) -> int:
    from .contracts import Verdict
    from .finish import judge

    parser = argparse.ArgumentParser(prog="node judge", allow_abbrev=False)
    parser.add_argument("run", type=Path)
    args = parser.parse_args(argv)
    manifest = args.run / "manifest.json"
    ended = json.loads(manifest.read_text(encoding="utf-8"))["ended"] if manifest.exists() else "the run did not reach its end"
    verdict = judge(args.run, ended, write=False)
    print("\n  ".join([verdict.line, *verdict.reasons]))
    kept = Verdict.read(args.run / "verdict.json") if (args.run / "verdict.json").exists() else None
    if kept is not None and kept != verdict:
        print(f"  the archive says otherwise: {kept.line}")
        return 1
    return 0 if verdict.verdict == "VALID" else 1


def main(argv: list[str]) -> int:
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    try:
        if command == "run":
            return _run(rest)
        if command == "judge":
            return _judge(rest)
        if command == "worker":
            from .worker import main as worker

            return worker(rest)
    except (SpecError, FileNotFoundError) as e:
        print(e, file=sys.stderr)
        return 2
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
