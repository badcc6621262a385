"""The embedded engine: its answers are the target's own, its states are those of each document alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import CONFIGS, tiny_target

from spectrain.config.schema import EngineConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.data.hidden_states import TargetStates
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling
from spectrain.data.state_types import as_stored
from spectrain.engines import hf
from spectrain.engines.check_states import check_states
from spectrain.engines.hf import HFEngine
from spectrain.engines.inprocess_states import InProcessStates
from spectrain.errors import InputError, RunError
from spectrain.target import cpu_kernels as cpu_attention_module
from spectrain.target.cpu_kernels import CPU_SDPA, cpu_attention
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel
from spectrain.target.resolve import resolve_target

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=14, seed=0)
SAMPLED = Sampling(temperature=0.8, top_p=0.9, top_k=40, max_new_tokens=14, seed=3)
# A random target hardly ever ends an answer by its one end token; with these it does so after some ten tokens.
END_IDS = [2, *range(5, 304, 12)]
# One family per kind of cache and mask: plain, windows of 8 in turn with soft-cap, keys shared between layers,
# recurrent.
FAMILIES = ["llama", "gemma3_text", "gemma4_text", "qwen3_5_text"]
EAGER = {"gpt_oss", "gemma2"}  # attention sinks and soft-capped scores exist in eager attention only


def make_engine(
    folder: Path, family: str, batch_size: int = 3, capture_tokens: int = 64, max_length: int = 400
) -> HFEngine:
    config = TargetConfig(
        path=str(tiny_target(family, folder)), attn_implementation="eager" if family in EAGER else "sdpa"
    )
    resolved = resolve_target(config)
    target = TargetModel.load(resolved, config)
    target.generation_config.eos_token_id = END_IDS
    return HFEngine(target, resolved, EngineConfig(batch_size=batch_size, capture_tokens=capture_tokens), max_length)


def make_conversations(count: int, turns: int = 1) -> list[tuple[Conversation, str]]:
    words = ("sum", "of the capital", "x", "Paris and 42 and more", "say it", "user")
    conversations = []
    for number in range(count):
        texts = tuple(
            " ".join(words[(number * 5 + turn + k) % 6] for k in range(1 + number % 5)) + f" {number}"
            for turn in range(turns)
        )
        conversations.append(
            (Conversation(id=f"c{number}", turns=texts, domain="d"), "heldout" if number % 4 == 3 else "train")
        )
    return conversations


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> HFEngine:
    return make_engine(tmp_path_factory.mktemp("llama"), "llama")


def full_logits(engine: HFEngine, ids: list[int]) -> torch.Tensor:
    """Reference implementation: the unmodified model over one whole document, [S, V]."""
    with torch.no_grad():
        return engine.target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()


def by_id(responses: list[Response]) -> dict[str, Response]:
    assert len({response.conversation.id for response in responses}) == len(responses)
    return {response.conversation.id: response for response in responses}


def answer_ids(response: Response) -> list[int]:
    return response.input_ids[response.loss_mask.astype(bool)].tolist()


# Generation


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_transformers_generate(family: str, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, family)
    conversations = make_conversations(9)
    found = by_id(list(engine.generate(conversations, GREEDY)))
    assert {response.finish_reason for response in found.values()} == {"stop", "length"}
    for conversation, split in conversations:
        response = found[conversation.id]
        prompt = engine.template.first_prompt_ids(conversation)
        with torch.no_grad():
            own = engine.target.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=14,
                do_sample=False,
                pad_token_id=0,
            )[0].tolist()
        assert response.input_ids.tolist() == own
        assert response.loss_mask.tolist() == [0] * len(prompt) + [1] * (len(own) - len(prompt))
        stopped = own[-1] in END_IDS
        assert response.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(own) - len(prompt) == 14
        assert (response.split, response.domain, response.key) == (
            split,
            "d",
            engine.response_key(conversation, GREEDY),
        )


def drawn_reference(logits_V: torch.Tensor, sampling: Sampling, uniform: float) -> int:
    """Inverse transform from the truncated distribution, token by token in float64."""
    scaled = (logits_V / sampling.temperature).numpy()
    order = np.argsort(-scaled, kind="stable")[: sampling.top_k]
    probs = np.exp(scaled[order] - scaled[order].max())
    probs /= probs.sum()
    kept = [k for k in range(len(order)) if probs[:k].sum() < sampling.top_p]
    sampling = {int(order[k]): probs[k] for k in kept}
    target, total = uniform * sum(sampling.values()), 0.0
    for token in sorted(sampling):
        total += sampling[token]
        if target < total:
            return token
    return max(sampling)


def test_sampled_answers_follow_the_truncated_distribution_of_the_whole_document(
    llama: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: dict[str, list[float]] = {}
    real = hf.DrawnDialogue.next_uniform

    def recorded(dialogue: hf.DrawnDialogue) -> torch.Tensor:
        uniform = real(dialogue)
        used.setdefault(dialogue.conversation.id, []).append(float(uniform))
        return uniform

    monkeypatch.setattr(hf.DrawnDialogue, "next_uniform", recorded)
    for response in llama.generate(make_conversations(6), SAMPLED):
        answer, uniforms = answer_ids(response), used[response.conversation.id]
        assert len(uniforms) == len(answer) == len(set(uniforms))
        logits_SV = full_logits(llama, response.input_ids.tolist())
        start = len(response.input_ids) - len(answer)
        for step, token in enumerate(answer):
            assert token == drawn_reference(logits_SV[start + step - 1], SAMPLED, uniforms[step])


def test_random_numbers_are_uniform_and_differ_between_prompts_turns_and_seeds() -> None:
    numbers = []
    for number in range(40):
        for seed in range(2):
            for turn in range(2):
                conversation = Conversation(id="same", turns=(f"prompt {number}",) * 2)
                dialogue = hf.DrawnDialogue(conversation, "train", "k", [1], [0], turn=turn)
                dialogue.begin_turn(25, seed)
                numbers.append(dialogue.uniforms)
    drawn = torch.stack(numbers)
    assert len(drawn.flatten().unique()) == drawn.numel()
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.02)  # 4 standard errors
    assert bool((drawn.mean(dim=0) - 0.5).abs().max() < 0.1)  # the first number of a stream too


def test_an_answer_does_not_depend_on_company_order_or_resumption(llama: HFEngine) -> None:
    conversations = make_conversations(10)
    reference = by_id(list(llama.generate(conversations, SAMPLED)))
    alone = HFEngine(llama.target, llama.resolved, EngineConfig(batch_size=1), 400)
    wide = HFEngine(llama.target, llama.resolved, EngineConfig(batch_size=16), 400)
    begun = llama.generate(conversations, SAMPLED)
    first = {next(begun).key for _ in range(4)}
    begun.close()  # as a kill would
    rest = [pair for pair in conversations if llama.response_key(pair[0], SAMPLED) not in first]
    assert len(rest) == 6
    for found in (
        alone.generate(conversations[::-1], SAMPLED),
        wide.generate(conversations, SAMPLED),
        llama.generate(rest, SAMPLED),
    ):
        for name, response in by_id(list(found)).items():
            assert response.input_ids.tolist() == reference[name].input_ids.tolist()
            assert response.key == reference[name].key


def test_the_batch_is_refilled_while_others_are_still_being_answered(
    llama: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    real = hf.ResponseGenerator._decode
    monkeypatch.setattr(
        hf.ResponseGenerator,
        "_decode",
        lambda self, rows, cache: (widths.append(len(rows)), real(self, rows, cache))[1],
    )
    engine = HFEngine(llama.target, llama.resolved, EngineConfig(batch_size=8), 400)
    heard: list[int] = []
    responses = list(engine.generate(make_conversations(32), SAMPLED, heard.append))  # one group
    assert len(responses) == 32
    generated = sum(int(response.loss_mask.sum()) for response in responses)
    assert sum(heard) == generated
    assert sum(widths) == generated - 32  # the first token of each comes from its prefill
    assert max(widths) <= 8
    assert sum(widths) / len(widths) > 0.75 * 8


def test_prefill_takes_no_more_tokens_at_a_time_than_allowed(llama: HFEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[list[int]] = []
    real = hf.ResponseGenerator._prefill

    def recorded(self: hf.ResponseGenerator, joining: list[hf.DrawnDialogue], cache: object) -> object:
        lengths.append([len(dialogue.ids) for dialogue in joining])
        return real(self, joining, cache)

    monkeypatch.setattr(hf.ResponseGenerator, "_prefill", recorded)
    conversations = [*make_conversations(8), (Conversation(id="long", turns=("word " * 40,)), "train")]
    engine = HFEngine(llama.target, llama.resolved, EngineConfig(batch_size=9, capture_tokens=130), 400)
    assert len(list(engine.generate(conversations, GREEDY))) == 9
    assert lengths[0] == [max(map(max, lengths))]  # alone, for it is longer than allowed
    assert all(len(group) * max(group) <= 130 for group in lengths[1:])
    assert max(len(group) for group in lengths) > 1


def served_prompt(engine: HFEngine, conversation: Conversation, answers: list[str]) -> list[int]:
    """Reference: what transformers renders of the turns so far, up to the next answer."""
    messages = []
    for turn, text in enumerate(conversation.turns[: len(answers) + 1]):
        messages.append({"role": "user", "content": text})
        messages += [{"role": "assistant", "content": answer} for answer in answers[turn : turn + 1]]
    return engine.target.tokenizer.apply_chat_template(  # type: ignore[no-any-return]
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_every_turn_is_greedy_after_what_a_server_shows(family: str, tmp_path: Path) -> None:
    """A random target mostly ends its answers with tokens that are not the template's, so turns are documents."""
    engine = make_engine(tmp_path, family, batch_size=4)
    tokenizer, sampling = engine.target.tokenizer, replace(GREEDY, max_new_tokens=30)
    documents: dict[str, list[Response]] = {}
    for response in engine.generate(make_conversations(12, turns=3), sampling):
        documents.setdefault(response.conversation.id, []).insert(0, response)
    assert len(documents) == 12
    turns_answered: Counter[int] = Counter()
    for found in documents.values():
        conversation, answers = found[0].conversation, list[str]()
        for response in found:
            key = engine.response_key(conversation, sampling)
            assert response.key == (f"{key}-{len(answers) + 1}" if answers else key)
            ids, mask = response.input_ids.tolist(), response.loss_mask.tolist()
            greedy = full_logits(engine, ids).argmax(-1).tolist()
            starts = [i for i, counts in enumerate(mask) if counts and not mask[i - 1]]
            for start in starts:
                end = start + [*mask, 0][start:].index(0)
                prompt = served_prompt(engine, conversation, answers)
                assert start != starts[0] or ids[:start] == prompt
                assert tokenizer.decode(ids[:start]) == tokenizer.decode(prompt)
                assert ids[start:end] == greedy[start - 1 : end - 1]
                stopped = ids[end - 1] in END_IDS
                assert stopped or end - start == 30
                # vLLM returns no character at the end whose bytes are not all there (tests/vllm/test_server.py).
                answers.append(tokenizer.decode(ids[start : end - 1], skip_special_tokens=True).rstrip("\ufffd"))
            assert response.finish_reason == ("stop" if stopped else "length")
        assert len(answers) == 3 or found[-1].finish_reason == "length"
        turns_answered[len(answers)] += 1
    assert turns_answered[3] >= 2  # some went all the way
    assert turns_answered[1] + turns_answered[2] >= 1  # and some were cut off


def test_a_turn_after_the_templates_own_end_token_goes_on_the_document(llama: HFEngine) -> None:
    """The target is made to say the end token third; then all turns are one document, ids as they were generated."""
    end = llama.target.tokenizer.eos_token_id
    letters = llama.target.tokenizer.convert_tokens_to_ids(list("abcdefgh"))  # whole characters

    class Ending(hf.DrawnDialogue):
        def commit(self, token: int, end_ids: frozenset[int]) -> None:
            said = len(self.ids) - self.answer_start
            super().commit(end if said == 2 else letters[token % 8], frozenset([end]))

    generator = hf.ResponseGenerator(llama.target, llama.template, [end], GREEDY, 400, 3, 64, 12)
    generator._turns._kind = Ending
    keys = iter("abcde")
    for response in generator.answer(make_conversations(5, turns=3), lambda _: next(keys)):
        ids, mask = response.input_ids.tolist(), response.loss_mask.tolist()
        assert "-" not in response.key
        assert sum(mask) == 9 and ids[-1] == end
        answer = [i for i, counts in enumerate(mask) if counts]
        texts = [llama.target.tokenizer.decode([ids[i] for i in answer[k : k + 2]]) for k in (0, 3)]
        prompt = served_prompt(llama, response.conversation, texts)
        whole = llama.target.tokenizer.decode(ids[: answer[6]])
        assert whole == llama.target.tokenizer.decode(prompt)


def test_documents_stay_within_max_length(llama: HFEngine) -> None:
    conversations = make_conversations(8, turns=3)
    longest = max(len(llama.template.first_prompt_ids(conversation)) for conversation, _ in conversations)
    engine = HFEngine(llama.target, llama.resolved, EngineConfig(batch_size=3), longest + 5)
    responses = list(engine.generate(conversations, GREEDY))
    assert len({response.conversation.id for response in responses}) == 8
    assert max(len(response.input_ids) for response in responses) <= longest + 5
    assert any(response.finish_reason == "length" and len(response.input_ids) == longest + 5 for response in responses)
    for response in responses:  # a further user turn without room for its answer is left out
        assert response.loss_mask[-1] == 1


def test_a_prompt_without_room_is_named_before_anything_is_generated(
    llama: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations = [
        *make_conversations(3),
        (Conversation(id="giant", turns=("word " * 200,), source="p.jsonl:4"), "train"),
    ]
    length = len(llama.template.first_prompt_ids(conversations[-1][0]))
    monkeypatch.setattr(llama.target, "run", lambda *args, **kwargs: pytest.fail("the target was run"))
    for max_length in (50, length):
        engine = HFEngine(llama.target, llama.resolved, EngineConfig(), max_length)
        with pytest.raises(InputError, match=rf"p\.jsonl:4.*giant.*target\.max_length={max_length}"):
            engine.generate(conversations, GREEDY)


def test_imported_answers_are_rendered_and_not_generated(llama: HFEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.target, "run", lambda *args, **kwargs: pytest.fail("the target was run"))
    conversation = Conversation(id="i", turns=("What is 17 and 25?", "And x?"), answers=("42", "def f(x): return x"))
    (response,) = llama.generate([(conversation, "train")], GREEDY)
    ids, mask = llama.template.render_answered(conversation)
    assert (response.input_ids.tolist(), response.loss_mask.tolist(), response.finish_reason) == (ids, mask, "imported")
    assert 0 < sum(mask) < len(mask)

    first_answer = mask.index(1)
    (cut,) = HFEngine(llama.target, llama.resolved, EngineConfig(), first_answer + 1).generate(
        [(conversation, "train")], GREEDY
    )
    assert cut.input_ids.tolist() == ids[: first_answer + 1]
    with pytest.raises(InputError, match="prompt i "):
        HFEngine(llama.target, llama.resolved, EngineConfig(), first_answer).generate([(conversation, "train")], GREEDY)


# Capture


def make_responses(lengths: list[int], seed: int = 0) -> list[Response]:
    random = np.random.default_rng(seed)
    responses = []
    for number, length in enumerate(lengths):
        mask = (np.arange(length) >= length // 3).astype(np.uint8)
        mask[length // 2] = 0  # a second user turn of one token
        ids = random.integers(3, 304, length).astype(np.int32)
        conversation = Conversation(id=f"r{number}", turns=("x",))
        responses.append(
            Response(
                conversation, ids, mask, "stop", GREEDY, None, "heldout" if number % 2 else "train", f"key{number}"
            )
        )
    return responses


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


# The self-check


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


def test_nothing_is_handed_out_when_the_self_check_fails(llama: HFEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = llama.target.run

    def wrong(*args: object, **kwargs: object) -> object:
        output = real(*args, **kwargs)
        return replace(output, last_hidden_BSH=output.last_hidden_BSH.flip(-1))

    monkeypatch.setattr(llama.target, "run", wrong)
    with pytest.raises(RunError, match="self-check"):
        next(iter(llama.capture(make_responses([20, 20]), (1,))))


# Attention on the CPU


def test_cpu_attention_copies_no_heads_and_attends_document_by_document(
    llama: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    real = cpu_attention_module.scaled_dot_product_attention

    def recorded(query: torch.Tensor, key: torch.Tensor, *args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        shapes.append((tuple(query.shape), tuple(key.shape)))
        return real(query, key, *args, **kwargs)

    monkeypatch.setattr(cpu_attention_module, "scaled_dot_product_attention", recorded)
    list(llama.capture(make_responses([20, 12]), (1,)))
    assert set(shapes) == {((1, 4, 20, 8), (1, 2, 20, 8)), ((1, 4, 12, 8), (1, 2, 12, 8))}
    shapes.clear()
    list(llama.generate(make_conversations(3), GREEDY))
    assert {query[1] for query, _ in shapes} == {4}
    assert {key[1] for _, key in shapes} == {2}


def test_the_stock_attention_is_put_back(llama: HFEngine) -> None:
    def use_and_fail() -> None:
        with cpu_attention(llama.target.model):
            assert llama.target.model.config._attn_implementation == CPU_SDPA
            raise KeyError

    with pytest.raises(KeyError):
        use_and_fail()
    assert llama.target.model.config._attn_implementation == "sdpa"


def test_lengths_that_do_not_fit_the_row_are_refused(llama: HFEngine) -> None:
    positions = torch.cat([torch.arange(6), torch.arange(4)])[None]
    with pytest.raises(ValueError, match="documents of 9 tokens"), cpu_attention(llama.target.model, (6, 3)):
        llama.target.run(torch.ones(1, 10, dtype=torch.long), positions)
