"""A drafter from its configuration: fresh, or one from a folder that is trained further.

A fresh one is random first; then the kind copies from the target what does nearly the same job there
(``init_from_target.py``), and solves for the rest in closed form if it can and the configuration says so
(``drafter.init``; that needs training documents, ``stages/fit.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.data.vocab import DraftVocab
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.drafter_folder import load_drafter
from spectrain.drafters.hub_drafters import drafter_path
from spectrain.drafters.init_from_target import copy_head_rows
from spectrain.drafters.registry import find_method
from spectrain.target.head import TargetHead
from spectrain.target.spec import TargetSpec


def build_drafter(
    config: DrafterConfig, spec: TargetSpec, vocab: DraftVocab, head: TargetHead, target_folder: Path, seed: int = 0
) -> Drafter:
    """A fresh drafter, initialised and attached to the target's head. Deterministic in ``seed``; float32."""
    method = find_method(config.method)
    drafter = method.build(method.shape(config, spec), vocab, config)
    drafter.reset(torch.Generator().manual_seed(seed))
    if config.init != "random":
        copy_head_rows(drafter, head)
        method.copy_from_target(drafter, spec, head, target_folder)
    return _ready_to_train(drafter, config, head)


def continue_drafter(
    config: DrafterConfig,
    head: TargetHead,
    usual_taps: Sequence[int] | None = None,
    served_length: int | None = None,
) -> Drafter:
    """The drafter in ``config.path``, ready to be trained further: how it is trained is the configuration's, all else
    is the folder's.

    ``usual_taps``, ``served_length``: as in ``drafter_folder.load_drafter``. Float32 whatever it was stored in: small
    updates of 16-bit weights would round away.
    """
    drafter = load_drafter(drafter_path(config), usual_taps, served_length)
    drafter.float().train()
    settled = find_method(drafter.method).settings(drafter.shape)
    drafter.config = _with_settings(replace(config, method=drafter.method), settled)
    return _ready_to_train(drafter, config, head)


def _with_settings(config: DrafterConfig, settings: Mapping[str, object]) -> DrafterConfig:
    """``settings``: value of each key, by its name below ``drafter``."""
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        changed = {section: replace(getattr(config, section), **{key: value})} if section else {key: value}
        config = replace(config, **changed)
    return config


def _ready_to_train(drafter: Drafter, config: DrafterConfig, head: TargetHead) -> Drafter:
    if drafter.shape.owns_head:
        drafter.body.lm_head.requires_grad_(config.train_head)
    return drafter.attach(head)
