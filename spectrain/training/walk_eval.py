"""Evaluation during training: the server's acceptance length, by the walk, on held-out documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spectrain.config import DecodingConfig
from spectrain.data.packing import PackedBatch, pack_batch
from spectrain.data.states import StateStore
from spectrain.decoding.verify import Law
from spectrain.decoding.walk import Span, supervised_spans, walk, walk_all_lengths
from spectrain.drafters.base import Drafter, DraftScores
from spectrain.evaluation.metrics import AcceptanceStats, Round, acceptance


@dataclass(frozen=True)
class WalkResult:
    """``stats`` for the configured number of draft tokens; ``length_by_n[n - 1]`` is the acceptance length with n, in expectation."""

    stats: AcceptanceStats
    length_by_n: list[float]
    rounds: list[list[Round]]  # per document


def serving_laws(config: DecodingConfig) -> tuple[Law, Law]:
    """(the target's sampling law, the law drafts are made by)."""
    law = Law(config.temperature, config.top_p, config.top_k)
    return law, law if config.proposal_policy == "sample" and not law.greedy else Law()


def evaluate_by_walk(
    drafter: Drafter,
    store: StateStore,
    documents: Sequence[int],
    config: DecodingConfig,
    eos_ids: Sequence[int],
    row_tokens: int,
    most_tokens: int | None = None,
) -> WalkResult:
    """Walk ``documents`` of the store with ``config.num_speculative_tokens`` drafts a round, and all lengths up to ``most_tokens``.

    Scores come from one teacher-forced pass a document; random choices at temperature > 0 are drawn from (seed, document), so the figure
    does not depend on batching.
    """
    n = config.num_speculative_tokens
    most = max(n, most_tokens or n)
    law, draft_law = serving_laws(config)
    device = next(drafter.parameters()).device
    spans: list[Span] = []
    rounds: list[list[Round]] = []
    for group in _groups(documents, store, row_tokens):
        batch = pack_batch([store[d] for d in group])
        scores = drafter.score(batch.to(device), most, law, draft_law)
        for number, own in zip(group, document_spans(batch, scores, eos_ids), strict=True):
            rng = None if law.greedy or draft_law.greedy else np.random.default_rng((config.seed, number))
            rounds.append([r for span in own for r in walk(span, n, rng)])
            spans.extend(own)
    by_n = [expectation.acceptance_length for expectation in walk_all_lengths(spans, most)]
    return WalkResult(acceptance(rounds, n), by_n, rounds)


def document_spans(batch: PackedBatch, scores: DraftScores, eos_ids: Sequence[int]) -> list[list[Span]]:
    """Cut the scores of a packed batch into the answers of each document."""
    accept_TK = torch.zeros(batch.num_tokens, scores.accept_RK.shape[1])
    accept_TK[scores.anchor_R.cpu()] = scores.accept_RK.float().cpu()
    result, offset = [], 0
    for length in batch.lengths():
        part = slice(offset, offset + length)
        ids, mask, accept = batch.input_ids_T[part].numpy(), batch.loss_mask_T[part].numpy(), accept_TK[part].numpy()
        result.append([Span(start, accept[start:end], int(ids[end - 1]) in eos_ids) for start, end in supervised_spans(mask)])
        offset += length
    return result


def _groups(documents: Sequence[int], store: StateStore, row_tokens: int) -> list[list[int]]:
    """Consecutive documents of at most ``row_tokens`` together (a longer one alone)."""
    groups: list[list[int]] = []
    room = 0
    for number in documents:
        length = int(store.lengths[number])
        if not groups or length > room:
            groups.append([])
            room = row_tokens
        groups[-1].append(number)
        room -= length
    return groups
