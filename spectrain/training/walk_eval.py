"""Evaluation during training: the server's acceptance length, by the walk, on held-out documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spectrain.config import DecodingConfig
from spectrain.data.packing import PackedBatch, pack_batch
from spectrain.data.states import StateStore
from spectrain.decoding.confidence import ConfidenceSamples
from spectrain.decoding.verify import Law
from spectrain.decoding.walk import Span, expected_walk, supervised_spans, walk, walk_all_lengths
from spectrain.drafters.base import Advance, Drafter, DraftScores
from spectrain.evaluation.metrics import AcceptanceStats, Round, acceptance
from spectrain.training.confidence_eval import joined, walk_samples


@dataclass(frozen=True)
class WalkResult:
    """``stats`` for the configured number of draft tokens; ``length_by_n[n - 1]`` is the acceptance length with n, in expectation.

    ``confidence``: what a confidence head said in the rounds of the walk and what became of it; None without such a head.
    """

    stats: AcceptanceStats
    length_by_n: list[float]
    rounds: list[list[Round]]  # per document
    confidence: ConfidenceSamples | None = None


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
    advance: Advance = lambda documents: None,
) -> WalkResult:
    """Walk ``documents`` of the store with ``config.num_speculative_tokens`` drafts a round, and all lengths up to ``most_tokens``.

    A drafter whose drafts depend on how many are asked for (``length_matters``) is scored once for every length, as it would be served;
    where ``most_tokens`` is not given, only for the configured one, and ``length_by_n`` is empty.
    Scores come from one teacher-forced pass a document; random choices at temperature > 0 are drawn from (seed, document), so the figure
    does not depend on batching. ``advance`` is told about every document, in parts where it is scored more than once.
    """
    n = config.num_speculative_tokens
    most = max(n, most_tokens or n)
    law, draft_law = serving_laws(config)
    device = next(drafter.parameters()).device
    shown = n if drafter.length_matters else most  # the length whose scores the rounds come from
    lengths = range(1, most + 1) if drafter.length_matters and most_tokens is not None else (shown,)
    spans: dict[int, list[Span]] = {length: [] for length in lengths}
    rounds: list[list[Round]] = []
    confidence: list[ConfidenceSamples] = []
    for group in _groups(documents, store, row_tokens):
        batch = pack_batch([store[d] for d in group])
        placed = batch.to(device)
        for length in set(lengths) - {shown}:
            other = document_spans(batch, drafter.score(placed, length, law, draft_law), eos_ids)
            spans[length] += [span for own in other for span in own]
            advance(len(group) / len(lengths))
        scores = drafter.score(placed, shown, law, draft_law)
        advance(len(group) / len(lengths))
        for number, own in zip(group, document_spans(batch, scores, eos_ids), strict=True):
            rng = None if law.greedy or draft_law.greedy else np.random.default_rng((config.seed, number))
            rounds.append([r for span in own for r in walk(span, n, rng)])
            spans[shown] += own
        if scores.confidence_RK is not None:
            said = document_spans(batch, DraftScores(scores.anchor_R, scores.confidence_RK), eos_ids)
            for number, own, heard in zip(group, document_spans(batch, scores, eos_ids), said, strict=True):
                # A stream of its own: the figures of the walk do not depend on whether there is a confidence head.
                rng = np.random.default_rng((config.seed, number, 1))
                confidence += [walk_samples(span, words.accept, n, rng) for span, words in zip(own, heard, strict=True)]
    if drafter.length_matters:
        by_n = [expected_walk(spans[length], length).acceptance_length for length in lengths if most_tokens is not None]
    else:
        by_n = [expectation.acceptance_length for expectation in walk_all_lengths(spans[shown], most)]
    return WalkResult(acceptance(rounds, n), by_n, rounds, joined(confidence))


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
