"""The command line: command, options, overrides; then errors to one line and an exit code.

    spectrain COMMAND [group=option ...] [key=value ...] [--dry-run] [-m] [--debug] [--help]

Exit codes: 0 done; 2 the configuration or an input is wrong, nothing was started; 1 a failure while running; 130
interrupted. Torch and transformers are imported after the configuration has been read, so help and configuration errors
come at once.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectrain.config.conversion import suggest
from spectrain.config.help_text import COMMANDS, FLAGS, command_help, overview
from spectrain.config.schema import SpectrainConfig
from spectrain.console import say, stdout
from spectrain.errors import ConfigError, SpectrainError

if TYPE_CHECKING:
    from spectrain.stages.context import Context


@dataclass(frozen=True)
class Command:
    """A parsed command line."""

    command: str = ""
    overrides: tuple[str, ...] = ()
    help: bool = False
    version: bool = False
    dry_run: bool = False
    multirun: bool = False
    debug: bool = False
    words: tuple[str, ...] = ()  # of `inspect`: what to look at; of `eval`: parity
    values: dict[str, str] = field(default_factory=dict)  # of `inspect`: --limit, --split
    print_only: bool = False  # of `serve`
    flags: tuple[str, ...] = ()  # of `serve`: what stands behind `--`, for vLLM


_SWITCHES = {
    "-h": "help",
    "--help": "help",
    "--version": "version",
    "--dry-run": "dry_run",
    "-m": "multirun",
    "--multirun": "multirun",
    "--debug": "debug",
}
_COMMAND_SWITCHES = {"serve": {"--print": "print_only"}}
_VALUES = {"inspect": ("--limit", "--split")}
_WORDS = {"inspect": ("responses",), "eval": ("parity",)}


def parse(arguments: Sequence[str]) -> Command:
    """Raises ConfigError for a command, an option or a word that does not exist."""
    switches: dict[str, Any] = {}
    values: dict[str, str] = {}
    overrides, words = [], []
    command, rest = "", list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if argument in _SWITCHES:
            switches[_SWITCHES[argument]] = True
        elif argument in _COMMAND_SWITCHES.get(command, {}):
            switches[_COMMAND_SWITCHES[command][argument]] = True
        elif argument == "--" and command == "serve":
            switches["flags"] = tuple(rest)
            rest = []
        elif name in _VALUES.get(command, ()):
            if not equals and not rest:
                raise ConfigError(f"{name} needs a value")
            values[name.removeprefix("--")] = value if equals else rest.pop(0)
        elif argument.startswith("-"):
            raise ConfigError(f"unknown option {argument}: the options are {', '.join(FLAGS)}, --version")
        elif not command:
            command = _known(argument, list(COMMANDS), "command")
        elif command in _WORDS and not equals:
            words.append(_known(argument, _WORDS[command], "word"))
        else:
            overrides.append(argument)
    return Command(command=command, overrides=tuple(overrides), words=tuple(words), values=values, **switches)


def _known(word: str, options: Sequence[str], kind: str) -> str:
    if word not in options:
        close = suggest(word, options)
        hint = (
            f"did you mean {close[0]}?" if close else f"use {'one of ' if len(options) > 1 else ''}{', '.join(options)}"
        )
        raise ConfigError(f"unknown {kind} {word!r}: {hint}")
    return word


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in arguments
    try:
        return _dispatch(parse(arguments))
    except SpectrainError as error:
        if debug:
            traceback.print_exc()
        say("error: " + " ".join(str(error).split()))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted: finished work is kept, the same command continues")
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        say(f"error: {type(error).__name__}: {' '.join(str(error).split())[:500]} (unexpected; --debug shows where)")
        return 1


def _dispatch(command: Command) -> int:
    if command.version:
        stdout.print(f"spectrain {metadata.version('spectrain')}", markup=False)
    elif command.help or not command.command:
        stdout.print(command_help(command.command) if command.command else overview(), markup=False, soft_wrap=True)
        return 0 if command.help else 2
    elif command.command == "inspect":
        _inspect(command)
    elif command.command == "serve":
        _serve(command)
    elif command.multirun:
        _multirun(command)
    else:
        from spectrain.config.loading import compose, reused_config

        config = compose(command.overrides)
        reused = reused_config(command.overrides)
        if reused is not None:
            say(f"configuration: {reused}, and what was given")
        execute(command.command, config, command.dry_run, word=command.words[0] if command.words else "")
    return 0


def execute(
    command: str, config: SpectrainConfig, dry_run: bool = False, data_dir: Path | None = None, word: str = ""
) -> float | None:
    """Check everything, then do the work of a command. Returns the figure a sweep maximises: the acceptance length,
    where one is measured.

    ``data_dir``: the run directory whose responses, states and drafter this run reads, if not its own. ``word``: what
    follows the command.
    """
    from spectrain.stages.checks import check_config, prepare

    check_config(config, command)  # before the slow imports
    from spectrain.stages.plan import show_plan

    looks_only = dry_run or command == "plan"
    context = prepare(config, command, data_dir, fetch=not looks_only)
    if looks_only:
        show_plan(context, command)
        return None
    with context.run_dir.locked():
        context.open_run_dir()
        return _work(word or command)(context)


def _work(command: str) -> Callable[[Context], float | None]:
    """The function behind a command; only its own imports are paid for."""
    module, name = {"eval": ("eval", "evaluate"), "parity": ("eval_parity", "parity")}.get(command, (command, command))
    return getattr(importlib.import_module(f"spectrain.stages.{module}"), name)


def _multirun(command: Command) -> None:
    from spectrain.config.loading import multirun, sweep_jobs
    from spectrain.stages.checks import check_config

    if command.command == "plan":
        raise ConfigError("plan takes no -m: plan one configuration at a time")
    if command.words:
        raise ConfigError(f"{command.command} {command.words[0]} takes no -m: check one drafter at a time")
    for config in sweep_jobs(command.overrides):  # a mistake in the last job must not wait for the first ones
        check_config(config, command.command)
    with tempfile.TemporaryDirectory() as scratch:
        job = partial(_job, command.command, command.dry_run, _shared_data_dir(command))
        multirun(command.overrides, job, Path(scratch) if command.dry_run else None)


def _shared_data_dir(command: Command) -> Path | None:
    """The run directory that all jobs of a sweep read from: the one they lie in. None if they differ in their data.

    Responses and states are made there first, once, so that a sweep over a learning rate runs the target no more often
    than one run.
    """
    from spectrain.config.loading import compose, swept

    keys, fixed = swept(command.overrides)
    if command.command not in ("fit", "run", "eval") or any(_changes_data(key, command.command) for key in keys):
        return None
    config = compose(fixed)
    if command.command != "eval" and not command.dry_run:
        execute("capture", config)
    return Path(config.run.dir)


def _changes_data(key: str, command: str) -> bool:
    section = key.partition(".")[0]
    if key == "drafter.path":  # to go on from, it decides the taps; to measure, it reads what is there
        return command != "eval"
    return section not in ("trainer", "drafter", "decoding", "suite", "logger") or key in ("drafter", "drafter.taps")


def _job(command: str, dry_run: bool, data_dir: Path | None, composed: Any) -> float | None:
    """One job of a sweep, in this process or in one that a launcher started."""
    from spectrain.config.loading import sweep_config

    config = sweep_config(composed)
    say(f"run.dir={config.run.dir}")
    return execute(command, config, dry_run, data_dir)


def _inspect(command: Command) -> None:
    from spectrain.config.loading import compose
    from spectrain.stages.inspect import inspect

    if not command.words:
        raise ConfigError("inspect what? Use: spectrain inspect responses run.dir=DIR")
    limit = command.values.get("limit", "3")
    if not limit.isdigit() or int(limit) < 1:
        raise ConfigError(f"--limit must be a whole number of at least 1, got {limit!r}")
    split = command.values.get("split")
    inspect(
        compose(command.overrides), int(limit), None if split is None else _known(split, ("train", "heldout"), "split")
    )


def _serve(command: Command) -> None:
    from spectrain.config.loading import compose

    if command.multirun:
        raise ConfigError("serve takes no -m: serve one drafter at a time")
    config = compose(command.overrides)  # before the slow imports
    from spectrain.stages.serve import serve

    serve(config, command.overrides, command.flags, command.print_only or command.dry_run)
