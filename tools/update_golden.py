"""Renders tests/golden/ again; look at the difference before you commit it.

.envs/launcher/bin/python tools/update_golden.py
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> None:
    from tests.golden_cases import CASES, GOLDEN, files_of, folder_of

    rendered = {folder_of(*case): files_of(*case) for case in CASES}
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for folder, files in rendered.items():
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    print(f"{len(rendered)} bundles in {GOLDEN}")


if __name__ == "__main__":
    main()
