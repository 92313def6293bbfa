"""python launch.py --recipe NAME: a recipe becomes a job, and the job becomes one archived run with one verdict."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdlaunch.job import Job

ROOT = Path(__file__).resolve().parent


def _recipe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a recipe key; recorded in the run.")(command)
    command = click.option("--cluster", default="local", show_default=True, help="Name in clusters/ or a path.")(command)
    return click.option("--recipe", required=True, help="Name in recipes/ or a path.")(command)


def _job(recipe: str, cluster: str, settings: tuple[str, ...], local: bool = False) -> Job:
    from datetime import UTC, datetime

    from pdlaunch import cluster as clusters
    from pdlaunch import job, recipe as recipes, vcs

    context = job.Context(ROOT, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), *vcs.commit_and_dirt(ROOT), run_locally=local)
    return job.build(recipes.load(recipes.find(recipe, ROOT / "recipes", "recipe"), settings),
                     clusters.load(recipes.find(cluster, ROOT / "clusters", "cluster")), context)


@click.group()
def cli() -> None:
    """Disaggregated serving from a recipe to a verdict."""


@cli.command()
@_recipe_options
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write; must not exist.")
def render(recipe: str, cluster: str, settings: tuple[str, ...], out: Path) -> None:
    """Write the bundle: sbatch OUT/job.sbatch works without this repository."""
    from pdlaunch import bundle

    click.echo(bundle.render(_job(recipe, cluster, settings), out))


def main() -> int:
    from pdlaunch.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_OK, LaunchError

    try:
        cli(standalone_mode=False)
    except LaunchError as e:
        click.echo(f"error: {e}", err=True)
        return e.exit_code
    except click.ClickException as e:
        e.show()
        return EXIT_BAD_INPUT
    except click.Abort:
        return EXIT_INTERRUPTED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
