"""Before anything is stored: are the captured states the target's?

A wrong gain, a missing scale or a document that sees its neighbour would give states that train a drafter without
complaint, and a drafter whose drafts every server then rejects. So captured last hidden states go through the
independently loaded head, and what it says is compared with what the unmodified model says about the same document
alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spectrain.data.hidden_states import TargetStates
from spectrain.errors import RunError
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel

DOCUMENTS = 3
POSITIONS = 8  # per document, evenly spaced
PREFIX = 512  # tokens of a document that are run again; states depend on earlier tokens only
# Largest difference in log-probability that rounding may make: in 16 bits, logits alone are rounded to 1/8. Errors of
# substance are of the order of 1.
TOLERANCE = {torch.float32: 0.01, torch.float16: 0.5, torch.bfloat16: 0.5}


@torch.no_grad()
def check_states(target: TargetModel, head: TargetHead, states: Sequence[TargetStates]) -> None:
    """Compare the head's argmax, and its log-probability, with the target's own at a few positions of a few documents.

    A different argmax is tolerated where the target itself holds both tokens for equally likely, within rounding. In 16
    bits one position in four may differ by more, since rounding can send a token to other experts; what is wrong in
    substance is wrong nearly everywhere. Raises ``RunError`` that says at which position what differs.
    """
    differences: list[str] = []
    checked = 0
    for document in states[:DOCUMENTS]:
        ids_1S = document.input_ids[None, :PREFIX].long().to(target.device)
        positions_P = torch.linspace(0, ids_1S.shape[1] - 1, min(POSITIONS, ids_1S.shape[1])).long()
        own_PV = (
            target.model(input_ids=ids_1S, use_cache=False, logits_to_keep=positions_P)
            .logits[0]
            .float()
            .log_softmax(-1)
            .cpu()
        )
        hidden_PH = document.last_hidden[positions_P].to(head.lm_head_weight.device, head.lm_head_weight.dtype)
        ours_PV = head.hidden_to_logits(hidden_PH).log_softmax(-1).cpu()
        for position, own_V, ours_V in zip(positions_P.tolist(), own_PV, ours_PV, strict=True):
            difference = _difference(target, own_V, ours_V)
            checked += 1
            if difference:
                differences.append(f"at position {position} of response {document.key} {difference}")
    if len(differences) > (0 if target.dtype == torch.float32 else checked // 4):
        raise RunError(
            f"self-check of the captured states failed at {len(differences)} of {checked} positions: "
            f"{differences[0]}; the head of model "
            f"type {target.spec.model_type!r} or the capture does not fit this target, and nothing was stored"
        )


def _difference(target: TargetModel, own_V: torch.Tensor, ours_V: torch.Tensor) -> str:
    """How the head's log-probabilities differ from the target's own beyond rounding; empty if they do not."""
    tolerance = TOLERANCE[target.dtype]
    token, other = int(own_V.argmax()), int(ours_V.argmax())
    gap, shift = float(own_V[token] - own_V[other]), float(ours_V[token] - own_V[token])
    if not gap <= tolerance:  # in this form NaN is a difference too
        return (
            f"the target's own next token is {_named(target, token)}, Head(last_hidden) says {_named(target, other)}, "
            f"which the target holds for {gap:.2f} nats less likely"
        )
    if not abs(shift) <= tolerance:
        token_name = _named(target, token)
        return f"Head(last_hidden) gives the target's own next token {token_name} {shift:+.3f} nats of log-probability"
    return ""


def _named(target: TargetModel, token: int) -> str:
    return f"{token} ({target.tokenizer.decode([token])!r})"
