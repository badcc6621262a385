"""Kinds of drafters: one ``DrafterMethod`` each. Nothing outside asks which kind a drafter is.

A kind is one module that ends with ``METHOD = …`` and one line of ``_SHIPPED``. A kind of your own needs no line: name
its module (``drafter=mine drafter.module=my_pkg.my_drafter``), or let your package declare an entry point in the group
``spectrain.drafters``, and fit, eval, plan, the report and the folder know it like those that ship.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.config.overrides import DRAFTER_ENTRY_POINTS, suggest
from spectrain.config.trainer_schema import TrainerConfig
from spectrain.data.vocab import DraftVocab
from spectrain.drafters.drafter import Drafter, DrafterShape
from spectrain.drafters.training_cost import BatchSize, CorpusSize, TrainingCost, TrainingRows
from spectrain.errors import ConfigError
from spectrain.target.head import TargetHead
from spectrain.target.spec import TargetSpec

_SHIPPED = {
    "eagle3": "spectrain.drafters.autoregressive.eagle3",
    "peagle": "spectrain.drafters.autoregressive.peagle",
    "mtp": "spectrain.drafters.autoregressive.mtp",
    "gemma4_mtp": "spectrain.drafters.autoregressive.gemma4_mtp",
    "dflash": "spectrain.drafters.block.dflash",
    "dspark": "spectrain.drafters.block.dspark",
    "dflash2": "spectrain.drafters.block.dflash2",
}
_NEEDED = ("shape", "build", "body", "describe", "read_shape", "training_cost")  # methods of a kind that is trained


@dataclass(frozen=True)
class Corpus:
    """What a kind may want to know of the training text before it is built. ``token_counts``: how often each token of
    the target's vocabulary occurs, [V]; counted when first asked for.
    """

    token_counts: Callable[[], np.ndarray]
    head: TargetHead


class DrafterMethod:
    """A kind of drafter. The defaults are those of a kind that this version can only tell vLLM about."""

    name: ClassVar[str]  # drafter.method, and speculators_model_type of its folders
    label: ClassVar[str]  # as a person reads it
    sections: ClassVar[tuple[str, ...]] = ()  # of ``drafter`` that only this kind and its relatives read
    reads_options: ClassVar[bool] = True  # ``drafter.options``, for settings that have no section
    trainable: ClassVar[bool] = True
    # A shorter round is the beginning of a longer one, and costs its share of it.
    drafts_step_by_step: ClassVar[bool] = False
    reads_target_kv: ClassVar[bool] = False  # the target's own keys and values, see ``kv_layers``

    # It begins with what its target comes with, which is measured beside it (``untuned``).
    is_tuned: ClassVar[bool] = False

    # --- from configuration to drafter -------------------------------------------------------------------------------

    def default_taps(self, spec: TargetSpec) -> tuple[int, ...]:
        """Taps where the configuration names none."""
        return spec.default_taps()

    def taps(self, config: DrafterConfig, spec: TargetSpec) -> tuple[int, ...]:
        """The taps of the configuration, or the default ones. ConfigError outside [0, N], N the target's layers."""
        taps = config.taps if config.taps is not None else self.default_taps(spec)
        beyond = [tap for tap in taps if tap > spec.num_layers]
        if beyond:
            raise ConfigError(
                f"drafter.taps={list(taps)}: {beyond[0]} lies beyond the last layer; the target has {spec.num_layers} "
                f"layers, so taps run from 0 to {spec.num_layers}"
            )
        return tuple(taps)

    def kv_layers(self, spec: TargetSpec) -> tuple[int, ...]:
        """Layers of the target, from 0 and ascending, whose keys and values such a drafter reads."""
        return ()

    def max_drafts(self, config: DrafterConfig) -> int | None:
        """Drafts of a round that a fresh drafter of this configuration gives at most; None: no limit."""
        return None

    def has_confidence(self, config: DrafterConfig) -> bool:
        """Whether a fresh drafter of this configuration estimates how likely its drafts are to be accepted."""
        return False

    def check(self, config: DrafterConfig) -> None:
        """ConfigError for settings that this kind does not have."""

    def resolve(self, config: DrafterConfig, corpus: Corpus, say: Callable[[str], None]) -> DrafterConfig:
        """The configuration with what depends on the training text filled in. ``say``: a line for the user."""
        return config

    def shape(self, config: DrafterConfig, spec: TargetSpec) -> DrafterShape:
        """The shape of a fresh drafter. Raises ConfigError for a setting that does not fit the target."""
        raise self._lacks("shape")

    def build(self, shape: Any, vocab: DraftVocab, config: DrafterConfig) -> Drafter:
        """A drafter with any weights."""
        raise self._lacks("build")

    def body(self, shape: Any) -> nn.Module:
        """Its parameters alone, for counting them on the meta device."""
        raise self._lacks("body")

    def copy_from_target(self, drafter: Any, spec: TargetSpec, head: TargetHead, folder: Path) -> None:
        """Copy what a fresh drafter can use of the target, beyond rows of its head (``drafter.init=target``)."""

    def check_copies(self, config: DrafterConfig, spec: TargetSpec, folder: Path) -> None:
        """InputError for a target whose weights ``copy_from_target`` would refuse; reads next to nothing of them."""

    def training_cost(
        self, config: DrafterConfig, trainer: TrainerConfig, entries: Mapping[str, int], corpus: CorpusSize
    ) -> TrainingCost:
        """``entries``: name -> entries of each of its matrices."""
        raise self._lacks("training_cost")

    def training_rows(self, config: DrafterConfig, trainer: TrainerConfig, batch: BatchSize) -> TrainingRows:
        """What a pass over ``batch`` keeps in memory. Where a kind does not say so, all tokens pass all layers."""
        return TrainingRows(batch.tokens, students=batch.generated_tokens, teachers=batch.generated_tokens)

    def simulated_rows(self, config: DrafterConfig, drafts: int, batch: BatchSize) -> TrainingRows:
        """The same of the evaluation by simulation, for so many drafts a round; ``students`` are made at a time."""
        return TrainingRows(batch.tokens, students=batch.generated_tokens, teachers=batch.generated_tokens)

    # --- its folder --------------------------------------------------------------------------------------------------

    architecture: ClassVar[str] = ""  # architectures[0] of its config.json
    taps_field: ClassVar[str] = ""  # its field for the ids of its taps
    # What vLLM takes where a folder in the speculators layout is silent.
    vllm_defaults: ClassVar[Mapping[str, Any]] = {}
    default_theta: ClassVar[float | None] = None  # rope_theta where such a folder has none; None: it must have one
    # What vLLM is told besides the folder's name; None: vLLM has no such kind.
    speculative_config: ClassVar[Mapping[str, Any] | None] = None
    may_leave_out_taps: ClassVar[bool] = False  # others write folders without them, and mean the target's default ones
    # Architectures under which others write drafters of this kind.
    foreign_architectures: ClassVar[tuple[str, ...]] = ()
    layout: ClassVar[str] = ""  # another project's layout that ``convert`` writes such drafters in; empty: none
    layout_holds_copies: ClassVar[bool] = False  # with the target's embedding and lm_head
    library: ClassVar[str] = "speculators"  # whose layout its folder has, as the Hub names libraries

    def sglang_algorithm(self, fields: Mapping[str, Any]) -> str:
        """What SGLang calls the drafter of a config.json in the speculators layout, where it computes the same; empty
        where it does not.
        """
        return ""

    def describe(self, drafter: Any) -> dict[str, Any]:
        """Fields of config.json that only this kind has."""
        raise self._lacks("describe")

    def stored_tensors(self, drafter: Any) -> dict[str, Tensor]:
        """Its weights as its folder has them."""
        return dict(drafter.body.state_dict())

    def body_tensors(self, drafter: Any, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of ``stored_tensors``, for a drafter whose weights are not yet read. KeyError for one that is
        missing.
        """
        return stored

    def finish_folder(self, drafter: Any, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        """``config``, in the speculators layout, as config.json is to have it; for a kind whose folder has another
        layout. What is not of the speculators layout keeps ``config`` under ``spectrain.drafter``, without its own
        ``spectrain``, or is read by ``read_foreign``. The weights are in ``folder`` already; more may be added.
        """
        return config

    weights_name: ClassVar[str] = "model.safetensors"  # of the file of its weights
    # Whether its folder is served in the target's place, rather than beside it.
    serves_as_target: ClassVar[bool] = False

    def comes_with(self, shape: Any, folder: Path) -> bool:
        """Whether the target in ``folder`` brings such a drafter along, which is measured beside what was tuned from
        it.
        """
        return False

    def untuned(self, drafter: Any, spec: TargetSpec, folder: Path) -> Drafter:
        """What a target that ``comes_with`` it brings along, ready to draft in the place of ``drafter``."""
        raise self._lacks("untuned")

    def metadata(self, drafter: Any) -> dict[str, Any]:
        """What our own loop or a later training has a use for and vLLM has not; written under ``spectrain``."""
        return {}

    def read_shape(self, fields: dict[str, Any]) -> DrafterShape:
        """The shape that a config.json describes. Raises KeyError, TypeError or ValueError where it describes none."""
        raise self._lacks("read_shape")

    def read_drafter(self, shape: Any, vocab: DraftVocab, metadata: Mapping[str, Any]) -> Drafter:
        """A drafter of that shape, its weights not yet read. ``metadata``: as ``metadata`` gave it. Raises ValueError
        where that makes no sense.
        """
        return self.build(shape, vocab, DrafterConfig(method=self.name))

    def read_max_drafts(self, fields: Mapping[str, Any]) -> int | None:
        """Drafts of a round at most, by a config.json that may lack what ``read_shape`` wants."""
        return None

    def settings(self, shape: Any) -> dict[str, object]:
        """What the keys of ``drafter`` that decide a shape would say of this one: ``{"block.block_size": 8}``. A
        drafter that is trained further keeps them.
        """
        return {}

    def standard_tensors(self, tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
        """The tensors of a folder under the names of the body's parameters. Raises InputError, naming ``where``."""
        return tensors

    def misfit(self, shape: Any, spec: TargetSpec) -> str:
        """Why such a drafter cannot draft for a target of its own dimensions; empty where it can."""
        return ""

    def read_foreign(self, architecture: str, config: dict[str, Any], where: str) -> dict[str, Any]:
        """A config.json of another project's layout as one of the speculators layout. Raises InputError."""
        raise self._lacks("read_foreign")

    def write_foreign(self, standard: dict[str, Any], where: str) -> dict[str, Any]:
        """The other way round, in the layout ``layout``: of a config.json as ``standard_config`` gives it. Raises
        InputError for what the layout has no word for.
        """
        raise self._lacks("write_foreign")

    def foreign_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors under the names of ``layout``."""
        return tensors

    def _lacks(self, method: str) -> ConfigError:
        if not self.trainable:
            return ConfigError(f"drafter.method={self.name}: {self.label} drafters are served here, not trained")
        return ConfigError(
            f"drafter.method={self.name}: class {type(self).__name__} in {type(self).__module__} has no method "
            f"{method}: define it as DrafterMethod in spectrain/drafters/registry.py describes it"
        )


_registered: dict[str, DrafterMethod] = {}
_of_module: dict[str, dict[str, DrafterMethod]] = {}  # what each module of ``drafter.module`` registered


def register(method: DrafterMethod) -> DrafterMethod:
    """Make a kind known under its name; of two with one name the later one counts. Raises ConfigError for one without
    a name or a label, or without a method that training would miss later.
    """
    for attribute in ("name", "label"):
        if not getattr(method, attribute, ""):
            raise ConfigError(
                f"a kind of drafter has no {attribute}: set `{attribute}` in class {type(method).__name__}"
            )
    for needed in _NEEDED if method.trainable else ():
        if getattr(type(method), needed) is getattr(DrafterMethod, needed):
            raise method._lacks(needed)
    _registered[method.name] = method
    return method


def load_module(module: str | None) -> tuple[str, ...]:
    """Import the module of ``drafter.module``, which registers its kind: by ``register``, or by a ``METHOD`` in it.
    Returns the names of the kinds that it registers.

    It is looked for in the current folder, too. Raises ConfigError if it cannot be imported, or registers nothing.
    """
    if module is None:
        return ()
    if module not in _of_module:
        _of_module[module] = _import_kinds(module)
    for method in _of_module[module].values():
        register(method)
    return tuple(_of_module[module])


def _import_kinds(module: str) -> dict[str, DrafterMethod]:
    if os.getcwd() not in sys.path:  # an installed command does not have it there, unlike `python -m`
        sys.path.append(os.getcwd())
    before = dict(_registered)
    try:
        found = importlib.import_module(module)
        if isinstance(getattr(found, "METHOD", None), DrafterMethod):
            register(found.METHOD)
    except (Exception, SystemExit) as error:  # whatever code of the user's raises
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"drafter.module={module} cannot be imported ({type(error).__name__}: {reason})") from error
    kinds = {
        name: method
        for name, method in _registered.items()
        if before.get(name) is not method or type(method).__module__ == module
    }
    if not kinds:
        raise ConfigError(f"drafter.module={module} registers no kind of drafter: end it with METHOD = MyMethod()")
    return kinds


def find_method(name: str) -> DrafterMethod:
    """The kind called ``name``. Raises ConfigError, with the nearest name, if there is none."""
    method = known_method(name)
    if method is None:
        names = method_names()
        close = suggest(name, names)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(names)}"
        raise ConfigError(f"drafter.method={name} is unknown: {hint} (a kind of your own comes with drafter.module)")
    return method


def known_method(name: str) -> DrafterMethod | None:
    if name in _registered:
        return _registered[name]
    if name in _SHIPPED:
        return register(importlib.import_module(_SHIPPED[name]).METHOD)
    for entry in entry_points(group=DRAFTER_ENTRY_POINTS, name=name):
        return register(_load_entry(entry))
    return None


def _load_entry(entry: EntryPoint) -> DrafterMethod:
    try:
        found = entry.load()
        method = found if isinstance(found, DrafterMethod) else found.METHOD
        if not isinstance(method, DrafterMethod):
            raise TypeError(f"METHOD is a {type(method).__name__}, not a DrafterMethod")
    except (Exception, SystemExit) as error:  # whatever code of a package raises
        raise ConfigError(
            f"drafter.method={entry.name}: an installed package declares it as {entry.value}, which cannot be loaded "
            f"({type(error).__name__}: {error}): repair that package or uninstall it"
        ) from error
    return method


def method_names() -> list[str]:
    """Names of all kinds that can be trained, those that ship first."""
    names = [*_SHIPPED, *_registered, *(entry.name for entry in entry_points(group=DRAFTER_ENTRY_POINTS))]
    return [name for name in dict.fromkeys(names) if _trainable(name)]


def _trainable(name: str) -> bool:
    try:
        method = known_method(name)
    except ConfigError:  # a broken package must not hide the kinds that work
        return False
    return method is not None and method.trainable


def all_methods() -> list[DrafterMethod]:
    """Every kind, those included that are only told to vLLM."""
    found = (known_method(name) for name in dict.fromkeys((*_SHIPPED, *_registered)))
    return [method for method in found if method is not None]
