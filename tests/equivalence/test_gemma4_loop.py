"""A Gemma-4 assistant in the real loop: what training simulates is what is accepted, losses are those of a double loop,
and a task that can be learned is learned.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from decoders import prompts_of
from drafter_tools import MemoryStore, fit, trainer_config
from gemma4_tools import SORTS, Gemma4, random_ids
from small_targets import MOTIFS, PERIODIC_VOCAB, periodic_target, periodic_text, plain_answers, random_prompts
from torch import Tensor

from spectrain.config.drafter_schema import AutoregressiveConfig, DrafterConfig, Gemma4MTPConfig, LossConfig
from spectrain.config.evaluation_schema import DecodingConfig
from spectrain.data.hidden_states import TargetStates
from spectrain.data.packing import pack_batch
from spectrain.data.vocab import full_vocab
from spectrain.decoding.acceptance import acceptance
from spectrain.decoding.loop import DecodingSettings, GenerationResult, Prompt, speculative_generate
from spectrain.decoding.proposers import Observation
from spectrain.decoding.sampling import GREEDY, SamplingParams
from spectrain.drafters.autoregressive.gemma4_mtp import Gemma4MTP
from spectrain.drafters.build import build_drafter
from spectrain.drafters.drafter_folder import load_drafter
from spectrain.target.head import TargetHead
from spectrain.training.simulated_acceptance import simulate_heldout

VOCAB, N, EOS = 20, 4, 7
HOT = SamplingParams(temperature=1.0)
SMALL = {"vocab_size": VOCAB, "sliding_window": 5}


def answered(gemma: Gemma4, texts: list[list[int]], results: list[GenerationResult]) -> list[TargetStates]:
    pairs = enumerate(zip(texts, results, strict=True))
    return [gemma.states(text, result.ids, key=f"{i:03d}") for i, (text, result) in pairs]


@pytest.fixture(scope="module", params=[0, 10], ids=["tied head", "centroids"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Gemma4, Gemma4MTP]:
    """An assistant that has learned a little, so drafts are accepted and rejected in every mixture."""
    gemma = Gemma4.make("e_series", tmp_path_factory.mktemp("gemma"), double=True, **SMALL)
    drafter = gemma.assistant(request.param, num_layers=2, loss=LossConfig(weights={"kl": 1.0}))
    texts = random_prompts(VOCAB, 60, seed=1)
    store = MemoryStore(answered(gemma, texts, plain_answers(EOS, gemma.target, texts, 16, HOT)))
    settings = trainer_config(packed_length=400, max_steps=60, epochs=60, learning_rate=1e-2)
    fit(tmp_path_factory.mktemp("fit"), drafter, store, settings)  # type: ignore[arg-type]
    return gemma, drafter.eval()


@pytest.mark.parametrize("n", [1, N])
def test_greedy_rounds_are_the_loops_one_by_one(trained: tuple[Gemma4, Gemma4MTP], n: int) -> None:
    gemma, drafter = trained
    texts = random_prompts(VOCAB, 40, seed=2)
    settings = DecodingSettings(n, eos_ids=(EOS,), batch_size=16)
    results = speculative_generate(gemma.target, drafter, prompts_of(texts, 26), settings).results
    assert [r.ids for r in results] == [r.ids for r in plain_answers(EOS, gemma.target, texts, 26, GREEDY)]
    documents = answered(gemma, texts, results)
    decoding = DecodingConfig(num_speculative_tokens=n)
    found = simulate_heldout(drafter, MemoryStore(documents), range(len(documents)), decoding, (EOS,), packed_length=90)
    assert found.rounds == [r.rounds for r in results]
    rounds = [one for r in results for one in r.rounds]
    assert {one.accepted for one in rounds if not one.cut} >= set(range(min(n, 3) + 1))


@pytest.mark.parametrize("sampling", [HOT, SamplingParams(temperature=0.7, top_k=6)], ids=["1", "0.7 top-k"])
def test_a_slot_is_accepted_as_the_loop_would(trained: tuple[Gemma4, Gemma4MTP], sampling: SamplingParams) -> None:
    """min(1, p/q) of the document's own token, p as it is proposed from, q as the target decodes."""
    gemma, drafter = trained
    prompt, answer = random_ids(3, 5), random_ids(6, 6)
    prompt, answer = [t % VOCAB for t in prompt], [t % VOCAB for t in answer]
    document = gemma.states(prompt, answer)
    scores = drafter.score(pack_batch([document]), 1, sampling, sampling)
    for anchor, accept in zip(scores.anchor_R.tolist(), scores.accept_RK[:, 0].tolist(), strict=True):
        ids = [*prompt, *answer]
        cache = drafter.new_cache(1)
        hidden = gemma.target.post_norm(document.last_hidden[:anchor])[None]
        kv = {
            layer: (k[:anchor].transpose(0, 1)[None], v[:anchor].transpose(0, 1)[None])
            for layer, (k, v) in document.target_kv.items()
        }
        drafter.observe(cache, Observation(torch.tensor([ids[:anchor]]), torch.tensor([anchor]), None, hidden, kv))
        proposal = drafter.propose(cache, torch.tensor([ids[anchor]]), 1, sampling, [torch.Generator().manual_seed(0)])
        assert proposal.log_probs is not None
        p = float(proposal.log_probs[0, 0].exp()[ids[anchor + 1]])
        scaled_V = gemma.target.logits(document.last_hidden[anchor]).double() / sampling.temperature
        if sampling.top_k:
            scaled_V[scaled_V < scaled_V.topk(sampling.top_k).values[-1]] = -math.inf
        q = float(scaled_V.softmax(-1)[ids[anchor + 1]])
        assert accept == pytest.approx(min(1.0, p / q) if q else accept, abs=1e-5)


@pytest.mark.parametrize("centroids", [0, 16], ids=["tied head", "centroids"])
def test_losses_are_those_of_a_double_loop(centroids: int, tmp_path: Path) -> None:
    """Σ over columns and steps that count, each step's distribution made by drafting along the document; among packed
    documents, one of which counts nowhere.
    """
    gemma = Gemma4.make("dense", tmp_path, double=True, sliding_window=5)
    drafter = gemma.assistant(centroids, loss=LossConfig(weights={"ce": 0.3, "tv": 0.7}))
    documents = [gemma.states(random_ids(4, 1), random_ids(9, 2)), gemma.states(random_ids(6, 3), [])]
    documents.append(gemma.states(random_ids(2, 4), random_ids(5, 5)))
    sums = drafter.train_losses(pack_batch(documents))
    loss = weight = centroid_loss = 0.0
    for document in documents:
        ids, mask = document.input_ids.tolist(), document.loss_mask.tolist()
        for t in range(len(ids)):
            feature = gemma.target.post_norm(document.last_hidden[t])[None, None]
            for k in range(3):
                if t + 2 + k >= len(ids) or not (mask[t + 1] and mask[t + 2 + k]):
                    continue
                hidden_h = stepped(gemma, drafter, document, t, k, feature)
                log_p_V = (drafter.body.matrix_VH.detach() @ hidden_h).double().log_softmax(-1)
                q_V = gemma.target.logits(document.last_hidden[t + 1 + k]).double().softmax(-1)
                ce, tv = -log_p_V[ids[t + 2 + k]], 0.5 * (log_p_V.exp() - q_V).abs().sum()
                loss, weight = loss + 0.8**k * float(0.3 * ce + 0.7 * tv), weight + 0.8**k
                if centroids:
                    head = drafter.body.masked_embedding
                    mass_C = torch.stack([q_V[tokens].sum() for tokens in head.token_ordering.view(centroids, -1)])
                    log_c_C = (head.centroids.weight.detach() @ hidden_h).double().log_softmax(-1)
                    centroid_loss -= 0.8**k * float(mass_C @ log_c_C)
    assert float(sums.weight) == pytest.approx(weight, rel=1e-6)
    assert float(sums.loss) == pytest.approx(loss + centroid_loss, rel=1e-4)
    sums.loss.backward()
    gradients = {name: parameter.grad for name, parameter in drafter.body.named_parameters()}
    assert all(gradient is not None and bool(gradient.abs().max() > 0) for gradient in gradients.values())


def stepped(gemma: Gemma4, drafter: Gemma4MTP, document: TargetStates, t: int, k: int, feature: Tensor) -> Tensor:
    """The normed output of step k of column t, by transformers' model alone on the keys that the step sees."""
    body, ids = drafter.body, document.input_ids.tolist()
    window = {"sliding_attention": 5, "full_attention": 10_000}
    kv = {
        kind: tuple(
            part[max(0, t + 1 - window[kind]) : t + 1].transpose(0, 1)[None] for part in document.target_kv[layer]
        )
        for kind, layer in gemma.target.spec.kv_sources().items()
    }
    embed = gemma.target.model.get_input_embeddings()
    with torch.no_grad():
        for step in range(k + 1):
            x = body.pre_projection(torch.cat([embed(torch.tensor([[ids[t + 1 + step]]])), feature], dim=-1))
            everything = {kind: torch.ones(1, 1, 1, pair[0].shape[2], dtype=torch.bool) for kind, pair in kv.items()}
            normed = body.model(
                inputs_embeds=x,
                attention_mask=everything,
                position_ids=torch.tensor([[t]]),
                shared_kv_states=kv,
                use_cache=False,
            ).last_hidden_state
            feature = body.post_projection(normed)
    return normed[0, 0]


def small_documents(gemma: Gemma4) -> list[TargetStates]:
    sizes = [(3, 6), (2, 9), (4, 5), (2, 4), (3, 8), (2, 5)]
    return [
        gemma.states(random_ids(a, i), random_ids(b, i + 50), key=f"{i:03d}", split="heldout" if i == 5 else "train")
        for i, (a, b) in enumerate(sizes)
    ]


def test_a_batch_is_the_sum_of_its_documents(tmp_path: Path) -> None:
    """Losses, counts and gradients, however documents are packed: so ranks and accumulation steps add up."""
    gemma = Gemma4.make("e_series", tmp_path, double=True, sliding_window=5)
    drafter, documents = gemma.assistant(16), small_documents(gemma)
    found = []
    for batches in ([documents], [[one] for one in documents], [documents[4:], documents[:4][::-1]]):
        drafter.zero_grad()
        sums = [drafter.train_losses(pack_batch(batch)) for batch in batches]
        total = torch.stack([one.loss for one in sums]).sum()
        total.backward()
        weight = sum(float(one.weight) for one in sums)
        found.append(
            (float(total.detach()), weight, [p.grad.clone() for p in drafter.parameters() if p.grad is not None])
        )
    for loss, weight, gradients in found[1:]:
        assert (loss, weight) == pytest.approx(found[0][:2], rel=1e-6)
        for ours, wanted in zip(gradients, found[0][2], strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def test_a_resumed_training_is_an_uninterrupted_one(tmp_path: Path) -> None:
    gemma = Gemma4.make("dense", tmp_path / "target")
    store, settings = (
        MemoryStore(small_documents(gemma)),
        trainer_config(packed_length=30, max_steps=6, epochs=6, checkpoint_every_steps=3, eval_every_steps=3),
    )
    fit(tmp_path / "whole", gemma.assistant(16), store, settings)  # type: ignore[arg-type]
    first = next(path for path in (tmp_path / "whole" / "checkpoints").iterdir() if path.name.endswith("3"))
    shutil.copytree(first, tmp_path / "resumed" / "checkpoints" / first.name)
    fit(tmp_path / "resumed", gemma.assistant(16), store, settings)  # type: ignore[arg-type]
    last = sorted(path.name for path in (tmp_path / "whole" / "checkpoints").iterdir())[-1]
    for file in sorted((tmp_path / "whole" / "checkpoints" / last).rglob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "resumed" / file.relative_to(tmp_path / "whole")).read_bytes(), (
            file.name
        )


@pytest.mark.slow
@pytest.mark.parametrize("centroids", [0, 6], ids=["tied head", "centroids"])
def test_it_learns_a_periodic_task_and_the_loop_accepts_it(centroids: int, tmp_path: Path) -> None:
    folder, answer, n = tmp_path / "target", 30, 3
    target = periodic_target(
        folder, 160, "gemma4_text", final_logit_softcapping=None, vocab_size_per_layer_input=PERIODIC_VOCAB
    )
    gemma = Gemma4(folder, target, TargetHead.from_checkpoint(folder))
    starts = [(m, phase) for m, motif in enumerate(MOTIFS) for phase in range(len(motif))]
    prompts = [periodic_text(m, phase, 8 + phase % 3) for m, phase in starts]

    def answers(texts: list[list[int]]) -> list[list[int]]:
        asked = [Prompt(text, answer) for text in texts]
        return [one.ids for one in speculative_generate(target, None, asked, DecodingSettings()).results]

    said = answers(prompts)
    assert said == [periodic_text(m, phase + 8 + phase % 3, answer) for m, phase in starts]
    documents = [
        gemma.states(prompt, one, f"{i:03d}", "heldout" if i % 5 == 4 else "train")
        for i, (prompt, one) in enumerate(zip(prompts, said, strict=True))
    ]
    own = Gemma4MTPConfig(hidden_size=32, num_centroids=centroids, centroid_top_k=2 if centroids else 32)
    config = DrafterConfig(
        method="gemma4_mtp", num_layers=2, autoregressive=AutoregressiveConfig(ttt_steps=n), gemma4_mtp=own
    )
    drafter = build_drafter(config, target.spec, full_vocab(PERIODIC_VOCAB), gemma.head, folder)
    settings = trainer_config(packed_length=160, max_steps=300, epochs=300, eval_every_steps=300, learning_rate=3e-3)
    result = fit(tmp_path, drafter, MemoryStore(documents), settings)  # type: ignore[arg-type]
    last = [line for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()) if "loss" in line][
        -50:
    ]
    assert all(sum(line["accuracy_per_step"][k] for line in last) / len(last) >= 0.99 for k in range(n))
    assert result.best_acceptance_length > 0.95 * (1 + n)
    served = load_drafter(tmp_path / "drafter").attach(gemma.head)
    fresh = [periodic_text(m, phase, 12) for m, phase in starts]
    generation = speculative_generate(target, served, [Prompt(ids, answer) for ids in fresh], DecodingSettings(n))
    assert acceptance([r.rounds for r in generation.results]).acceptance_rate >= 0.95
    assert [r.ids for r in generation.results] == answers(fresh)


def test_every_sort_of_target_is_drafted_for_without_loss(tmp_path: Path) -> None:
    for sort in SORTS:
        gemma = Gemma4.make(sort, tmp_path / sort, double=True, **SMALL)
        texts = random_prompts(VOCAB, 6, seed=4)
        settings = DecodingSettings(3, eos_ids=(EOS,), batch_size=4)
        results = speculative_generate(gemma.target, gemma.assistant(), prompts_of(texts, 12), settings).results
        assert [r.ids for r in results] == [r.ids for r in plain_answers(EOS, gemma.target, texts, 12, GREEDY)]
