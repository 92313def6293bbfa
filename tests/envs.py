"""Where the tests find the environments that `make setup` made; a missing one fails with the command that makes it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRESS_THREAD = "nixl-1.4.1-progress-thread-delay"
PER_REGION = "vllm-0.31.0-nixl-per-region-kv-heads"
PER_GROUP = "vllm-0.31.0-nixl-per-group-pages"
_VARIANTS = {
    frozenset({PROGRESS_THREAD}): "engine-stock",
    frozenset({PROGRESS_THREAD, PER_REGION}): "engine-per-region",
    frozenset({PROGRESS_THREAD, PER_REGION, PER_GROUP}): "engine-per-group",
}


def _python(name: str) -> Path:
    python = ROOT / ".envs" / name / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(f"{python} is missing: run `make setup`")
    return python


def engine_python(patches: list[str]) -> Path:
    """The Python of the engine environment with the progress-thread patch and exactly these vLLM patches."""
    return _python(_VARIANTS[frozenset(patches) | {PROGRESS_THREAD}])


def launcher_python() -> Path:
    return _python("launcher")


def aiperf() -> Path:
    return _python("aiperf").with_name("aiperf")
