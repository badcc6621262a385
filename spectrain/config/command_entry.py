"""What an entry of the table of commands holds (``commands.py``): what a command is called, what it does, needs, reads
and writes, and the function behind it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spectrain.config.evaluation_schema import BASELINES
from spectrain.config.overrides import suggest
from spectrain.errors import ConfigError

PIPELINE = ("generate", "capture", "fit", "eval")  # its stages, in their order


@dataclass(frozen=True)
class Switch:
    """An option of every command, on or off, anywhere on the line."""

    name: str  # in the parsed command line
    flags: tuple[str, ...]
    help: str


SWITCHES = (
    Switch("dry_run", ("--dry-run",), "compose and check everything, print the plan, touch nothing"),
    Switch("multirun", ("-m", "--multirun"), "one job, in a run directory of its own, for each of the values key=a,b"),
    Switch("debug", ("--debug",), "show the traceback of an error"),
    Switch("help", ("-h", "--help"), "this text"),
    Switch("version", ("--version",), "the version"),
)


@dataclass(frozen=True)
class Option:
    """An option of one command. ``read`` turns its text into a value; None: it takes no value and is on or off."""

    flag: str
    help: str
    read: Callable[[str], Any] | None = None
    metavar: str | None = None
    default: Any = None


@dataclass(frozen=True)
class Command:
    """One command of the command line."""

    name: str
    summary: str
    detail: str
    # module:function; takes a Context where it touches a run directory, else the parsed command line, or, where
    # ``takes_config``, configuration, overrides, dry_run and the command's options
    function: str = ""
    reads: str = ""
    writes: str = "nothing"
    sections: tuple[str, ...] = ()  # sections and groups of the configuration that matter
    keys: tuple[str, ...] = ()  # the ones worth showing
    examples: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    words: tuple[Command, ...] = ()  # what may follow the name, as `parity` follows `eval`
    needs_word: bool = False  # nothing is done without one of them
    stages: tuple[str, ...] = ()  # of the pipeline, that it brings up to date
    needs_prompts: bool = True  # training prompts have to be configured
    needs_drafter: bool = False  # works on a drafter that is there
    keeps_config: bool = False  # leaves the run's configuration as it is
    captures: bool = False  # runs the target over responses, even where all that training needs is there
    trains: bool = False
    measures: bool = False  # decodes the prompts of a suite
    sweeps: bool = False  # and does so for several suites and methods
    compares: bool = False  # and does so in our own loop, too, whatever the engine
    looks_only: bool = False  # always as with --dry-run
    touches_run_dir: bool = True  # composes, checks, locks the run directory and works in it
    takes_config: bool = False
    takes_multirun: bool = True
    takes_flags: bool = False  # of another program, behind `--`
    takes_names: bool = False  # what follows are files and folders, not overrides
    takes_topics: bool = False  # what follows are words to explain, not overrides

    def asks_suite(self, named_suites: Sequence[str]) -> bool:
        """Whether the configured suite is asked: by whatever measures, but not by a sweep over others."""
        return self.measures and not (self.sweeps and named_suites)

    def for_methods(self, swept: Sequence[str]) -> Command:
        """This command, where a sweep names methods that need no drafter and nothing else: it needs none."""
        without = self.sweeps and bool(swept) and set(swept) <= set(BASELINES)
        return replace(self, needs_drafter=False) if without else self

    def load(self) -> Callable[..., Any]:
        """The function behind the command; only its own imports are paid for."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)


def known(word: str, allowed: tuple[str, ...], kind: str) -> str:
    """``word``, if it is allowed; else ConfigError with the nearest one that is."""
    if word in allowed:
        return word
    close = suggest(word, allowed)
    several = "one of " if len(allowed) > 1 else ""
    hint = f"did you mean {close[0]}?" if close else f"use {several}{', '.join(allowed)}"
    raise ConfigError(f"unknown {kind} {word!r}: {hint}")
