"""Which state of this repository a run was launched from."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path


def commit_and_dirt(root: Path) -> tuple[str, str]:
    """(commit, sha256 of the uncommitted difference or ""). ("", "") without git or outside a checkout.

    The difference covers tracked files and the content of untracked ones that git does not ignore.
    """
    if shutil.which("git") is None or not (root / ".git").exists():
        return "", ""
    commit = _git(root, "rev-parse", "HEAD").decode().strip()
    difference = _git(root, "diff", "HEAD", "--no-ext-diff", "--binary")
    untracked = [p for p in _git(root, "ls-files", "--others", "--exclude-standard", "-z").split(b"\0") if p]
    if not commit or not (difference or untracked):
        return commit, ""
    digest = hashlib.sha256(difference)
    for name in sorted(untracked):
        path = root / name.decode(errors="surrogateescape")
        digest.update(b"\0" + name + b"\0" + (path.read_bytes() if path.is_file() else b""))
    return commit, digest.hexdigest()


def _git(root: Path, *words: str) -> bytes:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, timeout=30, check=False)
    return done.stdout if done.returncode == 0 else b""
