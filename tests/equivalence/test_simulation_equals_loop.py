"""What ``fit`` shows is what the loop does: at temperature 0 the same rounds, one by one; at temperature 1 the same
distribution.

A random float64 target with a vocabulary of 20 and a drafter that has learned a little of it: drafts are accepted and
rejected in every mixture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from decoders import prompts_of
from drafter_tools import MemoryStore, as_dtype, fit, trainer_config
from small_targets import capture, captured, plain_answers, random_prompts, random_target
from torch import Tensor

from spectrain.config.drafter_schema import DrafterConfig, LossConfig
from spectrain.config.evaluation_schema import DecodingConfig
from spectrain.data.hidden_states import TargetStates
from spectrain.data.packing import pack_batch
from spectrain.data.vocab import build_vocab
from spectrain.decoding.acceptance import Round
from spectrain.decoding.loop import DecodingSettings, speculative_generate
from spectrain.decoding.proposers import Observation
from spectrain.decoding.sampling import GREEDY, SamplingParams, truncated_log_probs
from spectrain.drafters.autoregressive.eagle3 import Eagle3
from spectrain.drafters.build import build_drafter
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel
from spectrain.training.simulated_acceptance import SimulatedAcceptance, simulate_heldout

VOCAB, TAPS, N, EOS = 20, (1, 2, 3), 4, 7
HOT = SamplingParams(temperature=1.0)


@dataclass
class Setting:
    target: TargetModel
    drafter: Eagle3
    head: TargetHead


# Method and draft vocabulary.
DRAFTERS = {"full vocabulary": ("eagle3", None), "reduced vocabulary": ("eagle3", 15), "P-EAGLE": ("peagle", 15)}


@pytest.fixture(scope="module", params=list(DRAFTERS.values()), ids=list(DRAFTERS))
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder: Path = tmp_path_factory.mktemp("target")
    target = random_target(folder, VOCAB)
    head = TargetHead.from_checkpoint(folder, dtype=torch.float64)
    texts = random_prompts(VOCAB, 60, seed=1)
    documents = captured(TAPS, target, texts, plain_answers(EOS, target, texts, 16, HOT))
    method, kept = request.param
    vocab = build_vocab(((d.input_ids.numpy(), d.loss_mask.numpy()) for d in documents), kept, VOCAB)
    config = DrafterConfig(method, taps=TAPS, draft_vocab_size=kept, loss=LossConfig(weights={"kl": 1.0}))
    drafter = build_drafter(config, target.spec, vocab, head, folder).double()
    drafter.attach(head)
    store = MemoryStore([as_dtype(d, torch.float64) for d in documents])
    fit(
        tmp_path_factory.mktemp("fit"),
        drafter,
        store,
        trainer_config(packed_length=400, max_steps=80, epochs=80, learning_rate=3e-3),
    )
    return Setting(target, drafter.eval(), head)


def simulated(setting: Setting, documents: list[TargetStates], decoding: DecodingConfig) -> SimulatedAcceptance:
    return simulate_heldout(
        setting.drafter, MemoryStore(documents), range(len(documents)), decoding, (EOS,), packed_length=200
    )


@pytest.mark.parametrize("n", [1, N])
def test_greedy_rounds_are_the_loops_one_by_one(setting: Setting, n: int) -> None:
    texts = random_prompts(VOCAB, 40, seed=2)
    settings = DecodingSettings(n, eos_ids=(EOS,), batch_size=16)
    results = speculative_generate(setting.target, setting.drafter, prompts_of(texts, 26), settings).results
    assert [r.ids for r in results] == [r.ids for r in plain_answers(EOS, setting.target, texts, 26, GREEDY)]
    found = simulated(setting, captured(TAPS, setting.target, texts, results), DecodingConfig(num_speculative_tokens=n))
    assert found.rounds == [r.rounds for r in results]
    # The comparison is worth something: texts of both endings, rounds of every outcome.
    assert {r.finish_reason for r in results} == {"stop", "length"}
    rounds = [one for r in results for one in r.rounds]
    assert {one.accepted for one in rounds if not one.cut} == set(range(n + 1))
    if n > 1:
        assert any(one.cut for one in rounds)


def test_argmax_drafts_at_temperature_one_give_the_same_rounds_too(setting: Setting) -> None:
    """An argmax draft is accepted iff the target drew it, so the text decides and not chance."""
    texts = random_prompts(VOCAB, 30, seed=3)
    settings = DecodingSettings(3, HOT, eos_ids=(EOS,), seed=5)
    results = speculative_generate(setting.target, setting.drafter, prompts_of(texts, 20), settings).results
    decoding = DecodingConfig(num_speculative_tokens=3, temperature=1.0, proposal_policy="greedy")
    assert simulated(setting, captured(TAPS, setting.target, texts, results), decoding).rounds == [
        r.rounds for r in results
    ]


def draft_distribution(setting: Setting, ids: list[int], taps: Tensor, sampling: SamplingParams) -> Tensor:
    """The drafter's distribution [V] of the token after ``ids``, whose last token is the anchor."""
    cache = setting.drafter.new_cache(1)
    observed = len(ids) - 1
    setting.drafter.observe(
        cache, Observation(torch.tensor([ids[:-1]]), torch.tensor([observed]), taps[None, :observed])
    )
    proposal = setting.drafter.propose(cache, torch.tensor([ids[-1]]), 1, sampling, [torch.Generator().manual_seed(0)])
    assert proposal.log_probs is not None
    return proposal.log_probs[0, 0].exp()


@pytest.mark.parametrize(
    "sampling",
    [HOT, SamplingParams(temperature=0.7, top_k=6), SamplingParams(temperature=1.3, top_p=0.8)],
    ids=["1", "0.7 top-k", "1.3 top-p"],
)
def test_a_slot_is_accepted_with_one_minus_the_distance_of_the_distributions(
    setting: Setting, sampling: SamplingParams
) -> None:
    """Σ_x q(x)·P(accepted | x) over every continuation x = 1 − TV(p, q) (Leviathan et al. 2023, theorem 3.5)."""
    for text in random_prompts(VOCAB, 4, seed=4):
        documents = [capture(setting.target, text[:-1], [text[-1], x], TAPS, f"{x:03d}", "train") for x in range(VOCAB)]
        scores = setting.drafter.score(pack_batch(documents), 1, sampling, sampling)
        assert scores.accept_RK.shape == (VOCAB, 1)
        target_logits = setting.target.logits(documents[0].last_hidden[len(text) - 1]).double()
        q = truncated_log_probs(target_logits, sampling).exp()
        p = draft_distribution(setting, text, documents[0].taps, sampling).double()
        expected = 1 - 0.5 * float((p - q).abs().sum())
        assert 0.02 < expected < 0.98
        assert float((q * scores.accept_RK[:, 0]).sum()) == pytest.approx(expected, abs=1e-5)
        for x in range(VOCAB):  # and token by token
            chance = min(1.0, float(p[x] / q[x])) if q[x] > 0 else 0.0
            assert float(scores.accept_RK[x, 0]) == pytest.approx(chance, abs=1e-4)


def sums(rounds: list[list[Round]]) -> np.ndarray:
    """Per prompt: rounds, and accepted tokens, of complete rounds."""
    complete = [[one for one in own if not one.cut] for own in rounds]
    return np.array([[len(own), sum(one.accepted for one in own)] for own in complete], dtype=float)


def ratio_and_error(per_prompt: np.ndarray) -> tuple[float, float]:
    """Accepted tokens per round, and its standard error over prompts (delta method)."""
    ratio = per_prompt[:, 1].sum() / per_prompt[:, 0].sum()
    residual = per_prompt[:, 1] - ratio * per_prompt[:, 0]
    return ratio, math.sqrt(len(per_prompt) * residual.var(ddof=1)) / per_prompt[:, 0].sum()


def test_sampled_drafts_stand_as_often_in_the_simulation_as_in_the_loop(setting: Setting) -> None:
    """Independent texts: the simulation on what the target said alone, the loop on other random numbers."""
    texts = random_prompts(VOCAB, 400, seed=6)
    decoding = DecodingConfig(num_speculative_tokens=3, temperature=1.0, proposal_policy="sample")
    found = simulated(
        setting,
        captured(TAPS, setting.target, texts, plain_answers(EOS, setting.target, texts, 16, HOT, seed=11)),
        decoding,
    )
    settings = DecodingSettings(3, HOT, draft_sampling=HOT, eos_ids=(EOS,), seed=12, batch_size=200)
    loop = speculative_generate(setting.target, setting.drafter, prompts_of(texts, 16), settings).results
    simulation_ratio, simulation_error = ratio_and_error(sums(found.rounds))
    loop_ratio, loop_error = ratio_and_error(sums([r.rounds for r in loop]))
    assert loop_ratio > 0.3
    assert math.hypot(simulation_error, loop_error) < 0.06
    assert abs(simulation_ratio - loop_ratio) < 4 * math.hypot(simulation_error, loop_error)
    # The expectation over all random choices of the simulation lies there too, with less noise.
    assert abs(found.length_by_n[2] - 1 - loop_ratio) < 4 * math.hypot(simulation_error, loop_error)


def test_the_simulation_does_not_depend_on_how_documents_are_grouped(setting: Setting) -> None:
    texts = random_prompts(VOCAB, 12, seed=8)
    documents = captured(TAPS, setting.target, texts, plain_answers(EOS, setting.target, texts, 14, HOT))
    decoding = DecodingConfig(num_speculative_tokens=2, temperature=1.0, proposal_policy="sample")
    grouped, alone = (
        simulate_heldout(
            setting.drafter,
            MemoryStore(documents),
            range(len(documents)),
            decoding,
            (EOS,),
            packed_length=tokens,
            most_tokens=5,
        )
        for tokens in (200, 1)
    )
    assert grouped.rounds == alone.rounds
    assert grouped.length_by_n == pytest.approx(alone.length_by_n, rel=1e-6)
    assert len(grouped.length_by_n) == 5
