"""Which token of the vocabulary stands for what a block does not know yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.drafters.registry import Corpus
from spectrain.errors import ConfigError

# An embedding much shorter than most was never trained: queries of mask slots would all be equal to nothing.
_LEAST_NORM = 0.5


def choose_mask_token(used_V: np.ndarray, embedding_VH: Tensor) -> int:
    """The last token of the vocabulary that the training text never uses and whose embedding is no shorter than most.

    ``used_V``: how often each token occurs. Reserved tokens tend to come last. Raises ConfigError where every token
    occurs.
    """
    norms_V = embedding_VH.float().norm(dim=-1).cpu()
    whole_V = norms_V >= _LEAST_NORM * norms_V.median()
    unused_V = torch.from_numpy(used_V[: len(norms_V)] == 0)
    candidates = torch.nonzero(unused_V & whole_V)[:, 0]
    if len(candidates) == 0:
        candidates = torch.nonzero(unused_V)[:, 0]
    if len(candidates) == 0:
        raise ConfigError(
            "every token of the vocabulary occurs in the training text: name one with drafter.block.mask_token_id"
        )
    return int(candidates[-1])


def resolve_mask_token(config: DrafterConfig, corpus: Corpus, say: Callable[[str], None]) -> DrafterConfig:
    """The configuration with a mask token: the given one, or one that the training text never uses."""
    used_V, given = corpus.token_counts(), config.block.mask_token_id
    if given is not None:
        if given < len(used_V) and used_V[given]:
            say(
                f"fit: note: the mask token {given} occurs {used_V[given]:,} times in the training text, where it "
                f"means something else"
            )
        return config
    mask = choose_mask_token(used_V, corpus.head.embed_weight)
    say(f"fit: token {mask}, which the training text never uses, is the mask token")
    return replace(config, block=replace(config.block, mask_token_id=mask))
