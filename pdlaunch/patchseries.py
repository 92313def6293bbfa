"""patches/series.yaml: the patches, their files and hashes, and how they stack."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from pdlaunch import unidiff, yamlfile
from pdlaunch.errors import PatchError, RecipeError, Where

ABSENT = "absent"
_HASH = r"[0-9a-f]{64}|absent"


@dataclass(frozen=True)
class PatchFile:
    """One file of a patch, relative to site-packages."""

    path: str
    before: str = yamlfile.key(pattern=_HASH)
    """sha256 without this patch, or `absent` for a file that the patch creates."""
    after: str = yamlfile.key(pattern=_HASH)
    text_of: str = ""
    """The same hunks as this other path of the patch file (packages that ship one text in two folders)."""
    either: bool = False
    """This file may be missing, if another one of the patch is there (nixl_cu12 or nixl_cu13)."""


@dataclass(frozen=True)
class Patch:
    """One patch file; its name is the file name without .patch."""

    name: str
    distributions: tuple[str, ...]
    """Names of the wheels that carry these files; at least one must be installed."""
    version: str
    """The release (without +local) that the hashes belong to."""
    purpose: str
    drop: str
    """When the patch may go."""
    files: tuple[PatchFile, ...]
    requires: tuple[str, ...] = ()
    roles: tuple[str, ...] = ("prefill", "decode")
    environments: tuple[str, ...] = ("cpu", "gpu")
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that the patch reads -> what they mean."""
    evidence: bool = True
    """Whether a run that does not list the patch must prove that its files are stock."""
    hunks: dict[str, tuple[unidiff.Hunk, ...]] = field(default_factory=dict, metadata={"written": False})


@dataclass(frozen=True)
class Series:
    """patches/series.yaml. serving_versions: distribution -> version that this project serves with."""

    serving_versions: dict[str, str]
    patches: tuple[Patch, ...]
    path: Path = field(default=Path(), metadata={"written": False})

    def patch(self, name: str) -> Patch:
        for patch in self.patches:
            if patch.name == name:
                return patch
        names = [patch.name for patch in self.patches]
        raise PatchError(
            f"unknown patch {name!r}",
            where=Where(self.path),
            rule=f"one of {', '.join(names)}",
            hint=yamlfile.nearest(name, names),
        )

    def closed(self, names: Collection[str]) -> list[Patch]:
        """The named patches in series order; PatchError when one needs another that is not named."""
        for name in names:
            for needed in self.patch(name).requires:
                if needed not in names:
                    raise PatchError(
                        f"{name} requires {needed}",
                        rule="a stacked patch needs the ones below it",
                        hint=f"name {needed} as well",
                    )
        return [patch for patch in self.patches if patch.name in names]


def load_series(path: Path) -> Series:
    """Read and check series.yaml and every patch file beside it.

    PatchError: a key or hash is wrong, a patch file is missing or no diff, its files differ from the list, or two
    patches of one release change a file without a `requires` chain and matching hashes.
    """
    try:
        document = yamlfile.read(path)
        loaded = yamlfile.bind(Series, document)
    except RecipeError as e:
        raise PatchError(e.what, where=e.where, rule=e.rule, hint=e.hint) from None
    patches: list[Patch] = []
    for index, patch in enumerate(loaded.patches):
        where = document.where(("patches", index))
        patch_file = path.parent / f"{patch.name}.patch"
        if not patch_file.is_file():
            raise PatchError(
                f"{patch_file} does not exist", where=where, rule="one file <name>.patch per patch beside series.yaml"
            )
        ready = Patch(**{**vars(patch), "hunks": unidiff.read_patch(patch_file)})
        _check_files(ready, where)
        _check_stack(ready, patches, where)
        patches.append(ready)
    return Series(loaded.serving_versions, tuple(patches), path)


def _check_files(patch: Patch, where: Where) -> None:
    listed = {f.path for f in patch.files if not f.text_of}
    if listed != set(patch.hunks):
        raise PatchError(
            f"{patch.name}: listed {sorted(listed)}, changed {sorted(patch.hunks)}",
            where=where,
            rule="list every file of the patch",
        )
    for f in patch.files:
        parts = PurePosixPath(f.path).parts
        if f.path.startswith("/") or ".." in parts or parts != tuple(f.path.split("/")):
            raise PatchError(f"{f.path!r} leaves site-packages", where=where, rule="a plain relative path")
        if f.text_of and f.text_of not in listed:
            raise PatchError(
                f"text_of {f.text_of!r} is no file of {patch.name}", where=where, rule=f"one of {sorted(listed)}"
            )
        if f.before == f.after:
            raise PatchError(f"{f.path} has the same hash before and after", where=where)


def _check_stack(patch: Patch, earlier: list[Patch], where: Where) -> None:
    names = {p.name for p in earlier}
    for needed in patch.requires:
        if needed not in names:
            raise PatchError(
                f"{patch.name} requires {needed!r}", where=where, rule=f"a patch above it: {sorted(names)}"
            )
    if patch.name in names:
        raise PatchError(f"{patch.name} is there twice", where=where, rule="each patch once")
    for f in patch.files:
        below = [(p, g) for p in earlier if p.version == patch.version for g in p.files if g.path == f.path]
        for p, _ in below:
            if p.name not in patch.requires:
                raise PatchError(
                    f"{patch.name} and {p.name} both change {f.path}",
                    where=where,
                    rule="the later one lists all earlier ones in requires",
                )
        if below and below[-1][1].after != f.before:
            raise PatchError(
                f"{f.path}: before is {f.before}, but {below[-1][0].name} leaves {below[-1][1].after}",
                where=where,
                rule="stacked hashes meet",
            )


def expected_hashes(
    series: Series, names: Collection[str], versions: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Relative path -> what it must hash to in an environment with exactly these patches; a node proves it by itself.

    Covers the files of the named patches and the stock files of every patch that is not named (except those with
    evidence: false). A value is a sha256, `absent`, or both joined by ` or ` for a file that need not be installed.
    versions: distribution -> version, default series.serving_versions; patches of other versions are left out.
    """
    serving = series.serving_versions if versions is None else versions
    wanted = {patch.name for patch in series.closed(names)}
    found: dict[str, str] = {}
    for patch in series.patches:
        if serving.get(patch.distributions[0]) != patch.version:
            if patch.name in wanted:
                name = patch.distributions[0]
                raise PatchError(
                    f"{patch.name} is for {name} {patch.version}, the run serves with {serving.get(name)}",
                    rule="patch and installed version agree",
                    hint="remove the patch, or change the version",
                )
            continue
        for f in patch.files:
            if patch.name in wanted:
                value = f.after
            elif patch.evidence and f.path not in found:
                value = f.before
            else:
                continue
            found[f.path] = f"{value} or {ABSENT}" if f.either else value
    return found
