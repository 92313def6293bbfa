"""Makes this folder's tokenizer.json from a recall model's: the words " w640" to " w1999" are added, so that Dynamo's mocker speaks.

The mocker of Dynamo 1.6.1 answers with random token ids from 1000 to 1999 (2,000 ids seen). With the recall models' 640 ids they all decode
to nothing: the stream is well formed, has no text, and AIPerf counts every request as failed.

    python models/mocker-words/make.py     (standard library; again after a recall model was trained with another tokenizer)
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "gemma4-recall-4x1"
LAST_ID = 1999


def make(out: Path) -> None:
    """Writes the five files of the folder into `out`, which exists."""
    tokenizer = json.loads((SOURCE / "tokenizer.json").read_text(encoding="utf-8"))
    first = 1 + max(*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"]))
    tokenizer["added_tokens"] += [
        {"id": i, "content": f" w{i}", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        for i in range(first, LAST_ID + 1)
    ]
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(SOURCE / name, out / name)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config", {})):
        if "vocab_size" in part:
            part["vocab_size"] = LAST_ID + 1
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write into; this one unless told")
    make(parser.parse_args().out)


if __name__ == "__main__":
    main()
