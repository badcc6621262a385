"""Speculation at temperature 0 changes nothing but the number of passes, and the simulation knows their number
beforehand.
"""

import pytest
import torch
from decoders import BigramProposer, PrefixProposer, float64_target, full_forward, prefix_hash, prompts_of
from tiny import VOCAB_SIZE

from spectrain.decoding.acceptance import Round
from spectrain.decoding.loop import DecodingSettings, Prompt, speculative_generate
from spectrain.decoding.proposers import NGramProposer
from spectrain.decoding.sampling import SamplingParams
from spectrain.decoding.simulate import Span, simulate

FAMILIES = [
    ("llama", {}),
    ("qwen3", {}),
    ("gemma3", {"sliding_window": 8}),
    ("gemma4", {}),
    ("qwen3_5", {}),
]
MAX_NEW_TOKENS, N = 28, 4  # 1 + 5·5 + 2: a perfect drafter's last round is cut
PROMPTS = [[5, 17, 80, 3], [200, 9], [44] * 11 + [7], [30, 31, 32, 30, 31, 32, 30], [260]]


@pytest.fixture(scope="module", params=FAMILIES, ids=[family for family, _ in FAMILIES])
def setting(request, tmp_path_factory):
    """A target, the answers of transformers' own generate (each prompt alone, its own cache), and an end token that
    some contain.
    """
    family, overrides = request.param
    target = float64_target(family, tmp_path_factory.mktemp(family), **overrides)
    answers = [generated(target, prompt) for prompt in PROMPTS]
    return target, answers, answers[0][6]


def generated(target, prompt):
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return target.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


def ended(answer, eos):
    return answer[: answer.index(eos) + 1] if eos in answer else answer


def oracle(answers, error_every=10**9, short=False):
    """Drafts the target's own continuation, each token wrong with chance 1 / error_every; what it drafts depends on the
    prefix alone.
    """
    texts = [prompt + answer + [0] * 16 for prompt, answer in zip(PROMPTS, answers, strict=True)]

    def draft(prefix, n):
        text = next(text for text in texts if text[: len(prefix)] == prefix)
        true = text[len(prefix) : len(prefix) + n]
        drafts = [(token + (prefix_hash(prefix, j) % error_every == 0)) % VOCAB_SIZE for j, token in enumerate(true)]
        return drafts[: prefix_hash(prefix, 99) % (n + 1)] if short else drafts

    return draft


def proposer_named(name, answers):
    return {
        "none": lambda: None,
        "ngram": lambda: NGramProposer(3, 1),
        "noise": lambda: PrefixProposer(lambda prefix, n: [prefix_hash(prefix, j) % VOCAB_SIZE for j in range(n)]),
        "oracle": lambda: PrefixProposer(oracle(answers, 4), taps=(1, 2)),
        "hidden": lambda: PrefixProposer(oracle(answers, 4), reads_last_hidden=True),
        "taps and hidden": lambda: PrefixProposer(oracle(answers, 4, short=True), (2,), reads_last_hidden=True),
        "perfect": lambda: PrefixProposer(oracle(answers)),
        "short": lambda: PrefixProposer(oracle(answers, 5, short=True)),
    }[name]()


RUNS = [
    ("none", 1),
    ("none", None),
    ("ngram", 1),
    ("ngram", None),
    ("noise", None),
    ("oracle", 1),
    ("oracle", 2),
    ("oracle", None),
]


@pytest.mark.parametrize(("name", "batch_size"), [*RUNS, ("perfect", None), ("short", 3)])
def test_output_is_plain_greedy_output(setting, name, batch_size):
    target, answers, eos = setting
    expected = [ended(answer, eos) for answer in answers]
    assert {answer[-1] == eos for answer in expected} == {True, False}  # both ways to finish occur
    proposer = proposer_named(name, answers)
    reported = []
    settings = DecodingSettings(N, eos_ids=(eos,), batch_size=batch_size)
    generation = speculative_generate(
        target, proposer, prompts_of(PROMPTS, MAX_NEW_TOKENS), settings, on_tokens=reported.append
    )
    assert [result.ids for result in generation.results] == expected
    assert [result.finish_reason for result in generation.results] == [
        "stop" if answer[-1] == eos else "length" for answer in expected
    ]
    assert sum(reported) == sum(len(answer) for answer in expected)
    for prompt, result in zip(PROMPTS, generation.results, strict=True):
        check_bookkeeping(prompt, result)
    if name == "perfect":
        assert all(r.accepted == N for result in generation.results for r in result.rounds[:-1])


def check_bookkeeping(prompt, result):
    """Rounds tile the answer: each starts where the one before ended, and accepted + 1 tokens lie between."""
    position = len(prompt)  # the first token comes from the prompt's own pass
    for r in result.rounds:
        assert r.anchor == position
        assert 0 <= r.accepted <= r.drafted
        position += r.accepted + 1
    last = len(prompt) + len(result.ids) - 1
    assert last <= position <= last + 1


def decoded(target, proposer, eos, **settings):
    prompts = prompts_of(PROMPTS, MAX_NEW_TOKENS)
    return speculative_generate(target, proposer, prompts, DecodingSettings(N, eos_ids=(eos,), **settings)).results


@pytest.mark.parametrize("name", ["noise", "oracle", "perfect"])
def test_accepted_counts_are_the_simulation_round_by_round(setting, name):
    target, answers, eos = setting
    proposer = proposer_named(name, answers)
    results = decoded(target, proposer, eos)
    cuts = 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        text, start = prompt + result.ids, len(prompt)
        accept = torch.zeros(len(result.ids), N, dtype=torch.bool)
        for i in range(len(result.ids)):
            for j, token in enumerate(proposer.draft(text[: start + i + 1], N)):
                accept[i, j] = start + i + 1 + j < len(text) and text[start + i + 1 + j] == token
        assert simulate(Span(start, accept.numpy(), result.finish_reason == "stop"), N) == result.rounds
        cuts += sum(r.cut for r in result.rounds)
    if name == "perfect":
        assert cuts > 0  # otherwise the rule for cut rounds went untested


@pytest.mark.parametrize("name", ["oracle", "hidden", "taps and hidden"])
def test_the_proposer_is_shown_what_the_target_computed_at_each_position(setting, name):
    """Everything observed, prefill and rounds together, is one pass over the answer without any cache: through prompts
    of different lengths, rejected drafts, and rows that leave the batch. The last hidden state is the one that
    transformers itself hands to the head: after the final norm.
    """
    target, answers, eos = setting
    proposer = proposer_named(name, answers)
    results = decoded(target, proposer, eos)
    assert len({len(result.rounds) for result in results}) > 1  # some leave while others go on
    assert any(r.accepted < r.drafted for result in results for r in result.rounds)
    seen_of = {tuple(prompt): seen for prompt in PROMPTS for seen in proposer.seen if seen.ids[: len(prompt)] == prompt}
    assert len(seen_of) == len(PROMPTS)
    tolerance = 1e-4 if target.spec.hybrid else 1e-10  # recurrent layers keep float32 inside
    for prompt, result in zip(PROMPTS, results, strict=True):
        seen, text = seen_of[tuple(prompt)], prompt + result.ids
        assert len(seen.ids) >= len(text) - N - 2  # all but the last anchor and what the last round added
        assert seen.ids == text[: len(seen.ids)]
        assert bool(seen.taps) == bool(proposer.taps) and bool(seen.last_hidden) == proposer.reads_last_hidden
        for shown, expected in (
            (seen.taps, lambda ids: full_forward(target, ids, proposer.taps)[1]),
            (seen.last_hidden, lambda ids: normed_hidden(target, ids)),
        ):
            if shown:
                torch.testing.assert_close(torch.cat(shown), expected(seen.ids), rtol=tolerance, atol=tolerance)


def normed_hidden(target, ids):
    """[S, H]: what transformers' own pass gives the head."""
    taken = []
    hook = target.model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    try:
        with torch.no_grad():
            target.model(torch.tensor([ids]))
    finally:
        hook.remove()
    return taken[0][0]


def test_drawn_drafts_do_not_change_greedy_output(setting):
    target, answers, eos = setting
    proposer = BigramProposer(
        torch.randn(target.spec.vocab_size, target.spec.vocab_size, generator=torch.Generator().manual_seed(0))
    )
    results = decoded(target, proposer, eos, draft_sampling=SamplingParams(1.0))
    assert [result.ids for result in results] == [ended(answer, eos) for answer in answers]


def test_limits_per_prompt_and_one_token_answers(setting):
    target, answers, _ = setting
    limits = [1, 2, 7, 3, 20]
    prompts = [Prompt(prompt, limit) for prompt, limit in zip(PROMPTS, limits, strict=True)]
    results = speculative_generate(target, proposer_named("oracle", answers), prompts, DecodingSettings(N)).results
    assert [result.ids for result in results] == [answer[:limit] for answer, limit in zip(answers, limits, strict=True)]
    assert results[0].rounds == []
    assert {result.finish_reason for result in results} == {"length"}


def test_first_token_may_end_the_answer(setting):
    target, answers, _ = setting
    first = answers[1][0]
    settings = DecodingSettings(N, eos_ids=(first,))
    result = speculative_generate(target, NGramProposer(), [Prompt(PROMPTS[1], 9)], settings).results[0]
    assert (result.ids, result.rounds, result.finish_reason) == ([first], [], "stop")


def test_rounds_at_the_end_of_a_text(setting):
    """A perfect drafter against limit and end token, counted by hand."""
    target, answers, _ = setting
    prompt, answer, perfect = PROMPTS[0], answers[0], proposer_named("perfect", answers)
    start = len(prompt)
    rounds = {
        limit: speculative_generate(target, perfect, [Prompt(prompt, limit)], DecodingSettings(3)).results[0].rounds
        for limit in (4, 5, 6)
    }
    assert rounds[4] == [Round(start, 3, 3)]  # all three were accepted and are text; the bonus is not
    assert rounds[5] == [Round(start, 3, 3)]
    assert rounds[6] == [Round(start, 3, 3), Round(start + 4, 3, 1, cut=True)]
    position = next(i for i in range(1, MAX_NEW_TOKENS) if answer[i] not in answer[:i])
    assert position <= 8
    settings = DecodingSettings(8, eos_ids=(answer[position],))
    stopped = speculative_generate(target, perfect, [Prompt(prompt, 99)], settings).results[0]
    assert stopped.ids == answer[: position + 1]
    assert stopped.rounds == [Round(start, 8, position)]  # an end token completes its round, it does not cut it


def test_no_prompts_is_no_work(setting):
    assert speculative_generate(setting[0], NGramProposer(), [], DecodingSettings(N)).results == []


@pytest.mark.parametrize(("ids", "limit"), [([], 5), ([1], 0)])
def test_a_prompt_needs_a_token_and_room_for_another(ids, limit):
    with pytest.raises(ValueError, match="at least one token"):
        Prompt(ids, limit)
