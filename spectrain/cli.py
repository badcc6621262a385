"""The command line: verb, options, overrides; then errors to one line and an exit code.

    spectrain VERB [group=option ...] [key=value ...] [--dry-run] [-m] [--debug] [--help]

Exit codes: 0 done; 2 the configuration or an input is wrong, nothing was started; 1 a failure while running; 130 interrupted.
Torch and transformers are imported after the configuration has been read, so help and configuration errors come at once.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from spectrain.build import suggest
from spectrain.config import SpectrainConfig
from spectrain.console import say, stdout
from spectrain.errors import ConfigError, SpectrainError
from spectrain.usage import FLAGS, VERBS, overview, verb_help


@dataclass(frozen=True)
class Command:
    """A parsed command line."""

    verb: str = ""
    overrides: tuple[str, ...] = ()
    help: bool = False
    version: bool = False
    dry_run: bool = False
    multirun: bool = False
    debug: bool = False
    words: tuple[str, ...] = ()  # of `inspect`: what to look at
    values: dict[str, str] = field(default_factory=dict)  # of `inspect`: --limit, --split


_SWITCHES = {"-h": "help", "--help": "help", "--version": "version", "--dry-run": "dry_run", "-m": "multirun", "--multirun": "multirun", "--debug": "debug"}
_VALUES = {"inspect": ("--limit", "--split")}
_WORDS = {"inspect": ("responses",)}


def parse(arguments: Sequence[str]) -> Command:
    """Raises ConfigError for a verb, an option or a word that does not exist."""
    switches: dict[str, Any] = {}
    values: dict[str, str] = {}
    overrides, words = [], []
    verb, rest = "", list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if argument in _SWITCHES:
            switches[_SWITCHES[argument]] = True
        elif name in _VALUES.get(verb, ()):
            if not equals and not rest:
                raise ConfigError(f"{name} needs a value")
            values[name.removeprefix("--")] = value if equals else rest.pop(0)
        elif argument.startswith("-"):
            raise ConfigError(f"unknown option {argument}: the options are {', '.join(FLAGS)}, --version")
        elif not verb:
            verb = _known(argument, list(VERBS), "verb")
        elif verb in _WORDS and not equals:
            words.append(_known(argument, _WORDS[verb], "word"))
        else:
            overrides.append(argument)
    return Command(verb=verb, overrides=tuple(overrides), words=tuple(words), values=values, **switches)


def _known(word: str, options: Sequence[str], kind: str) -> str:
    if word not in options:
        close = suggest(word, options)
        hint = f"did you mean {close[0]}?" if close else f"use {'one of ' if len(options) > 1 else ''}{', '.join(options)}"
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
    elif command.help or not command.verb:
        stdout.print(verb_help(command.verb) if command.verb else overview(), markup=False, soft_wrap=True)
        return 0 if command.help else 2
    elif command.verb == "inspect":
        _inspect(command)
    elif command.multirun:
        _multirun(command)
    else:
        from spectrain.compose import compose, reused_config

        config = compose(command.overrides)
        reused = reused_config(command.overrides)
        if reused is not None:
            say(f"configuration: {reused}, and what was given")
        execute(command.verb, config, command.dry_run)
    return 0


def execute(verb: str, config: SpectrainConfig, dry_run: bool = False) -> float | None:
    """Check everything, then do the work of a verb. Returns the figure a sweep maximises: the acceptance length, where one is measured."""
    from spectrain.checks import check_config

    check_config(config, verb)  # before the slow imports
    from spectrain.checks import prepare
    from spectrain.stages.plan import show_plan

    context = prepare(config, verb)
    if dry_run or verb == "plan":
        show_plan(context, verb)
        return None
    with context.run_dir.locked():
        context.open_run_dir()
        return _work(verb)(context)


def _work(verb: str) -> Any:
    if verb == "generate":
        from spectrain.stages.generate import generate as work
    elif verb == "capture":
        from spectrain.stages.capture import capture as work
    elif verb == "fit":
        from spectrain.stages.fit import fit as work
    elif verb == "eval":
        from spectrain.stages.evaluate import evaluate as work
    else:
        from spectrain.stages.run import run as work
    return work


def _multirun(command: Command) -> None:
    from spectrain.compose import multirun

    if command.verb == "plan":
        raise ConfigError("plan takes no -m: plan one configuration at a time")
    job = partial(_job, command.verb, command.dry_run)
    if command.dry_run:
        with tempfile.TemporaryDirectory() as scratch:
            multirun(command.overrides, job, partial(_check_job, command.verb), Path(scratch))
    else:
        multirun(command.overrides, job, partial(_check_job, command.verb))


def _check_job(verb: str, config: SpectrainConfig) -> None:
    from spectrain.checks import check_config

    check_config(config, verb)


def _job(verb: str, dry_run: bool, composed: Any) -> float | None:
    """One job of a sweep, in this process or in one that a launcher started."""
    from spectrain.compose import sweep_config

    config = sweep_config(composed)
    say(f"run.dir={config.run.dir}")
    return execute(verb, config, dry_run)


def _inspect(command: Command) -> None:
    from spectrain.compose import compose
    from spectrain.stages.inspect import inspect_responses

    if not command.words:
        raise ConfigError("inspect what? Use: spectrain inspect responses run.dir=DIR")
    limit = command.values.get("limit", "3")
    if not limit.isdigit() or int(limit) < 1:
        raise ConfigError(f"--limit must be a whole number of at least 1, got {limit!r}")
    split = _known(command.values.get("split", "all"), ("all", "train", "heldout"), "split")
    inspect_responses(compose(command.overrides), int(limit), split)
