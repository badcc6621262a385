"""Which token of the target's vocabulary stands for what a drafter does not know yet, where it drafts several positions
in one pass.

Here, because kinds of both shapes have one: ``drafter.block.mask_token_id``, ``drafter.peagle.mask_token_id``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.drafters.registry import Corpus
from spectrain.errors import ConfigError
from spectrain.target.spec import TargetSpec

# An embedding much shorter than most was never trained: queries of mask slots would all be equal to nothing.
_LEAST_NORM = 0.5


def choose_mask_token(used_V: np.ndarray, embedding_VH: Tensor) -> int | None:
    """The last token of the vocabulary that the training text never uses and whose embedding is no shorter than most;
    None where every token occurs.

    ``used_V``: how often each token occurs. Reserved tokens tend to come last.
    """
    norms_V = embedding_VH.float().norm(dim=-1).cpu()
    whole_V = norms_V >= _LEAST_NORM * norms_V.median()
    unused_V = torch.from_numpy(used_V[: len(norms_V)] == 0)
    candidates = torch.nonzero(unused_V & whole_V)[:, 0]
    if len(candidates) == 0:
        candidates = torch.nonzero(unused_V)[:, 0]
    return int(candidates[-1]) if len(candidates) else None


def resolve_mask_token(
    config: DrafterConfig, section: str, corpus: Corpus, say: Callable[[str], None]
) -> DrafterConfig:
    """The configuration with ``drafter.SECTION.mask_token_id``: the given one, or one that the training text never
    uses. Raises ConfigError where it uses all.
    """
    settings = getattr(config, section)
    used_V, given = corpus.token_counts(), settings.mask_token_id
    if given is not None:
        if given < len(used_V) and used_V[given]:
            say(
                f"fit: note: the mask token {given} occurs {used_V[given]:,} times in the training text, where it "
                f"means something else"
            )
        return config
    mask = choose_mask_token(used_V, corpus.head.embed_weight)
    if mask is None:
        raise ConfigError(
            f"every token of the vocabulary occurs in the training text: name one with drafter.{section}.mask_token_id"
        )
    say(f"fit: token {mask}, which the training text never uses, is the mask token")
    return replace(config, **{section: replace(settings, mask_token_id=mask)})


def mask_token_of(config: DrafterConfig, section: str, spec: TargetSpec) -> int:
    """Of the configuration. Before the training text is known any token will do for counting. Raises ConfigError for
    one outside the target's vocabulary.
    """
    mask = getattr(config, section).mask_token_id or 0
    if mask >= spec.vocab_size:
        raise ConfigError(
            f"drafter.{section}.mask_token_id={mask} is outside the target's vocabulary of {spec.vocab_size}"
        )
    return int(mask)
