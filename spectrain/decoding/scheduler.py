"""The hardware-aware prefix scheduler: verify as many drafts as pay on this machine, with these requests, now (the
DSpark paper).

A step of the loop commits, in expectation, τ = Σ over rows (1 + Σ over kept slots of their survival) tokens, and takes
longer the more tokens the target's pass holds. So (row, slot) pairs are admitted in descending order of survival, as
long as tokens per second, τ · steps_per_s(batch tokens), keep rising. A small batch, whose pass is bound by reading
weights, gets long drafts; a full one gets only those that are nearly certain.

**The first fall ends it, even if throughput would rise again further on.** A later pair may be the next slot of the
same row, whose confidence depends on the draft in the slot under decision: looking there before deciding would make the
kept drafts a biased sample, and verification would no longer return the target's distribution. Admitting in descending
order and stopping at once decides each slot from what lies before it (survival falls along a row, so a row's slots come
in order), and leaves the distribution as it was.

The cost of a step is measured once, on the machine at hand, before the first prompt, and saved with the results.

Besides it the simpler policies: all drafts, or those whose survival is above a threshold.

Legend: B batch, n draft slots.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spectrain.config.evaluation_schema import DecodingConfig
from spectrain.decoding.confidence import survival
from spectrain.decoding.proposers import Observation, Proposer
from spectrain.decoding.sampling import GREEDY
from spectrain.decoding.verify import verify
from spectrain.target.cpu_kernels import cpu_attention
from spectrain.target.kv_cache import TargetCache, open_cache
from spectrain.target.model import TargetModel

CONTEXT_TOKENS = 128  # text before the drafts while the cost is measured
_REPEATS, _ENOUGH_S = 5, 2.0  # of each measurement: so many, fewer where they take long


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step of the loop: drafting by the number of rows, the target's pass by the number of its tokens
    (anchors and drafts).

    Curves are pairs of (count, seconds), ascending; between the counts seconds are interpolated, outside the last slope
    goes on.
    """

    verify: tuple[tuple[int, float], ...]
    draft: tuple[tuple[int, float], ...] = ((1, 0.0),)

    def steps_per_s(self, rows: int, tokens: int) -> float:
        return 1.0 / (_curve(self.verify, tokens) + _curve(self.draft, rows))


def _curve(points: Sequence[tuple[int, float]], at: float) -> float:
    counts, seconds = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    if len(counts) > 1 and at > counts[-1]:
        return float(seconds[-1] + (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2]) * (at - counts[-1]))
    return float(np.interp(at, counts, seconds))


def schedule(survival_Bn: np.ndarray, drafted_B: Sequence[int], steps_per_s: Callable[[int], float]) -> list[int]:
    """Drafts to keep per row.

    Args:
        survival_Bn: chance that each draft and all before it are accepted; never rises along a row.
        drafted_B: drafts that each row has.
        steps_per_s: steps a second with so many tokens in the target's pass, anchors included.
    """
    kept = [0] * len(survival_Bn)
    # Equal survival: the earlier slot first, so that a row's slots stay in order.
    pairs = sorted(
        (-float(chance), slot, row)
        for row, chances in enumerate(survival_Bn.tolist())
        for slot, chance in enumerate(chances[: drafted_B[row]])
    )
    tokens, expected = len(kept), float(len(kept))
    throughput = expected * steps_per_s(tokens)
    for negative, _, row in pairs:
        tokens, expected = tokens + 1, expected - negative
        now = expected * steps_per_s(tokens)
        if now <= throughput:
            break
        throughput = now
        kept[row] += 1
    return kept


@dataclass(frozen=True)
class SchedulerPolicy:
    """Drafts are kept as ``schedule`` says."""

    cost: StepCost

    def lengths(self, confidence_Bn: Tensor, drafted_B: list[int]) -> list[int]:
        survival_Bn = survival(confidence_Bn).cpu().numpy()
        rows = len(drafted_B)
        return schedule(survival_Bn, drafted_B, lambda tokens: self.cost.steps_per_s(rows, tokens))


def measure_step_cost(target: TargetModel, proposer: Proposer, rows: int, n: int, seed: int = 0) -> StepCost:
    """Times steps of up to ``rows`` rows with up to n drafts each, on random text. Takes seconds."""
    bench = _Bench(target, proposer, rows, n, seed)
    with cpu_attention(target.model):
        return bench.curves()


class _Bench:
    """Batches whose rows hold some random text already; one of each size is filled, once."""

    def __init__(self, target: TargetModel, proposer: Proposer, rows: int, n: int, seed: int) -> None:
        self.target = target
        self.proposer = proposer
        self.rows = rows
        self.n = n
        generator = torch.Generator().manual_seed(seed)
        ids_BT = torch.randint(target.spec.vocab_size, (rows, CONTEXT_TOKENS + n + 1), generator=generator)
        self.ids_BT = ids_BT.to(target.device)
        self.caches: dict[int, TargetCache] = {}

    def curves(self) -> StepCost:
        counts = [1]
        while counts[-1] * 2 < self.rows * (self.n + 1):
            counts.append(counts[-1] * 2)
        counts = sorted({*counts, self.rows, self.rows * (self.n + 1)})
        row_counts = [count for count in counts if count <= self.rows]
        # A pass over more tokens that is faster is noise.
        verify_s = np.maximum.accumulate([self.verify_s(count) for count in counts]).tolist()
        draft_s = np.maximum.accumulate([self.draft_s(count) for count in row_counts]).tolist()
        return StepCost(
            verify=tuple(zip(counts, verify_s, strict=True)), draft=tuple(zip(row_counts, draft_s, strict=True))
        )

    def verify_s(self, tokens: int) -> float:
        """The target's pass, its logits and the verdict, over so many tokens spread evenly over the rows."""
        rows = min(tokens, self.rows)
        lengths = [tokens // rows + (row < tokens % rows) for row in range(rows)]
        cache = self._filled(rows)
        ids_BT = self.ids_BT[:rows, CONTEXT_TOKENS : CONTEXT_TOKENS + max(lengths)]

        def step() -> None:
            output = cache.forward(ids_BT, lengths, self.proposer.taps, self.proposer.kv_layers)
            lengths_B = torch.tensor([length - 1 for length in lengths])
            verify(ids_BT[:, 1:], None, self.target.logits(output.last_hidden_BSH), GREEDY, None, lengths_B)
            cache.keep([1] * rows)  # the anchor alone stays

        return self._median_s(step)

    def draft_s(self, rows: int) -> float:
        """Drafting n tokens in so many rows, and observing one token of each."""
        ids_BT = self.ids_BT[:rows, :CONTEXT_TOKENS]
        lengths = [CONTEXT_TOKENS] * rows
        context = open_cache(self.target, rows)
        output = context.forward(ids_BT, lengths, self.proposer.taps, self.proposer.kv_layers)
        lengths_B = torch.tensor(lengths, device=ids_BT.device)
        seen = Observation.of_pass(self.target, self.proposer, ids_BT, output, lengths_B)
        cache = self.proposer.new_cache(rows)
        self.proposer.observe(cache, seen)
        last = seen.part(positions=slice(CONTEXT_TOKENS - 1, None), lengths_B=torch.ones_like(lengths_B))

        def step() -> None:
            self.proposer.propose(cache, ids_BT[:, -1], self.n, GREEDY, None)
            self.proposer.observe(cache, last)

        return self._median_s(step)

    def _filled(self, rows: int) -> TargetCache:
        if rows not in self.caches:
            cache = open_cache(self.target, rows)
            cache.forward(self.ids_BT[:rows, :CONTEXT_TOKENS], [CONTEXT_TOKENS] * rows, ())
            cache.keep([CONTEXT_TOKENS] * rows)
            self.caches[rows] = cache
        return self.caches[rows]

    def _median_s(self, step: Callable[[], None]) -> float:
        seconds: list[float] = []
        while len(seconds) < 2 or (len(seconds) <= _REPEATS and sum(seconds) < _ENOUGH_S):
            start_s = time.perf_counter()
            step()
            if self.target.device.type == "cuda":
                torch.cuda.synchronize(self.target.device)
            seconds.append(time.perf_counter() - start_s)
        return statistics.median(seconds[1:])  # the first one warms up


FIXED, THRESHOLD, SCHEDULER = "fixed", "threshold", "scheduler"


class DraftPolicy(Protocol):
    """How many of the drafts that were made are verified."""

    def lengths(self, confidence_Bn: Tensor, drafted_B: list[int]) -> list[int]:
        """Drafts to keep, at most ``drafted_B[b]`` of row b, from calibrated confidences [B, n].

        Keeping slot j of a row may depend on that row's confidences up to slot j and on other rows, never on a later
        slot of the same row.
        """
        ...


@dataclass(frozen=True)
class ThresholdPolicy:
    """Drafts are kept while their survival is at least ``threshold``."""

    threshold: float

    def lengths(self, confidence_Bn: Tensor, drafted_B: list[int]) -> list[int]:
        survival_Bn = survival(confidence_Bn)
        # Survival never rises from slot to slot, so counting the slots above the threshold finds the prefix.
        kept_B = (survival_Bn >= self.threshold).sum(-1).tolist()
        return [min(kept, drafted) for kept, drafted in zip(kept_B, drafted_B, strict=True)]


def build_policy(name: str, config: DecodingConfig, cost: StepCost | None) -> DraftPolicy | None:
    """The policy of that name; ``cost`` is the scheduler's."""
    if name == FIXED:
        return None
    if name == THRESHOLD:
        return ThresholdPolicy(config.threshold)
    if cost is None:
        raise ValueError("the scheduler needs to know what a step costs")
    return SchedulerPolicy(cost)
