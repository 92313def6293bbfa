"""Makes this folder's tokenizer.json from a recall model's: the words " w640" to " w1999" are added, so that Dynamo's mocker speaks.

The mocker of Dynamo 1.6.1 answers with random token ids from 1000 to 1999 (2,000 ids seen). With the recall models' 640 ids they all decode
to nothing: the stream is well formed, has no text, and AIPerf counts every request as failed.

    python models/mocker-words/make.py     (standard library; run from the repository root)
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "gemma4-recall-4x1"
LAST_ID = 1999


def main() -> None:
    tokenizer = json.loads((SOURCE / "tokenizer.json").read_text(encoding="utf-8"))
    first = 1 + max(*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"]))
    tokenizer["added_tokens"] += [
        {"id": i, "content": f" w{i}", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        for i in range(first, LAST_ID + 1)
    ]
    (HERE / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(SOURCE / name, HERE / name)
    config = json.loads((HERE / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config", {})):
        if "vocab_size" in part:
            part["vocab_size"] = LAST_ID + 1
    (HERE / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
