"""Why a server drafts otherwise than we do: the known ways to read a drafter's folder wrongly, each tried on the text.

A hypothesis is our own drafter with one thing changed: other layers, another head table, a switch the other way round.
It is led along the texts of the server; the one under which it drafts what the server drafted names the cause. What can
be tried follows from what the drafter has, not from its name, so a further kind of drafter is covered by adding what is
particular to it.

Legend: S tokens of the text, A taps, H hidden, D draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.acceptance import Round
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.layers import Rotary
from spectrain.evaluation.parity import ParityReport, Played
from spectrain.evaluation.replay import Follower, Text
from spectrain.target.model import TargetModel

_PROMPTS, _ROUNDS = 3, 40  # what is replayed under a hypothesis, at most
_GLIMPSE, _KEPT = (
    6,
    5,
)  # rounds from the first difference on, under every hypothesis; so many of the best (and their equals) go on
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
class Hypothesis:
    """A way the server may have read the drafter. ``hint`` says what it would be doing.

    taps: layers it would read; ``None``: the right ones. states: what it would make of them, [1, S, A, H]. changes:
    (object, attribute, value) of our drafter, set while it is tried.
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


def explain(
    target: TargetModel, drafter: Drafter, report: ParityReport, theirs: Sequence[Played], num_drafts: int
) -> tuple[str, ...]:
    """Hints for a report with differences, the likeliest first."""
    drafts = [difference for difference in report.different if difference.what == "draft"]
    if not drafts:
        return (_TARGET_DIFFERS,) if report.different else ()
    chosen = list(dict.fromkeys(difference.prompt for difference in drafts))[:_PROMPTS]
    tried = hypotheses(drafter, target.spec.num_layers)
    tap_ids = sorted({tap for hypothesis in tried for tap in hypothesis.taps or drafter.taps} | set(drafter.taps))
    texts = [
        (Text(target, [*theirs[p].prompt, *theirs[p].answer], tap_ids), theirs[p].rounds[:_ROUNDS]) for p in chosen
    ]
    first = drafts[0].round
    glimpse = [(texts[0][0], theirs[chosen[0]].rounds[first : first + _GLIMPSE])]
    glimpsed = [_reproduced(hypothesis, drafter, glimpse, num_drafts) for hypothesis in tried]
    bar = min(sorted(glimpsed)[-_KEPT:], default=0.0)
    kept = [hypothesis for hypothesis, share in zip(tried, glimpsed, strict=True) if share >= bar]
    as_written = _reproduced(Hypothesis("as written"), drafter, texts, num_drafts)
    scored = [(_reproduced(hypothesis, drafter, texts, num_drafts), hypothesis.hint) for hypothesis in kept]
    scored.sort(key=lambda pair: -pair[0])
    explaining = [
        f"{hint} (this reproduces {share:.0%} of vLLM's drafts)" for share, hint in scored if share >= _EXPLAINS
    ]
    if explaining:
        return tuple(explaining)
    if scored and scored[0][0] > as_written + _COMES_CLOSE:
        return (
            f"perhaps, among other things, {scored[0][1]} (this reproduces {scored[0][0]:.0%} of vLLM's drafts, not "
            f"all)",
        )
    return (
        "none of the known causes reproduces vLLM's drafts: compare its configuration, tensors and arithmetic with "
        "ours",
    )


def hypotheses(drafter: Drafter, num_layers: int) -> list[Hypothesis]:
    """Everything worth trying for this drafter. ``num_layers``: of the target."""
    return [
        *_tap_hypotheses(drafter, num_layers),
        *_vocabulary_hypotheses(drafter),
        *_switch_hypotheses(drafter),
        *_rope_hypotheses(drafter),
        *_block_hypotheses(drafter),
    ]


def _tap_hypotheses(drafter: Drafter, num_layers: int) -> Iterator[Hypothesis]:
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
            yield Hypothesis(wanted.format(list(candidate)), taps=candidate)
    yield Hypothesis(
        "position: features come one position late, as if tokens and features were not shifted alike", states=_one_late
    )


def _one_late(taps_1SAH: Tensor) -> Tensor:
    return torch.cat([taps_1SAH[:, :1], taps_1SAH[:, :-1]], dim=1)


def _vocabulary_hypotheses(drafter: Drafter) -> Iterator[Hypothesis]:
    """Drafts are rows of the head; d2t says which token a row is."""
    ids_D = getattr(drafter, "draft_ids_D", None)
    if ids_D is not None and len(ids_D) < drafter.vocab.target_size:
        rows_D = torch.arange(len(ids_D), device=ids_D.device)
        yield Hypothesis(
            "d2t: it is not applied, rows of the draft head are taken for tokens",
            changes=((drafter, "draft_ids_D", rows_D),),
        )
        doubled = ((drafter, "draft_ids_D", (ids_D + rows_D) % drafter.vocab.target_size),)
        yield Hypothesis(
            "d2t: it is applied as an offset to ids, so the table holds ids where offsets belong", changes=doubled
        )


def _switch_hypotheses(drafter: Drafter) -> Iterator[Hypothesis]:
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
        yield Hypothesis(
            f"norm: {name} is read as {str(not on).lower()}, {meaning.format(word)}", changes=tuple(changes)
        )


def _rope_hypotheses(drafter: Drafter) -> Iterator[Hypothesis]:
    layer = getattr(getattr(drafter, "shape", None), "layer", None)
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
        yield Hypothesis(
            f"rope: theta is {theta:g}{scaling} instead of {own:g}", changes=((drafter, "rotary", rotary),)
        )


def _block_hypotheses(drafter: Drafter) -> Iterator[Hypothesis]:
    """One pass over a block: what its slots see of each other."""
    body: Any = getattr(drafter, "body", None)
    shape: Any = getattr(body, "shape", None)
    if hasattr(shape, "causal"):
        word = "see no later slots" if not shape.causal else "see all slots"
        changed = dataclasses.replace(shape, causal=not shape.causal)
        yield Hypothesis(
            f"attention: slots of a block {word} (sliding_window_non_causal)", changes=((body, "shape", changed),)
        )
    if getattr(shape, "sliding_window", None) is not None:
        changed = dataclasses.replace(shape, sliding_window=None)
        yield Hypothesis("attention: the sliding window is not applied", changes=((body, "shape", changed),))


def _reproduced(
    hypothesis: Hypothesis, drafter: Drafter, texts: Sequence[tuple[Text, Sequence[Round]]], n: int
) -> float:
    """Share of the server's rounds whose drafts the drafter makes under a hypothesis."""
    same = total = 0
    with hypothesis.applied():
        for text, rounds in texts:
            taps_1SAH = text.taps(hypothesis.taps or drafter.taps)
            if hypothesis.states is not None and taps_1SAH is not None:
                taps_1SAH = hypothesis.states(taps_1SAH)
            follower = Follower(drafter, text, taps_1SAH, n)
            for round_ in rounds:
                same += follower.draft(round_.anchor)[: len(round_.drafts)] == round_.drafts
                total += 1
    return same / total if total else 0.0
