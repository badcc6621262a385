"""The embedded engine: its answers are the target's own. (What it captures: ``test_hf_capture.py``.)"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_engines import END_IDS, GREEDY, SAMPLED, make_conversations, make_engine, make_responses

from spectrain.config.schema import EngineConfig
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling
from spectrain.engines import hf
from spectrain.engines.hf import HFEngine
from spectrain.errors import InputError
from spectrain.target import cpu_kernels as cpu_attention_module
from spectrain.target.cpu_kernels import CPU_SDPA, cpu_attention

# One family per kind of cache and mask: plain, windows of 8 in turn with soft-cap, keys shared between layers,
# recurrent.
FAMILIES = ["llama", "gemma3_text", "gemma4_text", "qwen3_5_text"]


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
