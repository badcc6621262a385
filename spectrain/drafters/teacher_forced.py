"""Acceptance of a document's own tokens, for the simulation.

At temperature 0 a slot is accepted iff the drafter's argmax is the document's token. At temperature > 0 the document
was drawn from the target's truncated distribution q, and the server would accept its token with probability min(1,
p/q); a drafter that proposes its argmax has a one-hot p, which makes that probability 0 or 1 again. Chunked like the
losses: no [tokens, vocabulary] is ever whole.

Legend: U teacher positions, K steps, C positions of a chunk, S predictions, H hidden, D draft vocabulary, V target
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from spectrain.data.vocab import DraftVocab
from spectrain.decoding.sampling import SamplingParams, truncated_log_probs
from spectrain.decoding.simulate import acceptance_probability
from spectrain.drafters.losses.fused import Teacher, rows_in_chunk
from spectrain.target.cpu_kernels import linear
from spectrain.target.families import at_least_float32


def accept_probability(
    hidden_KUH: Tensor,
    lm_head_DH: Tensor,
    teacher: Teacher,
    token_U: Tensor,
    vocab: DraftVocab | None,
    sampling: SamplingParams,
    draft_sampling: SamplingParams,
    logits: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """float32 [K, U]: probability that student k's slot accepts ``token_U`` (target ids). ``vocab`` None: the drafter
    knows all tokens.

    ``draft_sampling`` greedy: argmax drafts. ``logits``: what makes [.., D] of hidden states; None: ``lm_head_DH``.
    """
    draft_U = token_U if vocab is None else vocab.target_to_draft().to(token_U.device)[token_U]
    log_q_U = None if draft_sampling.greedy else target_log_probs(teacher, token_U, sampling)
    matrix_DH = lm_head_DH.to(hidden_KUH.dtype)
    made = logits or partial(linear, weight=matrix_DH)
    accept = [
        acceptance(partial(_logits, hidden_UH, made), matrix_DH, draft_U, log_q_U, draft_sampling)
        for hidden_UH in hidden_KUH
    ]
    return torch.stack(accept) if accept else hidden_KUH.new_zeros(hidden_KUH.shape[:2], dtype=torch.float32)


def target_log_probs(teacher: Teacher, token_U: Tensor, sampling: SamplingParams) -> Tensor:
    """log q [U] of one token at each position, q the target's truncated distribution: what its temperature, top-k and
    top-p leave.
    """
    rows = rows_in_chunk(teacher.head.lm_head_weight)
    chunks = []
    for part in _parts(len(token_U), rows):
        log_q_CV = truncated_log_probs(teacher.head.hidden_to_logits(teacher.last_hidden_UH[part]), sampling)
        chunks.append(log_q_CV.gather(-1, token_U[part, None])[:, 0])
    return torch.cat(chunks) if chunks else teacher.last_hidden_UH.new_empty(0)


def acceptance(
    logits: Callable[[slice], Tensor],
    matrix_DH: Tensor,
    draft_S: Tensor,
    log_q_S: Tensor | None,
    draft_sampling: SamplingParams,
) -> Tensor:
    """float32 [S]: probability that each prediction accepts the document's token ``draft_S`` (draft ids, -1: outside).

    ``logits`` of a slice of the predictions [C, D]; ``matrix_DH`` says how many are made at a time; ``log_q_S`` is not
    needed where ``draft_sampling`` is greedy.
    """
    accept_S = torch.zeros(len(draft_S), device=draft_S.device)
    for part in _parts(len(draft_S), rows_in_chunk(matrix_DH)):
        logits_CD = at_least_float32(logits(part))
        if draft_sampling.greedy:
            accept_S[part] = (logits_CD.argmax(-1) == draft_S[part]).float()
            continue
        assert log_q_S is not None
        log_p_C = truncated_log_probs(logits_CD, draft_sampling).gather(-1, draft_S[part].clamp(min=0)[:, None])[:, 0]
        accept_S[part] = torch.where(draft_S[part] >= 0, acceptance_probability(log_p_C, log_q_S[part]).float(), 0.0)
    return accept_S


def _logits(hidden_UH: Tensor, made: Callable[[Tensor], Tensor], part: slice) -> Tensor:
    return made(hidden_UH[part])


def _parts(count: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]
