"""Writes pdlaunch/data/<program>.json: the flags of dynamo.vllm, dynamo.mocker, dynamo.frontend and vllm.serve, from their own parsers.

Run it with the Python of an engine environment, from the repository root:
    .envs/engine-stock/bin/python tools/make_flag_lists.py pdlaunch/data
Each file: {"program", "versions", "abbreviations", "flags": [{"names", "values", "choices", "env"}]}
values is the number of arguments that argparse takes ("0", "1", "?", "*", "+"); choices are argparse's, and for --attention-backend those
of vLLM's registry; env is the variable that sets the same thing, from the help text of Dynamo's own arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

_ENV = re.compile(r"env(?:ironment)? var(?:iable)?:?\s*([A-Z][A-Z0-9_]+)")


class _CapturedError(Exception):
    pass


def _record(seen: list[argparse.ArgumentParser], last: Callable[[argparse.ArgumentParser], bool], start: Callable[[], Any]) -> None:
    """Run start() and keep each parser that is asked to parse; stop at the one that last() accepts."""
    original = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        seen.append(self)
        if last(self):
            raise _CapturedError
        return original(self, args, namespace)

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]
    try:
        start()
    except _CapturedError:
        return
    finally:
        argparse.ArgumentParser.parse_known_args = original  # type: ignore[method-assign]
    raise SystemExit("no parser was captured: the program does not parse its flags the way this tool expects")


def _is_vllm(parser: argparse.ArgumentParser) -> bool:
    return type(parser).__name__ == "FlexibleArgumentParser"


def dynamo_vllm() -> list[argparse.ArgumentParser]:
    from dynamo.vllm.args import _parse_cli_args

    seen: list[argparse.ArgumentParser] = []
    _record(seen, _is_vllm, lambda: _parse_cli_args(["--model", "m"]))
    return seen


def dynamo_mocker() -> list[argparse.ArgumentParser]:
    from dynamo.mocker.args import parse_args

    seen: list[argparse.ArgumentParser] = []
    _record(seen, lambda _: True, lambda: parse_args(["--model-path", "m"]))
    return seen


def dynamo_frontend() -> list[argparse.ArgumentParser]:
    from dynamo.frontend.main import parse_args

    seen: list[argparse.ArgumentParser] = []
    sys.argv = ["frontend"]
    _record(seen, lambda _: True, parse_args)
    return seen


def vllm_serve() -> list[argparse.ArgumentParser]:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    subparsers = FlexibleArgumentParser().add_subparsers()
    return [ServeSubcommand().subparser_init(subparsers)]


def _values(action: argparse.Action) -> str:
    if action.nargs is None:
        return "1"
    return str(action.nargs)


def _flags(parsers: list[argparse.ArgumentParser]) -> list[dict[str, Any]]:
    flags: dict[str, dict[str, Any]] = {}
    for parser in parsers:
        for action in parser._actions:
            if not action.option_strings or action.option_strings[0] in flags:
                continue
            env = _ENV.search(action.help or "") if action.help != argparse.SUPPRESS else None
            # Sorted: Dynamo's parser names come out of a hash map in another order each time.
            choices = None if action.choices is None else sorted(str(c) for c in action.choices)
            flags[action.option_strings[0]] = {
                "names": list(action.option_strings),
                "values": _values(action),
                "choices": choices,
                "env": env.group(1) if env else None,
            }
    if "--attention-backend" in flags:
        flags["--attention-backend"]["choices"] = attention_backends()
    return [flags[name] for name in sorted(flags)]


def attention_backends() -> list[str]:
    """Names that the parser leaves to AttentionConfig: those of the enum that have a class, and auto."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return sorted(["auto", *(name for name, member in AttentionBackendEnum.__members__.items() if member.value)])


def main(folder: Path) -> None:
    asyncio.set_event_loop(asyncio.new_event_loop())
    programs = {"dynamo.vllm": dynamo_vllm, "dynamo.mocker": dynamo_mocker, "dynamo.frontend": dynamo_frontend, "vllm.serve": vllm_serve}
    versions = {"ai-dynamo": version("ai-dynamo"), "vllm": version("vllm").partition("+")[0]}
    folder.mkdir(parents=True, exist_ok=True)
    for program, capture in programs.items():
        parsers = capture()
        flags = _flags(parsers)
        abbreviations = any(p.allow_abbrev for p in parsers)
        head = json.dumps({"program": program, "versions": versions, "abbreviations": abbreviations})[:-1]
        body = ",\n  ".join(json.dumps(flag) for flag in flags)
        (folder / f"{program}.json").write_text(f'{head}, "flags": [\n  {body}\n]}}\n', encoding="utf-8")
        print(f"{program}: {len(flags)} flags")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
