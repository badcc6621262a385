"""Hidden states that the embedded engine captures: those of each document alone, whatever runs beside it, stored or
asked for while training runs. (Whether they are checked: ``test_check_states.py``.)
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_engines import make_engine, make_responses
from tiny import CONFIGS

from spectrain.data.responses import Response
from spectrain.data.state_types import as_stored
from spectrain.engines import hf
from spectrain.engines.hf import HFEngine
from spectrain.engines.inprocess_states import InProcessStates
from spectrain.target.head import TargetHead


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> HFEngine:
    return make_engine(tmp_path_factory.mktemp("llama"), "llama")


def reference_states(
    engine: HFEngine, response: Response, tap_ids: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference implementation: taps [S, A, H], none of them the last layer's, and logits [S, V], by the unmodified
    model on the document alone.
    """
    with torch.no_grad():
        output = engine.target.model(
            input_ids=torch.from_numpy(response.input_ids).long()[None], use_cache=False, output_hidden_states=True
        )
    return torch.stack([output.hidden_states[tap][0] for tap in tap_ids], dim=1), output.logits[0].double()


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.slow
def test_packed_states_are_those_of_each_document_alone(family: str, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, family, capture_tokens=64)
    responses = make_responses([23, 5, 40, 1, 17, 12, 9, 70])
    tap_ids = (0, 1, 3)
    found = {states.key: states for states in engine.capture(responses, tap_ids)}
    assert len(found) == len(responses)
    head = TargetHead.from_checkpoint(engine.resolved.folder)
    for response in responses:
        states, length = found[response.key], len(response.input_ids)
        taps_SAH, logits_SV = reference_states(engine, response, tap_ids)
        assert states.input_ids.numpy().tolist() == response.input_ids.tolist()
        assert states.loss_mask.numpy().tolist() == response.loss_mask.tolist()
        assert states.split == response.split
        torch.testing.assert_close(states.taps, taps_SAH, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(head.hidden_to_logits(states.last_hidden).double(), logits_SV, rtol=1e-4, atol=1e-4)
        needed = [t + 1 < length and bool(response.loss_mask[t + 1]) for t in range(length)]
        assert states.log_normalizer.isnan().logical_not().tolist() == needed
        expected = logits_SV.logsumexp(-1)[torch.tensor(needed)]
        torch.testing.assert_close(states.log_normalizer[torch.tensor(needed)].double(), expected, rtol=1e-4, atol=1e-4)


def test_a_document_does_not_see_its_neighbours(llama: HFEngine) -> None:
    responses = make_responses([20, 19, 18])
    changed = [replace(responses[0], input_ids=(responses[0].input_ids + 1) % 300), *responses[1:]]
    before = {states.key: states for states in llama.capture(responses, (1, 4))}
    after = {states.key: states for states in llama.capture(changed, (1, 4))}
    assert not torch.equal(before["key0"].taps, after["key0"].taps)
    for key in ("key1", "key2"):
        assert torch.equal(before[key].taps, after[key].taps)
        assert torch.equal(before[key].last_hidden, after[key].last_hidden)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_log_normalizer_belongs_to_the_states_as_they_will_be_stored(llama: HFEngine, dtype: str) -> None:
    (states,) = llama.capture(make_responses([30]), (1,), dtype)
    assert states.last_hidden.dtype == torch.float32  # rounding is the store's business
    head = TargetHead.from_checkpoint(llama.resolved.folder)
    needed = states.log_normalizer.isnan().logical_not()
    stored = head.hidden_to_logits(as_stored(states.last_hidden, dtype).float()).logsumexp(-1)[needed]
    exact = head.hidden_to_logits(states.last_hidden).logsumexp(-1)[needed]
    torch.testing.assert_close(states.log_normalizer[needed], stored, rtol=0, atol=1e-5)
    assert float((exact - stored).abs().max()) > 1e-4  # or this test could not tell them apart


def test_no_taps_are_possible(llama: HFEngine) -> None:
    (states,) = llama.capture(make_responses([8]), ())
    assert states.taps.shape == (8, 0, 32)


def test_batches_hold_whole_documents_within_the_budget_the_longest_first(llama: HFEngine) -> None:
    responses = make_responses([30, 70, 30, 4, 30, 1, 1])
    made = hf.capture_batches(llama.target, responses, 64)
    assert [[len(response.input_ids) for response in batch] for batch in made] == [[70], [30, 30], [30, 4, 1, 1]]


def test_a_document_that_is_asked_for_brings_the_batch_that_capture_computes_it_in(llama: HFEngine) -> None:
    responses = make_responses([30, 70, 30, 4, 30, 1, 1])
    captured = {states.key: states for states in llama.capture(responses, (1, 3))}
    asker = InProcessStates(llama.target, llama.resolved, responses, (1, 3), (), 64, "float32")
    company = {70: [70], 30: [30, 30], 4: [30, 4, 1, 1], 1: [30, 4, 1, 1]}
    for number in (3, 1, 5, 3):
        made = asker.ask(responses[number])
        assert [len(states.input_ids) for states in made] == company[len(responses[number].input_ids)]
        assert responses[number].key in [states.key for states in made]
        for states in made:
            assert states.taps.equal(captured[states.key].taps)
            assert states.last_hidden.equal(captured[states.key].last_hidden)
