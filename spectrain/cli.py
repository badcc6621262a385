"""The command line: command, options, overrides; then errors to one line and an exit code.

    spectrain COMMAND [group=option ...] [key=value ...] [--dry-run] [-m] [--debug] [--help]

Exit codes: 0 done; 2 the configuration or an input is wrong, nothing was started; 1 a failure while running; 143, 129,
130 and 138 ended by SIGTERM, SIGHUP, SIGINT and SIGUSR1 (``signals.py``). What a command is and needs,
``config/commands.py`` says. Torch and transformers are imported after the configuration has been read, so help and
configuration errors come at once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from spectrain import signals
from spectrain.config.commands import COMMANDS, SWITCHES, Command, known
from spectrain.config.overrides import suggest
from spectrain.config.schema import SpectrainConfig
from spectrain.console import say, say_traceback, stdout
from spectrain.errors import ConfigError, RunError, SpectrainError
from spectrain.files import full_disk
from spectrain.processes import ProcessId
from spectrain.stages.launching import devices_to_launch, ranks_of_launcher, set_environment

if TYPE_CHECKING:
    from spectrain.training.distributed import Ranks


_SIGNAL_S = 0.2  # that an error waits for a signal which would explain it


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line."""

    command: Command | None = None
    overrides: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()  # all of them, as given
    topics: tuple[str, ...] = ()  # of a command that explains: what
    options: dict[str, Any] = field(default_factory=dict)  # the command's own: flag without dashes -> value
    flags: tuple[str, ...] = ()  # what is behind `--`, for another program
    help: bool = False
    version: bool = False
    dry_run: bool = False
    multirun: bool = False
    debug: bool = False


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser() -> _Parser:
    """Options alone: overrides, which may be between them, are what the parser does not know."""
    switches = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    for switch in SWITCHES:
        switches.add_argument(*switch.flags, dest=switch.name, action="store_true")
    settings: dict[str, Any] = {
        "parents": [switches],
        "add_help": False,
        "allow_abbrev": False,
        "exit_on_error": False,
    }
    parser = _Parser(prog="spectrain", **settings)
    subparsers = parser.add_subparsers(dest="command", parser_class=_Parser)
    for command in COMMANDS.values():
        subparser = subparsers.add_parser(command.name, **settings)
        options = {option.flag: option for each in (command, *command.words) for option in each.options}
        for option in options.values():
            how: dict[str, Any] = {"action": "store_true"} if option.read is None else {"type": option.read}
            subparser.add_argument(option.flag, default=option.default or (None if option.read else False), **how)
    return parser


def parse(arguments: Sequence[str]) -> CommandLine:
    """Raises ConfigError for a command, an option or a word that does not exist."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    ours, flags = arguments[:cut], tuple(arguments[cut + 1 :])
    try:
        found, rest = _parser().parse_known_args(ours)
    except argparse.ArgumentError as error:
        if error.argument_name == "command":
            word = next(argument for argument in ours if not argument.startswith("-"))
            known(word, tuple(COMMANDS), "command")
        raise ConfigError(f"{error.argument_name} needs a value") from error
    values = vars(found)
    name = values.pop("command")
    command = COMMANDS[name] if name else None
    switches = {switch.name: values.pop(switch.name, False) for switch in SWITCHES}
    unknown = [argument for argument in rest if argument.startswith("-")]
    if cut < len(arguments) and not (command and command.takes_flags):
        unknown.append("--")
    if unknown:
        raise _unknown_option(unknown[0], command)
    if command is not None and command.takes_topics:
        return CommandLine(command=command, topics=tuple(rest), **switches)
    if command is not None and command.words:
        words = {word.name.split()[-1]: word for word in command.words}
        for argument in [argument for argument in rest if "=" not in argument]:
            if command.takes_names:
                break
            command = words[known(argument, tuple(words), "word")]
            rest.remove(argument)
        flags_of_it = [option.flag for option in command.options]
        others = [f"--{name}" for name, value in values.items() if value and f"--{name}" not in flags_of_it]
        if others:
            raise _unknown_option(others[0], command)
    if command is not None and command.takes_names:
        return CommandLine(command=command, topics=tuple(rest), options=values, **switches)
    return CommandLine(
        command=command, overrides=tuple(rest), arguments=tuple(arguments), options=values, flags=flags, **switches
    )


def _unknown_option(flag: str, command: Command | None) -> ConfigError:
    flags = [flag for switch in SWITCHES for flag in switch.flags]
    flags += [option.flag for option in command.options] if command else []
    close = suggest(flag.partition("=")[0], flags)
    hint = f"did you mean {close[0]}?" if close else f"the options are {', '.join(flags)}"
    return ConfigError(f"unknown option {flag}: {hint}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    Without ``arguments`` it is this process's, whose signals are handled then; else they remain the caller's.
    """
    if arguments is None:
        signals.install()
        arguments = sys.argv[1:]
    code = _run(list(arguments))
    signals.wait_if_ending()
    return code


def _run(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    try:
        return _dispatch(parse(arguments))
    except SpectrainError as error:
        # Whoever was at work for us is gone already, and may have got the signal first.
        signals.wait_if_signalled(_SIGNAL_S if error.exit_code == 1 else 0.0)
        if debug:
            say_traceback()
        say("error: " + " ".join(str(error).split()))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted: finished work is kept, the same command continues")
        return 130
    except Exception as error:
        signals.wait_if_signalled(_SIGNAL_S)
        if debug:
            say_traceback()
        full = full_disk(error)  # of a library's writing: ours say it by themselves
        if full:
            say(f"error: {full}")
            return RunError.exit_code
        say(f"error: {type(error).__name__}: {' '.join(str(error).split())[:500]} (unexpected; --debug shows where)")
        return 1


def _dispatch(line: CommandLine) -> int:
    command = line.command
    if line.version:
        stdout.print(f"spectrain {metadata.version('spectrain')}", markup=False)
    elif line.help or command is None:
        from spectrain.config.help_text import command_help, overview

        _show(command_help(command) if command else overview())
        return 0 if line.help else 2
    elif line.multirun and not command.takes_multirun:
        raise ConfigError(f"{command.name} takes no -m: use it for one configuration at a time")
    elif command.takes_config:
        from spectrain.config.loading import compose

        config = compose(line.overrides)  # before the slow imports
        command.load()(config, line.overrides, dry_run=line.dry_run, **line.options)
    elif not command.touches_run_dir:
        command.load()(line)
    elif line.multirun:
        _multirun(line, command)
    else:
        return _run_once(line, command)
    return 0


def _show(text: str) -> None:
    stdout.print(text, markup=False, soft_wrap=True)


def _run_once(line: CommandLine, command: Command) -> int:
    from spectrain.config.loading import compose, given_keys, reused_config

    with ranks_of_launcher() as ranks:
        config, given = compose(line.overrides), given_keys(line.overrides)
        if config.run.smoke:
            from spectrain.stages.smoke import smoke_config

            config = smoke_config(config, command, line.dry_run, given)
        set_environment(config, ranks)
        alone = ranks is None and command.trains and not line.dry_run
        count = devices_to_launch(config, command, given) if alone else 1
        if count > 1:
            from spectrain.training.distributed import launch

            return launch(count, line.arguments)
        reused = reused_config(line.overrides)
        if reused is not None:
            say(f"configuration: {reused}, and what was given")
        execute(command, config, line.dry_run, given=given, ranks=ranks)
    return 0


def execute(
    command: Command,
    config: SpectrainConfig,
    dry_run: bool = False,
    data_dir: Path | None = None,
    given: frozenset[str] = frozenset(),
    ranks: Ranks | None = None,
) -> float | None:
    """Check everything, then do the work of a command. Returns the figure a sweep maximises: the acceptance length,
    where one is measured.

    Args:
        data_dir: the run directory whose responses, hidden states and drafter this run reads, if not its own.
        given: keys that the command line sets, rather than a file or a default.
        ranks: the processes that do it together, of which this is one; None: this one alone.
    """
    from spectrain.stages.checks import check_config, prepare

    command = command.for_methods(config.sweep.methods)
    if ranks is not None and not command.trains:
        raise ConfigError(f"{command.name} is one process, start it without a launcher: fit and run use several")
    check_config(config, command, given)  # before the slow imports
    from spectrain.stages.plan_table import show_plan

    looks_only = dry_run or command.looks_only
    checked = partial(prepare, config, command, data_dir, fetch=not looks_only, given=given)
    context = checked() if ranks is None else ranks.first_then_all(checked)
    if looks_only:
        show_plan(context)
        return None
    if ranks is not None:
        context.ranks = ranks
        if not ranks.is_first:
            ranks.wait()  # until the run directory is there
            return command.load()(context)
    with context.run_dir.locked():
        context.open_run_dir()
        context.ranks.wait()
        return command.load()(context)


# --- sweeps --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep, in this process or in one that a launcher started: can be pickled."""

    command: str
    dry_run: bool
    data_dir: Path | None
    sent_by: ProcessId = field(default_factory=ProcessId.of_this)

    def __call__(self, composed: Any) -> float | None:
        from spectrain.config.loading import given_keys, sweep_config, sweep_overrides

        config = sweep_config(composed)
        given = given_keys(sweep_overrides())
        if ProcessId.of_this() != self.sent_by and threading.current_thread() is threading.main_thread():
            signals.install()  # a launcher's process, whose own handlers would keep nothing
        with ranks_of_launcher() as ranks:  # a launcher such as submitit may start a job as several
            set_environment(config, ranks)
            say(f"run.dir={config.run.dir}")
            return execute(COMMANDS[self.command], config, self.dry_run, self.data_dir, given, ranks)


def _multirun(line: CommandLine, command: Command) -> None:
    from spectrain.config.loading import compose, given_keys, multirun, sweep_jobs, swept
    from spectrain.config.overrides import check_launcher
    from spectrain.stages.checks import check_config, prepare

    check_launcher(line.overrides)
    # A mistake in the last job must not wait for the first ones.
    jobs, given = sweep_jobs(line.overrides), given_keys(line.overrides)
    if any(config.run.smoke for config in jobs):
        raise ConfigError("run.smoke=true takes no -m: try one configuration at a time")
    for config in jobs:
        check_config(config, command, given)
    keys, fixed = swept(line.overrides)
    shared = compose(fixed) if _share_data(keys, command) else None
    data_dir = None if shared is None else Path(shared.run.dir)
    for config in jobs:
        prepare(config, command, data_dir, fetch=False, given=given)
    if shared is not None and command.trains and not line.dry_run:
        execute(COMMANDS["generate" if shared.states_computed else "capture"], shared, given=given_keys(fixed))
    with tempfile.TemporaryDirectory() as scratch:
        job = SweepJob(command.name, line.dry_run, data_dir)
        multirun(line.overrides, job, Path(scratch) if line.dry_run else None)


def _share_data(swept_keys: Sequence[str], command: Command) -> bool:
    """Whether all jobs of a sweep read from one run directory, the one they lie in: where they do not differ in their
    data.

    Responses and hidden states are made there first, once, so that a sweep over a learning rate runs the target no more
    often than one run.
    """
    return (command.trains or command.needs_drafter) and not any(_changes_data(key, command) for key in swept_keys)


def _changes_data(key: str, command: Command) -> bool:
    section = key.partition(".")[0]
    if key in (
        "drafter.path",
        "drafter.revision",
    ):  # to go on from, it decides the taps; to measure, it reads what is there
        return command.trains
    chooses_taps = key in ("drafter", "drafter.method", "drafter.taps")
    return section not in ("trainer", "strategy", "drafter", "decoding", "suite", "logger", "launcher") or chooses_taps


# --- commands that touch no run directory --------------------------------------------------------------------------


def inspect_responses(line: CommandLine) -> None:
    from spectrain.config.loading import compose

    if line.command is not None and line.command.needs_word:
        raise ConfigError("inspect what? Use: spectrain inspect responses run.dir=DIR")
    config = compose(line.overrides)  # before the slow imports
    from spectrain.stages.inspect import inspect

    inspect(config, line.options["limit"], line.options["split"])


def serve_drafter(line: CommandLine) -> None:
    from spectrain.config.loading import compose

    config = compose(line.overrides)  # before the slow imports
    from spectrain.stages.serve import serve

    serve(config, line.overrides, line.flags, line.options["print"] or line.dry_run)


def compare_records(line: CommandLine) -> None:
    from spectrain.stages.eval_compare import compare_named

    compare_named(line.topics, anyway=line.options.get("anyway", False))


def data_matrix(line: CommandLine) -> None:
    from spectrain.config.loading import given_keys
    from spectrain.stages.checks import check_config, prepare
    from spectrain.stages.eval_matrix import measuring_config, named_runs, runs_and_overrides, show_matrix

    names, overrides = runs_and_overrides(line.topics)
    runs, suites, given = named_runs(names), line.options["suites"] or (), given_keys(overrides)
    if overrides and not suites:
        raise ConfigError(f"{overrides[0]} says how to measure: add --suites NAME,NAME, which says what")
    sweep = next(word for word in COMMANDS["eval"].words if word.sweeps)
    jobs = [measuring_config(path, suites, overrides) for path in runs.values()] if suites else []
    for config in jobs:  # a mistake in the last one must not wait for the first
        check_config(config, sweep, given)
        prepare(config, sweep, fetch=False, given=given)
    for name, config in zip(runs, jobs, strict=False):
        say(f"matrix: {name}")
        execute(sweep, config, line.dry_run, given=given)
    if not (jobs and line.dry_run):
        show_matrix(runs, suites, line.options["out"])


def explain_topics(line: CommandLine) -> None:
    from spectrain.config.help_text import explain

    _show(explain(line.topics))
