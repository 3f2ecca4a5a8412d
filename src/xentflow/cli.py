"""The command line: parse and dispatch only.

Exit status 0: done, and everything as expected; 1: it failed; 2: it was asked for wrongly; 130: interrupted by Ctrl-C.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.markup import escape

from xentflow import __version__
from xentflow.errors import WrongRequest, XentflowError


@dataclass(frozen=True)
class _Command:
    summary: str
    load: Callable[[], tuple[type[Any], Callable[[Any, Path], int]]]
    """Gives the typed configuration and what runs it; imported only when the command line is used."""


def _verify() -> tuple[type[Any], Callable[[Any, Path], int]]:
    from xentflow.claims import verify

    return verify.VerifyConfig, verify.run


def _derive() -> tuple[type[Any], Callable[[Any, Path], int]]:
    from xentflow import deriving

    return deriving.DeriveConfig, deriving.run


def _probe() -> tuple[type[Any], Callable[[Any, Path], int]]:
    from xentflow import probes

    return probes.ProbeConfig, probes.run


def _reproduce() -> tuple[type[Any], Callable[[Any, Path], int]]:
    from xentflow.experiments import reproduce

    return reproduce.ReproduceConfig, reproduce.run


def _train() -> tuple[type[Any], Callable[[Any, Path], int]]:
    from xentflow.experiments import train

    return train.TrainConfig, train.run


def _bench() -> tuple[type[Any], Callable[[Any, Path], int]]:
    from xentflow import bench

    return bench.BenchConfig, bench.run


_COMMANDS = {
    "bench": _Command("Measure speed: ratios, interleaved, with the floor beside them.", _bench),
    "probe": _Command("Measure how far a module's updates are from descent on an energy.", _probe),
    "derive": _Command("Print the derivation and the certificate of a block.", _derive),
    "reproduce": _Command("Run the paper's experiment and its controls, and report it.", _reproduce),
    "train": _Command("Train a derived network without labels in its passes, or compare it.", _train),
    "verify": _Command("Try the paper's claims, and the package's own, on random instances.", _verify),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        _complain("xentflow", "interrupted; every file in the output is whole")
        return 130


def _main(arguments: Sequence[str] | None) -> int:
    parser = ArgumentParser(prog="xentflow", description="Attention you can derive.", version=__version__)
    commands = parser.add_subcommands(dest="command", required=True)
    for name, command in _COMMANDS.items():
        commands.add_subcommand(name, _parser(name, command), help=command.summary)
    settings = parser.parse_args(arguments)
    name = settings.command
    config_type, run = _COMMANDS[name].load()
    values = vars(settings[name])
    try:
        config = config_type(**{field.name: values[field.name] for field in fields(config_type)})
    except XentflowError as error:
        _complain(f"xentflow {name}", str(error))
        return 2
    try:
        return run(config, Path(values["output"]))
    except XentflowError as error:
        _complain(f"xentflow {name}", str(error))
        return 2 if isinstance(error, WrongRequest) else 1


def _complain(who: str, what: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]{who}:[/] {escape(what)}")


def _parser(name: str, command: _Command) -> ArgumentParser:
    parser = ArgumentParser(description=command.summary)
    parser.add_argument("--config", action="config", help="YAML file with these settings")
    parser.add_argument("--output", metavar="DIR", default=f"results/{name}", help="folder for result.json")
    config_type = command.load()[0]
    flags = {field.name for field in fields(config_type) if field.type is bool}
    # What a command is about stands right behind it, as in `xentflow bench training`.
    subject = [field for field in fields(config_type) if field.metadata.get("subject")]
    for field in subject:
        parser.add_argument(
            field.name, nargs="?", type=field.type, default=field.default, help=field.metadata["subject"]
        )
    parser.add_class_arguments(config_type, as_group=False, skip={field.name for field in subject})
    for action in parser._actions:
        # A flag alone means yes; it may still be given a value, as a configuration file does.
        if action.dest in flags:
            action.nargs, action.const = "?", True
    return parser


if __name__ == "__main__":
    sys.exit(main())
