"""The steps behind the verbs of launch.py: load the two files, describe a job, run or submit it, ask for recall."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shlex
import shutil
import tempfile
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pdlaunch import bundle, job, local, mounts, preflight, slurm, vcs
from pdlaunch import cluster as clusters
from pdlaunch import recipe as recipes
from pdlaunch.errors import RecipeError, SubmitError


def load_job(root: Path, recipe: str, cluster: str, settings: tuple[str, ...], *, run_locally: bool = False) -> job.Job:
    """The job of two names or paths. run_locally: a Slurm cluster's environments on this machine, without Slurm."""
    context = job.Context(root, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), *vcs.commit_and_dirt(root), run_locally=run_locally)
    of_cluster = tuple(s.removeprefix("cluster.") for s in settings if s.startswith("cluster."))
    found_recipe = recipes.load(
        recipes.find(recipe, root / "recipes", "recipe"), tuple(s for s in settings if not s.startswith("cluster."))
    )
    found_cluster = clusters.load(recipes.find(cluster, root / "clusters", "cluster"), of_cluster)
    if run_locally and found_cluster.launcher == "slurm":
        if any(e.image for e in found_cluster.environments):
            raise RecipeError(
                f"--local with the container images of {found_cluster.name}",
                where=found_cluster.source.where("environments"),
                rule="a local run needs environments with python",
            )
        found_cluster = dataclasses.replace(found_cluster, launcher="local")
    return job.build(found_recipe, found_cluster, context)


def catalogue(root: Path) -> list[dict[str, str]]:
    """Every recipe and cluster of the repository."""
    found: list[tuple[str, recipes.Recipe | clusters.Cluster]] = []
    found += [("recipe", recipes.load(path)) for path in sorted((root / "recipes").glob("*.yaml"))]
    found += [("cluster", clusters.load(path)) for path in sorted((root / "clusters").glob("*.yaml"))]
    return [{"kind": kind, "name": item.name, "description": item.description} for kind, item in found]


def check_rows(found: job.Job) -> list[dict[str, str]]:
    """Every check that passed and every warning; the first check that fails is raised."""
    preflight.check_job(found)
    rows = [{"check": f.name, "result": "ok", "detail": f.observed} for f in preflight.findings(found, submitting=False)]
    try:
        mounts.check_bundle(found, found.context.root / "bundles")
    except RecipeError as e:
        rows.append({"check": "bundle folder", "result": "warning", "detail": f"{e.what} (render and submit need another --out)"})
    rows += [{"check": n.code, "result": "info", "detail": n.message} for n in found.notes]
    return rows + [{"check": w.code, "result": "warning", "detail": f"{w.message} ({w.fix})"} for w in found.warnings]


def render(found: job.Job, out: Path) -> Path:
    preflight.check_job(found)
    return shown(new_bundle(found, out))


def shown(path: Path) -> Path:
    """As a person may type it here: relative to the current folder when it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def new_bundle(found: job.Job, out: Path | None) -> Path:
    """Render into `out`, or into bundles/<recipe>-<utc>-<6 hex>: two starts in one second must not meet."""
    if out is None:
        stamp = found.context.created_utc.replace("-", "").replace(":", "")
        out = found.context.root / "bundles" / f"{found.recipe.name}-{stamp}-{secrets.token_hex(3)}"
    mounts.check_bundle(found, out)
    return bundle.render(found, out)


def describe(found: job.Job) -> list[str]:
    """Placement, ports, commands and the script, for --dry-run."""
    spec, lines = found.spec, [f"{found.recipe.name} on {found.cluster.name} ({found.cluster.launcher}, {found.cluster.device})"]
    lines += [f"warning: {w.message} ({w.fix})" for w in found.warnings]
    lines.append("placement:")
    for number, node in enumerate(spec.nodes):
        on_node = [
            f"{e.name}{f'.r{i}' if i else ''}{f' GPUs {r.gpus[0]}-{r.gpus[-1]}' if r.gpus else ''}"
            for e in spec.engines
            for i, r in enumerate(e.ranks)
            if r.node == number
        ]
        services = ["etcd, nats, frontend"] if number == 0 else []
        lines.append(f"  node {number} (component {node.component}, {node.gpus} GPUs): {', '.join([*services, *on_node])}")
    lines.append(f"ports: frontend {spec.http_port or 'a free one'}; all others are free ones of the node, chosen at start")
    for service in spec.services:
        lines.append(f"{service.name}: {shlex.join(service.argv)}")
    for engine in spec.engines:
        for rank in engine.ranks:
            lines.append(f"{engine.name} (node {rank.node}): {shlex.join(rank.argv)}")
        lines += [f"  {name}={shlex.quote(value)}" for name, value in engine.env.items()]
    if spec.proof.prediction is not None:
        lines.append(f"transfer of one prompt: {spec.proof.prediction.formula}")
    for name, text in bundle.scripts(found, Path("BUNDLE")).items():
        lines += [f"--- {name} ---", text.rstrip()]
    return lines


def start(found: job.Job, out: Path | None, *, say: Callable[[str], None], live: bool) -> int:
    """Run the job here, or submit it; the exit code. A bundle that Slurm refused is removed: the same command writes it again.

    A bundle whose job may exist is kept; the message says how to go on with it.
    """
    preflight.check_job(found, submitting=True)
    folder = new_bundle(found, out)
    if found.cluster.launcher == "local":
        return run_here(folder, found.cluster.node_python, live=live)
    try:
        receipt = slurm.submit(folder)
    finally:
        if slurm.read_receipt(folder) is None:
            shutil.rmtree(folder)
    say(f"submitted job {receipt.job_id}\nbundle: {shown(folder)}\nnext: python launch.py status {shlex.quote(str(shown(folder)))}")
    return 0


def run_here(folder: Path, node_python: str, *, live: bool) -> int:
    """Run a bundle on this machine, with a live view on a terminal and plain lines elsewhere."""
    run_dir = local.new_run_dir(folder)
    if not live:
        return local.run(folder, run_dir, node_python)
    from pdlaunch.console import LiveView
    from pdlaunch.node.output import say

    log = folder / "run.log"
    with log.open("w", encoding="utf-8") as output, LiveView(f"{run_dir.parent.name}  (lines: {log})", run_dir) as view:
        code = local.run(folder, run_dir, node_python, output, view.tick)
    say(slurm.verdict_line(run_dir) or f"no verdict; the last lines of {log}:\n{_tail(log)}")
    say(f"archive: {run_dir}")
    return code


def _tail(path: Path, lines: int = 40) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def submit_folder(folder: Path, *, say: Callable[[str], None], live: bool) -> int:
    """Submit (or run) a bundle that was rendered before."""
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 - its processes start in it; links in the path are kept
    if slurm.is_run(folder):
        raise SubmitError(
            f"{folder} is a run folder, not a bundle",
            rule="a folder that launch.py render wrote",
            hint="run.repeat_command in its spec.json starts it again",
        )
    launcher = slurm.spec_of(folder).run.launcher
    bundle.require_whole(folder)
    if launcher == "local":
        return run_here(folder, clusters.load_archived(folder / "cluster.yaml").node_python, live=live)
    receipt = slurm.submit(folder)
    say(f"submitted job {receipt.job_id} ({receipt.how})")
    return 0


_REFUSALS = (401, 403, 404, 405, 407)
"""Not ours, no such path, no such model: nothing that was asked has been answered wrongly."""


@dataclasses.dataclass(frozen=True)
class RecallQuestion:
    url: str
    model: str
    prompts: int
    prompt_tokens: int
    max_tokens: int
    timeout_s: float
    out: Path | None


def _check_question(question: RecallQuestion) -> None:
    limits = {"--prompts": (question.prompts, 1, 1000), "--prompt-tokens": (question.prompt_tokens, 64, 10_000_000),
              "--max-tokens": (question.max_tokens, 1, 1_000_000), "--timeout-s": (question.timeout_s, 0.001, 86400)}  # fmt: skip
    for name, (value, least, most) in limits.items():
        if not least <= value <= most:
            raise SubmitError(f"{name} {value}", rule=f"{least:g} to {most:,}")
    if not question.model.strip():
        raise SubmitError("--model is empty", rule="the name that GET /v1/models of the endpoint gives")
    if any(ord(c) <= 32 for c in question.url):
        raise SubmitError(f"--url {question.url!r} holds a space or a control character", rule="--url http://HOST:PORT")
    answers = None if question.out is None else question.out / "before.jsonl"
    if answers is not None and answers.exists():
        raise SubmitError(f"{answers} is there already", rule="answers are written once", hint="another --out, or remove it")


def ask_recall(question: RecallQuestion, say: Callable[[str], None]) -> dict[str, Any]:
    """The recall check alone, against any OpenAI-compatible endpoint; raw answers go to question.out or a new temporary folder.

    SubmitError when the first request shows that there is no such endpoint, or that it refuses this client: no more are sent then.
    """
    from pdlaunch.node.completion import NOT_OPENAI
    from pdlaunch.node.recall import run_recall
    from pdlaunch.node.spec import RecallSpec

    def no_endpoint(found: dict[str, Any]) -> str:
        error = str(found["error"])
        if found["status"] == 0 and error and not found["hang"]:
            return f"unreachable: {error[:300]}"
        if found["status"] in _REFUSALS or found["status"] // 100 == 3:
            return f"{error[:300]} ({question.url})"
        return f"{question.url} is {error[:300]}" if error.startswith(NOT_OPENAI) else ""

    _check_question(question)
    new = question.out is None or not question.out.exists()
    out = question.out or Path(tempfile.mkdtemp(prefix="pdlaunch-recall-"))
    spec = RecallSpec(question.prompts, question.prompt_tokens, ("before",), question.max_tokens)

    stop = threading.Event()
    refused: list[str] = []

    def row(found: dict[str, Any]) -> None:
        if found["prompt"] == 0 and (why := no_endpoint(found)):
            refused.append(why)
            stop.set()
            return
        if found["prompt"] == 0:
            say(f"answers: {out}")
        say(f"prompt {found['prompt']}: {'correct' if found['correct'] else 'WRONG: ' + str(found['why'])[:160]}")

    try:
        result = run_recall(question.url, question.model, spec, "before", secrets.token_hex(6), out, question.timeout_s, stop, on_row=row)
    except ValueError as e:
        if question.out is None:
            out.rmdir()
        raise SubmitError(str(e), rule="--url http://HOST:PORT and a prompt length of at least 64 tokens") from None
    if refused:
        result.path.unlink()
        if new:
            out.rmdir()
        raise SubmitError(refused[0], rule="--url and --model of an OpenAI-compatible endpoint that this machine may use")
    return {
        "correct": result.correct,
        "asked": result.asked,
        "hangs": result.hangs,
        "leaked": result.leaked,
        "passed": result.passed,
        "answers": str(result.path),
    }
