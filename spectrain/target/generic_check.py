"""Before anything is done with a target that takes the generic path: does what was found hold of the loaded model?

Its two ends were measured without weights (``generic_family.py``). Here, with its weights and in the type that is used,
random token sequences go through the unmodified model, through our passes over it and through the head that is read
from its checkpoint, and each part of what we would use is compared: embeddings, taps, the normed last hidden states,
logits, and a text that a cache takes in pieces, some of them given back, as the lossless loop does.

Legend: R texts, S tokens of each, L layers and one, H hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectrain.errors import ConfigError, InputError
from spectrain.target.generic_family import unknown
from spectrain.target.head import TargetHead
from spectrain.target.kv_cache import open_cache
from spectrain.target.model import TargetModel

_TEXTS, _TOKENS = 3, 40
_TAKEN_BACK = 5
# The largest difference that rounding may make, of the largest entry. What another kernel or another order of sums does
# grows from layer to layer, so what goes through layers twice may differ more than what goes through none.
_END_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_LAYERS_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 0.2}


def check_generic(target: TargetModel, folder: Path, trust_remote_code: bool = False) -> None:
    """``InputError`` that names the part of the target which is not what was found, and the largest difference."""
    head = TargetHead.from_checkpoint(folder, target.dtype, target.device, trust_remote_code)
    generator = torch.Generator().manual_seed(0)
    ids_RS = torch.randint(0, head.vocab_size, (_TEXTS, _TOKENS), generator=generator).to(target.device)
    part = "its decoder cannot be run as others are"
    try:
        _compare_pass(target, head, ids_RS)
        part = "a cache that takes a text in pieces cannot be used with it"
        _compare_cache(target, ids_RS)
    except (InputError, ConfigError):
        raise
    except Exception as error:  # code of the target's may raise anything
        reason = " ".join(str(error).split())[:200]
        raise unknown(target.spec.model_type, f"{part} ({type(error).__name__}: {reason})") from error


@torch.no_grad()
def _compare_pass(target: TargetModel, head: TargetHead, ids_RS: Tensor) -> None:
    layers = target.spec.num_layers
    ours = target.run(ids_RS, _positions(ids_RS), tap_ids=range(layers + 1))
    assert ours.taps_BSAH is not None
    taps_LRSH = ours.taps_BSAH.movedim(2, 0)
    own = target.model(input_ids=ids_RS, use_cache=False, output_hidden_states=True)
    states: Any = own.hidden_states
    if states is None or len(states) != layers + 1:
        found = 0 if states is None else len(states)
        raise unknown(target.spec.model_type, f"it hands out {found} hidden states, {layers} layers have {layers + 1}")
    _require(target, "the embedding, as it enters the first layer", head.embed(ids_RS), taps_LRSH[0])
    for layer, state_RSH in enumerate(states[:-1]):
        name = f"tap {layer}, beside transformers' own hidden state"
        _require(target, name, taps_LRSH[layer], state_RSH, _LAYERS_TOLERANCE)
    last_RSH = ours.last_hidden_BSH
    _require(target, "the final norm of the last hidden state", head.post_norm(last_RSH), states[-1])
    _require(target, "the logits, made by norm and head", head.hidden_to_logits(last_RSH), own.logits)
    _require(target, "the logits, made by its own norm and head", target.logits(last_RSH), own.logits)


@torch.no_grad()
def _compare_cache(target: TargetModel, ids_RS: Tensor) -> None:
    """Two texts of different lengths, one of which gives tokens back, must be what they are alone."""
    first, second = _TOKENS // 2, _TOKENS - _TAKEN_BACK
    whole_RSH = target.run(ids_RS[:2], _positions(ids_RS[:2])).last_hidden_BSH
    cache = open_cache(target, 2)
    cache.forward(ids_RS[:2, :first], [first, first], ())
    cache.keep([first, first - _TAKEN_BACK])
    rest = [ids_RS[0, first:second], ids_RS[1, first - _TAKEN_BACK : second - _TAKEN_BACK]]
    pieces_RSH = cache.forward(torch.stack(rest), [second - first] * 2, ()).last_hidden_BSH
    cache.keep([second - first] * 2)
    asked = [whole_RSH[0, first:second], whole_RSH[1, first - _TAKEN_BACK : second - _TAKEN_BACK]]
    name = "the last hidden state of a text that a cache takes in pieces"
    _require(target, name, pieces_RSH, torch.stack(asked), _LAYERS_TOLERANCE)


def _positions(ids_RS: Tensor) -> Tensor:
    return torch.arange(ids_RS.shape[1], device=ids_RS.device).expand_as(ids_RS)


def _require(
    target: TargetModel,
    part: str,
    ours: Tensor,
    own: Tensor,
    tolerances: dict[torch.dtype, float] = _END_TOLERANCE,
) -> None:
    if ours.shape != own.shape:
        raise unknown(target.spec.model_type, f"{part}: ours has shape {tuple(ours.shape)}, its own {tuple(own.shape)}")
    ours, own = ours.double().cpu(), own.double().cpu()
    difference = float((ours - own).abs().max() / own.abs().max().clamp_min(1e-30))
    if not difference <= tolerances[target.dtype]:  # in this form NaN is a difference too
        raise unknown(
            target.spec.model_type,
            f"the self-check failed at {part}: it differs from the unmodified model's by {difference:.2g} of the "
            f"largest entry, rounding explains {tolerances[target.dtype]:.2g}",
        )
