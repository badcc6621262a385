"""The self-checks of what is captured: they pass for the target's own hidden states, and name layer and position for
others.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hf_engines import make_engine, make_responses
from tiny import tiny_target

from spectrain.config.schema import EngineConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.data.hidden_states import TargetStates
from spectrain.data.state_types import as_stored
from spectrain.engines.check_states import CheckDocument, SelfCheck, check_states
from spectrain.engines.hf import HFEngine
from spectrain.engines.inprocess_states import InProcessStates
from spectrain.errors import RunError
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel
from spectrain.target.resolve import ResolvedTarget, resolve_target

TAPS = (1, 2, 4)
DOCUMENTS = [[5, 9, 200, 31, 7], [40, 41, 42], [3, 99, 14, 15, 92, 65, 35]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetConfig, ResolvedTarget]:
    config = TargetConfig(path=str(tiny_target("llama", tmp_path_factory.mktemp("target"))))
    return config, resolve_target(config)


def captured(target: tuple[TargetConfig, ResolvedTarget], taps: tuple[int, ...]) -> list[CheckDocument]:
    """Reference implementation: hidden states and greedy tokens of the unmodified model, as a server would
    give them.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(target[1].folder), dtype=torch.float32)
    inputs: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    documents = []
    for number, ids in enumerate(DOCUMENTS):
        with torch.no_grad():
            output = model(torch.tensor([ids[:-1]]), output_hidden_states=True)
        layers = [*output.hidden_states[:-1], inputs[-1]]
        rows = torch.cat([torch.stack([layer[0] for layer in layers], dim=1), torch.zeros(1, 5, 32)])
        states = TargetStates(
            torch.tensor(ids, dtype=torch.int32),
            torch.zeros(len(ids), dtype=torch.uint8),
            rows[:, list(taps)],
            rows[:, 4],
            None,
            f"document {number}",
            "train",
        )
        documents.append(CheckDocument(states, int(output.logits[0, -1].argmax())))
    return documents


def check(target: tuple[TargetConfig, ResolvedTarget], method: str, states_dtype: str = "float32") -> SelfCheck:
    made = SelfCheck(EngineConfig(self_check=method), *target, TAPS, states_dtype)
    made.prepare(DOCUMENTS)
    return made


@pytest.mark.parametrize("method", ["auto", "taps", "greedy", "off"])
def test_the_targets_own_states_pass(target: tuple[TargetConfig, ResolvedTarget], method: str) -> None:
    made = check(target, method)
    assert made.method == ("taps" if method == "auto" else method)
    made.compare(captured(target, TAPS))


@pytest.mark.parametrize(
    ("taps", "tap", "layer"), [((2, 3, 4), 1, 2), ((0, 1, 3), 1, 0), ((1, 3, 4), 2, 3), ((1, 2, 3), 4, 3)]
)
def test_states_of_another_layer_are_named(
    target: tuple[TargetConfig, ResolvedTarget], taps: tuple[int, ...], tap: int, layer: int
) -> None:
    with pytest.raises(
        RunError,
        match=rf"as tap {tap} is not .* after {tap} layers \(it is the one after {layer} layers\).* at position 0 ",
    ):
        check(target, "taps").compare(captured(target, taps))


def stored(documents: list[CheckDocument], dtype: str) -> list[CheckDocument]:
    """As they are read from a shard."""
    return [
        replace(
            document,
            states=replace(
                document.states,
                taps=as_stored(document.states.taps, dtype),
                last_hidden=as_stored(document.states.last_hidden, dtype),
            ),
        )
        for document in documents
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("method", ["taps", "greedy"])
@pytest.mark.slow
def test_storing_in_fewer_bits_is_no_difference(
    target: tuple[TargetConfig, ResolvedTarget], dtype: str, method: str
) -> None:
    check(target, method, dtype).compare(stored(captured(target, TAPS), dtype))
    if method == "taps":
        with pytest.raises(RunError, match=r"as tap 1 is not .* after 1 layers \(it is the one after 2 layers\)"):
            check(target, method, dtype).compare(stored(captured(target, (2, 3, 4)), dtype))
        doubtful = stored(captured(target, TAPS), dtype)
        doubtful[1].states.taps[0, 1] *= 1.05
        with pytest.raises(RunError, match=r"as tap 2 is not .* at position 0 of document document 1"):
            check(target, method, dtype).compare(doubtful)


@pytest.mark.parametrize("value", [torch.nan, 50.0])
def test_one_wrong_row_is_found(target: tuple[TargetConfig, ResolvedTarget], value: float) -> None:
    documents = captured(target, TAPS)
    taps = documents[2].states.taps.clone()
    taps[3, 1, 0] = value
    documents[2] = replace(documents[2], states=replace(documents[2].states, taps=taps))
    said = r"tap 2 .* position 3 of document document 2" if value == 50.0 else "not finite in float32.*document 2"
    with pytest.raises(RunError, match=said):
        check(target, "taps").compare(documents)


@pytest.mark.parametrize("method", ["taps", "greedy"])
def test_a_last_hidden_state_that_is_not_the_heads_input_is_found(
    target: tuple[TargetConfig, ResolvedTarget], method: str
) -> None:
    documents = captured(target, TAPS)
    other = documents[1].states.taps[:, 1]
    documents[1] = replace(documents[1], states=replace(documents[1].states, last_hidden=other))
    match = (
        "last_hidden is not .* document 1"
        if method == "taps"
        else r"position 1 of document document 1 .* last_hidden \(layer 4\)"
    )
    with pytest.raises(RunError, match=match):
        check(target, method).compare(documents)


def test_a_target_that_does_not_fit_or_is_quantised_is_checked_by_its_tokens(
    target: tuple[TargetConfig, ResolvedTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SelfCheck(EngineConfig(quantization="fp8"), *target, TAPS, "float32").method == "greedy"
    monkeypatch.setattr("spectrain.engines.check_states._free_memory", lambda: 1000)
    made = SelfCheck(EngineConfig(), *target, TAPS, "float32")
    monkeypatch.setattr(TargetModel, "load", lambda *args: pytest.fail("the model was loaded"))
    made.prepare(DOCUMENTS)
    assert made.method == "greedy"


# --- engine=hf: the model is beside it -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> HFEngine:
    return make_engine(tmp_path_factory.mktemp("llama"), "llama")


def first_states(engine: HFEngine) -> list[TargetStates]:
    return list(engine.capture(make_responses([40, 30]), (1,)))


def test_the_self_check_passes_for_the_target_itself(llama: HFEngine) -> None:
    check_states(llama.target, TargetHead.from_checkpoint(llama.resolved.folder), first_states(llama))


def test_the_self_check_names_a_head_that_differs(llama: HFEngine) -> None:
    states, head = first_states(llama), TargetHead.from_checkpoint(llama.resolved.folder)
    head.norm_weight += 1  # the other gain convention
    with pytest.raises(RunError, match=r"position 0 of response key0.*next token"):
        check_states(llama.target, head, states)


def test_the_self_check_finds_a_scale_that_leaves_the_argmax_alone(llama: HFEngine) -> None:
    states, head = first_states(llama), TargetHead.from_checkpoint(llama.resolved.folder)
    head.math = replace(head.math, logit_scale=1.3)
    with pytest.raises(RunError, match="log-probability"):
        check_states(llama.target, head, states)


def test_the_self_check_finds_states_that_saw_a_neighbour(llama: HFEngine) -> None:
    first, second = first_states(llama)
    output = llama.target.run(torch.cat([second.input_ids, first.input_ids])[None].long(), torch.arange(70)[None])
    leaked = replace(first, last_hidden=output.last_hidden_BSH[0, 30:])
    with pytest.raises(RunError, match="key0"):
        check_states(llama.target, TargetHead.from_checkpoint(llama.resolved.folder), [leaked])


def test_the_self_check_tolerates_a_tie(llama: HFEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    states, head = first_states(llama)[:1], TargetHead.from_checkpoint(llama.resolved.folder)
    model_forward = llama.target.model.forward

    def tied(**inputs: object) -> object:
        output = model_forward(**inputs)
        two = output.logits.topk(2, dim=-1)
        # The second token overtakes the first by less than rounding might.
        output.logits.scatter_(-1, two.indices[..., 1:], two.values[..., :1] + 1e-4)
        return output

    own = head.hidden_to_logits(states[0].last_hidden).topk(2, dim=-1)
    head_logits = head.hidden_to_logits
    monkeypatch.setattr(llama.target.model, "forward", tied)
    monkeypatch.setattr(
        head,
        "hidden_to_logits",
        lambda hidden: (raw := head_logits(hidden)).scatter(
            -1, raw.topk(2).indices[..., 1:], raw.topk(2).values[..., :1] - 1e-4
        ),
    )
    assert bool((own.values[:, 0] > own.values[:, 1]).all())
    check_states(llama.target, head, states)


def test_in_16_bits_the_self_check_allows_for_a_few_tokens_that_went_to_other_experts(
    llama: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, head = first_states(llama), TargetHead.from_checkpoint(llama.resolved.folder)
    checked = torch.linspace(0, 39, 8).long()
    monkeypatch.setattr(type(llama.target), "dtype", torch.bfloat16)
    for wrong, passes in ((4, True), (5, False)):  # of 16
        last_hidden = states[0].last_hidden.clone()
        last_hidden[checked[:wrong]] *= -1
        damaged = [replace(states[0], last_hidden=last_hidden), states[1]]
        if passes:
            check_states(llama.target, head, damaged)
        else:
            with pytest.raises(RunError, match="5 of 16"):
                check_states(llama.target, head, damaged)


@pytest.mark.parametrize("source", ["stored", "inprocess"])
def test_nothing_is_handed_out_when_the_self_check_fails(
    llama: HFEngine, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    real = llama.target.run
    responses = make_responses([20, 20])

    def wrong(*args: object, **kwargs: object) -> object:
        output = real(*args, **kwargs)
        return replace(output, last_hidden_BSH=output.last_hidden_BSH.flip(-1))

    monkeypatch.setattr(llama.target, "run", wrong)
    stored = llama.capture(responses, (1,))
    asker = InProcessStates(llama.target, llama.resolved, responses, (1,), (), 64, "float32")
    with pytest.raises(RunError, match="self-check"):
        next(iter(stored if source == "stored" else asker.ask(responses[0])))
