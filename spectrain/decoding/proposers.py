"""What the decoding loop needs of anything that drafts, and drafting by n-gram lookup.

A proposer sees verified tokens (``observe``) and guesses what follows them (``propose``), as a drafter does inside
vLLM. A trained drafter satisfies the protocol itself; n-gram lookup shows that a proposer needs nothing of the target
at all.

Legend: B batch, T tokens, A taps, H hidden, n draft tokens, V vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from spectrain.decoding.sampling import SamplingParams
from spectrain.errors import ConfigError
from spectrain.target.model import TargetModel, TargetOutput


@dataclass(frozen=True)
class Proposal:
    """The drafts of one round.

    ids: [B, n'] with n' ≤ the n asked for. log_probs: log-probabilities [B, n', V] in the target's vocabulary that each
    draft was drawn from, or ``None`` when the drafts were chosen, not drawn (a one-hot distribution). lengths: [B]
    drafts per row when rows differ (the rest of a row is padding), or ``None`` when every row has n'.

    confidence: [B, n'] in (0, 1), how likely each draft is accepted if those before it are (calibrated, where the
    drafter has been), or ``None``. Entry j is made from what is known before draft j is chosen: otherwise cutting
    drafts short by it would change the distribution of the output.
    """

    ids: Tensor
    log_probs: Tensor | None = None
    confidence: Tensor | None = None
    lengths: Tensor | None = None


@dataclass(frozen=True)
class Observation:
    """Verified tokens of a batch of texts, in text order, and what the target computed at their positions.

    Rows are padded on the right; ``lengths_B`` says how many tokens of each are real. What a proposer does not ask for
    is ``None``: taps (``Proposer.taps``), the last hidden state, after the target's final norm or before it
    (``Proposer.reads_last_hidden``, ``read_hidden``), and the target's own keys and values of named layers
    (``Proposer.kv_layers``).
    """

    ids_BT: Tensor
    lengths_B: Tensor
    taps_BTAH: Tensor | None = None
    last_hidden_BTH: Tensor | None = None
    target_kv: Mapping[int, tuple[Tensor, Tensor]] | None = None  # layer -> keys and values [B, G, T, d]

    @classmethod
    def of_pass(
        cls, target: TargetModel, proposer: Proposer, ids_BT: Tensor, output: TargetOutput, lengths_B: Tensor
    ) -> Observation:
        """What ``proposer`` asks for of one pass of the target over ``ids_BT``."""
        hidden = None
        if proposer.reads_last_hidden:
            hidden = read_hidden(proposer, target, output.last_hidden_BSH)
        return cls(ids_BT, lengths_B, output.taps_BSAH, hidden, output.target_kv)

    def part(
        self, rows: Any = slice(None), positions: slice = slice(None), lengths_B: Tensor | None = None
    ) -> Observation:
        """These rows and positions; ``lengths_B``: of what is left, as before where it is not given."""
        taps, hidden, kv = self.taps_BTAH, self.last_hidden_BTH, self.target_kv
        return Observation(
            self.ids_BT[rows][:, positions],
            self.lengths_B[rows] if lengths_B is None else lengths_B,
            None if taps is None else taps[rows][:, positions],
            None if hidden is None else hidden[rows][:, positions],
            None
            if kv is None
            else {layer: (k[rows][:, :, positions], v[rows][:, :, positions]) for layer, (k, v) in kv.items()},
        )


def read_hidden(proposer: Any, target: Any, last_hidden: Tensor) -> Tensor:
    """The target's last hidden state [..., H], given before its final norm, as ``proposer`` reads it: behind the norm,
    or before it where the proposer says so by ``reads_before_norm``. ``target``: with ``post_norm``.
    """
    return last_hidden if getattr(proposer, "reads_before_norm", False) else target.post_norm(last_hidden)


class Proposer(Protocol):
    """Drafts for a batch of texts.

    taps: the taps of the target that ``observe`` reads, ascending; empty when it needs none.
    reads_last_hidden: whether it also reads the target's last hidden state, after the final norm.
    kv_layers: layers of the target, from 0, whose keys and values it reads; empty when it needs none.
    The cache is the proposer's own; ``observe`` changes it in place, ``propose`` leaves no trace in it.
    """

    taps: tuple[int, ...]
    reads_last_hidden: bool
    kv_layers: tuple[int, ...]

    def new_cache(self, batch_size: int) -> Any:
        """State for a batch of texts of which nothing has been seen yet."""
        ...

    def observe(self, cache: Any, observation: Observation) -> None:
        """Take in verified tokens and what the target computed there."""
        ...

    def propose(
        self,
        cache: Any,
        anchor_B: Tensor,
        n: int,
        sampling: SamplingParams,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Proposal:
        """Drafts for the n tokens after the anchor, the last committed token, whose own taps do not exist yet.

        A greedy ``sampling`` asks for argmax drafts (``Proposal.log_probs`` is ``None``); any other asks for drafts
        drawn from the drafter's distribution under the same temperature and truncation. Row b then draws from
        ``generators[b]`` alone (on the CPU), so that what it drafts does not depend on the other rows.
        """
        ...

    def select(self, cache: Any, rows: Tensor) -> Any:
        """The cache of these rows of the batch, in this order; the old one is not used again."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """A proposer that learns from finished answers, too."""

    def finish(self, cache: Any, row: int, text: Sequence[int]) -> None:
        """A row is done: ``text`` is its prompt and whole answer."""
        ...


class NGramProposer:
    """Prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding): the text itself is the
    drafter.

    The longest suffix of ``ngram_max`` … ``ngram_min`` tokens that occurred before is looked up, and its first
    occurrence is read on from there, as vLLM does it. A row without a match drafts nothing, and a match near the end of
    the text drafts fewer than n.
    """

    taps: tuple[int, ...] = ()
    reads_last_hidden = False
    kv_layers: tuple[int, ...] = ()

    def __init__(self, ngram_max: int = 4, ngram_min: int = 2) -> None:
        if not 1 <= ngram_min <= ngram_max:
            raise ConfigError(f"ngram_min={ngram_min} must lie between 1 and ngram_max={ngram_max}")
        self.ngram_max = ngram_max
        self.ngram_min = ngram_min

    def new_cache(self, batch_size: int) -> list[list[int]]:
        return [[] for _ in range(batch_size)]

    def observe(self, cache: list[list[int]], observation: Observation) -> None:
        rows = zip(cache, observation.ids_BT.tolist(), observation.lengths_B.tolist(), strict=True)
        for text, ids, length in rows:
            text.extend(ids[:length])

    def propose(
        self,
        cache: list[list[int]],
        anchor_B: Tensor,
        n: int,
        sampling: SamplingParams,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Proposal:
        drafts = [self.lookup([*text, anchor], n) for text, anchor in zip(cache, anchor_B.tolist(), strict=True)]
        lengths = [len(draft) for draft in drafts]
        ids_Bn = torch.tensor([draft + [0] * (n - len(draft)) for draft in drafts], dtype=torch.long).reshape(
            len(drafts), n
        )
        return Proposal(ids=ids_Bn.to(anchor_B.device), lengths=torch.tensor(lengths, device=anchor_B.device))

    def select(self, cache: list[list[int]], rows: Tensor) -> list[list[int]]:
        return [cache[row] for row in rows.tolist()]

    def lookup(self, text: Sequence[int], n: int) -> list[int]:
        """At most n tokens that followed the first occurrence of the longest repeated suffix of ``text``."""
        ids = np.asarray(text, dtype=np.int64)
        for size in range(min(self.ngram_max, len(ids) - 1), self.ngram_min - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], size)  # ends before the suffix itself
            starts = np.flatnonzero((windows == ids[-size:]).all(axis=1))
            if len(starts):
                after = int(starts[0]) + size
                return [int(token) for token in ids[after : after + n]]
        return []
