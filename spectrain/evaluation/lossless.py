"""Why an answer with speculation differs from the one without, at temperature 0: two tokens that tie within rounding,
or a failure.

Speculation scores several tokens in one pass where plain decoding scores one, so rounding differs; where the target's
two best tokens lie closer together than that, either may come first. Anything else is wrong. The texts are compared up
to the first difference only: behind it they are different texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectrain.evaluation.parity import TIE
from spectrain.evaluation.replay import Text
from spectrain.target.model import TargetModel


@dataclass(frozen=True)
class OutputDifference:
    """The first token in which two answers differ.

    position: of the token in the answer, from 0. logits: the target's, of either token there, in one pass over the text
    before it. tolerance: how far apart rounding puts two equal ones.
    """

    prompt: str
    position: int
    plain_id: int
    speculative_id: int
    plain_logit: float
    speculative_logit: float
    tolerance: float

    @property
    def tie(self) -> bool:
        return abs(self.plain_logit - self.speculative_logit) <= self.tolerance

    def __str__(self) -> str:
        verdict = "a tie" if self.tie else "no tie: the output is wrong"
        return (
            f"{self.prompt}, token {self.position + 1}: {self.plain_id} without speculation, {self.speculative_id} "
            f"with it; logits {self.plain_logit:.6g} and {self.speculative_logit:.6g}, rounding explains "
            f"{self.tolerance:.2g}: {verdict}"
        )


def first_difference(
    target: TargetModel, name: str, prompt: Sequence[int], plain: Sequence[int], speculative: Sequence[int]
) -> OutputDifference | None:
    """None for equal answers, and where one is only the beginning of the other (an answer that a limit cut)."""
    pairs = enumerate(zip(plain, speculative, strict=False))
    position = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
    if position is None:
        return None
    logits_V = Text(target, [*prompt, *plain[:position]], ()).target_logits(len(prompt) + position - 1)
    finite = logits_V[logits_V.isfinite()]
    return OutputDifference(
        name,
        position,
        plain[position],
        speculative[position],
        float(logits_V[plain[position]]),
        float(logits_V[speculative[position]]),
        TIE[target.dtype] * float(finite.max() - finite.min()),
    )
