"""The model folder of dynamo.mocker: a real tokenizer with words for the token ids that the mocker makes up.

The mocker of Dynamo 1.6.1 answers with random ids from 1000 to 1999. A tokenizer without them decodes every answer to nothing, and AIPerf
counts each request as failed ("No responses with actual content").
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

VOCABULARY = 2048
COPIED = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json")


def write_mocker_model(folder: Path, base: Path) -> Path:
    """A copy of the tokenizer and configuration of `base`, its vocabulary filled up with words w<id>; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        shutil.copyfile(base / name, folder / name)
    tokenizer = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary.update({f"\u0120w{token}": token for token in range(len(vocabulary), VOCABULARY)})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False) + "\n", encoding="utf-8")
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    (config.get("text_config") or config)["vocab_size"] = VOCABULARY
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
