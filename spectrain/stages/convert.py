"""``spectrain convert``: a drafter's folder, or one on the Hub, in the layout of another project."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from spectrain.config.schema import SpectrainConfig
from spectrain.console import say
from spectrain.drafters.drafter_digests import CONFIG
from spectrain.drafters.foreign_checkpoints import standard_config
from spectrain.drafters.hub_drafters import drafter_path
from spectrain.drafters.layout_writers import Converted, convert_drafter
from spectrain.drafters.registry import find_method, load_module
from spectrain.drafters.serving_config import read_serving_config
from spectrain.errors import ConfigError, InputError
from spectrain.reading import read_json
from spectrain.stages.drafter_checks import check_drafter_folder


def convert(config: SpectrainConfig, given: Sequence[str] = (), dry_run: bool = False) -> Converted | None:
    """Write ``convert.out``. Raises ConfigError or InputError before anything is written."""
    own = config.convert
    if own.to is None:
        raise ConfigError("convert.to names no layout: use speculators, zlab, deepspec or eagle")
    if not own.out:
        raise ConfigError("convert.out is empty: name the folder to write")
    out = Path(own.out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"convert.out={own.out} is there already: name another folder, or remove it")
    load_module(config.drafter.module)
    source = drafter_path(config.drafter)
    check_drafter_folder(source, "drafter.path")
    if dry_run:
        say(f"convert: {source} would be written to {out} in layout {own.to}")
        return None
    named = bool({override.partition("=")[0] for override in given} & {"target", "target.path", "recipe"})

    def target_copies() -> Mapping[str, Tensor]:
        return _target_copies(config, source, named)

    done = convert_drafter(source, own.to, out, target_copies, own.max_shard_bytes)
    several = f", weights in {done.files} files" if done.files > 1 else ""
    copies = ", with copies of the target's embedding and lm_head" if done.has_copies else ""
    say(f"convert: {out} holds the {done.method} drafter in layout {own.to}{several}{copies}")
    standard = standard_config(read_json(source / CONFIG), str(source / CONFIG))
    if own.to == "eagle" and not find_method(done.method).sglang_algorithm(standard):
        say("note: EAGLE's layout, but vLLM alone computes this drafter, not SGLang: its switches, window or taps")
    return done


def _target_copies(config: SpectrainConfig, source: Path, named: bool) -> dict[str, Tensor]:
    """Embedding and lm_head of the target: the one that the command line names, else the drafter's own."""
    from spectrain.target.head import TargetHead
    from spectrain.target.resolve import resolve_target

    own = read_serving_config(str(source)).target
    target = config.target if named or own is None else replace(config.target, path=own, revision=None)
    advice = "name the target, target.path=FOLDER_OR_HUB_ID: that layout holds its embedding and lm_head"
    if not target.path:
        raise InputError(f"drafter {source} does not say what it was trained for: {advice}")
    try:
        folder = resolve_target(target).folder
    except InputError as error:
        raise InputError(f"{error}; {advice}") from error
    head = TargetHead.from_checkpoint(folder, trust_remote_code=target.trust_remote_code)
    return {"embed_tokens.weight": head.embed_weight, "lm_head.weight": head.lm_head_weight}
