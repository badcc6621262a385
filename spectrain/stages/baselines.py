"""Methods that need no trained drafter, as our own loop and vLLM run them: no speculation, n-gram lookup, suffix
decoding, and a small language model that drafts.
"""

from __future__ import annotations

from typing import Any

from spectrain.config.schema import SpectrainConfig
from spectrain.decoding.draft_model import DraftModelProposer
from spectrain.decoding.proposers import NGramProposer, Proposer
from spectrain.decoding.suffix import SuffixProposer
from spectrain.stages.context import Context


def baseline_proposer(context: Context, name: str) -> Proposer | None:
    """What drafts, fresh: it remembers nothing of other measurements. None for "none"."""
    decoding = context.config.decoding
    if name == "none":
        return None
    if name == "ngram":
        return NGramProposer(decoding.ngram_max, decoding.ngram_min)
    if name == "suffix":
        return SuffixProposer()
    return DraftModelProposer(context.draft_model, context.spec.vocab_size)


def baseline_speculation(config: SpectrainConfig, name: str) -> dict[str, Any]:
    """What vLLM is told of the method, as ``speculative_config``; empty for "none"."""
    decoding = config.decoding
    if name == "none":
        return {}
    told: dict[str, Any] = {"method": name, "num_speculative_tokens": decoding.num_speculative_tokens}
    if name == "ngram":
        told |= {"prompt_lookup_max": decoding.ngram_max, "prompt_lookup_min": decoding.ngram_min}
    if name == "draft_model":
        told["model"] = decoding.draft_model
    return told
