"""Gemma-4 MTP against transformers' own assistant, step for step, and its training against its drafting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gemma4_tools import SORTS, Gemma4, random_ids
from torch import Tensor
from transformers import Gemma4AssistantForCausalLM

from spectrain.data.packing import pack_batch
from spectrain.decoding.proposers import Observation
from spectrain.decoding.sampling import GREEDY
from spectrain.drafters.autoregressive.gemma4_mtp import Gemma4MTP
from spectrain.drafters.autoregressive.unroll import Columns
from spectrain.drafters.drafter_folder import load_drafter, save_drafter

STEPS = 4


@pytest.fixture(scope="module", params=SORTS)
def gemma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Gemma4:
    return Gemma4.make(request.param, tmp_path_factory.mktemp("gemma") / request.param)


def saved(drafter: Gemma4MTP, gemma: Gemma4, folder: Path) -> Path:
    save_drafter(
        drafter,
        folder,
        target=str(gemma.folder),
        target_architectures=("Gemma4ForCausalLM",),
        num_speculative_tokens=STEPS,
    )
    return folder


def reference_steps(
    assistant: Gemma4AssistantForCausalLM, gemma: Gemma4, ids: list[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits, feature) of each step of transformers' assistant behind the anchor ``ids[-1]``, with keys and values of
    a fresh prefill of what lies before it; each step takes the argmax. As in vLLM, the position is that of the last
    verified token, and a sliding layer sees as many keys as its window says.
    """
    window = assistant.config.text_config.sliding_window
    with torch.no_grad():
        prefill = gemma.target.model(
            input_ids=torch.tensor([ids[:-1]]), use_cache=False, output_hidden_states=True, return_shared_kv_states=True
        )
        kv = dict(prefill.shared_kv_states)
        kv["sliding_attention"] = tuple(part[:, :, -window:] for part in kv["sliding_attention"])
        token, feature = torch.tensor([[ids[-1]]]), prefill.hidden_states[-1][:, -1:]
        for _ in range(STEPS):
            embedding = gemma.target.model.get_input_embeddings()(token)
            output = assistant(
                inputs_embeds=torch.cat([embedding, feature], dim=-1),
                position_ids=torch.tensor([[len(ids) - 2]]),
                shared_kv_states=kv,
            )
            yield output.logits[0, 0], output.last_hidden_state[0, 0]
            token, feature = output.logits.argmax(-1), output.last_hidden_state


@pytest.mark.parametrize("centroids", [0, 16], ids=["tied head", "centroids"])
def test_each_step_is_that_of_transformers(gemma: Gemma4, centroids: int, tmp_path: Path) -> None:
    drafter = gemma.assistant(centroids)
    assistant = Gemma4AssistantForCausalLM.from_pretrained(saved(drafter, gemma, tmp_path / "assistant"))
    for seed, length in enumerate((2, 7, 8, 9, 25)):  # below, at and above the window
        ids = random_ids(length + 1, seed)
        cache = drafter.new_cache(1)
        observe(drafter, gemma, cache, ids[:-1])
        steps = drafter.draft_steps(cache, torch.tensor(ids[-1:]), STEPS)
        for normed_BH, (logits_V, feature_H) in zip(steps, reference_steps(assistant, gemma, ids), strict=True):
            ours_V = drafter.draft_logits(normed_BH)[0]
            scored_V = ours_V > torch.finfo(torch.float32).min
            assert int(scored_V.sum()) == (len(ours_V) if not centroids else 5 * len(ours_V) // centroids)
            torch.testing.assert_close(ours_V[scored_V], logits_V[scored_V], rtol=1e-2, atol=3e-3)
            assert not scored_V.logical_not().any() or float(logits_V[~scored_V].max()) < float(
                logits_V[scored_V].min()
            )
            torch.testing.assert_close(drafter.body.post_projection(normed_BH)[0], feature_H, rtol=1e-2, atol=3e-3)
            steps.token_B = ours_V.argmax(-1)[None]


def observe(drafter: Gemma4MTP, gemma: Gemma4, cache: object, ids: list[int]) -> None:
    ids_1T = torch.tensor([ids])
    output = gemma.target.run(ids_1T, torch.arange(len(ids))[None], kv_layers=drafter.kv_layers)
    drafter.observe(cache, Observation.of_pass(gemma.target, drafter, ids_1T, output, torch.tensor([len(ids)])))  # type: ignore[arg-type]


def test_unrolled_training_is_drafting_on_packed_documents(gemma: Gemma4) -> None:
    """Column t, step k = step k of a draft behind x_{t+1}, led along the document's own tokens."""
    drafter = gemma.assistant()
    texts = [random_ids(n, seed) for n, seed in ((23, 1), (9, 2), (14, 3))]
    batch = pack_batch([gemma.states(text[:4], text[4:], key=str(i)) for i, text in enumerate(texts)])
    columns = Columns.build(batch, STEPS)
    with torch.no_grad():
        hidden_KMH = drafter.unroll(batch, columns)
    for m, flat in enumerate(columns.query_M.tolist()):
        text, t = texts[int(batch.document_ids_T[flat])], int(batch.position_ids_T[flat])
        cache = drafter.new_cache(1)
        observe(drafter, gemma, cache, text[: t + 1])
        steps = drafter.draft_steps(cache, torch.tensor([text[t + 1]]), STEPS)
        for k in range(STEPS):
            with torch.no_grad():
                normed_BH = next(steps)
            if columns.valid_KM[k, m]:
                torch.testing.assert_close(hidden_KMH[k, m], normed_BH[0], rtol=1e-2, atol=3e-3)
                steps.token_B = torch.tensor([text[t + 2 + k]])


def test_layers_run_again_in_the_backward_pass_and_gradients_are_the_same(gemma: Gemma4) -> None:
    drafter, text = gemma.assistant(), random_ids(18, 4)
    batch = pack_batch([gemma.states(text[:4], text[4:])])
    columns = Columns.build(batch, STEPS)
    runs: list[None] = []
    drafter.body.model.layers[0].register_forward_hook(lambda *_: runs.append(None))
    found = []
    for recompute in (False, True):
        drafter.body.recompute = recompute
        drafter.zero_grad()
        runs.clear()
        drafter.unroll(batch, columns).square().sum().backward()
        found.append({name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None})
        assert len(runs) == STEPS * (1 + recompute)
    assert found[0].keys() == found[1].keys() and len(found[0]) > 10
    for name, gradient in found[0].items():
        assert torch.equal(found[1][name], gradient)


@pytest.mark.parametrize("centroids", [0, 16], ids=["tied head", "centroids"])
def test_a_folder_gives_the_same_drafter(gemma: Gemma4, centroids: int, tmp_path: Path) -> None:
    drafter = gemma.assistant(centroids)
    found = load_drafter(saved(drafter, gemma, tmp_path / "assistant")).attach(gemma.head)
    assert found.shape == drafter.shape and found.kv_layers == drafter.kv_layers
    for name, tensor in drafter.body.state_dict().items():
        assert torch.equal(found.body.state_dict()[name], tensor)
    for name, buffer in found.to(torch.bfloat16).body.model.rotary_emb.named_buffers():
        assert buffer.dtype == torch.float32 and torch.equal(
            buffer, dict(drafter.body.model.rotary_emb.named_buffers())[name]
        )


def test_drafting_leaves_no_trace_and_rows_do_not_see_one_another(gemma: Gemma4) -> None:
    drafter = gemma.assistant()
    texts = [random_ids(n, n) for n in (12, 5, 30)]
    alone = []
    for text in texts:
        cache = drafter.new_cache(1)
        observe(drafter, gemma, cache, text[:-1])
        first = drafter.propose(cache, torch.tensor(text[-1:]), STEPS, GREEDY).ids
        assert torch.equal(drafter.propose(cache, torch.tensor(text[-1:]), STEPS, GREEDY).ids, first)
        alone.append(first[0])
    states = [gemma.states(text[:-1], []) for text in texts]
    width = max(len(text) - 1 for text in texts)
    cache = drafter.new_cache(3)
    for start, stop in ((0, 4), (4, 11), (11, width)):  # as the text grows, some rows ending before others
        lengths = torch.tensor([max(0, min(len(text) - 1, stop) - start) for text in texts])
        drafter.observe(cache, padded(gemma, states, start, stop, lengths))
    anchors = torch.tensor([text[-1] for text in texts])
    assert torch.equal(drafter.propose(cache, anchors, STEPS, GREEDY).ids, torch.stack(alone))


def padded(gemma: Gemma4, states: list, start: int, stop: int, lengths: Tensor) -> Observation:
    def rows(of) -> Tensor:
        parts = [of(one)[start:stop] for one in states]
        return torch.stack([torch.cat([p, p.new_full((stop - start - len(p), *p.shape[1:]), 9)]) for p in parts])

    kv = {
        layer: tuple(rows(lambda one, i=i: one.target_kv[layer][i]).transpose(1, 2) for i in (0, 1))  # noqa: B023
        for layer in states[0].target_kv
    }
    hidden = gemma.target.post_norm(rows(lambda one: one.last_hidden))
    return Observation(rows(lambda one: one.input_ids).long(), lengths, None, hidden, kv)
