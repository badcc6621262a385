"""Before anything is stored: are the captured states the target's?

A wrong gain, a missing scale or a document that sees its neighbour would give states that train a drafter without complaint, and a drafter
whose drafts every server then rejects. So captured last hidden states go through the independently loaded head, and what it says is
compared with what the unmodified model says about the same document alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spectrain.data.states import TargetStates
from spectrain.errors import RunError
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel

DOCUMENTS = 3
POSITIONS = 8  # per document, evenly spaced
PREFIX = 512  # tokens of a document that are run again; states depend on earlier tokens only
# Largest difference in log-probability that rounding may make. Errors of substance are of the order of 1.
TOLERANCE = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.5}


@torch.no_grad()
def check_states(target: TargetModel, head: TargetHead, states: Sequence[TargetStates]) -> None:
    """Compare the head's arg max, and its log-probability, with the target's own at a few positions of a few documents.

    A different arg max is tolerated where the target itself holds both tokens for equally likely, within rounding.
    Raises ``RunError`` that says at which position what differs.
    """
    tolerance = TOLERANCE[target.dtype]
    for document in states[:DOCUMENTS]:
        ids_1S = document.input_ids[None, :PREFIX].long().to(target.device)
        positions_P = torch.linspace(0, ids_1S.shape[1] - 1, min(POSITIONS, ids_1S.shape[1])).long()
        own_PV = target.model(input_ids=ids_1S, use_cache=False).logits[0, positions_P].float().log_softmax(-1).cpu()
        hidden_PH = document.last_hidden[positions_P].to(head.lm_head_weight.device, head.lm_head_weight.dtype)
        ours_PV = head.hidden_to_logits(hidden_PH).log_softmax(-1).cpu()
        for position, own_V, ours_V in zip(positions_P.tolist(), own_PV, ours_PV, strict=True):
            token, other = int(own_V.argmax()), int(ours_V.argmax())
            where = f"self-check of the captured states failed at position {position} of response {document.key}"
            hint = f"the head of model type {target.spec.model_type!r} or the capture does not fit this target; nothing was stored"
            if not own_V[token] - own_V[other] <= tolerance:
                raise RunError(
                    f"{where}: the target's own next token is {_named(target, token)}, Head(last_hidden) says {_named(target, other)}, "
                    f"which the target holds for {float(own_V[token] - own_V[other]):.2f} nats less likely: {hint}"
                )
            if not abs(own_V[token] - ours_V[token]) <= tolerance:
                raise RunError(
                    f"{where}: the target gives {_named(target, token)} a log-probability of {float(own_V[token]):.3f}, "
                    f"Head(last_hidden) {float(ours_V[token]):.3f}: {hint}"
                )


def _named(target: TargetModel, token: int) -> str:
    return f"{token} ({target.tokenizer.decode([token])!r})"
