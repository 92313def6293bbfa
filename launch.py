"""python launch.py --recipe NAME: a recipe becomes a job, and the job becomes one archived run with one verdict."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CTRL_C = signal.getsignal(signal.SIGINT)
if __name__ == "__main__" and CTRL_C is signal.default_int_handler:  # until main() is there to say it; its imports would show a trace
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"interrupted\n"), os._exit(130)))

import click  # noqa: E402

ROOT = Path(__file__).resolve().parent
FOLDER = click.Path(path_type=Path)
_recipe = click.option("--recipe", required=True, help="Name in recipes/, or a path.")
_cluster = click.option("--cluster", default="local", show_default=True, help="Name in clusters/, or a path.")
_set = click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key (cluster.KEY, or @FILE of keys).")
_here = click.option("--local", "run_locally", is_flag=True, help="Run the same bundle on this machine, without Slurm.")


_format = click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    return _recipe(_cluster(_set(command)))


def _optional(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--recipe", help="Name in recipes/, or a path.")(_cluster(_set(_here(command))))


def _show(rows: list[dict[str, Any]] | dict[str, Any], form: str) -> None:
    from pdlaunch.console import shown

    click.echo(shown(rows, form))


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@_optional
@click.option("--dry-run", is_flag=True, help="Show placement, ports, commands and the script; write nothing.")
@click.pass_context
def cli(context: click.Context, /, dry_run: bool, **names: Any) -> None:
    """Disaggregated serving from a recipe to one archived run with one verdict.

    python launch.py --recipe NAME submits a recipe; with a local cluster, or with --local, it runs here.

    Exit codes: 0 ok, 1 the verdict or a check failed, 2 bad input, 3 unexpected, 130 interrupted.
    """
    verb, given = context.invoked_subcommand, names["recipe"] or names["settings"] or names["run_locally"] or dry_run
    if verb is not None:
        if given:
            raise click.UsageError(f"options belong behind the verb: launch.py {verb} --recipe NAME ...")
        return
    if names["recipe"] is None:
        click.echo(context.get_help())
        context.exit(2)
    from pdlaunch import session
    job = session.load_job(ROOT, **names)
    if dry_run:
        click.echo("\n".join(session.describe(job)))
        return
    context.exit(session.start(job, None, say=click.echo, live=sys.stdout.isatty()))


@cli.command(name="list")
@_format
def list_(form: str) -> None:
    """Recipes and clusters of this repository."""
    from pdlaunch import session
    _show(session.catalogue(ROOT), form)


@cli.command()
@_options
@_format
def check(form: str, **names: Any) -> None:
    """Everything that can be known before submission; warnings do not fail."""
    from pdlaunch import session
    _show(session.check_rows(session.load_job(ROOT, **names)), form)


@cli.command()
@_options
@click.option("--out", type=FOLDER, required=True, help="Folder to write; must not exist.")
def render(out: Path, **names: Any) -> None:
    """Write the bundle: sbatch OUT/job.sbatch works without this repository."""
    from pdlaunch import session
    click.echo(session.render(session.load_job(ROOT, **names), out))


@cli.command()
@_optional
@click.option("--bundle", type=FOLDER, help="A rendered bundle instead of a recipe.")
@click.option("--out", type=FOLDER, help="Where the bundle is written; default: bundles/<recipe>-<utc>-<hex>.")
@click.pass_context
def submit(context: click.Context, /, bundle: Path | None, out: Path | None, **names: Any) -> None:
    """Submit a recipe or a bundle, once; with a local cluster or --local: run it here."""
    from pdlaunch import session
    if (names["recipe"] is None) == (bundle is None):
        raise click.UsageError("give --recipe or --bundle, one of them")
    if bundle is None:
        context.exit(session.start(session.load_job(ROOT, **names), out, say=click.echo, live=sys.stdout.isatty()))
    if names["run_locally"] or names["settings"] or out:
        raise click.UsageError("--bundle takes what was rendered: no --local, --set or --out")
    context.exit(session.submit_folder(bundle, say=click.echo, live=sys.stdout.isatty()))


@cli.command()
@click.argument("bundle", type=FOLDER)
@_format
def status(bundle: Path, form: str) -> None:
    """State of a submitted bundle: Slurm's word, last stage, verdict."""
    from pdlaunch import slurm
    _show(slurm.status(bundle), form)


@cli.command()
@click.argument("bundle", type=FOLDER)
def cancel(bundle: Path) -> None:
    """Cancel the job of a bundle; its archive says INCOMPLETE."""
    from pdlaunch import slurm
    click.echo(f"cancelled job {slurm.cancel(bundle)}")


@cli.command()
@click.option("--url", required=True, help="Base URL of any OpenAI-compatible endpoint, as in http://127.0.0.1:8000.")
@click.option("--model", required=True, help="Model name that requests carry.")
@click.option("--prompts", default=9, show_default=True, help="Prompts, each with a code of its own at another depth.")
@click.option("--prompt-tokens", default=800, show_default=True, help="Length of each prompt in tokens.")
@click.option("--max-tokens", default=64, show_default=True, help="Tokens to generate; more for a model that thinks first.")
@click.option("--timeout-s", type=click.FloatRange(0, min_open=True), default=120.0, help="Deadline of one request; passing it is a hang.")
@click.option("--out", type=FOLDER, help="Folder for the raw answers; default: a new temporary one.")
@_format
@click.pass_context
def recall(context: click.Context, /, form: str, **question: Any) -> None:
    """The recall check alone: does the endpoint answer from the prompt that it was sent?"""
    from pdlaunch import session
    result = session.ask_recall(session.RecallQuestion(**question), (lambda line: click.echo(line, err=True)))
    _show(result, form)
    context.exit(0 if result["passed"] else 1)


@cli.command()
@click.option("--cluster", default="local", show_default=True, help="Name in clusters/, or a path.")
@_format
@click.pass_context
def doctor(context: click.Context, cluster: str, form: str) -> None:
    """What this machine has and lacks for a cluster file."""
    from pdlaunch import cluster as clusters
    from pdlaunch import doctor as doctors
    from pdlaunch import recipe

    lines = doctors.examine(clusters.load(recipe.find(cluster, ROOT / "clusters", "cluster")), ROOT)
    _show([x.row() for x in lines], form)
    context.exit(0 if all(x.ok for x in lines) else 1)


@cli.command()
@click.argument("run")
@click.option("--results", type=FOLDER, default=ROOT / "results", help="Folder of archived runs.")
@_format
@click.pass_context
def verify(context: click.Context, run: str, results: Path, form: str) -> None:
    """Every byte of an archived run, and its verdict judged again offline. RUN: a folder, <recipe>/<name>, or last."""
    from pdlaunch import archive

    found = archive.verify(path := archive.find(run, results))
    _show(found.table(path), form)
    context.exit(0 if found.intact else 1)


@cli.command()
@click.argument("verb", type=click.Choice(["status", "apply", "revert", "verify"]))
@click.argument("names", nargs=-1)
@click.option("--python", help="Python of the environment to look at or change.")
@click.option("--dry-run", is_flag=True, help="Say what would change.")
@click.pass_context
def patch(context: click.Context, verb: str, names: tuple[str, ...], python: str | None, dry_run: bool) -> None:
    """Patches of patches/series.yaml in an installed environment."""
    from pdlaunch import patching

    if python is None:
        raise click.UsageError("--python PYTHON: which environment?")
    site_packages = patching.site_packages_of(Path(python))
    context.exit(patching.main([verb, *names, "--site-packages", str(site_packages), *(["--dry-run"] if dry_run else [])]))


FORWARDED = {
    "plan": ("pdlaunch.verb_plan", "KV price, capacity and whether prefill can hand its cache to decode, before a GPU is booked."),
    "compare": ("pdlaunch.verb_results", "Typed differences between runs, and which of them are more than noise."),
    "report": ("pdlaunch.verb_results", "One self-contained HTML page over runs."),
    "runs": ("pdlaunch.verb_results", "Index of archived runs."),
    "utilisation": ("pdlaunch.verb_results", "GPU utilisation of one role against its load."),
    "export": ("pdlaunch.verb_results", "Measured phases as AIPerf JSON, InferenceX rows or llm-d benchmark reports."),
    "import": ("pdlaunch.verb_results", "A file of one of those formats in another."),
}
"""Verb -> the module that has a click command of that name, loaded only when it is called, and its line of help here."""


def _forward(verb: str, module: str, text: str) -> None:
    @cli.command(name=verb, help=text, add_help_option=False, context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    @click.pass_context
    def forwarded(context: click.Context, /, arguments: tuple[str, ...]) -> None:
        import importlib

        command = getattr(importlib.import_module(module), "import_" if verb == "import" else verb)
        context.exit(command.main(list(arguments), prog_name=f"launch.py {verb}", standalone_mode=False) or 0)


for _verb, (_module, _text) in FORWARDED.items():
    _forward(_verb, _module, _text)


def main() -> int:
    """One message for an error that a person can correct, a trace for one that they cannot."""
    from pdlaunch.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_UNEXPECTED, LaunchError

    try:
        signal.signal(signal.SIGINT, CTRL_C)
        code = cli(standalone_mode=False)
    except LaunchError as e:
        click.echo(f"error: {e}", err=True)
        return e.exit_code
    except click.ClickException as e:
        e.show()
        return EXIT_BAD_INPUT
    except OSError as e:  # a path or a disk that the system refuses: for a person to correct
        click.echo(f"error: {str(e.filename or 'output')[-200:]}: {e.strerror or e}", err=True)
        return EXIT_BAD_INPUT
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except Exception:  # noqa: BLE001 - the top level
        import traceback

        traceback.print_exc()
        click.echo("error: unexpected; this is a defect of the launcher", err=True)
        return EXIT_UNEXPECTED
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
