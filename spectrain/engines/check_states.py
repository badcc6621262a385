"""Before anything is stored: are the captured hidden states the target's, of the layers that were asked for?

A wrong gain, a missing scale, a neighbouring layer or a document that sees its neighbour would give hidden states that
train a drafter without complaint, and a drafter whose drafts every server then rejects. So the first ones captured are
compared with what the unmodified model of transformers computes.

``engine=hf`` has that model beside it: captured last hidden states go through the independently loaded head, and what
it says is compared with what the model says about the same document alone (``check_states``).

vLLM has its own implementation of every model, its own numbering of layers and its own kernels (``SelfCheck``). A few
short documents go through it first, and what it captures is compared, layer by layer, with what transformers computes
for them (``taps``); the reference is computed before vLLM starts, while the memory is free, and nothing of the model is
kept. Where the target does not fit into memory that way, its last hidden states go through the independently loaded
head, which must choose the token that vLLM chose (``greedy``).

Legend: P positions, S tokens of a document that have hidden states, L layers and one (the residual stream after 0 … N
layers), H hidden, V vocabulary.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spectrain.config.schema import EngineConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.console import say
from spectrain.data.hidden_states import TargetStates
from spectrain.data.hidden_states_writer import is_finite
from spectrain.data.state_types import as_stored
from spectrain.errors import InputError, NotFiniteError, RunError
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel, choose_device, choose_dtype
from spectrain.target.resolve import ResolvedTarget
from spectrain.target.spec import TargetSpec, load_config

# What rounding may do: at every position in float32, at most positions in 16 bits, where it can send a token to other
# experts.
# The largest difference in log-probability: in 16 bits, logits alone are rounded to 1/8. Errors of substance are of the
# order of 1.
_LOGIT_TOLERANCE = {torch.float32: 0.01, torch.float16: 0.5, torch.bfloat16: 0.5}
# The largest relative difference of a hidden state. Neighbouring layers of real models differ by several per cent at
# least.
_STATE_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
# What storing a hidden state in fewer bits may add to that, as a multiple of what it does to the reference (which is
# rounded a little otherwise).
_STORING = 1.5

DOCUMENTS, TOKENS = 8, 96  # vLLM is checked with prefixes of documents: a prefix is a document
# engine=hf: documents, positions of each (evenly spaced), and tokens of each that are run again (hidden states depend
# on earlier tokens only).
_DOCUMENTS, _POSITIONS, _PREFIX = 3, 8, 512


def _failure(reason: str) -> RunError:
    return RunError(f"self-check of the captured hidden states failed: {reason}; nothing was stored")


# --- against the model beside it (engine=hf) -----------------------------------------------------------------------


@torch.no_grad()
def check_states(target: TargetModel, head: TargetHead, states: Sequence[TargetStates]) -> None:
    """Compare the head's argmax, and its log-probability, with the target's own at a few positions of a few documents.

    A different argmax is tolerated where the target itself holds both tokens for equally likely, within rounding. In 16
    bits one position in four may differ by more, since rounding can send a token to other experts; what is wrong in
    substance is wrong nearly everywhere. Raises ``RunError`` that says at which position what differs.
    """
    differences: list[str] = []
    checked = 0
    for document in states[:_DOCUMENTS]:
        ids_1S = document.input_ids[None, :_PREFIX].long().to(target.device)
        positions_P = torch.linspace(0, ids_1S.shape[1] - 1, min(_POSITIONS, ids_1S.shape[1])).long()
        sharing = {"return_shared_kv_states": True} if document.target_kv else {}
        output = target.model(input_ids=ids_1S, use_cache=False, logits_to_keep=positions_P, **sharing)
        if document.target_kv:
            _compare_kv(target, document, output.shared_kv_states)
        own_PV = output.logits[0].float().log_softmax(-1).cpu()
        hidden_PH = document.last_hidden[positions_P].to(head.lm_head_weight.device, head.lm_head_weight.dtype)
        ours_PV = head.hidden_to_logits(hidden_PH).log_softmax(-1).cpu()
        for position, own_V, ours_V in zip(positions_P.tolist(), own_PV, ours_PV, strict=True):
            difference = _difference(target, own_V, ours_V)
            checked += 1
            if difference:
                differences.append(f"position {position} of response {document.key}, where {difference}")
    if len(differences) > (0 if target.dtype == torch.float32 else checked // 4):
        raise _failure(
            f"at {len(differences)} of {checked} positions; the first is {differences[0]}; the head of model type "
            f"{target.spec.model_type!r} or the capture does not fit this target"
        )


def _compare_kv(target: TargetModel, document: TargetStates, own: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Keys and values of a document among others are those that the model makes of it alone. ``own``: by the kind of
    layer, [1, G, S, d].
    """
    kinds = {layer: kind for kind, layer in target.spec.kv_sources().items()}
    for layer, pair in document.target_kv.items():
        for name, x_SGd, own_1GSd in zip(("keys", "values"), pair, own[kinds[layer]], strict=True):
            own_SGd = own_1GSd[0].transpose(0, 1).float().cpu()
            error_S = _relative_error(x_SGd[: len(own_SGd)].flatten(1), own_SGd.flatten(1)[None])[0]
            bad = error_S.max() if target.dtype == torch.float32 else error_S.median()
            if not bad <= _STATE_TOLERANCE[target.dtype]:
                raise _failure(
                    f"{name} of layer {layer} are not the target's, at position {int(error_S.argmax())} of response "
                    f"{document.key} by {float(error_S.max()):.2g} of their size"
                )


def _difference(target: TargetModel, own_V: Tensor, ours_V: Tensor) -> str:
    """How the head's log-probabilities differ from the target's own beyond rounding; empty if they do not."""
    tolerance = _LOGIT_TOLERANCE[target.dtype]
    token, other = int(own_V.argmax()), int(ours_V.argmax())
    gap, shift = float(own_V[token] - own_V[other]), float(ours_V[token] - own_V[token])
    if not gap <= tolerance:  # in this form NaN is a difference too
        return (
            f"the target's own next token is {_named(target, token)}, Head(last_hidden) says {_named(target, other)}, "
            f"which the target holds for {gap:.2f} nats less likely"
        )
    if not abs(shift) <= tolerance:
        token_name = _named(target, token)
        return f"Head(last_hidden) gives the target's own next token {token_name} {shift:+.3f} nats of log-probability"
    return ""


def _named(target: TargetModel, token: int) -> str:
    return f"{token} ({target.tokenizer.decode([token])!r})"


# --- against references made before vLLM starts --------------------------------------------------------------------


def check_prefixes(documents: Iterable[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    """The shortest few of ``(name, ids)``, cut, to check a vLLM with."""
    usable = sorted((document for document in documents if len(document[1]) > 1), key=lambda one: (len(one[1]), one[0]))
    return [(f"{name} (self-check)", ids[:TOKENS]) for name, ids in usable[:DOCUMENTS]]


@dataclass(frozen=True)
class CheckDocument:
    """A document to check, and the token that vLLM chose after all of it but its last token."""

    states: TargetStates
    token: int


class SelfCheck:
    """Of vLLM: ``prepare`` before it starts, ``compare`` before anything is stored. ``method``: taps, greedy or off."""

    def __init__(
        self,
        engine: EngineConfig,
        target: TargetConfig,
        resolved: ResolvedTarget,
        tap_ids: Sequence[int],
        states_dtype: str,
    ) -> None:
        """``states_dtype``: what hidden states are stored as, for they may be compared after they were read from a
        shard.
        """
        self._config = target
        self._resolved = resolved
        self._tap_ids = tuple(tap_ids)
        self._states_dtype = states_dtype
        hf_config = load_config(resolved.folder, target.trust_remote_code)
        self._spec = TargetSpec.from_config(hf_config, resolved.folder)
        self._device = choose_device(target.device)
        self._dtype = choose_dtype(target.dtype, self._device, self._spec)
        self._quantised = engine.quantization is not None or self._spec.quantization is not None
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
        """Run ``documents`` (token ids) through transformers and keep their hidden states after every layer. Only
        method ``taps`` does so.
        """
        if self.method != "taps":
            return
        try:
            model = TargetModel.load(self._resolved, self._config)
        except InputError as error:
            say(f"note: {error}; captured hidden states are checked by vLLM's greedy tokens alone")
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
        """Raise ``RunError`` that names the layer and the position if hidden states are not the target's.

        documents: those of ``prepare``, in the same order. ``NotFiniteError`` where the target itself gives no numbers.
        """
        for document in documents:
            for name in ("taps", "last_hidden"):
                if not is_finite(getattr(document.states, name).float()):
                    raise NotFiniteError(name, str(self._dtype).removeprefix("torch."), f" for {document.states.key}")
        if self.method == "taps":
            states = [document.states for document in documents]
            for slot, tap in enumerate(self._tap_ids):
                self._compare_layer(f"tap {tap}", tap, [one.taps[:-1, slot] for one in states], documents)
            last = [one.last_hidden[:-1] for one in states]
            self._compare_layer("last_hidden", self._spec.num_layers, last, documents)
        elif self.method == "greedy":
            self._compare_tokens(documents)

    def _compare_layer(
        self, name: str, layer: int, captured: Sequence[Tensor], documents: Sequence[CheckDocument]
    ) -> None:
        errors = [
            self._error(x_SH, reference_LSH) for x_SH, reference_LSH in zip(captured, self._references, strict=True)
        ]
        all_LP = torch.cat(errors, dim=1)
        own_P, tolerance = all_LP[layer], _STATE_TOLERANCE[self._dtype]
        bad = own_P.max() if self._dtype == torch.float32 else own_P.median()
        if bad <= tolerance:  # in this form NaN is a difference too
            return
        number, position = _first_above(errors, layer, tolerance)
        median_L = all_LP.nan_to_num(torch.inf).median(dim=1).values
        nearest = int(median_L.argmin())
        hint = f"{'it is' if median_L[nearest] <= tolerance else 'nearest is'} the one after {nearest} layers"
        raise _failure(
            f"what vLLM gives as {name} is not the residual stream after {layer} layers ({hint}); the first difference "
            f"is at position {position} of document {documents[number].states.key}, "
            f"{float(errors[number][layer, position]):.2g} of its size"
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
        tolerance = 0.5 if self._quantised or self._states_dtype != "float32" else _LOGIT_TOLERANCE[self._dtype]
        for document in documents:
            position = len(document.states.input_ids) - 2
            logits_V = head.hidden_to_logits(document.states.last_hidden[position].float())
            gap = float(logits_V.max() - logits_V[document.token])
            if not gap <= tolerance:
                raise _failure(
                    f"at position {position} of document {document.states.key} vLLM's next token is {document.token}, "
                    f"but the head makes {int(logits_V.argmax())} of last_hidden (layer {self._spec.num_layers}), by "
                    f"{gap:.2f} in the logits"
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
