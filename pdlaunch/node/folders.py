"""The run folder, and private temporary folders that name their owner, so that those of a killed run can be removed later."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from .contracts import write_json
from .procfs import PROC, started_ticks
from .spec import Spec

MIN_FREE_GIB = 0.25
PREFIX = "pdl-"
OWNER = "owner.json"
"""In each temporary folder: which process made it, {pid, started_ticks, boot, pid_namespace}."""


def new_run_dir(spec: Spec, job: str) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return Path(spec.run.results_dir) / spec.run.recipe / f"{stamp}-{job}"


def make_run_dir(run_dir: Path) -> None:
    """OSError when it is there already, cannot be made, or has too little room for the logs of a run."""
    if run_dir.exists():
        raise FileExistsError(errno.EEXIST, "it exists already; each run needs a new one")
    present = next(p for p in run_dir.parents if p.exists())
    free_gib = shutil.disk_usage(present).free / 2**30
    if free_gib < MIN_FREE_GIB:
        raise OSError(errno.ENOSPC, f"{present} has {free_gib:.2f} GiB free, {MIN_FREE_GIB} GiB are needed")
    for name in ("logs", "nodes"):
        (run_dir / name).mkdir(parents=True)


def temporary(parent: Path | str | None = None) -> Path:
    """A new folder of this process in parent, default TMPDIR."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    with contextlib.suppress(OSError):  # without a name it is used all the same; it stays if its owner is killed
        write_json(folder / OWNER, {"pid": os.getpid(), "started_ticks": started_ticks(os.getpid()), **_where()})
    return folder


def _where() -> dict[str, str]:
    """TMPDIR may be shared with other hosts and containers, whose process ids say nothing here."""
    return {"boot": (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
            "pid_namespace": str((PROC / "self/ns/pid").readlink())}


def remove_abandoned(*parents: Path) -> list[Path]:
    """Remove the temporary folders of this user whose owner ran on this system and is gone; returns them.

    A folder without a whole owner.json, of another boot or of another pid namespace stays: nothing shows that its owner is gone.
    """
    removed = []
    for parent in dict.fromkeys((Path(tempfile.gettempdir()), *parents)):
        for folder in sorted(parent.glob(f"{PREFIX}*")):
            try:
                if _abandoned(folder):
                    shutil.rmtree(folder)
                    removed.append(folder)
            except OSError:
                continue
    return removed


def _abandoned(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
        return False
    try:
        owner: Any = json.loads((folder / OWNER).read_text(encoding="utf-8"))
        here = {k: owner[k] for k in ("boot", "pid_namespace")} == _where()
        return here and isinstance(owner["pid"], int) and started_ticks(owner["pid"]) != owner["started_ticks"]
    except (ValueError, KeyError, TypeError):
        return False
