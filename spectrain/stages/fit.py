"""Stage ``fit``: train the drafter on hidden states. Writes ``drafter/``, ``checkpoints/`` and
``metrics.jsonl``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spectrain.config.overrides import flatten
from spectrain.console import say
from spectrain.data.corpus_counts import CorpusCounts, count_tokens, sampled_hidden
from spectrain.data.hidden_states import HiddenStateSource, StoredHiddenStates
from spectrain.data.packing import truncated_tokens
from spectrain.data.shard_damage import verify_at_first_read
from spectrain.data.vocab import DraftVocab, covered, vocab_of_counts
from spectrain.drafters.drafter_digests import CONFIG, note_changes, weight_files
from spectrain.drafters.drafter_folder import read_shape, weights_digest
from spectrain.drafters.hub_drafters import drafter_path
from spectrain.drafters.overlay import is_overlay, stitch
from spectrain.drafters.registry import Corpus, find_method
from spectrain.errors import InputError
from spectrain.stages import capture, state_sources
from spectrain.stages.closed_form import init_closed_form
from spectrain.stages.context import Context
from spectrain.stages.drafter_checks import sections_of_others
from spectrain.stages.run_dir import Decision, Inputs
from spectrain.target.head import TargetHead

# Positions whose whole distribution is computed to choose the draft vocabulary.
VOCAB_SAMPLE = 4096
_SAMPLE_BATCH = 256  # of these, positions whose logits are in memory together

# Settings that change what is logged or kept, not what is trained.
_NO_INPUTS = {
    *("trainer.log_every_steps", "trainer.keep_checkpoints", "trainer.checkpoint_every_steps"),
    *("trainer.loader_workers", "trainer.prefetch_batches"),
    *("trainer.devices", "trainer.strategy", "trainer.gradient_checkpointing", "trainer.compile"),
    *("decoding.draft_policy", "decoding.threshold"),
}


def decide(context: Context) -> Decision:
    """Whether the drafter has to be trained."""
    return context.run_dir.decide("fit", Inputs(_inputs(context), {}), partial(_lacking, context))


def _lacking(context: Context) -> str:
    """What is missing or damaged of a drafter that was trained."""
    folder = context.run_dir.drafter
    if not (folder / CONFIG).is_file() or not _has_weights(folder):
        return "outputs are missing"
    if not weights_digest(folder).startswith(context.run_dir.outputs("fit").get("weights", "")):
        return "the drafter's weights are damaged"
    try:
        read_shape(folder, context.spec.default_taps())
    except InputError:
        return "the drafter's settings are damaged"
    note_changes(folder)
    return ""


def _has_weights(folder: Path) -> bool:
    try:
        return bool(weight_files(folder))
    except InputError:  # an index names what is not there
        return False


def _inputs(context: Context) -> dict[str, Any]:
    config = context.config
    keys = {
        **flatten(config.drafter, "drafter."),
        **flatten(config.trainer, "trainer."),
        **flatten(config.decoding, "decoding."),
    }
    kept = {key: value for key, value in keys.items() if key not in _NO_INPUTS and not key.startswith("decoding.ngram")}
    others = tuple(f"drafter.{section}." for section in sections_of_others(find_method(config.drafter.method)))
    kept = {key: value for key, value in kept.items() if not key.startswith(others)}
    if config.trainer.head_precision == "auto":
        del kept["trainer.head_precision"]  # as in runs from before it could be chosen
    if config.drafter.path is not None:
        kept["weights of drafter.path"] = weights_digest(drafter_path(config.drafter))[:16]
    return {**capture.fixed_inputs(context), **capture.growing_inputs(context), **kept}


def fit(context: Context) -> float | None:
    """Train unless that has been done; brings responses and hidden states up to date first. Returns the best simulated
    acceptance length.
    """
    ranks = context.ranks
    decision = ranks.from_first(lambda: _brought_up_to_date(context))
    if decision.skip:
        say(str(decision))
        _stitch(context)
        return context.run_dir.outputs("fit").get("simulated_acceptance_length")
    verified_later = False
    if context.config.hidden_states.verify_checksums and not context.config.states_computed:
        verified_later = ranks.from_first(lambda: capture.verify(context))  # before an older drafter is removed
    with state_sources.opened(context) as (store, train, heldout), _recorded(context, decision) as outputs:
        if verified_later and isinstance(store, StoredHiddenStates):
            say("fit: note: hidden states that were never compared with their checksums are when they are first read")
            verify_at_first_read(store.folder, store.shards)
        outputs |= {"states_source": context.config.states.source} | _train(context, store, train, heldout)
    best, length = f"step {outputs['step']} of {outputs['steps']}", outputs["simulated_acceptance_length"]
    say(f"fit: {best} is the best, acceptance length {length:.3f} by simulation")
    if outputs["step"] == 0 and find_method(context.config.drafter.method).is_tuned:
        say("fit: note: training made it no better on held-out text, so the weights it began with are kept")
    _stitch(context)
    return outputs["simulated_acceptance_length"]


def _stitch(context: Context) -> None:
    """``export.stitch``: copies in the place of links to the target's files."""
    if context.config.export.stitch and context.ranks.is_first and is_overlay(context.run_dir.drafter):
        stitch(context.run_dir.drafter)


def _brought_up_to_date(context: Context) -> Decision:
    state_sources.bring_up_to_date(context)
    return decide(context)


@contextmanager
def _recorded(context: Context, decision: Decision) -> Iterator[dict[str, Any]]:
    """``RunDir.running`` on the first rank; the others begin when it has removed what is stale, and record nothing."""
    if not context.ranks.is_first:
        context.ranks.wait()
        yield {}
        return
    with context.run_dir.running(decision) as outputs:
        context.ranks.wait()
        yield outputs


def _train(context: Context, store: HiddenStateSource, train: Sequence[int], heldout: Sequence[int]) -> dict[str, Any]:
    from spectrain.drafters.build import build_drafter, continue_drafter
    from spectrain.training.checkpointing import newest_checkpoint
    from spectrain.training.trainer import FitPaths, Trainer

    config, run_dir, ranks = context.config, context.run_dir, context.ranks
    head = TargetHead.from_checkpoint(context.target.folder, trust_remote_code=config.target.trust_remote_code)
    counts = ranks.from_first(lambda: count_tokens(store, train, head.vocab_size, config.trainer.packed_length))
    train, counts = counts.of_teaching(train)
    if config.drafter.path is not None:
        drafter = continue_drafter(config.drafter, head, context.spec.default_taps(), config.target.max_length)
        vocab = drafter.vocab
    else:
        vocab = ranks.from_first(lambda: _draft_vocab(context, store, train, counts, head))
        corpus = Corpus(lambda: counts.used_V, head)
        method = find_method(config.drafter.method)
        settings = ranks.from_first(lambda: method.resolve(config.drafter, corpus, say))
        drafter = build_drafter(settings, context.spec, vocab, head, context.target.folder, config.trainer.seed)
        fresh = ranks.from_first(lambda: newest_checkpoint(run_dir.checkpoints) is None)
        if settings.init == "closed_form" and drafter.has_closed_form and fresh:
            init_closed_form(context, drafter, store, train)
    coverage = ranks.from_first(lambda: _coverage(store, heldout, vocab))
    say(
        f"fit: {len(train)} documents, draft vocabulary of {len(vocab.ids_D):,} covers {coverage:.2%} of the held-out "
        f"generated tokens"
    )
    lost = truncated_tokens(store.lengths[np.asarray(train)], config.trainer.packed_length)
    if lost:
        say(
            f"fit: note: {lost:,} tokens lie beyond the first trainer.packed_length of their document and are not "
            f"trained on"
        )
    trainer = Trainer(
        config=state_sources.without_workers(config),
        paths=FitPaths(run_dir.checkpoints, run_dir.drafter, run_dir.metrics),
        drafter=drafter,
        source=store,
        train=train,
        heldout=heldout,
        eos_ids=context.eos_ids,
        ranks=ranks,
        serving_dtype=getattr(torch, context.dtype_name),
        folder_metadata={
            "target": context.target_for_vllm,
            "target_architectures": context.spec.architectures,
            "metadata": {**context.target_record(), "coverage": coverage} | _needed(context),
        },
    )
    result = trainer.fit()
    return {
        "steps": result.steps,
        "step": result.best_step,
        "simulated_acceptance_length": result.best_acceptance_length,
        "loss": result.final_loss,
        "coverage": coverage,
        "weights": weights_digest(run_dir.drafter)[:16],
    }


def _needed(context: Context) -> dict[str, Any]:
    """What a server of the drafter has to be told, where vLLM's default would change the target."""
    length = context.spec.required_server_length(context.config.target.max_length)
    return {} if length is None else {"max_model_len": length}


def _draft_vocab(
    context: Context, store: HiddenStateSource, train: Sequence[int], counts: CorpusCounts, head: TargetHead
) -> DraftVocab:
    size = context.config.drafter.draft_vocab_size
    expected_V = None if size in (None, head.vocab_size) else _expected_tokens(store, train, counts, head)
    return vocab_of_counts(counts.generated_V, counts.shown_V, size, expected_V)


@torch.no_grad()
def _expected_tokens(
    store: HiddenStateSource, numbers: Sequence[int], counts: CorpusCounts, head: TargetHead
) -> np.ndarray:
    """How often the target expected each token at the positions where it generated one, float64 [V]: its distribution
    summed over a sample of them.
    """
    hidden_PH = sampled_hidden(store, numbers, counts.predicting_D, VOCAB_SAMPLE)
    expected_V = torch.zeros(head.vocab_size, dtype=torch.float64)
    for part_PH in hidden_PH.split(_SAMPLE_BATCH) if len(hidden_PH) else ():
        expected_V += torch.softmax(head.hidden_to_logits(part_PH), dim=-1).sum(0)
    return (expected_V * (counts.generated_V.sum() / max(len(hidden_PH), 1))).numpy()


def _coverage(store: HiddenStateSource, numbers: Sequence[int], vocab: DraftVocab) -> float:
    """Share of held-out generated tokens that the drafter can draft at all."""
    return covered(count_tokens(store, numbers, vocab.target_size).generated_V, vocab.ids_D.numpy())
