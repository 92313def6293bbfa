"""One verdict from the evidence of a run. Pure: the same spec, evidence and end give the same verdict, years later too.

VALID only when every needed check passed. INVALID when one of them failed, however the run ended. INCOMPLETE when none failed but some
could not be judged, because the run did not reach its end. Reasons come in the order of the checks: first what the text shows, then what
the logs say about it, then the bytes, then the rest.

Where the rules come from (numbers are those of public reports):
    recall             text alone decides: vllm#37333 (noise with 200), vllm#52234 (another request's text), vllm#52627 (only under load).
                       Every time that the recipe asks for must be complete; a hang is a failure (nixl#2047, dynamo#11914, vllm#29369)
    logs               logs.PATTERNS, each with its own report; EngineDeadError and the like count only before the stop
    gate               workers per role as the spec asks (dynamo#8263: a refused worker looks healthy), one completion that was looked
                       at, and with several KV cache groups the prompts of smoke.py
    transfer bytes     above 0 on decode: the right answer can come from decode's own prefill (vllm#26896)
    failed, expired    0 (vllm#50765; expired blocks may be read after they were given away)
    local compute      decode computes no prompt itself, but for single tokens (vllm#26896, dynamo#6678)
    predicted bytes    to the byte in each window in which every request is known
    policy             kv_load_failure_policy as the spec says, on both roles: with `recompute` a failure hides as decode's own prefill
    plan               one plan line per decode rank where layers have unequal ratios of KV heads
    build              versions and file hashes of every engine process
    agreement          dynamo#1204: right with decode only, nonsense as soon as prefill joins
    load               AIPerf's JSON, never its exit code alone (dynamo#3678: 0 with errors)
    fabric             RDMA that falls back to TCP silently: the port counters must carry what was transferred between hosts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from .contracts import Check, Evidence, Verdict, VerdictWord
from .logs import PATTERNS
from .smoke import TITLES, required
from .spec import EngineSpec, Spec

LOCAL_COMPUTE_TOKENS_PER_REQUEST = 1
"""The last token of a prompt may be computed again to get its logits; vLLM 0.31.0 counted 0."""
FABRIC_SHARE = 0.5
"""Of the transferred bytes, what the receiving ports must at least have counted; headers add, compression does not exist."""

ZERO_COUNTERS = (
    ("decode", "failed_transfers", "failed KV transfers"),
    ("decode", "failed_notifications", "failed notifications"),
    ("prefill", "failed_notifications", "failed notifications of prefill"),
    ("prefill", "expired", "requests whose KV blocks prefill gave up unread"),
    ("decode", "requests_with_error", "requests ended with an error"),
)

Rule = Callable[[Spec, Evidence], Iterator[Check]]


def judge(spec: Spec, evidence: Evidence, ended: str) -> Verdict:
    """ended: '' or 'complete' when the run reached its end, else the stage or reason with which it stopped."""
    early = "" if ended == "complete" else ended
    checks = [check for rule in RULES for check in rule(spec, evidence)]
    failed = [c for c in checks if c.needed and c.passed is False]
    unknown = [c for c in checks if c.needed and c.passed is None]
    reasons = [_reason(c) for c in failed]
    word: VerdictWord
    if failed:
        word = "INVALID"
        reasons += [f"the run ended early: {early}"] if early else []
    elif early or unknown or not any(c.needed for c in checks):
        word = "INCOMPLETE"
        reasons = [f"the run did not reach its end: {early}"] if early else []
        reasons += [f"{c.name} could not be judged: {c.observed}" for c in unknown]
        reasons += [] if checks else ["there is nothing to judge"]
    else:
        word = "VALID"
    return Verdict(word, _line(word, spec, evidence, reasons), tuple(reasons), tuple(checks), _text_checked(spec))


def _text_checked(spec: Spec) -> bool:
    return spec.proof.text_checked and spec.recall is not None


def _reason(check: Check) -> str:
    where = f" ({check.source})" if check.source and ":" in check.source else ""
    return f"{check.name}: {check.observed}{where}" if not check.name.startswith("log ") else f"{check.source}: {check.observed}"


def _line(word: str, spec: Spec, evidence: Evidence, reasons: list[str]) -> str:
    said = []
    if _text_checked(spec) and spec.recall is not None:
        asked, correct = (sum(evidence.get(f"recall.{when}.{name}") or 0 for when in spec.recall.when) for name in ("asked", "correct"))
        total = spec.recall.prompts * len(spec.recall.when)
        said.append(f"recall {correct}/{asked}{'' if asked == total else f' of {total}'}" if asked else "recall not asked")
    else:
        said.append("text NOT checked")
    moved = {name: evidence.get(f"transfer.decode.total.{name}") for name in ("bytes", "transfers", "failed_transfers")}
    if not spec.proof.disaggregated:
        said.append("aggregated, no transfer")
    elif all(value is not None for value in moved.values()):
        said.append(f"{moved['bytes']:,} bytes in {moved['transfers']:,} transfers, {moved['failed_transfers']:,} failed")
    elif _real(spec):
        said.append("transfer not measured")
    phases = [evidence.get(f"load.{phase.name}.passed") for phase in (spec.load.phases if spec.load else ())]
    said += [f"load {sum(p is True for p in phases)}/{len(phases)} phases"] if phases else []
    said += [_short(reasons[0])] if reasons else []
    return f"{word}  {spec.run.recipe}  " + ", ".join(said)


def _short(reason: str, limit: int = 160) -> str:
    first = reason.splitlines()[0]
    return first if len(first) <= limit else first[:limit] + "..."


def _check(evidence: Evidence, name: str, key: str, good: Callable[[object], bool], required: str, needed: bool = True) -> Check:
    """A check of one value; not judged when the value was not observed."""
    value = evidence.get(key)
    if value is None:
        return Check(name, None, f"{key} was not observed", required, "", needed)
    passed = good(value)
    shown = f"{value:,}" if isinstance(value, int) else str(value)
    if isinstance(value, bool):
        shown = "as required" if passed else f"not seen: {required}"
    return Check(name, passed, shown, required, evidence.values[key].source, needed)


def recall_rules(spec: Spec, evidence: Evidence) -> Iterator[Check]:
    """Every prompt of every time that the recipe asks for, right; a wrong answer decides at once, a missing one only leaves it open."""
    if spec.recall is None or not spec.proof.text_checked:
        return
    total = spec.recall.prompts
    for when in spec.recall.when:
        name, prefix, required = f"recall {when} load", f"recall.{when}", f"{total} of {total}"
        asked, correct = evidence.get(f"{prefix}.asked"), evidence.get(f"{prefix}.correct")
        if asked is None:
            yield Check(name, None, evidence.get(f"{prefix}.not_asked") or "it was not asked", required)
            continue
        hangs, leaked = evidence.get(f"{prefix}.hangs"), evidence.get(f"{prefix}.leaked")
        observed = f"recall {correct} of {total if asked == total or correct < asked else f'{asked} asked'}"
        observed += f", {hangs} hung" if hangs else ""
        observed += f", {leaked} answered with the code of another prompt" if leaked else ""
        source = evidence.values[f"{prefix}.asked"].source
        first = evidence.values.get(f"{prefix}.first_failure")
        if first is not None:
            observed, source = f"{observed}; first: {first.value}", first.source
        passed = False if correct < asked or leaked else True if asked == total else None
        yield Check(name, passed, observed, required, source)


def log_rules(spec: Spec, evidence: Evidence) -> Iterator[Check]:
    """The first line of each kind, over all processes; a line that was quoted for a weightier kind is not quoted again."""
    if evidence.get("log.scanned") is None:
        yield Check("logs", None, "no log was read", "the log of every process")
        return
    quoted: set[str] = set()
    quiet = True
    for pattern in PATTERNS:
        keys = [k for k in evidence.values if k.startswith("log.") and k.endswith(f".{pattern.name}.count")]
        found = [(k, evidence.values[k]) for k in sorted(keys)]
        sources = {v.source for _, v in found}
        if not found or sources <= quoted:
            continue
        quoted |= sources
        key, value = found[0]
        line, lines = evidence.get(f"{key.removesuffix('.count')}.line"), sum(v.value for _, v in found)
        observed = f"{line} [{lines} such lines; {pattern.meaning}]"
        quiet = quiet and not pattern.decides
        passed, required = (False, "no such line before the stop") if pattern.decides else (None, "nothing: the line is only shown")
        yield Check(f"log {pattern.name}", passed, observed, required, value.source, pattern.decides)
    if quiet:
        yield Check("logs", True, "no line of a known failure", "no such line before the stop", "logs/*.log")


def gate_rules(spec: Spec, evidence: Evidence) -> Iterator[Check]:
    if any(e.kind != "vllm.serve" for e in spec.engines):
        yield _workers(evidence)
        yield _completion(evidence, "first completion", "gate.deployment.failure", "a completion that was looked at")
    if spec.engines_of("control"):
        yield _completion(evidence, "first completion of the control engine", "gate.control.failure", "a completion")
    for prompt in spec.page_smoke.prompts if spec.page_smoke else ():
        prefix = f"gate.smoke.{prompt.name}"
        passed, observed = evidence.get(f"{prefix}.passed"), evidence.get(f"{prefix}.observed")
        source = evidence.values[f"{prefix}.passed"].source if passed is not None else ""
        yield Check(f"gate, {TITLES[prompt.name]}", passed, observed or "it was not asked", required(spec, prompt), source)


def _completion(evidence: Evidence, name: str, key: str, required: str) -> Check:
    check = _check(evidence, name, key, lambda v: v == "", required)
    return replace(check, observed="answered") if check.passed else check


def _workers(evidence: Evidence) -> Check:
    """A gate that never opened leaves this open: the workers may only have been slow; one that was refused is told by the log."""
    name, expected, found = "workers per role", evidence.get("gate.expected"), evidence.get("gate.found")
    if found is None or evidence.get("gate.ready") is not True:
        required = _counted(expected) if expected else "as in the spec"
        return Check(name, None, evidence.get("gate.failure") or "the gate was not reached", required)
    return Check(name, found == expected, _counted(found), _counted(expected or {}), "gate.json")


def _counted(workers: dict[str, int]) -> str:
    return ", ".join(f"{count} {role}" for role, count in sorted(workers.items())) or "none"


def transfer_rules(spec: Spec, evidence: Evidence) -> Iterator[Check]:
    measured = _measured(spec)
    if evidence.get("metrics.shared") is not None:
        yield _check(evidence, "metrics of each worker are its own", "metrics.shared", lambda _: False, "each worker its own port")
    for engine in measured:
        yield _check(evidence, f"metrics of {engine.name}", f"{engine.name}.metrics", lambda v: v is True, "vllm metrics in the scrapes")
    if not spec.proof.disaggregated or not measured:
        return
    total = "transfer.decode.total"
    yield _check(evidence, "KV bytes transferred", f"{total}.bytes", _positive, "above 0: right text alone proves no transfer")
    for role, counter, name in ZERO_COUNTERS:
        yield _check(evidence, name, f"transfer.{role}.total.{counter}", lambda v: v == 0, "0")
    yield _local_compute(evidence)
    for engine in spec.engines_of("decode"):
        yield _check(evidence, f"KV bytes read by {engine.name}", f"{engine.name}.bytes", _positive, "above 0", needed=False)
    yield from _predicted(spec, evidence)


def _measured(spec: Spec) -> list[EngineSpec]:
    return [e for e in spec.engines if e.role in ("prefill", "decode", "agg") and e.kind != "dynamo.mocker"]


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def _local_compute(evidence: Evidence) -> Check:
    prefix, name = "transfer.decode.total", "prompt tokens that decode computed itself"
    tokens, requests = evidence.get(f"{prefix}.tokens.local_compute"), evidence.get(f"{prefix}.requests")
    if tokens is None or requests is None:
        return Check(name, None, f"{prefix}.tokens.local_compute was not observed", "none but the last token of a prompt")
    allowed = requests * LOCAL_COMPUTE_TOKENS_PER_REQUEST
    return Check(name, tokens <= allowed, f"{tokens:,} tokens in {requests:,} requests", f"at most {allowed:,}",
                 evidence.values[f"{prefix}.tokens.local_compute"].source)


def _predicted(spec: Spec, evidence: Evidence) -> Iterator[Check]:
    """Needed in each window where the prediction is exact; elsewhere it is shown why it is not."""
    if spec.proof.prediction is None:
        return
    keys = [k for k in evidence.values if k.startswith("transfer.decode.") and k.endswith(".requests_counted") and ".total." not in k]
    for key in sorted(keys):
        prefix = key.removesuffix(".requests_counted")
        window = prefix.removeprefix("transfer.decode.")
        predicted, moved = evidence.get(f"{prefix}.predicted_bytes"), evidence.get(f"{prefix}.bytes")
        name = f"bytes as predicted, {window}"
        if predicted is None or moved is None:
            why = evidence.get(f"{prefix}.not_exact") or "bytes were not observed"
            yield Check(name, None, f"not exact: {why}", "predicted to the byte", evidence.values[key].source, needed=False)
        else:
            yield Check(name, moved == predicted, f"{moved:,} bytes moved for {evidence.get(key)} requests, {predicted:,} predicted",
                        "equal to the byte", evidence.values[f"{prefix}.bytes"].source)


def policy_rules(spec: Spec, evidence: Evidence) -> Iterator[Check]:
    required = spec.proof.kv_load_failure_policy
    if spec.proof.disaggregated:
        for engine in _measured(spec):
            yield _check(evidence, f"kv_load_failure_policy of {engine.name}", f"{engine.name}.kv_load_failure_policy",
                         lambda v: v == required, required)


def plan_rules(spec: Spec, evidence: Evidence) -> Iterator[Check]:
    """With mixed heads every rank of both roles must have said that the patch is active in it, and each decode rank that it reads by the
    per-region plan; silence means that other code served. The lines are those of the patch series (proof.log_patterns).

    Silence shows something only where the rank had reason to speak: the first line comes before a worker registers, the second with the
    first hand-over.
    """
    if not (spec.proof.mixed_heads and spec.proof.disaggregated):
        return
    registered = evidence.get("gate.ready") is True
    served = registered and evidence.get("gate.deployment.failure") is not None
    for label, roles, due in (("active_line", ("prefill", "decode"), registered), ("plan_line", ("decode",), served)):
        if label in spec.proof.log_patterns:
            for engine in (e for e in spec.engines if e.role in roles):
                yield _rank_lines(evidence, engine, label, due)


def _rank_lines(evidence: Evidence, engine: EngineSpec, label: str, due: bool) -> Check:
    keys = [f"log.{name}.pattern.{label}.distinct" for name in
            (engine.name, *(f"{engine.name}.r{rank}" for rank in range(1, len(engine.ranks))))]
    values = [evidence.get(key) for key in keys]
    known = [v for v in values if v is not None]
    source = next((evidence.values[k].source for k in keys if k in evidence.values), "")
    title = {"active_line": "patch active in", "plan_line": "plan lines of"}[label]
    enough = sum(known) >= engine.tensor_parallel
    when = "" if due else ", when the run had not come to registration" if label == "active_line" else ", before the first completion"
    return Check(f"{title} {engine.name}", True if enough else False if known and due else None,
                 f"{sum(known)} of {engine.tensor_parallel} {engine.role} ranks{when}", f"{engine.tensor_parallel}", source)


def _real(spec: Spec) -> bool:
    return any(e.kind != "dynamo.mocker" for e in spec.engines)


def behaviour_rules(spec: Spec, evidence: Evidence) -> Iterator[Check]:
    if _real(spec) and (spec.proof.versions or spec.proof.file_sha256):
        faults, required = evidence.get("build.faults"), "versions and file hashes of the spec in every engine process"
        observed = "no facts of any engine process" if faults is None else "; ".join(faults) or "as required"
        yield Check("build identity", None if faults is None else not faults, observed, required, "" if faults is None else "nodes/*.json")
    for check in spec.behaviour:
        if check == "build_identity":
            continue
        passed, why = evidence.get(f"behaviour.{check}.passed"), evidence.get(f"behaviour.{check}.why")
        source = evidence.values[f"behaviour.{check}.passed"].source if passed is not None else ""
        yield Check(check.replace("_", " "), passed, "passed" if passed else why or "it was not asked", "passed", source)


def agreement_rules(spec: Spec, evidence: Evidence) -> Iterator[Check]:
    if spec.agreement is None:
        return
    total = spec.agreement.prompts
    compared, equal = evidence.get("agreement.compared"), evidence.get("agreement.equal")
    if compared is None:
        yield Check("agreement with the control engine", None, "it was not asked", f"{total} of {total}")
        return
    first = evidence.values.get("agreement.first_failure")
    passed = False if equal < compared else True if compared == total else None
    observed = f"{equal} of {total} answers are equal" + (f"; first: {first.value}" if first else "")
    yield Check("agreement with the control engine", passed, observed, f"{total} of {total}", first.source if first else "agreement.jsonl")


def load_rules(spec: Spec, evidence: Evidence) -> Iterator[Check]:
    for phase in spec.load.phases if spec.load else ():
        prefix = f"load.{phase.name}"
        passed, why = evidence.get(f"{prefix}.passed"), evidence.get(f"{prefix}.why")
        source = evidence.values[f"{prefix}.passed"].source if passed is not None else ""
        observed = "it was not run to its end" if passed is None else "passed" if passed else "; ".join(why or [])
        yield Check(f"load {phase.name}", passed, observed, "complete, within its error rate, with the tokens asked for", source)


def fabric_rules(spec: Spec, evidence: Evidence) -> Iterator[Check]:
    """Only where the roles lie on different hosts and the receiving host has port counters; otherwise the path is not theirs."""
    hosts = {role: {evidence.get(f"{e.name}.host") for e in spec.engines if e.role == role} - {None} for role in ("prefill", "decode")}
    moved = evidence.get("transfer.decode.total.bytes")
    if not hosts["prefill"] or not hosts["decode"] or hosts["prefill"] & hosts["decode"] or not moved:
        return
    counted = [evidence.get(f"fabric.{host}.rcv_bytes") for host in hosts["decode"]]
    known = [v for v in counted if v is not None]
    if known:
        yield Check("RDMA carried the transfer", sum(known) >= FABRIC_SHARE * moved,
                    f"{sum(known):,} bytes received by the RDMA ports of the decode hosts, {moved:,} bytes transferred",
                    "the transferred bytes pass the RDMA ports", f"fabric counters of {', '.join(sorted(hosts['decode']))}")


RULES: tuple[Rule, ...] = (recall_rules, log_rules, agreement_rules, gate_rules, transfer_rules, policy_rules, plan_rules, behaviour_rules,
                           load_rules, fabric_rules)
