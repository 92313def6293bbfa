"""Asks a running OpenAI-compatible server the recall prompts, one at a time and all at once, and records the result for the model card.

python -m models.recall_served models/gemma4-recall-4x1 --url http://127.0.0.1:8000 --about "vLLM 0.31.0 on a CPU, float32, TP1"
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from models.recall_card import write_card
from pdlaunch.node.prompts import RecallPrompt, foreign_codes, judge, recall_prompts

LENGTHS = (200, 800, 1500, 2000)
COUNT = 9


def ask(url: str, model: str, text: str, max_tokens: int = 16) -> tuple[str, int]:
    """The answer of a chat completion and the prompt tokens that the server counted."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        said = json.load(reply)
    return said["choices"][0]["message"]["content"] or "", said["usage"]["prompt_tokens"]


def recalled(prompts: list[RecallPrompt], answers: list[str]) -> int:
    return sum(
        judge(prompt.code, answer, "", foreign_codes(prompts, prompt), prompt.decoys)
        for prompt, answer in zip(prompts, answers, strict=True)
    )


def measure(url: str, model: str, seed: str) -> list[dict]:
    rows = []
    for length in LENGTHS:
        prompts = recall_prompts(f"{seed}/{length}", COUNT, length)
        together_prompts = recall_prompts(f"{seed}/{length}/together", COUNT, length)
        began = time.monotonic()
        alone = [ask(url, model, prompt.text) for prompt in prompts]
        with ThreadPoolExecutor(COUNT) as pool:
            together = list(pool.map(lambda prompt: ask(url, model, prompt.text), together_prompts))
        rows.append({
            "tokens": round(sum(tokens for _, tokens in alone) / COUNT),
            "one_by_one": f"{recalled(prompts, [text for text, _ in alone])} of {COUNT}",
            "together": f"{recalled(together_prompts, [text for text, _ in together])} of {COUNT}",
            "seconds": round(time.monotonic() - began, 1),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model; its name is the served name")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--about", required=True, help="what served the model: engine, version, device, precision")
    parser.add_argument("--seed", default="served")
    options = parser.parse_args()
    rows = measure(options.url, options.model.name, options.seed)
    (options.model / "serving.json").write_text(json.dumps({"text": options.about, "rows": rows}, indent=1) + "\n")
    write_card(options.model)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
