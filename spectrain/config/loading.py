"""Composition of the configuration with Hydra.

The dataclasses of ``schema.py`` hold the defaults; they are handed to Hydra as one plain node, and the YAML files of
the groups hold deviations only. So there is one place for each default and no schema to keep in step. Hydra's own
messages are written for the authors of applications; here each becomes one line for the user of ours. Of Hydra only
what its documentation names is used: the compose API, ``hydra.main`` for sweeps, so that any launcher and sweeper
works, and a plugin for the search path.

Order, later wins: dataclass defaults (or the ``config.yaml`` of an existing run directory, except for sections whose
group is chosen anew) < group files < recipe < command line.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, TextIO

import hydra
import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from spectrain.config.folders import search_roots
from spectrain.config.group_files import GroupFile, chosen_files, set_in
from spectrain.config.overrides import (
    build,
    one_line,
    options_of,
    product,
    quoted,
    read_overrides,
    set_keys,
    user_drafters,
)
from spectrain.config.references import resolve
from spectrain.config.schema import SpectrainConfig
from spectrain.errors import ConfigError, InputError
from spectrain.masking import PRIVATE_FILE, is_secret_key, mask_override, masked_keys, reveal
from spectrain.reading import read_text

# What a group means when nobody says otherwise. None: nothing is added to the defaults.
GROUPS: dict[str, str | None] = {
    "target": None,
    "data": None,
    "engine": "hf",
    "states": "stored",
    "drafter": "eagle3",
    "trainer": "default",
    "suite": "heldout",
    "logger": "none",
    "launcher": "local",
    # Sets trainer.strategy, after the trainer.
    "strategy": None,
    # Pieces of recipes: they choose options of the groups above and set keys of any section.
    "method": None,
    "hardware": None,
    "recipe": None,  # last: a recipe overrides the other groups
}
_APP = "spectrain"
_PRIMARY = "spectrain_defaults"  # name of the primary configuration, which is no file
_HYDRA_VERSION = "1.3"
_registered: dict[str, Any] = {}  # what Hydra has been told already


class ShippedAndUserFolders(SearchPathPlugin):
    """Where Hydra looks for groups beside the first folder, which it is told by itself: the user's, then the shipped
    ones.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for root in search_roots()[1:]:
            search_path.append(_APP, f"file://{root.resolve().as_posix()}")


def compose(overrides: Sequence[str]) -> SpectrainConfig:
    """One configuration from command-line overrides.

    An existing run directory named by ``run.dir`` supplies what was configured there when no recipe and no target is
    chosen anew. Raises ConfigError or InputError with one line.
    """
    lines, parsed = read_overrides(overrides)
    swept = [override.input_line for override in parsed if override.is_sweep_override()]
    if swept:
        raise ConfigError(
            f"{mask_override(swept[0])} names several values: add -m to run one job for each, or write a list as "
            f"key=[a,b]"
        )
    return _compose_all(parsed, [lines])[0]


def given_keys(overrides: Sequence[str]) -> frozenset[str]:
    """The keys that the command line sets itself, rather than a group, a recipe or a stored configuration."""
    return set_keys(read_overrides(overrides)[1])


def reused_config(overrides: Sequence[str]) -> Path | None:
    """The ``config.yaml`` that ``compose`` starts from for these overrides, if any."""
    return _reused_config(read_overrides(overrides)[1])


# --- sweeps --------------------------------------------------------------------------------------------------------


def swept(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """(keys or groups that take several values, the overrides without them)."""
    lines, parsed = read_overrides(overrides)
    keys = [str(override.key_or_group) for override in parsed if override.is_sweep_override()]
    return keys, _without_sweeps(lines, parsed)


def _without_sweeps(lines: Sequence[str], parsed: Sequence[Override]) -> list[str]:
    return [line for line, override in zip(lines, parsed, strict=True) if not override.is_sweep_override()]


def sweep_jobs(overrides: Sequence[str]) -> list[SpectrainConfig]:
    """The configuration of every job of a sweep that is a plain product, with the ``run.dir`` that it will get; none if
    another sweeper chooses the values.
    """
    lines, parsed = read_overrides(overrides)
    users = [line for line in lines if line.startswith(("hydra.", "hydra/launcher="))]
    settings = [*_sweep_settings(parsed, None), *users]
    jobs = [[*job, *settings, f"hydra.job.num={number}"] for number, job in enumerate(product(parsed))]
    return _compose_all(parsed, jobs, _job_values)


def multirun(overrides: Sequence[str], job: Callable[[DictConfig], float | None], scratch: Path | None = None) -> None:
    """One job for each combination of a sweep, through Hydra's own entry, sweepers and launchers.

    Each job gets its own ``run.dir``: the swept values, as a folder below the ``run.dir`` that was given. ``scratch``
    takes Hydra's folders in a dry run. ``job``: what Hydra calls, here or in another process; for the latter it is
    pickled.
    """
    lines, parsed = read_overrides(overrides)
    os.environ.setdefault("SUBMITIT_PREEMPT_SIGNAL", "USR1")  # the warning of its jobs: one that we keep things on
    with one_line():
        _register(parsed)
        main = hydra.main(version_base=_HYDRA_VERSION, config_path=_first_root(), config_name=_PRIMARY)(job)
        if scratch is None:
            folder = _given_run_dir(parsed) or Path(_compose_all(parsed, [_without_sweeps(lines, parsed)])[0].run.dir)
            _make_private(folder.expanduser() / "multirun.yaml")
        with _as_command_line(["--multirun", *_sweep_settings(parsed, scratch), *lines]):
            main()


def sweep_config(composed: DictConfig) -> SpectrainConfig:
    """The configuration of one job of a sweep; called inside the job."""
    values = _plain(composed)
    values["run"]["dir"] = str(Path(values["run"]["dir"]) / str(HydraConfig.get().sweep.subdir))
    return build(values)


def _job_values(composed: DictConfig) -> dict[str, Any]:
    """As ``sweep_config``, before there are jobs: ``composed`` holds what Hydra would know inside the job."""
    values = _plain(composed)
    values["run"]["dir"] = str(Path(values["run"]["dir"]) / str(composed.hydra.sweep.subdir))
    return values


def sweep_overrides() -> list[str]:
    """The overrides of one job of a sweep, its own values among them; called inside the job."""
    return list(HydraConfig.get().overrides.task)


def _make_private(file: Path) -> None:
    """Make ``file``, into which Hydra writes a sweep's whole configuration, secrets and all, for this user alone."""
    file.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600))
    file.chmod(0o600)


@contextmanager
def _as_command_line(arguments: list[str]) -> Iterator[None]:
    """Inside: ``hydra.main`` reads these arguments, and raises errors instead of printing them and exiting."""
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [_APP, *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with redirect_stderr(_WithoutHydrasError(sys.stderr)):
            yield
    finally:
        sys.argv = argv
        GlobalHydra.instance().clear()
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


class _WithoutHydrasError:
    """Standard error without the line that Hydra prints before it raises what a job raised, which we print."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if text.startswith("Error executing job with overrides") else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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
    # A value with a slash (a path) would make folders of folders, a secret would be read by everybody, and no swept
    # value at all makes no name: number those.
    named = bool(swept) and not any("/" in str(o.input_line) or is_secret_key(str(o.key_or_group)) for o in swept)
    tasks = {str(o.key_or_group) for o in swept} == {"run.task"}  # of one run, in its directory
    return [
        f"hydra.job.name={_APP}",
        "hydra.output_subdir=null",
        f"hydra.sweep.dir={quoted(str(folder))}" if folder else "hydra.sweep.dir=${run.dir}",
        f"hydra.sweep.subdir={'.' if tasks else '${hydra.job.override_dirname}' if named else '${hydra.job.num}'}",
        f"hydra.job.config.override_dirname.exclude_keys=[{','.join(map(quoted, sorted(fixed)))}]",
    ]


# --- composition ---------------------------------------------------------------------------------------------------


def _compose_all(
    parsed: Sequence[Override],
    jobs: Sequence[list[str]],
    values_of: Callable[[DictConfig], dict[str, Any]] | None = None,
) -> list[SpectrainConfig]:
    """One configuration for each list of overrides, on the same base. ``values_of`` reads what was composed, with
    Hydra's own settings.
    """
    files = _group_files(parsed)
    with one_line():
        _register(parsed)
        GlobalHydra.instance().clear()
        with hydra.initialize_config_dir(config_dir=_first_root(), job_name=_APP, version_base=_HYDRA_VERSION):
            composed = [hydra.compose(_PRIMARY, job, return_hydra_config=values_of is not None) for job in jobs]
    try:
        return [build((values_of or _plain)(config)) for config in composed]
    except ConfigError as error:
        where = set_in(str(error), files, set_keys(parsed))
        raise (ConfigError(f"{error}{where}") if where else error) from error


def _group_files(parsed: Sequence[Override]) -> list[GroupFile]:
    """The files that a composition reads, later ones win: those of the defaults, of the command line, the recipe's."""
    chosen: dict[str, list[str]] = {group: [option] for group, option in GROUPS.items() if option is not None}
    for override in parsed:
        if override.key_or_group in GROUPS:
            chosen[str(override.key_or_group)] = options_of(override)
    ordered = sorted(chosen, key=list(GROUPS).index)
    return chosen_files([(group, option) for group in ordered for option in chosen[group]])


def _plain(composed: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(composed, resolve=False)
    if not isinstance(values, dict):
        raise ConfigError("the configuration is not a mapping")
    values.pop("hydra", None)
    return resolve(values)


def _register(parsed: Sequence[Override]) -> None:
    """Tell Hydra where our folders are, and which configuration it starts from: the defaults, and over them those of
    an existing run directory.
    """
    Plugins.instance().register(ShippedAndUserFolders)
    store = ConfigStore.instance()
    node = _primary_node(_base_values(parsed))
    if node != _registered.get(_PRIMARY):  # Hydra makes an object of every key
        store.store(name=_PRIMARY, node=node)
        _registered[_PRIMARY] = node
    # A drafter of the user's own module is an option of the group like any other, without a file.
    for name in user_drafters(parsed):
        store.store(group="drafter", name=name, node={"method": name})


def _first_root() -> str:
    roots = search_roots()
    if not roots:
        raise InputError("spectrain's configuration folders are missing: reinstall the package")
    return str(roots[0].resolve())


def _primary_node(base_values: Mapping[str, Any]) -> dict[str, Any]:
    defaults = dataclasses.asdict(SpectrainConfig())
    groups = {group: None if base_values else option for group, option in GROUPS.items()}
    node: dict[str, Any] = defaults
    if base_values:
        node = OmegaConf.to_container(OmegaConf.merge(defaults, dict(base_values)))  # type: ignore[assignment]
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


def _unmask(values: dict[str, Any], file: Path, parsed: Sequence[Override]) -> None:
    """Put back what ``config.yaml`` masks, from the file beside it that only its owner may read. What the command line
    sets anew is not missed.
    """
    private = file.with_name(PRIVATE_FILE)
    try:
        if private.is_file():
            reveal(values, yaml.safe_load(private.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{private}, which holds what {file.name} masks, cannot be read ({error})") from error
    given = tuple(str(override.get_key_element()).lstrip("+~") for override in parsed)
    missing = []
    for path in masked_keys(values):
        keys = [".".join(map(str, path[:length])) for length in range(1, len(path) + 1)]
        if any(key in given for key in keys):
            _drop(values, path)
        else:
            missing.append(keys[-1])
    if missing:
        raise InputError(f"{file} masks {', '.join(missing)}, and {private} does not say what was there: set it again")


def _drop(values: Any, path: tuple[Any, ...]) -> None:
    for name in path[:-1]:
        values = values[name]
    del values[path[-1]]


def _base_values(parsed: Sequence[Override]) -> dict[str, Any]:
    file = _reused_config(parsed)
    if file is None:
        return {}
    try:
        values = yaml.safe_load(read_text(file))
    except (InputError, ValueError, RecursionError) as error:
        raise InputError(f"{error}: delete {file}, or name a recipe") from error
    if not isinstance(values, dict):
        raise InputError(f"{file} is not a configuration: delete the file, or name a recipe")
    values.pop("run", None)
    _unmask(values, file, parsed)
    # A group that is chosen anew starts from its own defaults: what was set for another method or engine does not
    # belong to it.
    chosen = {str(override.key_or_group) for override in parsed}
    if isinstance(values.get("hidden_states"), dict):
        values["hidden_states"].pop("source", None)  # until it became states.source, of one value
    if "drafter.path" in chosen and isinstance(values.get("drafter"), dict):
        values["drafter"].pop("revision", None)  # that of another drafter
    kept = {section: value for section, value in values.items() if section not in chosen & set(GROUPS)}
    try:
        build(resolve(kept))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error} (correct that file, or name a recipe)") from error
    return kept
