"""Before a served target's states are stored: are they the target's, of the layers that were asked for?

vLLM has its own implementation of every model, its own numbering of layers and its own kernels. States of a
neighbouring layer, or of a model with a wrong scale, train a drafter without complaint. So a few short documents go
through the service first, and what it captures is compared, layer by layer, with what transformers computes for them
(``taps``). Where the target does not fit into memory that way, its last hidden states go through the independently
loaded head, which must choose the token that the engine chose (``greedy``).

The reference is computed before the service starts, while the memory is free, and nothing of the model is kept.

Legend: S tokens of a document that have states, L layers and one (the residual stream after 0 … N layers), H hidden.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spectrain.config.schema import EngineConfig, TargetConfig
from spectrain.console import say
from spectrain.data.hidden_states import TargetStates, as_stored
from spectrain.engines.check_states import TOLERANCE
from spectrain.errors import InputError, RunError
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel, choose_device, choose_dtype
from spectrain.target.resolve import ResolvedTarget
from spectrain.target.spec import TargetSpec, load_config

DOCUMENTS = 8
TOKENS = 96  # of a document: a prefix is a document
# Largest relative difference of a state that rounding may make: at every position in float32; at most positions in 16
# bits, where rounding can send a token to other experts. Neighbouring layers of real models differ by several per cent
# at least.
_STATES_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
# What storing a state in fewer bits may add to that, as a multiple of what it does to the reference (which is rounded a
# little otherwise).
_STORING = 1.5


@dataclass(frozen=True)
class CheckDocument:
    """A document to check, and what the engine answered to it without its last token."""

    states: TargetStates
    token: int


class SelfCheck:
    """``references(…)`` before the service starts, ``compare(…)`` before anything is stored."""

    def __init__(
        self,
        engine: EngineConfig,
        target: TargetConfig,
        resolved: ResolvedTarget,
        tap_ids: Sequence[int],
        states_dtype: str,
    ) -> None:
        """``states_dtype``: what states are stored as, for they may be compared after they were read from a shard."""
        self._config = target
        self._resolved = resolved
        self._tap_ids = tuple(tap_ids)
        self._states_dtype = states_dtype
        hf_config = load_config(resolved.folder, target.trust_remote_code)
        self._spec = TargetSpec.from_config(hf_config)
        self._device = choose_device(target.device)
        self._dtype = choose_dtype(target.dtype, self._device, self._spec)
        self._quantised = engine.quantization is not None or getattr(hf_config, "quantization_config", None) is not None
        self.method = self._method(engine.self_check)
        self._references: list[Tensor] = []

    def _method(self, asked: str) -> str:
        if asked != "auto":
            return asked
        return "taps" if not self._quantised and self._fits() else "greedy"

    def _fits(self) -> bool:
        """Whether the target's weights take at most two thirds of the memory that is free."""
        stored = sum(path.stat().st_size for path in self._resolved.folder.glob("*.safetensors"))
        needed = stored * self._dtype.itemsize / self._spec.dtype.itemsize
        on_gpu = self._device.type == "cuda"
        free = torch.cuda.mem_get_info(self._device)[0] if on_gpu else _free_memory()
        return needed * 1.5 < free

    def prepare(self, documents: Sequence[Sequence[int]]) -> None:
        """Run ``documents`` (token ids) through transformers and keep their states after every layer. Only method
        ``taps`` does so.
        """
        if self.method != "taps":
            return
        try:
            model = TargetModel.load(self._resolved, self._config)
        except InputError as error:
            say(f"note: {error}; captured states are checked by the engine's greedy tokens alone")
            self.method = "greedy"
            return
        everything = tuple(range(self._spec.num_layers + 1))
        for ids in documents:
            ids_1S = torch.tensor([list(ids)[:-1]], device=model.device)
            output = model.run(ids_1S, torch.arange(ids_1S.shape[1], device=model.device)[None], tap_ids=everything)
            assert output.taps_BSAH is not None
            self._references.append(output.taps_BSAH[0].transpose(0, 1).float().cpu())
        del model
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def compare(self, documents: Sequence[CheckDocument]) -> None:
        """Raise ``RunError`` that names the layer and the position if states are not the target's. Same documents as in
        ``prepare``.
        """
        if self.method == "taps":
            for slot, tap in enumerate(self._tap_ids):
                self._compare_layer(
                    f"tap {tap}", tap, [document.states.taps[:-1, slot] for document in documents], documents
                )
            last = self._spec.num_layers
            self._compare_layer(
                "last_hidden", last, [document.states.last_hidden[:-1] for document in documents], documents
            )
        elif self.method == "greedy":
            self._compare_tokens(documents)

    def _compare_layer(
        self, name: str, layer: int, captured: Sequence[Tensor], documents: Sequence[CheckDocument]
    ) -> None:
        errors = [
            self._error(x_SH, reference_LSH) for x_SH, reference_LSH in zip(captured, self._references, strict=True)
        ]
        all_LP = torch.cat(errors, dim=1)
        own_P, tolerance = all_LP[layer], _STATES_TOLERANCE[self._dtype]
        bad = own_P.max() if self._dtype == torch.float32 else own_P.median()
        if bad <= tolerance:  # in this form NaN is a difference too
            return
        number, position = _first_above(errors, layer, tolerance)
        median_L = all_LP.nan_to_num(torch.inf).median(dim=1).values
        nearest = int(median_L.argmin())
        hint = f"{'it is' if median_L[nearest] <= tolerance else 'nearest is'} the one after {nearest} layers"
        raise RunError(
            f"self-check of the captured states failed: what vLLM gives as {name} is not the residual stream after "
            f"{layer} layers "
            f"({hint}); the first difference is at position {position} of document {documents[number].states.key}, "
            f"{float(errors[number][layer, position]):.2g} of its size, and nothing was stored"
        )

    def _error(self, x_SH: Tensor, reference_LSH: Tensor) -> Tensor:
        """Relative error against every layer, [L, S], without what storing it explains."""
        error_LS = _relative_error(x_SH, reference_LSH)
        if self._states_dtype == "float32":
            return error_LS
        stored_LS = _relative_error(as_stored(reference_LSH, self._states_dtype), reference_LSH)
        return (error_LS - _STORING * stored_LS).clamp_min(0.0)  # NaN stays NaN

    def _compare_tokens(self, documents: Sequence[CheckDocument]) -> None:
        head = TargetHead.from_checkpoint(self._resolved.folder, trust_remote_code=self._config.trust_remote_code)
        for document in documents:
            position = len(document.states.input_ids) - 2
            logits_V = head.hidden_to_logits(document.states.last_hidden[position].float())
            gap = float(logits_V.max() - logits_V[document.token])
            if not gap <= (0.5 if self._quantised or self._states_dtype != "float32" else TOLERANCE[self._dtype]):
                raise RunError(
                    f"self-check of the captured states failed: at position {position} of document "
                    f"{document.states.key} vLLM's next token "
                    f"is {document.token}, but the head makes {int(logits_V.argmax())} of last_hidden (layer "
                    f"{self._spec.num_layers}), by "
                    f"{gap:.2f} in the logits; nothing was stored"
                )


def _free_memory() -> int:
    """Bytes of main memory that can be had, file caches included where the system says; else half of what the machine
    has.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _relative_error(x_SH: Tensor, reference_LSH: Tensor) -> Tensor:
    """||x - reference|| / ||reference||, [L, S]."""
    difference_LSH = x_SH.float() - reference_LSH
    return difference_LSH.norm(dim=-1) / reference_LSH.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)


def _first_above(errors: Sequence[Tensor], layer: int, tolerance: float) -> tuple[int, int]:
    """Number of the document and position where the error of ``layer`` first exceeds the tolerance."""
    for number, error_LS in enumerate(errors):
        above_S = ~(error_LS[layer] <= tolerance)
        if above_S.any():
            return number, int(above_S.nonzero()[0])
    return 0, 0
