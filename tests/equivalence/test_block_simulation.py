"""Block drafters in the real loop: the output is the target's, and what ``fit`` shows is what the loop does.

At temperature 0 the same rounds, one by one, for every number of drafts (a shorter draft is a shorter block, and drafts
other tokens where slots see each other); at temperature 1 the distributions, token by token. A random float64 target
with a vocabulary of 20, and drafters that have learned a little of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from decoders import prompts_of
from drafter_tools import MemoryStore, as_dtype, fit, trainer_config
from scipy.stats import chi2
from small_targets import capture, captured, plain_answers, random_prompts, random_target

from spectrain.config.drafter_schema import BlockConfig, DFlash2Config, DrafterConfig, DSparkConfig, LossConfig
from spectrain.config.evaluation_schema import DecodingConfig
from spectrain.data.hidden_states import TargetStates
from spectrain.data.packing import pack_batch
from spectrain.data.vocab import build_vocab
from spectrain.decoding.loop import DecodingSettings, speculative_generate
from spectrain.decoding.proposers import Observation
from spectrain.decoding.sampling import GREEDY, SamplingParams, truncated_log_probs
from spectrain.drafters.block import block_drafter
from spectrain.drafters.block.block_drafter import BlockDrafter
from spectrain.drafters.build import build_drafter
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel
from spectrain.training.simulated_acceptance import SimulatedAcceptance, simulate_heldout

VOCAB, TAPS, EOS, MASK = 20, (1, 2, 3), 7, 3
HOT = SamplingParams(temperature=1.0)
KINDS = {
    "dflash": DrafterConfig("dflash", block=BlockConfig(block_size=5), draft_vocab_size=15),
    "dspark": DrafterConfig("dspark", block=BlockConfig(block_size=4), dspark=DSparkConfig(markov_rank=8)),
    "dspark, rnn, window": DrafterConfig(
        "dspark",
        num_layers=2,
        block=BlockConfig(block_size=4, sliding_window=6),
        dspark=DSparkConfig(markov="rnn", markov_rank=8, sample_from_anchor=False),
    ),
    "dflash2": DrafterConfig(
        "dflash2",
        block=BlockConfig(block_size=5),
        dflash2=DFlash2Config(conv_kernel_size=3, selector_rank=8, selector_top_k=6),
    ),
}


@dataclass
class Setting:
    target: TargetModel
    drafter: BlockDrafter

    @property
    def most(self) -> int:
        return self.drafter.shape.num_drafts


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetModel, Path, list[TargetStates]]:
    folder: Path = tmp_path_factory.mktemp("target")
    model = random_target(folder, VOCAB)
    texts = random_prompts(VOCAB, 60, seed=1)
    return model, folder, captured(TAPS, model, texts, plain_answers(EOS, model, texts, 16, HOT))


@pytest.fixture(scope="module", params=KINDS)
def setting(
    request: pytest.FixtureRequest,
    target: tuple[TargetModel, Path, list[TargetStates]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Setting:
    model, folder, documents = target
    config = replace(KINDS[request.param], taps=TAPS, loss=LossConfig(weights={"kl": 1.0}))
    head = TargetHead.from_checkpoint(folder, dtype=torch.float64)
    vocab = build_vocab(((d.input_ids.numpy(), d.loss_mask.numpy()) for d in documents), config.draft_vocab_size, VOCAB)
    config = replace(config, block=replace(config.block, mask_token_id=MASK))
    drafter = build_drafter(config, model.spec, vocab, head, folder).double()
    drafter.attach(head)
    store = MemoryStore([as_dtype(d, torch.float64) for d in documents])
    fit(
        tmp_path_factory.mktemp("fit"),
        drafter,
        store,
        trainer_config(packed_length=400, max_steps=60, epochs=60, learning_rate=3e-3),
    )
    assert isinstance(drafter, BlockDrafter)
    drafter.eval()
    return Setting(model, drafter)


def simulated(setting: Setting, documents: list[TargetStates], decoding: DecodingConfig) -> SimulatedAcceptance:
    return simulate_heldout(
        setting.drafter, MemoryStore(documents), range(len(documents)), decoding, (EOS,), packed_length=200
    )


def counted(rounds: list) -> list[list[tuple[int, int, bool]]]:
    return [[(one.drafted, one.accepted, one.cut) for one in own] for own in rounds]


def test_greedy_rounds_are_the_loops_one_by_one(setting: Setting) -> None:
    texts = random_prompts(VOCAB, 24, seed=2)
    expected = [r.ids for r in plain_answers(EOS, setting.target, texts, 26, GREEDY)]
    for n in (1, setting.most - 1, setting.most):
        settings = DecodingSettings(n, eos_ids=(EOS,), batch_size=16)
        results = speculative_generate(setting.target, setting.drafter, prompts_of(texts, 26), settings).results
        assert [r.ids for r in results] == expected
        found = simulated(
            setting, captured(TAPS, setting.target, texts, results), DecodingConfig(num_speculative_tokens=n)
        )
        assert counted(found.rounds) == counted([r.rounds for r in results])
        rounds = [one for r in results for one in r.rounds]
        assert {one.accepted for one in rounds if not one.cut} >= {0, 1}
        assert n == 1 or any(one.cut for one in rounds)


def test_the_figure_for_every_length_is_that_of_its_own_blocks(setting: Setting) -> None:
    texts = random_prompts(VOCAB, 20, seed=9)
    documents = captured(TAPS, setting.target, texts, plain_answers(EOS, setting.target, texts, 20, GREEDY))
    numbers = range(len(documents))
    every = simulate_heldout(
        setting.drafter,
        MemoryStore(documents),
        numbers,
        DecodingConfig(num_speculative_tokens=2),
        (EOS,),
        200,
        most_tokens=setting.most,
    ).length_by_n
    assert len(every) == setting.most
    for n in range(1, setting.most + 1):
        decoding = DecodingConfig(num_speculative_tokens=n)
        alone = simulate_heldout(
            setting.drafter, MemoryStore(documents), numbers, decoding, (EOS,), 200, most_tokens=n
        ).length_by_n
        assert alone[n - 1] == pytest.approx(every[n - 1], rel=1e-9)


@pytest.mark.parametrize("sampling", [HOT, SamplingParams(temperature=0.7, top_k=6)], ids=["1", "0.7 top-k"])
def test_a_slot_is_accepted_with_one_minus_the_distance_of_the_distributions(
    setting: Setting, sampling: SamplingParams
) -> None:
    """Σ_x q(x)·P(accepted | x) over every continuation x = 1 − TV(p, q) (Leviathan et al. 2023, theorem 3.5), p from
    the real cache: for the first slot of a block, and for the second after a first draft that was accepted.
    """
    for text in random_prompts(VOCAB, 3, seed=4):
        seen = capture(setting.target, text[:-1], text[-1:], TAPS, "seen", "train")
        cache, observed = setting.drafter.new_cache(1), len(text) - 1
        setting.drafter.observe(
            cache, Observation(torch.tensor([text[:-1]]), torch.tensor([observed]), seen.taps[None, :observed])
        )
        streams = (torch.Generator().manual_seed(seed) for seed in range(100))
        proposals = (
            setting.drafter.propose(cache, torch.tensor(text[-1:]), 2, sampling, [stream]) for stream in streams
        )
        proposal = next(one for one in proposals if target_probs(setting, seen, sampling)[one.ids[0, 0]] > 0)
        assert proposal.log_probs is not None
        for slot in range(2):
            answers = [[text[-1], *proposal.ids[0, :slot].tolist(), x] for x in range(VOCAB)]
            documents = [
                capture(setting.target, text[:-1], answer, TAPS, f"{answer[-1]:03d}", "train") for answer in answers
            ]
            accept_x = setting.drafter.score(pack_batch(documents), 2, sampling, sampling).accept_RK[
                :: slot + 1, slot
            ]  # first anchor of each
            p, q = proposal.log_probs[0, slot].exp(), target_probs(setting, documents[0], sampling, before_last=1)
            expected = 1 - 0.5 * float((p - q).abs().sum())
            assert 0.01 < expected < 0.99
            assert float((q * accept_x).sum()) == pytest.approx(expected, abs=1e-5)


def target_probs(
    setting: Setting, document: TargetStates, sampling: SamplingParams, before_last: int = 0
) -> torch.Tensor:
    """[V]: the target's distribution of the token after a document without its last tokens."""
    return truncated_log_probs(setting.target.logits(document.last_hidden[-1 - before_last]).double(), sampling).exp()


def test_sampled_drafts_keep_the_targets_distribution(setting: Setting) -> None:
    """χ² of the first three tokens against the target's own distribution, with drafts drawn from the drafter's
    distribution at temperature 1.
    """
    prompt, count = [4, 9, 2], 3000
    settings = DecodingSettings(setting.most, HOT, draft_sampling=HOT, seed=3, batch_size=count)
    results = speculative_generate(setting.target, setting.drafter, prompts_of([prompt] * count, 4), settings).results
    first = [r.ids[0] for r in results]
    common = max(set(first), key=first.count)
    rows = [r.ids for r in results if r.ids[0] == common]
    second = max({ids[1] for ids in rows}, key=[ids[1] for ids in rows].count)
    for before, drawn in (
        ([], first),
        ([common], [ids[1] for ids in rows]),
        ([common, second], [ids[2] for ids in rows if ids[1] == second]),
    ):
        text = torch.tensor([[*prompt, *before]])
        output = setting.target.run(text, torch.arange(text.shape[1])[None])
        q = truncated_log_probs(setting.target.logits(output.last_hidden_BSH[0, -1]).double(), HOT).exp().numpy()
        observed = np.bincount(drawn, minlength=VOCAB)
        expected = q * len(drawn)
        whole = expected >= 5  # the rest is one class
        o, e = np.append(observed[whole], observed[~whole].sum()), np.append(expected[whole], expected[~whole].sum())
        keep = e > 0
        statistic = float((((o - e) ** 2)[keep] / e[keep]).sum())
        assert statistic < chi2.ppf(1 - 1e-4, keep.sum() - 1)
    accepted = sum(one.accepted for r in results for one in r.rounds)
    assert accepted / len(results) > 0.2 and math.isfinite(accepted)


@pytest.mark.parametrize("draft_sampling", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_blocks_are_scored_some_at_a_time(
    setting: Setting,
    target: tuple[TargetModel, Path, list[TargetStates]],
    draft_sampling: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many as fit into the limit at a time, down to one: the same scores."""
    batch, drafter = pack_batch(target[2][:6]), setting.drafter
    whole = drafter.score(batch, setting.most, HOT, draft_sampling)
    runs = []
    for rows in (1, 3 * drafter.shape.slots(setting.most)):
        monkeypatch.setattr("spectrain.drafters.block.block_shape._SCORED_ROWS", rows)
        with patch.object(block_drafter, "run_blocks", wraps=block_drafter.run_blocks) as spy:
            some = drafter.score(batch, setting.most, HOT, draft_sampling)
        runs.append(max(len(call.args[2]) for call in spy.call_args_list))
        torch.testing.assert_close(some.accept_RK, whole.accept_RK, rtol=1e-9, atol=1e-9)
        assert torch.equal(some.anchor_R, whole.anchor_R)
        if whole.confidence_RK is not None:
            torch.testing.assert_close(some.confidence_RK, whole.confidence_RK)
    assert runs == [1, 3] and len(whole.anchor_R) > 3
