"""Evaluation during training: simulated acceptance on held-out documents, the acceptance length that decoding and
vLLM will measure (``decoding/simulate.py`` says why), without decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spectrain import signals
from spectrain.config.evaluation_schema import DecodingConfig
from spectrain.data.hidden_states import HiddenStateSource
from spectrain.data.loader import announce
from spectrain.data.loss_mask import generated_ranges
from spectrain.data.packing import PackedBatch, pack_batch
from spectrain.decoding.acceptance import AcceptanceStats, Round, acceptance
from spectrain.decoding.confidence import ConfidenceSamples, joined, simulated_samples
from spectrain.decoding.sampling import SamplingParams
from spectrain.decoding.simulate import Span, expected_acceptance, expected_acceptance_by_length, simulate
from spectrain.drafters.drafter import Advance, Drafter, DraftScores
from spectrain.training.distributed import ALONE, Ranks


@dataclass(frozen=True)
class SimulatedAcceptance:
    """``stats`` and ``rounds`` (of each document) for the configured number of draft tokens; ``length_by_n[n - 1]`` is
    the acceptance length with n, in expectation.

    ``confidence``: what a confidence head said in the rounds of the simulation and what became of it; None without such
    a head.
    """

    stats: AcceptanceStats
    length_by_n: list[float]
    rounds: list[list[Round]]
    confidence: ConfidenceSamples | None = None


@dataclass(frozen=True)
class _Document:
    """What the simulation found in one document: its answers, by the number of drafts they were scored for; rounds; and
    what a confidence head said in them.
    """

    spans: dict[int, list[Span]]
    rounds: list[Round]
    confidence: list[ConfidenceSamples]


def decoding_sampling(config: DecodingConfig) -> tuple[SamplingParams, SamplingParams]:
    """(the target's sampling, that of drafts): drafts are drawn as the target samples, or greedy (argmax)."""
    sampling = SamplingParams(config.temperature, config.top_p, config.top_k)
    return sampling, sampling if config.proposal_policy == "sample" and not sampling.greedy else SamplingParams()


def simulate_heldout(
    drafter: Drafter,
    source: HiddenStateSource,
    documents: Sequence[int],
    config: DecodingConfig,
    eos_ids: Sequence[int],
    packed_length: int,
    most_tokens: int | None = None,
    advance: Advance = lambda documents: None,
    ranks: Ranks = ALONE,
) -> SimulatedAcceptance:
    """Simulate ``documents`` of the source with ``config.num_speculative_tokens`` drafts a round, and all lengths up
    to ``most_tokens``.

    A drafter whose drafts depend on how many are asked for (``length_matters``) is scored once for every length, as it
    would be decoded with; where ``most_tokens`` is not given, only for the configured one, and ``length_by_n`` is
    empty. Scores come from one teacher-forced pass a document; random choices at temperature > 0 are drawn from (seed,
    document), so the figure does not depend on batching, nor on how many ``ranks`` share the documents. ``advance`` is
    told about every document, in parts where it is scored more than once. Raises StopAsked where a rank was asked to
    stop meanwhile.
    """
    n = config.num_speculative_tokens
    most = max(n, most_tokens or n)
    sampling, draft_sampling = decoding_sampling(config)
    device = next(drafter.parameters()).device
    shown = n if drafter.length_matters else most  # the length whose scores the rounds come from
    lengths = range(1, most + 1) if drafter.length_matters and most_tokens is not None else (shown,)
    own_documents = documents[ranks.index :: ranks.count]
    announce(source, own_documents)
    found: list[_Document] = []
    for group in _groups(own_documents, source, packed_length):
        if signals.asked():
            break
        batch = pack_batch([source[d] for d in group])
        placed = batch.to(device)
        others: dict[int, list[list[Span]]] = {}
        for length in set(lengths) - {shown}:
            others[length] = document_spans(batch, drafter.score(placed, length, sampling, draft_sampling), eos_ids)
            advance(ranks.count * len(group) / len(lengths))
        scores = drafter.score(placed, shown, sampling, draft_sampling)
        advance(ranks.count * len(group) / len(lengths))
        for index, (number, own) in enumerate(zip(group, document_spans(batch, scores, eos_ids), strict=True)):
            rng = None if sampling.greedy or draft_sampling.greedy else np.random.default_rng((config.seed, number))
            rounds_here = [r for span in own for r in simulate(span, n, rng)]
            # A stream of its own: the simulation's figures do not depend on whether there is a confidence head.
            rng = np.random.default_rng((config.seed, number, 1))
            has_confidence = scores.confidence_RK is not None
            found.append(
                _Document(
                    {shown: own, **{length: by_document[index] for length, by_document in others.items()}},
                    rounds_here,
                    [simulated_samples(span, n, rng) for span in own] if has_confidence else [],
                )
            )
    parts = ranks.gathered(found)
    if sum(map(len, parts)) < len(documents):
        raise signals.StopAsked
    in_order = [parts[i % ranks.count][i // ranks.count] for i in range(len(documents))]
    spans = {length: [span for document in in_order for span in document.spans[length]] for length in lengths}
    rounds = [document.rounds for document in in_order]
    confidence = [sample for document in in_order for sample in document.confidence]
    if drafter.length_matters:
        by_n = [
            expected_acceptance(spans[length], length).acceptance_length
            for length in lengths
            if most_tokens is not None
        ]
    else:
        by_n = [expectation.acceptance_length for expectation in expected_acceptance_by_length(spans[shown], most)]
    return SimulatedAcceptance(acceptance(rounds, n), by_n, rounds, joined(confidence))


def document_spans(batch: PackedBatch, scores: DraftScores, eos_ids: Sequence[int]) -> list[list[Span]]:
    """Cut the scores of a packed batch into the answers of each document."""
    accept_TK = _by_position(scores.anchor_R, scores.accept_RK, batch.num_tokens)
    confidence_TK = None
    if scores.confidence_RK is not None:
        confidence_TK = _by_position(scores.anchor_R, scores.confidence_RK, batch.num_tokens)
    result, offset = [], 0
    for length in batch.lengths():
        document = slice(offset, offset + length)
        ids, mask = batch.input_ids_T[document].numpy(), batch.loss_mask_T[document].numpy()
        spans = []
        for start, end in generated_ranges(mask):
            answer = slice(offset + start, offset + end)
            said = None if confidence_TK is None else confidence_TK[answer]
            spans.append(Span(start, accept_TK[answer], int(ids[end - 1]) in eos_ids, said))
        result.append(spans)
        offset += length
    return result


def _by_position(anchor_R: Tensor, values_RK: Tensor, num_tokens: int) -> np.ndarray:
    """[num_tokens, K] of values that belong to anchors; 0 where a position is none."""
    values_TK = torch.zeros(num_tokens, values_RK.shape[1])
    values_TK[anchor_R.cpu()] = values_RK.float().cpu()
    return values_TK.numpy()


def _groups(documents: Sequence[int], source: HiddenStateSource, packed_length: int) -> list[list[int]]:
    """Consecutive documents of at most ``packed_length`` together (a longer one alone)."""
    groups: list[list[int]] = []
    room = 0
    for number in documents:
        length = int(source.lengths[number])
        if not groups or length > room:
            groups.append([])
            room = packed_length
        groups[-1].append(number)
        room -= length
    return groups
