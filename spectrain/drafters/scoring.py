"""Acceptance of a document's own tokens, for the walk.

At temperature 0 a slot is accepted iff the drafter's arg max is the document's token. At temperature > 0 the document was drawn
from the target's truncated law q, and the server would accept its token with probability min(1, p/q); a drafter that proposes its arg
max has a one-hot p, which makes that probability 0 or 1 again. Chunked like the losses: no [tokens, vocabulary] is ever whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.data.vocab import DraftVocab
from spectrain.decoding.verify import Law, truncated_log_probs
from spectrain.decoding.walk import acceptance_probability
from spectrain.drafters.losses import CHUNK_BYTES, Teacher
from spectrain.target.cpu_linear import linear
from spectrain.target.families import at_least_float32


def accept_probability(
    hidden_KUH: Tensor,
    lm_head_DH: Tensor,
    teacher: Teacher,
    token_U: Tensor,
    vocab: DraftVocab | None,
    law: Law,
    draft_law: Law,
) -> Tensor:
    """float32 [K, U]: probability that student k's slot accepts ``token_U`` (target ids). ``vocab`` None: the drafter knows all tokens.

    ``draft_law`` greedy: arg-max drafts.
    """
    k, u, h = hidden_KUH.shape
    lookup = None if vocab is None else vocab.target_to_draft().to(token_U.device)
    draft_U = token_U if lookup is None else lookup[token_U]
    widest = max(k * lm_head_DH.shape[0], 0 if draft_law.greedy else len(teacher.head.lm_head_weight))
    chunk = max(1, CHUNK_BYTES // (4 * widest))
    accept_KU = torch.zeros(k, u, device=hidden_KUH.device)
    for start in range(0, u, chunk):
        part = slice(start, min(start + chunk, u))
        logits_KCD = at_least_float32(linear(hidden_KUH[:, part], lm_head_DH.to(hidden_KUH.dtype)))
        if draft_law.greedy:
            accept_KU[:, part] = (logits_KCD.argmax(-1) == draft_U[part]).float()
            continue
        inside_C = draft_U[part] >= 0
        index_KC1 = draft_U[part].clamp(min=0).expand(k, -1)[..., None]
        log_p_KC = truncated_log_probs(logits_KCD, draft_law).gather(-1, index_KC1)[..., 0]
        log_q_CV = truncated_log_probs(teacher.head.hidden_to_logits(teacher.last_hidden_UH[part]), law)
        log_q_C = log_q_CV.gather(-1, token_U[part, None])[:, 0]
        accept_KU[:, part] = torch.where(inside_C, acceptance_probability(log_p_KC, log_q_C), 0.0)
    return accept_KU
