"""The command line: ``lightning-stream train | convert | inspect | verify | explain | simulate``.

A command's module is imported when the command is called: looking at a dataset needs neither torch nor a trainer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from lightning_stream.cli import datasets, states
from lightning_stream.errors import LightningStreamError, MissingExtraError

_WRONG_USE = 2

_PASSED_ON = {
    "train": "train from streamed shards; `lightning-stream train --help` lists what can be chosen",
    "convert": "other formats into MDS shards; `lightning-stream convert --help` lists them",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; gives the exit code: 0, 1 where what was looked at is not well, 2 for wrong use."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in _PASSED_ON:
        return _pass_on(given[0], given[1:])
    options = _parser().parse_args(given)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except (LightningStreamError, MissingExtraError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _WRONG_USE
    except BrokenPipeError:  # whoever reads had enough
        sys.stderr.close()
        return 0


def _pass_on(command: str, arguments: Sequence[str]) -> int:
    """Commands with command lines of their own."""
    try:
        if command == "train":
            from lightning_stream.cli.train import packaged_configs, run

            run(arguments, packaged_configs())
            return 0
        from lightning_stream.convert.command_line import main as convert

        return int(convert(arguments) or 0)
    except (LightningStreamError, MissingExtraError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _WRONG_USE
    except ModuleNotFoundError as error:
        if error.name not in ("hydra", "omegaconf", "lightning", "torch", "torchvision"):
            raise
        print(f"{command} needs {error.name}:  pip install 'lightning-stream[recipes]'", file=sys.stderr)
        return _WRONG_USE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-stream", description="Train from streamed shards, and look at shards, checkpoints and orders."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, told in _PASSED_ON.items():
        commands.add_parser(name, help=told, add_help=False)
    datasets.add_commands(commands)
    states.add_commands(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
