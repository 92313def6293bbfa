"""What was observed in a run, each value with the file that shows it; read from the files of the run alone, so that it can be read again.

Absent is never zero: a value that no file shows is not put down. Names:
    stage.<stage>[.<phase>].{state,at_s,duration_s}, stage.queue.duration_s
    gate.{ready,expected,found,failure,worker_ids}, gate.<target>.failure, gate.smoke.<prompt>.{passed,observed}
    recall.<when>.{asked,correct,hangs,leaked,first_failure,not_asked}, behaviour.<check>.{passed,why}, agreement.{compared,equal,units,...}
    load.<phase>.{passed,why,requested,completed,errors,error_rate_pct,output_tokens,...}, load.<phase>.<metric>.{avg,p50,p99}
    transfer.<role>.<window>.<counter of transfer.COUNTERS>, transfer.decode.<window>.{predicted_bytes,predicted_tokens,not_exact},
        where window is two snapshots (ready-before_load) or total; <engine>.<counter> for the whole run of one worker
    <engine>.{metrics,worker_ids,kv_load_failure_policy,exit,host,fabric,gpu}, <engine>.cache.<label>, <engine>.{version,sha256}.<name>
    build.{processes,faults}, log.scanned, log.<process>.<pattern>.{count,line}, log.<process>.pattern.<name>[.distinct]
    gpu.<role>.<run|load.phase>.{utilisation_mean_pct,utilisation_max_pct,memory_used_max_mib,samples}, fabric.<host>.<counter>
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import logs
from .build import BuildFacts, build_faults
from .contracts import GPU_CSV_HEADER, Evidence
from .load import judge_again
from .smoke import judge_smoke
from .spec import Spec
from .timeline import Timeline, read_timeline
from .transfer import put_transfer, read_rows

WORDS = re.compile(r"[A-Za-z0-9]+")
FABRIC_UNIT_BYTES = 4
"""port_xmit_data and port_rcv_data count four bytes each (InfiniBand specification, PortCounters)."""
PHASE_FIGURES = ("time_to_first_token", "inter_token_latency", "request_latency", "request_throughput", "output_token_throughput",
                 "input_sequence_length", "output_sequence_length", "goodput")


def collect(spec: Spec, run_dir: Path) -> Evidence:
    """Evidence of a finished or broken run. Never raises for a file that is missing or cut off; it is then not evidence."""
    evidence = Evidence()
    timeline = read_timeline(run_dir)
    _put_stages(evidence, timeline)
    nodes = read_nodes(run_dir)
    _put_gate(evidence, spec, run_dir)
    _put_recall(evidence, spec, run_dir, timeline)
    _put_behaviour(evidence, spec, run_dir)
    _put_load(evidence, spec, run_dir)
    put_transfer(evidence, spec, run_dir)
    _put_policy(evidence, spec)
    _put_build(evidence, spec, nodes)
    _put_logs(evidence, spec, run_dir, timeline)
    _put_gpus(evidence, spec, run_dir, nodes, timeline)
    _put_fabric(evidence, nodes)
    return evidence


def read_nodes(run_dir: Path) -> dict[str, dict[str, Any]]:
    """nodes/<process>.json by process; files that are not whole are left out."""
    found = {}
    for path in sorted((run_dir / "nodes").glob("*.json")):
        content = _object(path)
        if content is not None:
            found[path.stem] = content
    return found


def _object(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _put_stages(evidence: Evidence, timeline: Timeline) -> None:
    if timeline.queue_s is not None:
        evidence.put("stage.queue.duration_s", round(timeline.queue_s, 3), "receipt.json and events.jsonl:1", "s")
    for stage in timeline.stages:
        source = f"events.jsonl:{stage.line}"
        evidence.put(f"stage.{stage.label}.state", stage.state, source)
        evidence.put(f"stage.{stage.label}.at_s", round(stage.at_s, 3), source, "s")
        if stage.duration_s is not None:
            evidence.put(f"stage.{stage.label}.duration_s", round(stage.duration_s, 3), source, "s")


def _called_off(row: dict[str, Any]) -> bool:
    """A request that a stop of the run ended shows nothing of the deployment."""
    return str(row.get("error", "")).startswith("stopped")


def _put_gate(evidence: Evidence, spec: Spec, run_dir: Path) -> None:
    ready = _object(run_dir / "gate.json")
    if ready is not None:
        for key in ("ready", "expected", "found", "failure"):
            if key in ready:
                evidence.put(f"gate.{key}", ready[key], "gate.json")
    rows = read_rows(run_dir / "gate.jsonl")
    for prompt in spec.page_smoke.prompts if spec.page_smoke else ():
        found = judge_smoke(spec, prompt, rows)
        if found.passed is not None:
            source = f"gate.jsonl:{found.row + 1}" if found.row >= 0 else "spec.json page_smoke"
            evidence.put(f"gate.smoke.{prompt.name}.passed", found.passed, source)
        evidence.put(f"gate.smoke.{prompt.name}.observed", found.observed, "gate.jsonl")
    for line, row in enumerate(rows, start=1):
        if "smoke" in row or _called_off(row):
            continue
        target = row.get("target", "deployment")
        evidence.put(f"gate.{target}.failure", row.get("failure") or row.get("error") or "", f"gate.jsonl:{line}")
        ids = row.get("worker_ids")
        if isinstance(ids, dict) and ids and target == "deployment":
            evidence.put("gate.worker_ids", ids, f"gate.jsonl:{line}")


def _put_recall(evidence: Evidence, spec: Spec, run_dir: Path, timeline: Timeline) -> None:
    """A row counts as correct when it says so, and when its own text holds its code too: the archive is judged, not its summary."""
    for when in spec.recall.when if spec.recall else ():
        rows, source, prefix = read_rows(run_dir / "recall" / f"{when}.jsonl"), f"recall/{when}.jsonl", f"recall.{when}"
        asked = [row for row in rows if not _called_off(row)]
        right = [row for row in asked if row.get("correct") is True and not row.get("error") and _holds_code(row)]
        if rows:
            evidence.put(f"{prefix}.asked", len(asked), source)
            evidence.put(f"{prefix}.correct", len(right), source)
            evidence.put(f"{prefix}.hangs", sum(bool(row.get("hang")) for row in asked), source)
            evidence.put(f"{prefix}.leaked", sum(bool(row.get("leaked_from")) for row in asked), source)
        wrong = [(line, row) for line, row in enumerate(rows, start=1) if row in asked and row not in right]
        if wrong:
            line, row = wrong[0]
            evidence.put(f"{prefix}.first_failure", row.get("why") or f"{row.get('code')} is not in the answer", f"{source}:{line}")
        label = f"recall_{when}"
        reason = next((e.get("reason") for e in timeline.events if e["stage"] == label and e["state"] == "failed"), None)
        if reason and not rows:
            evidence.put(f"{prefix}.not_asked", reason, "events.jsonl")


def _holds_code(row: dict[str, Any]) -> bool:
    return row.get("code") in WORDS.findall(f"{row.get('content')} {row.get('reasoning')}")


def _put_behaviour(evidence: Evidence, spec: Spec, run_dir: Path) -> None:
    for line, row in enumerate(read_rows(run_dir / "behaviour.jsonl"), start=1):
        if not _called_off(row):
            evidence.put(f"behaviour.{row.get('check')}.passed", row.get("passed"), f"behaviour.jsonl:{line}")
            evidence.put(f"behaviour.{row.get('check')}.why", row.get("why"), f"behaviour.jsonl:{line}")
    rows = read_rows(run_dir / "agreement.jsonl")
    if spec.agreement is None or not rows:
        return
    compared = [(line, row) for line, row in enumerate(rows, start=1) if "equal" in row and "stopped" not in str(row.get("why"))]
    evidence.put("agreement.compared", len(compared), "agreement.jsonl")
    evidence.put("agreement.equal", sum(row["equal"] is True for _, row in compared), "agreement.jsonl")
    evidence.put("agreement.units", sorted({str(row.get("compared")) for _, row in compared}), "agreement.jsonl")
    different = [(line, row) for line, row in compared if row["equal"] is not True]
    if different:
        line, row = different[0]
        evidence.put("agreement.first_failure", row.get("why"), f"agreement.jsonl:{line}")
        evidence.put("agreement.first_difference", row.get("first_difference"), f"agreement.jsonl:{line}")


def _put_load(evidence: Evidence, spec: Spec, run_dir: Path) -> None:
    for phase in spec.load.phases if spec.load else ():
        result = judge_again(phase, run_dir / "load" / phase.name)
        if result is None:
            continue
        source = f"load/{phase.name}/aiperf/profile_export_aiperf.json"
        prefix = f"load.{phase.name}"
        if not result.stopped:
            evidence.put(f"{prefix}.passed", result.passed, source)
            evidence.put(f"{prefix}.why", list(result.why), source)
        figures: dict[str, Any] = {name: getattr(result, name) for name in (
            "requested", "completed", "errors", "error_rate_pct", "output_tokens", "exit_code", "wall_s", "aiperf_version")}
        for metric in PHASE_FIGURES:
            for statistic in ("avg", "p50", "p99"):
                value = result.metrics.get(metric, {}).get(statistic)
                figures[f"{metric}.{statistic}"] = value
        for name, value in figures.items():
            if value is not None and value != "":
                unit = str(result.metrics.get(name.rpartition(".")[0], {}).get("unit") or "")
                evidence.put(f"{prefix}.{name}", value, source, unit)


def _put_policy(evidence: Evidence, spec: Spec) -> None:
    """kv_load_failure_policy as each engine was started with it; 'not set' when the flag or the key is absent."""
    for index, engine in enumerate(spec.engines):
        if engine.role not in ("prefill", "decode") or engine.kind == "dynamo.mocker":
            continue
        argv, policy = engine.ranks[0].argv, "not set"
        for flag, value in zip(argv, (*argv[1:], ""), strict=True):
            text = flag.partition("=")[2] if flag.startswith("--kv-transfer-config=") else value if flag == "--kv-transfer-config" else ""
            if text:
                try:
                    policy = str(json.loads(text).get("kv_load_failure_policy", "not set"))
                except (ValueError, AttributeError):
                    policy = "not readable"
        evidence.put(f"{engine.name}.kv_load_failure_policy", policy, f"spec.json engines[{index}].ranks[0].argv")


def _put_build(evidence: Evidence, spec: Spec, nodes: dict[str, dict[str, Any]]) -> None:
    serving = {e.name for e in spec.engines if e.kind != "dynamo.mocker"}
    facts = {name: node for name, node in nodes.items() if name.partition(".")[0] in serving and "versions" in node}
    for name, node in facts.items():
        for distribution, version in sorted((node.get("versions") or {}).items()):
            evidence.put(f"{name}.version.{distribution}", version, f"nodes/{name}.json")
        for path, digest in sorted((node.get("file_sha256") or {}).items()):
            evidence.put(f"{name}.sha256.{path}", digest, f"nodes/{name}.json")
    if facts:
        evidence.put("build.processes", sorted(facts), "nodes/*.json")
        evidence.put("build.faults", build_faults(BuildFacts(facts, spec.proof)), "nodes/*.json")
    for name, node in nodes.items():
        ended = node.get("exit")
        if isinstance(ended, dict):
            evidence.put(f"{name}.exit", ended, f"nodes/{name}.json")


def _put_logs(evidence: Evidence, spec: Spec, run_dir: Path, timeline: Timeline) -> None:
    stop = next((e for e in timeline.events if e["stage"] == "stopped" and e["state"] == "begin"), None)
    sizes = (stop or {}).get("log_bytes") or {}
    scanned = []
    for path in sorted((run_dir / "logs").glob("*.log")):
        process, name = path.stem, f"logs/{path.name}"
        scanned.append(process)
        for finding in logs.scan(path, name, sizes.get(process)):
            prefix = f"log.{process}.{finding.pattern.name}"
            evidence.put(f"{prefix}.count", finding.count, finding.source)
            evidence.put(f"{prefix}.line", finding.quoted[0][1], finding.source)
        for label, regex in spec.proof.log_patterns.items():
            if process.partition(".")[0] in {e.name for e in spec.engines}:
                lines, distinct, first = logs.count(path, regex)
                evidence.put(f"log.{process}.pattern.{label}", lines, f"{name}:{first}" if first else name)
                evidence.put(f"log.{process}.pattern.{label}.distinct", distinct, f"{name}:{first}" if first else name)
    if scanned:
        evidence.put("log.scanned", scanned, "logs/*.log")


def _put_gpus(evidence: Evidence, spec: Spec, run_dir: Path, nodes: dict[str, dict[str, Any]], timeline: Timeline) -> None:
    """gpu.<role>.<window>.utilisation_{mean,max}_pct over all samples of all GPUs of the role; window is `run` or a load phase."""
    roles: dict[str, str] = {engine.name: engine.role for engine in spec.engines}
    samples: dict[str, list[tuple[str, float, float]]] = {}
    for path in sorted((run_dir / "gpu").glob("*.csv")):
        role = roles.get(path.stem.partition(".")[0])
        if role is not None:
            samples.setdefault(role, []).extend(_gpu_rows(path))
    spans = [("run", "", "~"), *_load_spans(timeline)]
    for role, rows in samples.items():
        for window, begin, end in spans:
            inside = [(use, memory) for utc, use, memory in rows if begin <= utc <= end]
            if inside:
                source, prefix = f"gpu/{role}-*.csv", f"gpu.{role}.{window}"
                evidence.put(f"{prefix}.utilisation_mean_pct", round(sum(u for u, _ in inside) / len(inside), 2), source, "%")
                evidence.put(f"{prefix}.utilisation_max_pct", max(u for u, _ in inside), source, "%")
                evidence.put(f"{prefix}.memory_used_max_mib", max(m for _, m in inside), source, "MiB")
                evidence.put(f"{prefix}.samples", len(inside), source)
    for name, node in nodes.items():
        if roles.get(name.partition(".")[0]) and not node.get("gpus") and roles[name.partition(".")[0]] not in samples:
            evidence.put(f"{name}.gpu", f"no GPU: {node.get('gpu_error') or 'none was assigned'}", f"nodes/{name}.json")


def _gpu_rows(path: Path) -> Iterable[tuple[str, float, float]]:
    """(utc, utilisation in percent, memory in MiB) per sample; rows that are not whole are left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or lines[0] != GPU_CSV_HEADER:
        return
    for line in lines[1:]:
        cells = line.split(",")
        try:
            yield cells[0], float(cells[2]), float(cells[3])
        except (IndexError, ValueError):
            continue


def _load_spans(timeline: Timeline) -> list[tuple[str, str, str]]:
    begun: dict[str, str] = {}
    spans = []
    for event in timeline.events:
        if event["stage"] == "load" and event.get("phase"):
            if event["state"] == "begin":
                begun[event["phase"]] = event["utc"]
            elif event["state"] == "end" and event["phase"] in begun:
                spans.append((f"load.{event['phase']}", begun[event["phase"]], event["utc"]))
    return spans


def _put_fabric(evidence: Evidence, nodes: dict[str, dict[str, Any]]) -> None:
    """Per host, because the processes of one host read the same counters: from the earliest `before` to the latest `after`."""
    hosts: dict[str, dict[str, list[int]]] = {}
    for name, node in sorted(nodes.items()):
        before, after = node.get("fabric_before") or {}, node.get("fabric_after") or {}
        if node.get("fabric_error") and not before:
            evidence.put(f"{name}.fabric", node["fabric_error"], f"nodes/{name}.json")
        for counter in sorted(set(before) & set(after)):
            span = hosts.setdefault(str(node.get("host")), {}).setdefault(counter, [before[counter], after[counter]])
            span[0], span[1] = min(span[0], before[counter]), max(span[1], after[counter])
    for host, counters in hosts.items():
        for counter, (first, last) in counters.items():
            if last != first:
                evidence.put(f"fabric.{host}.{counter}", last - first, "nodes/*.json fabric_before, fabric_after")
        for direction in ("rcv", "xmit"):
            spans = [span for counter, span in counters.items() if counter.endswith(f"/port_{direction}_data")]
            if spans:
                evidence.put(f"fabric.{host}.{direction}_bytes", FABRIC_UNIT_BYTES * sum(b - a for a, b in spans), "nodes/*.json", "bytes")
    for name, node in nodes.items():
        if node.get("host") in hosts:
            evidence.put(f"{name}.host", node["host"], f"nodes/{name}.json")
