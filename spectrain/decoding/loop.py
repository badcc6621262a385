"""The lossless decoding loop: draft, score all drafts in one pass of the target, keep what is accepted.

One round, with the anchor (the last committed token) at position a:

    proposer   drafts d_1 … d_n for positions a + 1 … a + n
    policy     keeps the leading drafts that are worth verifying (all of them, unless asked otherwise)
    target     runs over [anchor, d_1 … d_n]; row j of its logits is the distribution of slot j + 1
    verify     k drafts are accepted, and one more token follows them (the correction, or the bonus after n)
    observe    the proposer is shown anchor, d_1 … d_k with what that same pass computed there (taps, last hidden
               states); the new anchor is the token after them

Decoding without speculation is the same loop with no drafts. Rows of a batch accept different counts and leave when
they are done. Each prompt has its own random stream, so its answer does not depend on the prompts beside it.

Legend: B batch, T tokens of one pass, m = drafts + 1, H hidden, A taps, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spectrain.decoding.acceptance import Round
from spectrain.decoding.proposers import Observation, Proposal, Proposer, Remembering
from spectrain.decoding.sampling import GREEDY, SamplingParams
from spectrain.decoding.scheduler import DraftPolicy
from spectrain.decoding.verify import Verdict, verify
from spectrain.target.cpu_kernels import cpu_attention
from spectrain.target.kv_cache import open_cache
from spectrain.target.model import TargetModel, TargetOutput


@dataclass(frozen=True)
class Prompt:
    """A text to go on with.

    ids: its tokens, at least one. max_new_tokens: the most of its answer, at least 1; an end token counts. stream:
    number of its random stream under the seed of the settings; ``None``: its index among the prompts of the call.
    """

    ids: Sequence[int]
    max_new_tokens: int
    stream: int | None = None

    def __post_init__(self) -> None:
        if len(self.ids) == 0 or self.max_new_tokens < 1:
            raise ValueError("every prompt needs at least one token, and room for at least one more")


@dataclass(frozen=True)
class DecodingSettings:
    """How all prompts of a call are decoded.

    num_speculative_tokens: drafts a round; without effect where nothing drafts. sampling: the target's sampling
    distribution, which answers have whatever the drafts are. draft_sampling: greedy for argmax drafts (a one-hot
    distribution, lossless at every temperature), else what drafts are drawn from. policy: how many drafts of each row
    are verified, by the proposer's confidence; ``None``: all. eos_ids: tokens that end an answer. batch_size: prompts
    decoded together; ``None``: all.
    """

    num_speculative_tokens: int = 0
    sampling: SamplingParams = GREEDY
    draft_sampling: SamplingParams = GREEDY
    policy: DraftPolicy | None = None
    eos_ids: Collection[int] = ()
    seed: int = 0
    batch_size: int | None = None


@dataclass(frozen=True)
class GenerationResult:
    """Answer to one prompt: its ids (the end token included), the rounds that made it, and "stop" (end token) or
    "length".
    """

    ids: list[int]
    rounds: list[Round]
    finish_reason: str


@dataclass
class LoopTiming:
    """Wall-clock sums. A batch's round counts once in ``rounds``, whatever its number of rows."""

    rounds: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0  # propose and observe
    verify_s: float = 0.0  # the target's pass, verification, upkeep of its cache


@dataclass(frozen=True)
class Generation:
    """Results in the order of the prompts, and where the time went."""

    results: list[GenerationResult]
    timing: LoopTiming


def speculative_generate(
    target: TargetModel,
    proposer: Proposer | None,
    prompts: Sequence[Prompt],
    settings: DecodingSettings,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> Generation:
    """Answers to prompts, distributed exactly as the target's own under ``settings.sampling``.

    Args:
        proposer: what drafts; ``None`` decodes without speculation.
        on_tokens: called after each round with the number of tokens it added, for progress bars.
    """
    rows = [
        _Row(
            list(prompt.ids),
            prompt.max_new_tokens,
            _generator(settings.seed, index if prompt.stream is None else prompt.stream),
        )
        for index, prompt in enumerate(prompts)
    ]
    if proposer is None:
        settings = replace(settings, num_speculative_tokens=0)
    batch = settings.batch_size or max(len(rows), 1)
    timing = LoopTiming()
    for first in range(0, len(rows), batch):
        _Batch(target, proposer, rows[first : first + batch], settings, timing, on_tokens).run()
    return Generation([GenerationResult(row.answer, row.rounds, row.finish_reason) for row in rows], timing)


@dataclass
class _Row:
    """One prompt and its answer so far."""

    prompt: list[int]
    limit: int
    generator: torch.Generator
    answer: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def anchor(self) -> int:
        """Position of the last committed token."""
        return len(self.prompt) + len(self.answer) - 1

    def commit(self, tokens: list[int], eos_ids: Collection[int]) -> int:
        """Take new tokens up to an end token or the length limit; returns how many became text."""
        kept = 0
        for token in tokens[: self.limit - len(self.answer)]:
            self.answer.append(token)
            kept += 1
            if token in eos_ids:
                self.finish_reason = "stop"
                return kept
        if len(self.answer) == self.limit:
            self.finish_reason = "length"
        return kept

    def commit_round(
        self,
        drafts: list[int],
        accepted: int,
        next_token: int,
        eos_ids: Collection[int],
        confidence: tuple[float, ...] = (),
    ) -> None:
        anchor = self.anchor
        kept = self.commit([*drafts[:accepted], next_token], eos_ids)
        accepted = min(kept, accepted)
        # The text ends on an accepted draft with further slots undecided: a reader of the text cannot tell how many
        # would have been accepted.
        cut = self.finish_reason == "length" and kept == accepted < len(drafts)
        self.rounds.append(Round(anchor, len(drafts), accepted, cut, tuple(drafts), confidence))


class _Batch:
    """Prompts decoded together, from prefill until the last one is done."""

    def __init__(
        self,
        target: TargetModel,
        proposer: Proposer | None,
        rows: list[_Row],
        settings: DecodingSettings,
        timing: LoopTiming,
        on_tokens: Callable[[int], None],
    ) -> None:
        self.target = target
        self.proposer = proposer
        self.rows = rows
        self.settings = settings
        self.timing = timing
        self.on_tokens = on_tokens
        self.taps = () if proposer is None else proposer.taps
        self.kv_layers = () if proposer is None else proposer.kv_layers
        self.cache = open_cache(target, len(rows))
        self.draft_cache = None if proposer is None else proposer.new_cache(len(rows))

    def run(self) -> None:
        with cpu_attention(self.target.model):
            self._run()

    def _run(self) -> None:
        with self._timed("prefill_s"):
            self._prefill()
        while self.rows:
            with self._timed("draft_s"):
                proposal = self._propose()
            with self._timed("verify_s"):
                ids_BT, output, counts = self._verify(proposal)
            with self._timed("draft_s"):
                self._observe(ids_BT, output, counts)
            self.timing.rounds += 1

    def _prefill(self) -> None:
        lengths = [len(row.prompt) for row in self.rows]
        ids_BT = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        for ids, row in zip(ids_BT, self.rows, strict=True):
            ids[: len(row.prompt)] = torch.tensor(row.prompt)
        ids_BT = ids_BT.to(self.target.device)
        output = self.cache.forward(ids_BT, lengths, self.taps, self.kv_layers)
        last_B1H = output.last_hidden_BSH[torch.arange(len(lengths)), torch.tensor(lengths) - 1][:, None]
        no_drafts_B0 = ids_BT[:, :0]
        verdict = self._judge(no_drafts_B0, None, last_B1H, None)
        for row, token in zip(self.rows, verdict.next_token.tolist(), strict=True):
            row.commit([token], self.settings.eos_ids)
        self.on_tokens(len(self.rows))
        self.cache.keep(lengths)
        self._observe(ids_BT, output, lengths)

    def _propose(self) -> Proposal:
        anchor_B = torch.tensor([row.answer[-1] for row in self.rows], device=self.target.device)
        if self.proposer is None:
            return Proposal(ids=anchor_B[:, None][:, :0])
        draft_sampling = self.settings.draft_sampling
        generators = None if draft_sampling.greedy else [row.generator for row in self.rows]
        n = self.settings.num_speculative_tokens
        proposal = self.proposer.propose(self.draft_cache, anchor_B, n, draft_sampling, generators)
        return proposal if self.settings.policy is None else _shortened(proposal, self.settings.policy)

    def _verify(self, proposal: Proposal) -> tuple[Tensor, TargetOutput, list[int]]:
        """One pass of the target over anchor and drafts. Returns its tokens, its output, and how many of its tokens
        each row keeps.
        """
        lengths = [proposal.ids.shape[1]] * len(self.rows) if proposal.lengths is None else proposal.lengths.tolist()
        longest = max(lengths)
        draft_ids = proposal.ids[:, :longest]
        draft_log_probs = None if proposal.log_probs is None else proposal.log_probs[:, :longest]
        anchor_B1 = torch.tensor([[row.answer[-1]] for row in self.rows], device=self.target.device)
        ids_BT = torch.cat([anchor_B1, draft_ids.to(anchor_B1.device)], dim=1)
        output = self.cache.forward(ids_BT, [length + 1 for length in lengths], self.taps, self.kv_layers)
        verdict = self._judge(ids_BT[:, 1:], draft_log_probs, output.last_hidden_BSH, proposal.lengths)

        accepted, drafts = verdict.accepted.tolist(), draft_ids.tolist()
        confidence = [[]] * len(self.rows) if proposal.confidence is None else proposal.confidence.tolist()
        before = sum(len(row.answer) for row in self.rows)
        for b, (row, token) in enumerate(zip(self.rows, verdict.next_token.tolist(), strict=True)):
            row.commit_round(
                drafts[b][: lengths[b]], accepted[b], token, self.settings.eos_ids, tuple(confidence[b][: lengths[b]])
            )
        self.on_tokens(sum(len(row.answer) for row in self.rows) - before)
        counts = [count + 1 for count in accepted]
        self.cache.keep(counts)
        return ids_BT, output, counts

    def _judge(
        self, draft_ids: Tensor, draft_log_probs: Tensor | None, last_hidden_BmH: Tensor, lengths_B: Tensor | None
    ) -> Verdict:
        uniforms_Bm = None
        if not self.settings.sampling.greedy:
            # n + 1 numbers whatever the longest row drafted: a row's stream must not depend on its neighbours.
            most = self.settings.num_speculative_tokens + 1
            drawn = torch.stack([torch.rand(most, generator=row.generator, dtype=torch.float64) for row in self.rows])
            uniforms_Bm = drawn[:, : draft_ids.shape[1] + 1]
        logits_BmV = self._logits(last_hidden_BmH, lengths_B)
        return verify(draft_ids, draft_log_probs, logits_BmV, self.settings.sampling, uniforms_Bm, lengths_B)

    def _logits(self, last_hidden_BmH: Tensor, lengths_B: Tensor | None) -> Tensor:
        """Logits of anchors and drafts; zeros where a row has no draft, because the head costs as much as many
        layers.
        """
        if lengths_B is None:
            return self.target.logits(last_hidden_BmH)
        real_Bm = (
            torch.arange(last_hidden_BmH.shape[1], device=last_hidden_BmH.device)
            <= lengths_B.to(last_hidden_BmH.device)[:, None]
        )
        logits_RV = self.target.logits(last_hidden_BmH[real_Bm])
        logits_BmV = logits_RV.new_zeros(*real_Bm.shape, logits_RV.shape[-1])
        logits_BmV[real_Bm] = logits_RV
        return logits_BmV

    def _observe(self, ids_BT: Tensor, output: TargetOutput, counts: list[int]) -> None:
        """Let finished rows go, then show the proposer what the others committed."""
        alive = [b for b, row in enumerate(self.rows) if not row.finish_reason]
        rows: Any = slice(None)
        if len(alive) < len(self.rows):
            if isinstance(self.proposer, Remembering):
                for b in sorted(set(range(len(self.rows))) - set(alive)):
                    self.proposer.finish(self.draft_cache, b, self.rows[b].prompt + self.rows[b].answer)
            self.rows = [self.rows[b] for b in alive]
            counts = [counts[b] for b in alive]
            rows = torch.tensor(alive, dtype=torch.long, device=ids_BT.device)
            if alive:
                self.cache.select(alive)
                self.draft_cache = None if self.proposer is None else self.proposer.select(self.draft_cache, rows)
        if self.proposer is not None and alive:
            lengths_B = torch.tensor(counts, device=ids_BT.device)
            seen = Observation.of_pass(self.target, self.proposer, ids_BT, output, lengths_B)
            self.proposer.observe(self.draft_cache, seen.part(rows, slice(max(counts)), lengths_B))

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        setattr(self.timing, name, getattr(self.timing, name) + time.perf_counter() - start_s)


def _shortened(proposal: Proposal, policy: DraftPolicy) -> Proposal:
    """The leading drafts that the policy keeps."""
    if proposal.confidence is None:
        raise ValueError("a draft policy needs a proposer that states its confidence")
    batch, n = proposal.ids.shape
    drafted = [n] * batch if proposal.lengths is None else proposal.lengths.tolist()
    lengths = policy.lengths(proposal.confidence, drafted)
    return replace(proposal, lengths=torch.tensor(lengths, device=proposal.ids.device))


def _generator(seed: int, stream: int) -> torch.Generator:
    """A random stream of its own for each (seed, stream); SeedSequence keeps neighbouring numbers apart."""
    state = int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(state >> 1)  # manual_seed takes 63 bits
