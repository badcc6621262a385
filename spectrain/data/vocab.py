"""The draft vocabulary: the target's most frequent generated tokens.

A drafter that scores all V tokens spends most of its time in the head. Keeping the D tokens the target uses most on
this workload loses only the acceptance of the rest, which ``coverage`` reports. Ids stay ascending, so that ``target id
= i + d2t[i]`` is monotone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spectrain.errors import ConfigError


@dataclass(frozen=True)
class DraftVocab:
    """``ids_D``: the kept target ids, ascending int64; ``coverage``: share of generated training tokens that are among
    them.
    """

    ids_D: Tensor
    target_size: int
    coverage: float

    @property
    def is_full(self) -> bool:
        return len(self.ids_D) == self.target_size

    def d2t(self) -> Tensor:
        """Offsets as vLLM reads them: target id of draft id i is ``i + d2t[i]``. int64 [D]."""
        return self.ids_D - torch.arange(len(self.ids_D))

    def target_to_draft(self) -> Tensor:
        """int64 [V]: the draft id of a target id, -1 outside the draft vocabulary."""
        lookup_V = torch.full((self.target_size,), -1, dtype=torch.long)
        lookup_V[self.ids_D] = torch.arange(len(self.ids_D))
        return lookup_V


def full_vocab(target_size: int) -> DraftVocab:
    return DraftVocab(torch.arange(target_size), target_size, 1.0)


def vocab_from_d2t(d2t: Tensor, target_size: int) -> DraftVocab:
    """The vocabulary a checkpoint was trained with; coverage is unknown here and reported as nan."""
    return DraftVocab(d2t.long() + torch.arange(len(d2t)), target_size, float("nan"))


# A prompt's words come back in answers, if less often than an answer's own.
_PROMPT_WEIGHT = 0.05


def build_vocab(
    documents: Iterable[tuple[np.ndarray, np.ndarray]],
    size: int | None,
    target_size: int,
    expected_V: np.ndarray | None = None,
) -> DraftVocab:
    """``vocab_of_counts`` of the tokens of ``(input_ids, loss_mask)`` documents."""
    generated_V = np.zeros(target_size, dtype=np.int64)
    prompted_V = np.zeros(target_size, dtype=np.int64)
    for input_ids, loss_mask in documents:
        chosen = loss_mask.astype(bool)
        generated_V += np.bincount(input_ids[chosen], minlength=target_size)
        prompted_V += np.bincount(input_ids[~chosen], minlength=target_size)
    return vocab_of_counts(generated_V, prompted_V, size, expected_V)


def vocab_of_counts(
    generated_V: np.ndarray, prompted_V: np.ndarray, size: int | None, expected_V: np.ndarray | None = None
) -> DraftVocab:
    """The ``size`` tokens most likely to be generated, judged by how often each token was generated, and occurs in
    prompts; ties go to the lower id.

    A few hundred documents hold only some thousand distinct tokens, and the rest of the vocabulary should not be filled
    at random: a token scores its generated count, plus what the target expected to generate at the same positions
    (``expected_V``: its distribution summed over positions, in tokens), plus a little for occurring in prompts.

    Raises ConfigError where ``size`` exceeds the target's vocabulary.
    """
    target_size = len(generated_V)
    if size is None or size == target_size:
        return full_vocab(target_size)
    if size > target_size:
        raise ConfigError(
            f"drafter.draft_vocab_size={size} is larger than the target's vocabulary of {target_size}: choose at most "
            f"that"
        )
    score_V = generated_V + _PROMPT_WEIGHT * prompted_V + (0.0 if expected_V is None else expected_V)
    kept = np.sort(np.lexsort((np.arange(target_size), -score_V))[:size])
    return DraftVocab(torch.from_numpy(kept), target_size, covered(generated_V, kept))


def covered(generated_V: np.ndarray, kept: np.ndarray) -> float:
    """Share of generated tokens that are among the kept ids; 1 where none was generated."""
    total = generated_V.sum()
    return float(generated_V[kept].sum() / total) if total else 1.0
