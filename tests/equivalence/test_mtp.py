"""A tuned head is a drafter like any other: the loop's output is the target's own, its rounds are the simulation's, it
learns a periodic text, and only its own parameters are trained.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoders import prompts_of
from drafter_tools import MemoryStore, as_dtype, fit, gradients, packed, split_by_document, students, trainer_config
from mtp_tools import MtpTarget, mtp_target
from small_targets import (
    MOTIFS,
    capture,
    captured,
    periodic_target,
    periodic_text,
    plain_answers,
    random_prompts,
)

from spectrain.config.evaluation_schema import DecodingConfig
from spectrain.decoding.acceptance import acceptance
from spectrain.decoding.loop import DecodingSettings, Prompt, speculative_generate
from spectrain.decoding.sampling import GREEDY, SamplingParams
from spectrain.drafters.autoregressive.mtp import Mtp
from spectrain.evaluation.diagnosis import diagnose
from spectrain.evaluation.parity import DecodedPrompt, compare
from spectrain.target.smoke_targets import change_config
from spectrain.training.simulated_acceptance import simulate_heldout
from spectrain.training.trainer import Trainer

VOCAB, N, EOS = 20, 4, 7
HOT = SamplingParams(temperature=1.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> MtpTarget:
    folder = mtp_target(
        "mimo", tmp_path_factory.mktemp("mimo"), vocab_size=VOCAB, hidden_size=16, intermediate_size=24, head_dim=4
    )
    return MtpTarget("mimo", folder)


@pytest.fixture(scope="module")
def tuned(target: MtpTarget, tmp_path_factory: pytest.TempPathFactory) -> Mtp:
    """A head that has learned a little of the target."""
    texts = random_prompts(VOCAB, 60, seed=1)
    documents = captured((), target.model, texts, plain_answers(EOS, target.model, texts, 16, HOT))
    drafter = target.drafter(3)
    store = MemoryStore([as_dtype(document, torch.float64) for document in documents])
    options = trainer_config(packed_length=400, max_steps=80, epochs=80, learning_rate=3e-3)
    fit(tmp_path_factory.mktemp("fit"), drafter, store, options)
    assert isinstance(drafter, Mtp)
    return drafter.eval()


@pytest.mark.parametrize("n", [1, N])
def test_greedy_rounds_are_the_loops_one_by_one(target: MtpTarget, tuned: Mtp, n: int) -> None:
    texts = random_prompts(VOCAB, 40, seed=2)
    settings = DecodingSettings(n, eos_ids=(EOS,), batch_size=16)
    results = speculative_generate(target.model, tuned, prompts_of(texts, 26), settings).results
    assert [r.ids for r in results] == [r.ids for r in plain_answers(EOS, target.model, texts, 26, GREEDY)]
    documents = captured((), target.model, texts, results)
    found = simulate_heldout(
        tuned, MemoryStore(documents), range(40), DecodingConfig(num_speculative_tokens=n), (EOS,), packed_length=200
    )
    assert found.rounds == [r.rounds for r in results]
    rounds = [one for r in results for one in r.rounds]
    assert {one.accepted for one in rounds if not one.cut} == set(range(n + 1))


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_attention_paths_agree(target: MtpTarget, attention: str) -> None:
    documents = [target.document(mask, seed) for seed, mask in enumerate(("001111", "0101111"))]
    found = students(target.drafter(3, attention=attention), packed(documents))
    for key, expected in students(target.drafter(3), packed(documents)).items():
        torch.testing.assert_close(found[key], expected, rtol=1e-6, atol=1e-8)


def test_a_document_among_others_is_as_alone(target: MtpTarget) -> None:
    drafter = target.drafter(5)
    documents = [target.document(mask, seed) for seed, mask in enumerate(("0011111", "011111111", "1111111"))]
    together = students(drafter, packed(documents))
    for states, start in zip(documents, split_by_document(documents), strict=True):
        for (t, k), alone in students(drafter, packed([states])).items():
            torch.testing.assert_close(together[start + t, k], alone, rtol=1e-9, atol=1e-10)


def test_the_head_alone_is_trained(target: MtpTarget) -> None:
    """And all of it: every parameter has a gradient, the target's matrices have none."""
    drafter = target.drafter(3)
    drafter.train_losses(packed([target.document("0011111111", 3)])).loss.backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in drafter.parameters())
    names = {name for name, _ in drafter.named_parameters()}
    assert names == {f"body.{name}" for name in drafter.body.state_dict()}
    assert target.head.embed_weight.grad is None and not target.head.embed_weight.requires_grad


def test_one_step_or_many_are_the_same_first_step(target: MtpTarget) -> None:
    documents = [target.document("0011111111", 3)]
    one, seven = (students(target.drafter(steps), packed(documents)) for steps in (1, 7))
    for key, expected in one.items():
        torch.testing.assert_close(seven[key], expected, rtol=1e-12, atol=1e-12)
    assert max(k for _, k in seven) == 6


@pytest.mark.parametrize("misread", ["reads_before_norm", "feeds_normed"])
def test_a_head_that_is_read_otherwise_is_diagnosed(target: MtpTarget, tuned: Mtp, misread: str) -> None:
    texts = random_prompts(VOCAB, 6, seed=9)
    settings = DecodingSettings(3, eos_ids=(EOS,))

    def decoded() -> list[DecodedPrompt]:
        results = speculative_generate(target.model, tuned, prompts_of(texts, 24), settings).results
        return [DecodedPrompt(ids, one.ids, one.rounds) for ids, one in zip(texts, results, strict=True)]

    ours, thing = decoded(), tuned if misread == "reads_before_norm" else tuned.body
    right = getattr(thing, misread)
    try:
        setattr(thing, misread, not right)
        theirs = decoded()
    finally:
        setattr(thing, misread, right)
    report = compare(target.model, tuned, ours, theirs, 3)
    assert not report.passed
    wanted = "behind its final norm" if misread == "reads_before_norm" else "the unnormed output is fed back"
    assert wanted in diagnose(target.model, tuned, report, theirs, 3)[0]


def test_gradients_of_a_batch_are_those_of_its_documents(target: MtpTarget) -> None:
    """However documents are split over micro-batches and ranks: sums add up."""
    documents = [target.document(mask, seed) for seed, mask in enumerate(("0011111", "011111111", "1111111"))]

    def summed(groups: list[list[int]]) -> dict[str, torch.Tensor]:
        drafter = target.drafter(3)
        for group in groups:
            drafter.train_losses(packed([documents[number] for number in group])).loss.backward()
        return gradients(drafter)

    together = summed([[0, 1, 2]])
    for groups in ([[0], [1], [2]], [[2], [0, 1]]):
        for name, found in summed(groups).items():
            torch.testing.assert_close(found, together[name], rtol=1e-9, atol=1e-12)


def test_interrupted_and_resumed_is_uninterrupted(
    target: MtpTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = random_prompts(VOCAB, 12, seed=5)
    answers = plain_answers(EOS, target.model, texts, 12, HOT)
    store = MemoryStore([as_dtype(one, torch.float32) for one in captured((), target.model, texts, answers)])
    single = MtpTarget("mimo", target.folder, torch.float32)
    options = trainer_config(packed_length=60, max_steps=6, epochs=60, checkpoint_every_steps=2)
    fit(tmp_path / "whole", single.drafter(), store, options)
    step = Trainer._step

    def interrupted(self: Trainer, number: int, batches: object) -> object:
        if number == 3:
            raise KeyboardInterrupt
        return step(self, number, batches)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "parts", single.drafter(), store, options)
    fit(tmp_path / "parts", single.drafter(), store, options)
    whole, parts = (tmp_path / name / "drafter" / "tuned-mtp.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()


@pytest.mark.slow
def test_a_head_from_the_last_layer_learns_a_periodic_text(tmp_path: Path) -> None:
    steps, starts = 3, [(m, phase) for m, motif in enumerate(MOTIFS) for phase in range(len(motif))]
    model = periodic_target(tmp_path / "target", family="qwen2")
    change_config(tmp_path / "target", architectures=["MiMoForCausalLM"])
    single = MtpTarget("mimo", tmp_path / "target", torch.float32)
    drafter = single.drafter(steps, init="last_layer")
    documents = [
        capture(model, periodic_text(m, phase, 8), periodic_text(m, phase + 8, 30), (), f"{m}-{phase}", split)
        for m, phase in starts
        for split in ("train", "heldout")
    ]
    settings = trainer_config(packed_length=160, max_steps=300, epochs=300, eval_every_steps=300, learning_rate=3e-3)
    result = fit(tmp_path / "fit", drafter, MemoryStore(documents), settings)
    assert result.best_acceptance_length > 0.95 * (1 + steps)
    prompts = [Prompt(periodic_text(m, phase, 12), 30) for m, phase in starts]
    generation = speculative_generate(model, drafter.eval(), prompts, DecodingSettings(steps))
    assert acceptance([one.rounds for one in generation.results]).acceptance_rate >= 0.95
    assert [one.ids for one in generation.results] == [periodic_text(m, phase + 12, 30) for m, phase in starts]
