"""The lossless check of sampled outputs in ``eval``: answers under many seeds, with a method and without speculation
(``suite.lossless_seeds``).
"""

from __future__ import annotations

from collections.abc import Sequence

from spectrain.console import ProgressBar, say
from spectrain.data.prompts import Conversation
from spectrain.decoding.loop import Prompt
from spectrain.errors import RunError
from spectrain.evaluation.same_distribution import DistributionTest, Samples, compare_samples
from spectrain.evaluation.suites import evenly_spaced
from spectrain.stages.answer_suite import Decode, answer_limit
from spectrain.stages.context import Context

_PROMPTS = 4
_TOKENS = 12
_TOGETHER = 32  # answers decoded at the same time
_STREAM = 1 << 20  # beyond those of the suite's own answers


class SampledOutputs:
    """Collects the samples of each method; the first one's, without speculation, are what others are compared with."""

    def __init__(self, context: Context, conversations: Sequence[Conversation]) -> None:
        self._context = context
        self._conversations = evenly_spaced(conversations, _PROMPTS)
        self._plain: Samples | None = None
        self._asked = 0
        self.tests: list[tuple[str, DistributionTest]] = []

    def add(self, name: str, decode: Decode) -> float | None:
        """Draw a method's samples. Returns the p-value; None without ``suite.lossless_seeds``, and without
        speculation.
        """
        seeds = self._context.config.suite.lossless_seeds
        if not seeds:
            return None
        found = [self._answers(conversation, decode, seeds, name) for conversation in self._conversations]
        if self._plain is None:
            self._plain = found
            return None
        test = compare_samples(self._plain, found, _TOKENS)
        say(f"eval: {name}: {test}")
        self.tests.append((name, test))
        return test.p_value

    def _answers(self, conversation: Conversation, decode: Decode, seeds: int, name: str) -> list[list[int]]:
        ids = self._context.template.first_prompt_ids(conversation)
        length = min(_TOKENS, answer_limit(self._context, conversation, ids))
        answers: list[list[int]] = []
        with ProgressBar(f"seeds {name}", total=seeds, unit="answers") as bar:
            while len(answers) < seeds:
                count = min(_TOGETHER, seeds - len(answers))
                # No stream twice, so that the two sides are independent.
                prompts = [Prompt(ids, length, stream=_STREAM + self._asked + number) for number in range(count)]
                self._asked += count
                answers += [result.ids for result in decode(prompts, lambda tokens: None)[0]]
                bar.advance(count)
        return answers


def refuse_wrong_distribution(tests: Sequence[tuple[str, DistributionTest]]) -> None:
    """Raises RunError where a method's outputs have another distribution."""
    wrong = [(name, test) for name, test in tests if not test.same]
    if wrong:
        raise RunError(
            f"with {wrong[0][0]} outputs are distributed otherwise than without speculation ({wrong[0][1]}); report "
            "this, with the target's name"
        )
