"""Composition of the configuration with Hydra.

The dataclasses of ``config.py`` hold the defaults; they are handed to Hydra as one plain node, and the YAML files of
the groups hold deviations only. So there is one place for each default and no schema to keep in step. Hydra's own
messages are written for the authors of applications; here each becomes one line for the user of ours.

Order, later wins: dataclass defaults (or the ``config.yaml`` of an existing run directory, except for sections whose
group is chosen anew) < group files < recipe < command line.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spectrain.config.conversion import all_keys, build, suggest, unknown_key
from spectrain.config.folders import GROUP_FOLDERS, group_options, search_roots
from spectrain.config.schema import SpectrainConfig
from spectrain.errors import ConfigError, InputError

# What a group means when nobody says otherwise. None: nothing is added to the defaults.
GROUPS: dict[str, str | None] = {
    "target": None,
    "data": None,
    "engine": "hf",
    "hidden_states": "stored",
    "drafter": "eagle3",
    "trainer": "default",
    "suite": "heldout",
    "logger": "none",
    "recipe": None,  # last: a recipe overrides the other groups
}
_PRIMARY = "spectrain"
# Keys below these are not ours to know.
_OPEN_SECTIONS = ("engine.args", "engine.environment", "drafter.loss.weights", "drafter.options")


def compose(overrides: Sequence[str]) -> SpectrainConfig:
    """One configuration from command-line overrides.

    An existing run directory named by ``run.dir`` supplies what was configured there when no recipe and no target is
    chosen anew. Raises ConfigError or InputError with one line.
    """
    overrides, parsed = _read(overrides)
    swept = [override.input_line for override in parsed if override.is_sweep_override()]
    if swept:
        raise ConfigError(
            f"{swept[0]} names several values: add -m to run one job for each, or write a list as key=[a,b]"
        )
    with _one_line():
        hydra = _hydra(_base_values(parsed))
        return to_config(hydra.compose_config(_PRIMARY, overrides, run_mode=RunMode.RUN, with_log_configuration=False))


def reused_config(overrides: Sequence[str]) -> Path | None:
    """The ``config.yaml`` that ``compose`` starts from for these overrides, if any."""
    return _reused_config(_read(overrides)[1])


def swept(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """(keys or groups that take several values, the overrides without them)."""
    lines, parsed = _read(overrides)
    keys = [str(override.key_or_group) for override in parsed if override.is_sweep_override()]
    return keys, [line for line, override in zip(lines, parsed, strict=True) if not override.is_sweep_override()]


def sweep_jobs(overrides: Sequence[str]) -> list[SpectrainConfig]:
    """The configuration of every job of a sweep that is a plain product; none if another sweeper chooses the values."""
    _, parsed = _read(overrides)
    with _one_line():
        hydra = _hydra(_base_values(parsed))
        composed = [
            hydra.compose_config(_PRIMARY, job, run_mode=RunMode.RUN, with_log_configuration=False)
            for job in _product(parsed)
        ]
        return [to_config(config) for config in composed]


def multirun(overrides: Sequence[str], job: Callable[[DictConfig], float | None], scratch: Path | None = None) -> None:
    """One job for each combination of a sweep, through Hydra's own sweepers and launchers.

    Each job gets its own ``run.dir``: the swept values, as a folder below the ``run.dir`` that was given. ``scratch``
    takes Hydra's folders in a dry run.
    """
    overrides, parsed = _read(overrides)
    with _one_line():
        hydra = _hydra(_base_values(parsed))
        hydra.multirun(_PRIMARY, job, [*_sweep_settings(parsed, scratch), *overrides], with_log_configuration=False)


def sweep_config(composed: DictConfig) -> SpectrainConfig:
    """The configuration of one job of a sweep; called inside the job."""
    hydra = HydraConfig.get()
    values = _plain(composed)
    values["run"]["dir"] = str(Path(values["run"]["dir"]) / str(hydra.sweep.subdir))
    return build(values)


def to_config(composed: DictConfig) -> SpectrainConfig:
    return build(_plain(composed))


def _plain(composed: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(composed, resolve=False)
    if not isinstance(values, dict):
        raise ConfigError("the configuration is not a mapping")
    values.pop("hydra", None)
    with _one_line():
        resolved = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    return resolved  # type: ignore[return-value]


# --- Hydra's parts -------------------------------------------------------------------------------------------------


def _hydra(base_values: Mapping[str, Any]) -> Hydra:
    """A Hydra over our search path, with the defaults (and ``base_values`` over them) registered as its primary
    configuration.
    """
    version.setbase("1.3")
    GlobalHydra.instance().clear()
    ConfigStore.instance().store(name=_PRIMARY, node=_primary_node(base_values))
    roots = [root.resolve().as_posix() for root in search_roots()]
    if not roots:
        raise InputError("spectrain's configuration folders are missing: reinstall the package")
    search_path = create_config_search_path(None)
    for root in roots:
        search_path.prepend("spectrain", f"file://{root}", "schema")
    return Hydra.create_main_hydra2(task_name=_PRIMARY, config_search_path=search_path)


def _primary_node(base_values: Mapping[str, Any]) -> dict[str, Any]:
    defaults = dataclasses.asdict(SpectrainConfig())
    groups = {group: None if base_values else option for group, option in GROUPS.items()}
    node: dict[str, Any] = OmegaConf.to_container(OmegaConf.merge(defaults, dict(base_values)))  # type: ignore[assignment]
    hydra_defaults = [{"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]
    return {"defaults": ["_self_", *({group: option} for group, option in groups.items()), *hydra_defaults], **node}


def _reused_config(parsed: Sequence[Override]) -> Path | None:
    if any(override.key_or_group in ("recipe", "target", "target.path") for override in parsed):
        return None
    run_dir = _given_run_dir(parsed)
    file = run_dir / "config.yaml" if run_dir is not None else None
    return (
        file if file is not None and os.path.isfile(file) else None
    )  # unlike Path.is_file, False for names that no file can have


def _given_run_dir(parsed: Sequence[Override]) -> Path | None:
    """The ``run.dir`` of the command line, if there is one, in the user's home where it starts with ``~``."""
    given = [
        override.value()
        for override in parsed
        if override.key_or_group == "run.dir" and not override.is_sweep_override()
    ]
    return Path(str(given[-1])).expanduser() if given else None


def _base_values(parsed: Sequence[Override]) -> dict[str, Any]:
    file = _reused_config(parsed)
    if file is None:
        return {}
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read ({error}): delete the file, or name a recipe") from error
    if not isinstance(values, dict):
        raise InputError(f"{file} is not a configuration: delete the file, or name a recipe")
    values.pop("run", None)
    build(values)
    # A group that is chosen anew starts from its own defaults: what was set for another method or engine does not
    # belong to it.
    chosen = {str(override.key_or_group) for override in parsed}
    return {section: value for section, value in values.items() if section not in chosen & set(GROUPS)}


def _sweep_settings(parsed: Sequence[Override], scratch: Path | None) -> list[str]:
    """Where Hydra puts the folders of a sweep: into ours, and nothing of its own in them."""
    ours = [override for override in parsed if not str(override.key_or_group).startswith("hydra")]
    swept = [override for override in ours if override.is_sweep_override()]
    folder = scratch or _given_run_dir(parsed)
    # Values that all jobs share are no part of a job's name. (A key may be given twice, first with one value, then with
    # several.)
    fixed = {str(override.get_key_element()) for override in ours} - {
        str(override.get_key_element()) for override in swept
    }
    # A value with a slash (a path) would make folders of folders, and no swept value at all makes no name: number
    # those.
    named = bool(swept) and not any("/" in str(override.input_line) for override in swept)
    return [
        "hydra.output_subdir=null",
        f"hydra.sweep.dir={_quoted(str(folder))}" if folder else "hydra.sweep.dir=${run.dir}",
        "hydra.sweep.subdir=${hydra.job.override_dirname}" if named else "hydra.sweep.subdir=${hydra.job.num}",
        f"hydra.job.config.override_dirname.exclude_keys=[{','.join(map(_quoted, sorted(fixed)))}]",
    ]


def _product(parsed: Sequence[Override]) -> list[list[str]]:
    """The override lists of a plain sweep. Empty where another sweeper chooses the values."""
    if any(str(override.key_or_group) == "hydra/sweeper" for override in parsed):
        return []
    ours = [override for override in parsed if not str(override.key_or_group).startswith("hydra")]
    return [job for batch in BasicSweeper.split_arguments(ours, None) for job in batch]


# --- overrides -----------------------------------------------------------------------------------------------------


def _read(overrides: Sequence[str]) -> tuple[list[str], list[Override]]:
    """Parse and check overrides before Hydra sees them; raises ConfigError for syntax, unknown keys and unknown
    options.
    """
    parser = OverridesParser.create()
    lines, parsed = [], []
    for line in overrides:
        line, override = _parse(parser, line)
        _check_name(override)
        lines.append(line)
        parsed.append(override)
    return lines, parsed


def _parse(parser: OverridesParser, line: str) -> tuple[str, Override]:
    if line.startswith(_OPEN_SECTIONS):
        line = f"++{line}"  # adds the key where there is none
    try:
        return line, parser.parse_override(line)
    except HydraException as error:
        key, equals, value = line.partition("=")
        if not equals:
            raise ConfigError(f"cannot read {line!r}: write key=value or group=option") from error
        if all_keys().get(key) in (str, str | None, tuple[str, ...]) and value[:1] not in ("'", '"', "["):
            # Hydra's grammar has no room for "=", "~", brackets or letters beyond ASCII in bare text; a path may have
            # them all.
            line = f"{key}={_quoted(value)}"
            return line, parser.parse_override(line)
        raise ConfigError(
            f"cannot read {line!r} ({_first_line(error)}): put text with special characters into quotes"
        ) from error


def _quoted(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()


def _check_name(override: Override) -> None:
    key = str(override.key_or_group)
    if key.startswith("hydra") or "/" in key or "@" in key:
        return
    if key in GROUP_FOLDERS:
        value = None if override.is_sweep_override() else override.value()
        if not override.is_sweep_override() and not isinstance(value, list):
            _check_option(key, "null" if value is None else str(value))
        return
    if key.startswith(tuple(f"{section}." for section in _OPEN_SECTIONS)):
        return
    if key not in all_keys():
        raise unknown_key(key)


def _check_option(group: str, option: str) -> None:
    options = list(group_options(group))
    if option not in options:
        close = suggest(option, options)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"{group}={option} is unknown: {hint}{group} can be {', '.join(options) or 'nothing: no file is there'}"
        )


# --- errors --------------------------------------------------------------------------------------------------------


@contextmanager
def _one_line() -> Iterator[None]:
    """Errors of Hydra, OmegaConf and YAML as one line of ours."""
    try:
        yield
    except MissingConfigException as error:
        options = f": the options are {', '.join(error.options)}" if error.options else ""
        raise ConfigError(f"configuration {error.missing_cfg_file} was not found{options}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{mark.name}, line {mark.line + 1}: " if mark else ""
        raise ConfigError(f"broken YAML in {place}{getattr(error, 'problem', None) or _first_line(error)}") from error
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
        detail = f" ({_first_line(cause)})" if cause else ""
        raise ConfigError(f"cannot compose the configuration: {_first_line(error)}{detail}") from error


def _first_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error).strip().splitlines()[0]) if str(error).strip() else type(error).__name__
