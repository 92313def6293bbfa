"""The gate with the hybrid KV cache manager on: two prompts whose pages a wrong pairing of block lists, or a wrong window, would spoil.

Keys carry their position, so a list that is paired by its end instead of by token position shows only by the tokens that it loses, those
of the first blocks. Therefore the prompt with the short last page asks for the code in its first note: with any other note the wrong
pairing answered rightly, token for token. A length counts only as the server counts it (usage.prompt_tokens): a prompt is built, asked,
and built anew by what the server said, until its length is one that the test is about.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .agreement import TOKEN_KEYS, compare
from .chat import Chat, answer_row
from .completion import Completion
from .contracts import ANSWER_KEYS, utc_now
from .gate import roles_fault
from .prompts import RecallPrompt, estimate_tokens, judge, recall_prompts
from .spec import PageSmoke, SmokePrompt, Spec

ATTEMPTS = 6
_CANDIDATES = 12
_MAX_RATIO = 4.0
"""A server that counts more, or fewer, tokens than this times the estimate is not followed."""
TITLES = {"short_last_page": "last page at prefill at most half full", "beyond_window": "prompt beyond the sliding window"}

ROW_KEYS = (*ANSWER_KEYS, "attempt", "tokens")
"""Without them a row is not evidence."""

Row = dict[str, Any]


@dataclass(frozen=True)
class SmokeResult:
    """passed: None when the prompt, or its control, was not asked. row: index of the row that decided, -1 without one."""

    passed: bool | None
    observed: str
    row: int = -1


def run_smoke(spec: Spec, urls: dict[str, str], run_seed: str, out: Path, stop: threading.Event) -> list[str]:
    """Ask every prompt of spec.page_smoke, append the rows to `out`, and return what is wrong with the answers. Never raises for one.

    urls: of "deployment", then of "control" when the recipe has that engine.
    """
    failures = []
    for prompt in spec.page_smoke.prompts if spec.page_smoke else ():
        rows: list[Row] = []
        result = judge_smoke(spec, prompt, rows)
        with out.open("a", encoding="utf-8") as file:
            for attempt in range(0 if result.passed is False else ATTEMPTS):
                asked = _ask(spec, prompt, attempt, rows, urls, run_seed, stop)
                result = judge_smoke(spec, prompt, [*rows, *asked])
                for row in asked:
                    row["failure"] = ""
                asked[-1]["failure"] = "" if result.passed else result.observed
                rows += asked
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in asked)
                if stop.is_set() or asked[0]["error"] or not _misses(prompt, asked[0]):
                    break
        if result.passed is not True:
            failures.append(f"{TITLES[prompt.name]}: {result.observed}")
    return failures


def _ask(
    spec: Spec, wanted: SmokePrompt, attempt: int, before: Sequence[Row], urls: dict[str, str], run_seed: str, stop: threading.Event
) -> list[Row]:
    """The rows of one attempt: the deployment's and, when its length is one of those wanted, the control's."""
    assert spec.page_smoke is not None
    ratio = before[-1]["prompt_tokens"] / before[-1]["estimated_tokens"] if before else 1.0
    ratio = min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO)
    prompt = _prompt(f"{run_seed}/gate/{wanted.name}/{attempt}", wanted, ratio)
    more: Row = {"smoke": wanted.name, "attempt": attempt}
    if prompt is None:
        lengths = f"{wanted.minimum_tokens} to {wanted.maximum_tokens} tokens"
        error = f"not sent: no recall prompt of {lengths} can be built, at {ratio:.3f} tokens for each estimated one"
        return [{**answer_row(utc_now(), Completion(error=error)), **more, "tokens": []}]
    more |= {"lines": prompt.lines, "estimated_tokens": estimate_tokens(prompt.text), "code": prompt.code, "decoys": list(prompt.decoys)}
    rows: list[Row] = []
    for target, url in urls.items():
        if not rows or not (rows[0]["error"] or _misses(wanted, rows[0])):
            chat = Chat(url, spec.model.served_name, spec.deadlines.gate_s, stop)
            answer, row = chat.ask(prompt.text, spec.page_smoke.max_tokens, **(TOKEN_KEYS if "control" in urls else {}))
            rows.append({**row, **more, "target": target, "tokens": answer.tokens})
    return rows


def _prompt(seed: str, wanted: SmokePrompt, ratio: float) -> RecallPrompt | None:
    """Of some prompts that ask for their first note, the one that should be nearest to the middle of the wanted lengths.

    ratio: the server's tokens per estimated token.
    """
    middle = (wanted.minimum_tokens + wanted.maximum_tokens) / 2 / ratio
    made: list[RecallPrompt] = []
    for candidate in range(_CANDIDATES):
        try:
            first, _ = recall_prompts(f"{seed}/{candidate}", 2, round(middle) + candidate)
            made.append(first)
        except ValueError:
            continue
    return min(made, key=lambda prompt: abs(estimate_tokens(prompt.text) - middle), default=None)


def _misses(wanted: SmokePrompt, row: Row) -> bool:
    """Whether the server counted another length than those wanted; a length that it did not say is no reason to ask again."""
    count = row["prompt_tokens"]
    return count is not None and not wanted.minimum_tokens <= count <= wanted.maximum_tokens


def judge_smoke(spec: Spec, wanted: SmokePrompt, rows: Sequence[Row]) -> SmokeResult:
    """From the rows of gate.jsonl alone, so that an archive is judged as the run was; rows of other prompts are skipped."""
    smoke = spec.page_smoke
    assert smoke is not None
    if fault := length_fault(smoke, wanted):
        return SmokeResult(False, fault)
    mine = [(index, row) for index, row in enumerate(rows) if row.get("smoke") == wanted.name and set(ROW_KEYS) <= set(row)]
    asked = [(index, row) for index, row in mine if row.get("target") == "deployment"]
    if not asked:
        return SmokeResult(None, "it was not asked")
    index, row = asked[-1]
    count = row["prompt_tokens"]
    if row["error"]:
        known = "" if count is None else f"{count} tokens: "
        return SmokeResult(None if row["error"].startswith("stopped") else False, f"{known}{row['error']}", index)
    if count is None:
        return SmokeResult(False, "the length is not known: the answer has no usage.prompt_tokens", index)
    if _misses(wanted, row):
        tried = ", ".join(str(other["prompt_tokens"]) for _, other in asked)
        lengths = f"{wanted.minimum_tokens} to {wanted.maximum_tokens} tokens"
        return SmokeResult(False, f"no prompt of {lengths} was hit in {len(asked)} attempts, the server counted {tried}", index)
    about = f"{count} tokens, {count % smoke.block_tokens} beyond whole blocks of {smoke.block_tokens}: "
    if fault := roles_fault(spec, row.get("worker_ids")):
        return SmokeResult(False, about + fault, index)
    if not spec.engines_of("control"):
        right, said = _judge_alone(spec, row)
        return SmokeResult(right, about + said, index)
    control = next(((i, r) for i, r in mine if r.get("target") == "control" and r.get("attempt") == row["attempt"]), None)
    if control is None:
        return SmokeResult(None, f"{about}the control engine was not asked", index)
    passed, said = _judge_pair(row, control[1])
    return SmokeResult(passed, about + said, control[0])


def _judge_pair(row: Row, control: Row) -> tuple[bool | None, str]:
    found = compare(row, control)
    if str(control["error"]).startswith("stopped"):
        return None, str(found["why"])
    if not control["error"] and row["prompt_tokens"] != control["prompt_tokens"]:
        return False, f"the control engine counted {control['prompt_tokens']} tokens in the same prompt"
    if not found["equal"]:
        return False, str(found["why"])
    size = f"{len(row['tokens'])} tokens" if found["compared"] == "tokens" else "text"
    return True, f"{size} of the answer equal to the control engine's"


def _judge_alone(spec: Spec, row: Row) -> tuple[bool, str]:
    """Without a control: the hidden code where the recipe's texts can be judged, else a whole stream."""
    if not spec.proof.text_checked:
        return True, "a whole stream came, its text was not judged"
    if spec.recall is None:
        said = (row["content"] + row["reasoning"]).strip()
        return bool(said), "a text came, which was not judged" if said else "the answer has no text"
    if judge(row.get("code", ""), row["content"], row["reasoning"], (), row.get("decoys", ())):
        return True, f"the code {row.get('code')} was recalled"
    return False, f"the code {row.get('code')} is not the answer {(row['content'] or row['reasoning'])[:80]!r}"


def length_fault(smoke: PageSmoke, wanted: SmokePrompt) -> str:
    """Why a prompt of the wanted lengths would not test what its name says; '' when every length would."""
    low, high, block, window = wanted.minimum_tokens, wanted.maximum_tokens, smoke.block_tokens, smoke.window_tokens
    if wanted.name == "short_last_page":
        right = block < low <= high and low // block == high // block and low % block > 0 and high % block <= block // 2
    else:
        right = 2 * block < low <= high and low > window + block
    return "" if right else f"spec.json: {low} to {high} tokens do not suit {wanted.name}: blocks of {block}, window {window}"


def required(spec: Spec, wanted: SmokePrompt) -> str:
    told = "equal to the control engine's" if spec.engines_of("control") else "as the prompt asks"
    return f"an answer {told} to a prompt of {wanted.minimum_tokens} to {wanted.maximum_tokens} tokens"
