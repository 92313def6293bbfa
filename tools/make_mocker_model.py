"""Writes models/mocker/: a configuration and a tokenizer without weights, for Dynamo's mocker.

    .envs/launcher/bin/python tools/make_mocker_model.py

The mocker answers with token ids up to about 2,000, which the recall model's tokenizer of 640 tokens cannot turn into text: clients then see
empty answers, and AIPerf counts each as an error. This is the same tokenizer with more words behind its vocabulary.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE, TARGET = ROOT / "models" / "gemma4-recall-4x1", ROOT / "models" / "mocker"
VOCABULARY = 4096


def main() -> None:
    TARGET.mkdir(exist_ok=True)
    tokenizer = json.loads((SOURCE / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    used = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    # Ġ is the byte-level spelling of a space.
    vocabulary |= {f"Ġword{number}": number for number in range(VOCABULARY) if number not in used}
    (TARGET / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    config = json.loads((SOURCE / "config.json").read_text(encoding="utf-8"))
    config |= {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}
    (TARGET / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(SOURCE / name, TARGET / name)


if __name__ == "__main__":
    main()
