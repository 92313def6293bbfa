"""Options of the verbs compare, report, runs, utilisation, export and import; loaded only when one of them is called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pdlaunch.compare import ASSUMED_NOISE_PCT
from pdlaunch.exchange import command as exchange
from pdlaunch.report import command

ROOT = Path(__file__).resolve().parent.parent
FOLDER = click.Path(path_type=Path)
_format = click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
_results = click.option("--results", type=FOLDER, default=ROOT / "results", show_default="results/", help="Folder of archived runs.")
_invalid = click.option("--include-invalid", is_flag=True, help="Runs that are not VALID too; they are marked.")


def _choice(verb: Callable[..., Any]) -> Callable[..., Any]:
    """RUN..., or the last runs of a recipe."""
    verb = click.option("--last", type=int, help="The last N runs of --recipe.")(verb)
    verb = click.option("--recipe", default="", help="Runs of this recipe.")(verb)
    return click.argument("names", nargs=-1, metavar="RUN...")(verb)


def _answer(context: click.Context, answer: command.Answer) -> None:
    click.echo(answer.text)
    context.exit(answer.code)


@click.command()
@_choice
@_results
@_invalid
@click.option("--all-metrics", "every", is_flag=True, help="Every metric, not only the main ones.")
@click.option("--noise-pct", default=ASSUMED_NOISE_PCT, show_default=True, help="Assumed noise where a group has one run.")
@_format
@click.pass_context
def compare(context: click.Context, /, names: tuple[str, ...], recipe: str, last: int | None, results: Path, **options: Any) -> None:
    """Typed differences between runs, and which of them are more than noise."""
    _answer(context, command.compare_runs(command.Choice(names, recipe, last), results, **options))


@click.command()
@_choice
@_results
@_invalid
@click.option("--out", type=FOLDER, help="The page to write; default for one run: results/<recipe>/<run>.html.")
@click.option("--force", is_flag=True, help="Replace an existing page.")
@click.pass_context
def report(context: click.Context, /, names: tuple[str, ...], recipe: str, last: int | None, results: Path, **options: Any) -> None:
    """One self-contained HTML page over runs."""
    _answer(context, command.report(command.Choice(names, recipe, last), results, ROOT, **options))


@click.command()
@_results
@click.option("--where", multiple=True, metavar="KEY=VALUE", help="Only runs that fit; repeatable.")
@click.option("--sort", default="created", show_default=True, help="Column to sort by.")
@click.option("--last", type=int, help="The last N.")
@click.option("--matrix", "as_matrix", is_flag=True, help="The table of attempts: layout, patches, verdict, recall, transfers.")
@_format
@click.pass_context
def runs(context: click.Context, /, results: Path, **options: Any) -> None:
    """Index of archived runs."""
    _answer(context, command.list_runs(results, **options))


@click.command()
@click.argument("source", type=FOLDER)
@click.option("--load", type=FOLDER, help="Load table, when SOURCE has utilisation only.")
@click.option("--role", help="Only this role; default: all of a table or a run, prefill for scrapes and range queries.")
@click.option("--bin", "bin_s", type=float, help="Seconds of one period.")
@click.option(
    "--busy", "busy_tokens_per_s", default=5000.0, show_default=True, help="Prompt tokens per second from which a period is busy."
)
@_format
@click.pass_context
def utilisation(context: click.Context, /, source: Path, **options: Any) -> None:
    """GPU utilisation of one role against its load: table, range query, scrapes or a run."""
    _answer(context, command.utilisation(source, **options))


@click.command()
@_choice
@_results
@_invalid
@click.option("--to", required=True, type=click.Choice(sorted(exchange.WRITERS)), help="Format to write.")
@click.option("--out", type=FOLDER, required=True, help="Folder for the files; an existing file is never replaced.")
@click.pass_context
def export(
    context: click.Context, /, names: tuple[str, ...], recipe: str, last: int | None, results: Path, to: str, out: Path, **options: Any
) -> None:
    """Measured phases as AIPerf JSON, InferenceX rows or llm-d benchmark reports, denominators declared."""
    _answer(context, exchange.export(command.Choice(names, recipe, last), results, to, out, **options))


@click.command(name="import")
@click.argument("file", type=FOLDER)
@click.option("--from", "source", required=True, type=click.Choice(sorted(exchange.READERS)), help="Format of FILE.")
@click.option("--to", required=True, type=click.Choice(sorted(exchange.WRITERS)), help="Format to write.")
@click.option("--out", type=FOLDER, required=True, help="File to write; an existing one is never replaced.")
@click.pass_context
def import_(context: click.Context, /, file: Path, source: str, to: str, out: Path) -> None:
    """A file of one format in another; what the target cannot hold is left out."""
    _answer(context, exchange.convert(file, source, to, out))
