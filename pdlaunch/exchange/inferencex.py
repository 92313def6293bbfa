"""InferenceX result rows (utils/process_result.py): a bare JSON array, latencies in seconds without a unit suffix.

Denominators of that format: tput_per_gpu = total tokens / (prefill + decode GPUs); of a disaggregated run output_tput_per_gpu = output /
DECODE GPUs and input_tput_per_gpu = input / PREFILL GPUs; <stat>_intvty = 1000 / <stat>_tpot in ms. Rows hold mean, std, p50 (as median),
p90 and p99.
"""

from __future__ import annotations

import math
from typing import Any

from pdlaunch.errors import ArchiveError
from pdlaunch.exchange.points import Point, Role

_STATS = {"mean": "mean", "median": "p50", "p90": "p90", "p99": "p99", "std": "sd"}
_TIMES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2el": "latency_ms"}
CANNOT_HOLD = (
    "failed requests",
    "start and end time",
    "minimum, maximum and other percentiles",
    "lengths as measured",
    "request-rate loads",
    "verdict",
)


def write(point: Point) -> dict[str, Any]:
    """One row. ArchiveError when the format has no place for the point: an open loop, a CPU run whose ranks are no GPUs, or GPUs that
    engines share."""
    if point.concurrency is None:
        raise ArchiveError(
            f"{point.run} {point.phase}: no concurrency", rule="InferenceX rows are keyed by `conc`; a request rate has no place in them"
        )
    if point.denominator != "GPU":
        raise ArchiveError(f"{point.run} {point.phase}: a run without GPUs", rule="InferenceX rows divide by GPUs")
    if point.sharing:
        raise ArchiveError(f"{point.run} {point.phase}: {point.sharing}", rule="InferenceX rows have no place to say so")
    if not {"input", "output", "total"} <= set(point.rates):
        raise ArchiveError(f"{point.run} {point.phase}: no rates, the phase has no length", rule="InferenceX rows hold tokens/s per GPU")
    needed = ("prefill", "decode") if "prefill" in point.roles else ("agg",)
    if missing := [role for role in needed if role not in point.roles or point.roles[role].gpus < 1]:
        said = f"{point.run} {point.phase}: it is not known how many GPUs served ({', '.join(missing)})"
        raise ArchiveError(said, rule="InferenceX rows divide by GPUs; AIPerf's own file does not name them")
    row: dict[str, Any] = {
        "hw": point.hardware,
        "conc": point.concurrency,
        "model": point.model,
        "framework": point.framework,
        "precision": point.precision,
        "spec_decoding": point.speculation,
        "disagg": "prefill" in point.roles,
        "isl": point.isl,
        "osl": point.osl,
        "is_multinode": "prefill" in point.roles,
        "image": point.extra.get("image", ""),
        "recipe_fingerprint": point.extra.get("recipe_fingerprint", point.run),
    }
    per = point.per_gpu()
    if row["disagg"]:
        for role in ("prefill", "decode"):
            r = point.roles[role]
            row |= {f"{role}_tp": r.tp, f"{role}_pp": r.pp, f"{role}_dp": r.dp, f"{role}_num_workers": r.engines, f"num_{role}_gpu": r.gpus}
        row |= {"input_tput_per_gpu": per["input_per_prefill_gpu"], "output_tput_per_gpu": per["output_per_decode_gpu"]}
    else:
        r = point.roles["agg"]
        row |= {
            "tp": r.tp,
            "pp": r.pp,
            "dp": r.dp,
            "output_tput_per_gpu": per["output_per_gpu"],
            "input_tput_per_gpu": point.rates["input"] / point.gpus,
        }
    row["tput_per_gpu"] = per["total_per_gpu"]
    for theirs, ours in _TIMES.items():
        for stat, key in _STATS.items():
            value = point.stats.get(ours, {}).get(key)
            if value is not None:
                row[f"{stat}_{theirs}"] = value / 1000
                if theirs == "tpot" and value:
                    row[f"{stat}_intvty"] = 1000 / value
    return row | {k: v for k, v in point.extra.items() if k not in row}


def _number(row: dict[str, Any], key: str) -> float:
    value = row.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ArchiveError(f"row without a number in {key!r}: {value!r}", rule="an InferenceX row")
    return float(value)


def read(row: dict[str, Any]) -> Point:
    """The inverse. Rates of the whole deployment come from the per-GPU figures and their own denominators."""
    missing = [k for k in ("hw", "conc", "model", "framework", "isl", "osl", "disagg") if k not in row]
    if missing:
        raise ArchiveError(f"row without {', '.join(missing)}", rule="an InferenceX row")
    roles: dict[str, Role] = {}
    if row["disagg"]:
        for name in ("prefill", "decode"):
            sizes = [int(_number(row, f"{name}_{k}")) for k in ("tp", "pp", "dp", "num_workers")]
            roles[name] = Role(sizes[0], sizes[1], sizes[2], sizes[3], int(_number(row, f"num_{name}_gpu")))
        rates = {
            "input": _number(row, "input_tput_per_gpu") * roles["prefill"].gpus,
            "output": _number(row, "output_tput_per_gpu") * roles["decode"].gpus,
        }
    else:
        tp, pp, dp = (int(_number(row, k)) for k in ("tp", "pp", "dp"))
        gpus = tp * pp * dp
        roles["agg"] = Role(tp, pp, dp, 1, gpus)
        rates = {"input": _number(row, "input_tput_per_gpu") * gpus, "output": _number(row, "output_tput_per_gpu") * gpus}
    rates["total"] = _number(row, "tput_per_gpu") * sum(r.gpus for r in roles.values())
    stats: dict[str, dict[str, float]] = {}
    used = {
        "hw",
        "conc",
        "model",
        "framework",
        "precision",
        "spec_decoding",
        "disagg",
        "isl",
        "osl",
        "is_multinode",
        "tput_per_gpu",
        "input_tput_per_gpu",
        "output_tput_per_gpu",
        "tp",
        "pp",
        "dp",
    }
    for theirs, ours in _TIMES.items():
        for stat, key in _STATS.items():
            used |= {f"{stat}_{theirs}", f"{stat}_intvty"}
            if f"{stat}_{theirs}" in row:
                stats.setdefault(ours, {})[key] = _number(row, f"{stat}_{theirs}") * 1000
    used |= {f"{n}_{k}" for n in ("prefill", "decode") for k in ("tp", "pp", "dp", "num_workers")} | {"num_prefill_gpu", "num_decode_gpu"}
    return Point(
        str(row.get("recipe_fingerprint", "")),
        f"c{row['conc']}",
        str(row["model"]),
        str(row["framework"]),
        {},
        str(row["hw"]),
        str(row.get("precision", "")),
        str(row.get("spec_decoding", "")),
        int(row["isl"]),
        int(row["osl"]),
        int(row["conc"]),
        None,
        0,
        0,
        None,
        "",
        "",
        "GPU",
        roles,
        rates,
        stats,
        "",
        {k: v for k, v in row.items() if k not in used},
    )
