"""Diagnosis of a failed parity check: the known ways to misread a drafter's folder, each tried on vLLM's text.

A misreading is our own drafter with one thing changed: other layers, another head table, a switch the other way round.
It is led along the texts that vLLM made; the one under which it drafts what vLLM drafted names the cause. What can be
tried follows from what the drafter has, not from its name, so a further kind of drafter is covered by adding what is
particular to it.

Legend: S tokens of the text, A taps, H hidden, D draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.acceptance import Round
from spectrain.drafters.autoregressive.autoregressive_drafter import DraftSteps
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.layers import Rotary
from spectrain.evaluation.parity import DecodedPrompt, ParityReport
from spectrain.evaluation.replay import Follower, Text
from spectrain.target.model import TargetModel

_PROMPTS, _ROUNDS = 3, 40  # what is replayed under a misreading, at most
# First a few rounds from the first difference on, under every misreading; so many of the best (and their equals) go on.
_SCREENING_ROUNDS, _KEPT = 6, 5
_EXPLAINS, _COMES_CLOSE = 0.97, 0.2  # share of rounds reproduced; how much more than as written
_THETAS = (1e2, 1e3, 1e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7, 1e8)
_SWITCHES = {
    "norm_before_residual": "the residual stream starts from the {}normed feature",
    "norm_output": "the {}normed output is fed back from step to step",
    "norm_before_fc": "the norm over the concatenated taps is {}applied",
    "fc_norm": "the norm of each tap before fc is {}applied",
}
_TARGET_DIFFERS = (
    "the target itself answers otherwise, the drafter does not: "
    "compare dtype, revision, quantisation and attention of both sides"
)


@dataclass(frozen=True)
class Misreading:
    """A way in which vLLM may read the drafter otherwise than it is meant. ``hint`` says what it would be doing.

    taps: layers it would read; ``None``: the right ones. states: what it would make of their hidden states,
    [1, S, A, H]. changes: (object, attribute, value) of our drafter, set while it is tried.
    """

    hint: str
    taps: tuple[int, ...] | None = None
    states: Callable[[Tensor], Tensor] | None = None
    changes: tuple[tuple[Any, str, Any], ...] = ()

    @contextmanager
    def applied(self) -> Iterator[None]:
        before = [(thing, name, getattr(thing, name)) for thing, name, _ in self.changes]
        try:
            for thing, name, value in self.changes:
                setattr(thing, name, value)
            yield
        finally:
            for thing, name, value in before:
                setattr(thing, name, value)


def diagnose(
    target: TargetModel, drafter: Drafter, report: ParityReport, theirs: Sequence[DecodedPrompt], num_drafts: int
) -> tuple[str, ...]:
    """Hints for a report with differences, the likeliest first."""
    drafts = [difference for difference in report.different if difference.what == "draft"]
    if not drafts:
        return (_TARGET_DIFFERS,) if report.different else ()
    chosen = list(dict.fromkeys(difference.prompt for difference in drafts))[:_PROMPTS]
    tried = misreadings(drafter, target.spec.num_layers)
    tap_ids = sorted({tap for misreading in tried for tap in misreading.taps or drafter.taps} | set(drafter.taps))
    texts = [
        (Text(target, [*theirs[p].prompt, *theirs[p].answer], tap_ids, drafter.kv_layers), theirs[p].rounds[:_ROUNDS])
        for p in chosen
    ]
    first = drafts[0].round
    screening = [(texts[0][0], theirs[chosen[0]].rounds[first : first + _SCREENING_ROUNDS])]
    shares = [_reproduced(misreading, drafter, screening, num_drafts) for misreading in tried]
    bar = min(sorted(shares)[-_KEPT:], default=0.0)
    kept = [misreading for misreading, share in zip(tried, shares, strict=True) if share >= bar]
    as_written = _reproduced(Misreading("as written"), drafter, texts, num_drafts)
    scored = [(_reproduced(misreading, drafter, texts, num_drafts), misreading.hint) for misreading in kept]
    scored.sort(key=lambda pair: -pair[0])
    return _hints(scored, as_written)


def _hints(scored: Sequence[tuple[float, str]], as_written: float) -> tuple[str, ...]:
    """What is said of misreadings that reproduce such shares of vLLM's rounds, descending."""
    explaining = [
        f"{hint} (this reproduces {share:.0%} of vLLM's drafts)" for share, hint in scored if share >= _EXPLAINS
    ]
    if explaining:
        return tuple(explaining)
    if scored and scored[0][0] > as_written + _COMES_CLOSE:
        share, hint = scored[0]
        return (f"perhaps, among other things, {hint} (this reproduces {share:.0%} of vLLM's drafts, not all)",)
    return (
        "none of the known causes reproduces vLLM's drafts: compare its configuration, tensors and arithmetic with "
        "ours",
    )


def misreadings(drafter: Drafter, num_layers: int) -> list[Misreading]:
    """Everything worth trying for this drafter. ``num_layers``: of the target."""
    return [
        *_tap_misreadings(drafter, num_layers),
        *_vocabulary_misreadings(drafter),
        *_switch_misreadings(drafter),
        *_rope_misreadings(drafter),
        *_block_misreadings(drafter),
        *_parallel_misreadings(drafter),
        *_hidden_misreadings(drafter),
    ]


def _tap_misreadings(drafter: Drafter, num_layers: int) -> Iterator[Misreading]:
    taps = tuple(drafter.taps)
    if not taps:
        return
    wanted = f"layer ids: it reads the taps {{}} instead of {list(taps)}"
    default = tuple(sorted({2, num_layers // 2, num_layers - 3}))
    candidates = [tuple(tap + shift for tap in taps) for shift in (1, -1)]
    candidates += [
        (*taps[:i], taps[i] + shift, *taps[i + 1 :]) for i in range(len(taps)) for shift in (1, -1) if len(taps) > 1
    ]
    candidates += [default] if len(default) == len(taps) else []
    candidates += [tuple(reversed(taps))] if len(taps) > 1 else []
    for candidate in dict.fromkeys(candidates):
        if candidate != taps and all(0 <= tap <= num_layers for tap in candidate):
            yield Misreading(wanted.format(list(candidate)), taps=candidate)
    yield Misreading(
        "position: features come one position late, as if tokens and features were not shifted alike", states=_one_late
    )


def _one_late(taps_1SAH: Tensor) -> Tensor:
    return torch.cat([taps_1SAH[:, :1], taps_1SAH[:, :-1]], dim=1)


def _vocabulary_misreadings(drafter: Drafter) -> Iterator[Misreading]:
    """Drafts are rows of the head; d2t says which token a row is."""
    ids_D = getattr(drafter, "draft_ids_D", None)
    if ids_D is not None and len(ids_D) < drafter.vocab.target_size:
        rows_D = torch.arange(len(ids_D), device=ids_D.device)
        yield Misreading(
            "d2t: it is not applied, rows of the draft head are taken for tokens",
            changes=((drafter, "draft_ids_D", rows_D),),
        )
        doubled = ((drafter, "draft_ids_D", (ids_D + rows_D) % drafter.vocab.target_size),)
        yield Misreading(
            "d2t: it is applied as an offset to ids, so the table holds ids where offsets belong", changes=doubled
        )


def _switch_misreadings(drafter: Drafter) -> Iterator[Misreading]:
    body: Any = getattr(drafter, "body", None)
    shape: Any = getattr(body, "shape", None)
    for name, meaning in _SWITCHES.items():
        on = getattr(shape, name, None)
        # A norm that the drafter does not have cannot be tried.
        if on is None or (name in ("norm_before_fc", "fc_norm") and not on):
            continue
        changes = [(body, "shape", dataclasses.replace(shape, **{name: not on}))]
        changes += [(layer, name, not on) for layer in body.layers if hasattr(layer, name)]
        word = {"norm_before_residual": "un", "norm_output": "un"}.get(name, "not ") if on else ""
        yield Misreading(
            f"norm: {name} is read as {str(not on).lower()}, {meaning.format(word)}", changes=tuple(changes)
        )


def _rope_misreadings(drafter: Drafter) -> Iterator[Misreading]:
    shape = getattr(drafter, "shape", None)
    layer = getattr(shape, "turned", None) or getattr(shape, "layer", None)  # of heads that turn in part, that part
    if layer is None or not hasattr(drafter, "rotary"):
        return
    parameters = layer.rope_parameters
    own = float(parameters.get("rope_theta", 1e4))
    plain = parameters.get("rope_type", "default") == "default"
    for theta in dict.fromkeys((own, *_THETAS)):
        if theta == own and plain:
            continue
        rotary = Rotary(dataclasses.replace(layer, rope_parameters={"rope_type": "default", "rope_theta": theta}))
        scaling = "" if plain else " without the scaling"
        yield Misreading(
            f"rope: theta is {theta:g}{scaling} instead of {own:g}", changes=((drafter, "rotary", rotary),)
        )


def _block_misreadings(drafter: Drafter) -> Iterator[Misreading]:
    """One pass over a block: what its slots see of each other."""
    body: Any = getattr(drafter, "body", None)
    shape: Any = getattr(body, "shape", None)
    if hasattr(shape, "causal"):
        word = "see no later slots" if not shape.causal else "see all slots"
        changed = dataclasses.replace(shape, causal=not shape.causal)
        yield Misreading(
            f"attention: slots of a block {word} (sliding_window_non_causal)", changes=((body, "shape", changed),)
        )
    if getattr(shape, "sliding_window", None) is not None:
        changed = dataclasses.replace(shape, sliding_window=None)
        yield Misreading("attention: the sliding window is not applied", changes=((body, "shape", changed),))


def _parallel_misreadings(drafter: Drafter) -> Iterator[Misreading]:
    """Mask slots behind a column, where vLLM knows step-by-step drafting as well."""
    body: Any = getattr(drafter, "body", None)
    rotary = getattr(drafter, "rotary", None)
    if not isinstance(rotary, Rotary) or not hasattr(body, "mask_hidden"):
        return
    steps = partial(DraftSteps, body, rotary, drafter.head)
    yield Misreading(
        "mask slots: it drafts step by step, without parallel_drafting", changes=((drafter, "draft_steps", steps),)
    )


def _hidden_misreadings(drafter: Drafter) -> Iterator[Misreading]:
    """Heads that a target brings along: on which side of a norm the hidden states are read."""
    body: Any = getattr(drafter, "body", None)
    if not hasattr(body, "feeds_normed"):
        return
    before, normed = drafter.reads_before_norm, body.feeds_normed
    yield Misreading(
        f"norm: the target's last hidden state is read {'behind' if before else 'before'} its final norm",
        changes=((drafter, "reads_before_norm", not before),),
    )
    yield Misreading(
        f"norm: the {'un' if normed else ''}normed output is fed back from step to step",
        changes=((body, "feeds_normed", not normed),),
    )


def _reproduced(
    misreading: Misreading, drafter: Drafter, texts: Sequence[tuple[Text, Sequence[Round]]], n: int
) -> float:
    """Share of vLLM's rounds whose drafts the drafter makes under a misreading."""
    same = total = 0
    with misreading.applied():
        for text, rounds in texts:
            taps_1SAH = text.taps(misreading.taps or drafter.taps)
            if misreading.states is not None and taps_1SAH is not None:
                taps_1SAH = misreading.states(taps_1SAH)
            follower = Follower(drafter, text, taps_1SAH, n)
            for round_ in rounds:
                same += follower.draft(round_.anchor)[: len(round_.drafts)] == round_.drafts
                total += 1
    return same / total if total else 0.0
