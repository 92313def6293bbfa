"""The planner's own cost, and the same question put to another estimator.

Goals: one configuration under 2 ms in process; a search over 500 topologies under 1 s; `plan` from the shell under 0.5 s of user time.
Ratios are against a bare `python -c pass` of the same run. With AICONFIGURATOR_PYTHON set to an environment that has aiconfigurator,
its estimate for gemma-4-31B is asked for in the same run (seconds and MiB per request); without it that comparison is left out and
said so.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pdlaunch.planner import command  # noqa: E402
from pdlaunch.planner.capacity import capacity, plan_layout  # noqa: E402
from pdlaunch.planner.config import load_config  # noqa: E402
from pdlaunch.planner.layers import Model  # noqa: E402
from pdlaunch.planner.shape import MemoryFacts, RoleShape  # noqa: E402
from pdlaunch.planner.topology import candidate, shapes  # noqa: E402

GEMMA = ROOT / "models" / "configs" / "gemma-4-31b-it.json"
CONFIGS = ROOT / "tests" / "planner" / "configs"
MEMORY = MemoryFacts(non_torch_gib=0.7, peak_activation_gib=1.0, graph_estimate_gib=1.5)
SHELL = (
    "from pathlib import Path; from rich.console import Console; from pdlaunch.planner import command; "
    "from pdlaunch.planner.shape import RoleShape; shape = RoleShape(max_model_len=9216, gpu_memory_gib=276.6); "
    f"model = command.model_of(Path({str(GEMMA)!r})); "
    "command.render(command.plan(model, {'prefill': shape.with_changes(tensor_parallel=4), "
    "'decode': shape.with_changes(tensor_parallel=8)}), Console())"
)


def user_s(code: str, repetitions: int = 5) -> float:
    """Median user CPU seconds of python -c CODE."""
    times = []
    for _ in range(repetitions):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
        times.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
    return statistics.median(times)


def cpu_ms(model: Model, shape: RoleShape, repetitions: int = 50) -> float:
    """Median CPU milliseconds of block size, groups, both prices and capacity for one configuration."""
    times = []
    for _ in range(repetitions):
        start = time.process_time()
        layout = plan_layout(model, shape)
        layout.steady(shape.max_model_len)
        capacity(layout, 100 << 30)
        times.append(1000 * (time.process_time() - start))
    return statistics.median(times)


def in_process() -> bool:
    met = True
    for path in [GEMMA, *sorted(CONFIGS.glob("*.json"))]:
        model = command.model_of(path)
        backend = "FLASHMLA" if model.uses_mla else "FLASH_ATTN"
        took = cpu_ms(model, RoleShape(tensor_parallel=4, max_model_len=8192, backend=backend))
        met &= took < 2
        print(f"one configuration, {path.stem:22} {took:7.3f} ms  (goal 2 ms)")
    model = command.model_of(CONFIGS / "qwen3-next-80b-a3b.json")
    base = RoleShape(max_model_len=9216, gpu_memory_gib=276.6, memory=MEMORY)
    wanted = [
        shape for length in range(9216, 9216 + 64 * 12, 64) for shape in shapes(base.with_changes(max_model_len=length), 64, experts=True)
    ]
    start = time.process_time()
    for shape in wanted[:500]:
        candidate(model, shape, shape.max_model_len)
    took = time.process_time() - start
    print(f"search over {len(wanted[:500])} topologies           {took:7.3f} s   (goal 1 s)")
    return met and took < 1


def from_the_shell() -> bool:
    bare, plan = user_s("pass"), user_s(SHELL)
    print(f"plan from the shell, with tables     {plan:7.3f} s user, {plan / bare:.1f} x bare python  (goal 0.5 s)")
    return plan < 0.5


def other_estimator() -> None:
    """aiconfigurator 0.12 on gemma-4-31B at 9,216 tokens: the whole process, and its bytes per sequence and GPU beside ours."""
    python = os.environ.get("AICONFIGURATOR_PYTHON")
    if not python:
        print("aiconfigurator: not asked (AICONFIGURATOR_PYTHON is not set)")
        return
    with tempfile.TemporaryDirectory() as folder:
        # It knows the multimodal class only; the language part is the same.
        wrapped = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": load_config(GEMMA)}
        Path(folder, "config.json").write_text(json.dumps(wrapped), encoding="utf-8")
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        argv = [python, str(ROOT / "bench" / "ask_aiconfigurator.py"), folder, "9216", "4", "8"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
    theirs_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    ours_s = user_s(SHELL)
    print(f"same question, user time: aiconfigurator {theirs_s:.2f} s, plan {ours_s:.2f} s: {theirs_s / ours_s:.1f} x")
    theirs = json.loads(done.stdout.splitlines()[-1])["tp"]
    for tp in (4, 8):
        layout = plan_layout(command.model_of(GEMMA), RoleShape(tensor_parallel=tp, max_model_len=9216))
        print(
            f"  TP{tp}, MiB per request and GPU: aiconfigurator {theirs[str(tp)]['mib']:.1f} (no blocks); "
            f"held {layout.steady(9216).mib:.1f}, charged by vLLM {layout.admission(9216).mib:.1f}"
        )


if __name__ == "__main__":
    results = [in_process(), from_the_shell()]
    other_estimator()
    sys.exit(0 if all(results) else 1)
