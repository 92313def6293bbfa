"""One error root; the children are named by the stage that found the problem, and carry the exit code of the command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

EXIT_OK = 0
EXIT_VERDICT = 1
EXIT_BAD_INPUT = 2
EXIT_UNEXPECTED = 3
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Where:
    """A place in a file that a person wrote: path, 1-based line, dotted key."""

    path: Path | None = None
    line: int | None = None
    key: str | None = None

    def __str__(self) -> str:
        place = "" if self.path is None else str(self.path)
        if self.line is not None:
            place += f":{self.line}"
        if self.key:
            place += f" {self.key}" if place else self.key
        return place


class LaunchError(Exception):
    """Root of every error that is shown to a person as one message.

    what: what was found, with its value. rule: the rule or the legal values. hint: the next step. where: file:line and dotted key.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(self, what: str, *, where: Where | None = None, rule: str = "", hint: str = "") -> None:
        self.what, self.where, self.rule, self.hint = what, where, rule, hint
        super().__init__(str(self))

    def __str__(self) -> str:
        place = str(self.where) if self.where else ""
        lines = [f"{place}: {self.what}" if place else self.what]
        if self.rule:
            lines.append(f"  rule: {self.rule}")
        if self.hint:
            lines.append(f"  next: {self.hint}")
        return "\n".join(lines)


class RecipeError(LaunchError):
    """A recipe, a cluster file or a --set override is wrong."""


class PlanError(LaunchError):
    """The model and the shapes cannot work together, or cannot be priced."""


class PlacementError(LaunchError):
    """The engines do not fit the cluster."""


class BundleError(LaunchError):
    """A bundle cannot be written, or is not what its manifest says."""


class SubmitError(LaunchError):
    """Slurm refused, or its answer is not known."""


class PatchError(LaunchError):
    """A patch cannot be applied, reverted or verified."""


class ArchiveError(LaunchError):
    """An archived run is missing, foreign, truncated or changed."""
