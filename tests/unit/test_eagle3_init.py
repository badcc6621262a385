"""The closed-form initialisation: good where the target's states are linear in what the drafter sees, and each part
does what it was solved for.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from spectrain.config.drafter_schema import DrafterConfig
from spectrain.data.hidden_states import TargetStates
from spectrain.data.packing import PackedBatch, pack_batch
from spectrain.data.vocab import full_vocab
from spectrain.drafters.autoregressive.eagle3 import Eagle3, Eagle3Shape
from spectrain.drafters.autoregressive.eagle3_init import _own_column_heads
from spectrain.drafters.autoregressive.unroll import Columns, unroll
from spectrain.drafters.init_from_target import unit
from spectrain.drafters.layers import LayerShape
from spectrain.target.families import FAMILIES, HeadMath
from spectrain.target.head import TargetHead

HIDDEN, VOCAB, LENGTH = 32, 40, 24


def world(documents: int, seed: int = 0, mean: float = 2.0) -> tuple[TargetHead, list[TargetStates]]:
    """A target whose state turns by a rotation and adds its token: y_{t+1} = 0.7 R y_t + e(x_{t+1}).

    As in language models, embeddings have a common ``mean``, so that some direction of a drafter's input is nearly
    constant.
    """
    generator = torch.Generator().manual_seed(seed)
    embed = mean + torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(99))
    turn, _ = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(98)))
    head = TargetHead(HeadMath(FAMILIES["llama"], HIDDEN, 1e-6), embed, torch.ones(HIDDEN), None)
    texts = []
    for number in range(documents):
        ids = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
        y = [embed[ids[0]] + torch.randn(HIDDEN, generator=generator)]
        for t in range(1, LENGTH):
            y.append(0.7 * turn @ y[-1] + embed[ids[t]])
        last = torch.stack(y)
        mask = torch.tensor([0] * 4 + [1] * (LENGTH - 4), dtype=torch.uint8)
        texts.append(
            TargetStates(ids.int(), mask, last[:, None].clone(), last, torch.zeros(LENGTH), str(number), "train")
        )
    return head, texts


def drafter(
    layer_type: str, head: TargetHead, num_layers: int = 1, taps: tuple[int, ...] = (4,), **switches: bool
) -> Eagle3:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    layer = LayerShape(layer_type, HIDDEN, 48, 8, 4, 8, 1e-6, rope, 128)
    torch.manual_seed(1)
    model = Eagle3(Eagle3Shape(layer, num_layers, taps, VOCAB, VOCAB, **switches), full_vocab(VOCAB), DrafterConfig())
    model.attach(head)
    return model


def batches(texts: list[TargetStates]) -> Callable[[], Iterator[PackedBatch]]:
    return lambda: (pack_batch(texts[i : i + 8]) for i in range(0, len(texts), 8))


def agreement(model: Eagle3, head: TargetHead, batch: PackedBatch) -> list[float]:
    """Mean cosine between the drafter's state after each step and the target's state there."""
    columns = Columns.build(batch, 3)
    with torch.no_grad():
        hidden_KMH = unroll(model.body, model.rotary, head, model.body.fuse(batch.taps_TAH), batch, columns, "eager")
    result = []
    for step, valid_M in enumerate(columns.valid_KM):
        truth = batch.last_hidden_TH[columns.query_M[valid_M] + 1 + step]
        result.append(float(torch.cosine_similarity(hidden_KMH[step, valid_M], truth, dim=-1).mean()))
    return result


@pytest.mark.parametrize("layer_type", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "switches", [{}, {"fc_norm": True}, {"norm_before_residual": True}, {"norm_output": True}], ids=str
)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_solves_a_linear_world_on_unseen_text(layer_type: str, switches: dict[str, bool], num_layers: int) -> None:
    head, texts = world(64)
    _, unseen = world(8, seed=7)
    model = drafter(layer_type, head, num_layers, **switches)
    before = agreement(model, head, pack_batch(unseen))
    assert model.closed_form_init(batches(texts)) > 1000
    after = agreement(model, head, pack_batch(unseen))
    assert max(before) < 0.5
    assert min(after) > 0.93


@pytest.mark.parametrize("layer_type", ["llama", "qwen3"])
def test_first_head_of_each_group_sees_its_own_column(layer_type: str) -> None:
    head, texts = world(64)
    model = drafter(layer_type, head)
    model.closed_form_init(batches(texts))
    layer, batch = model.body.layers[0], pack_batch(texts[:1])
    with torch.no_grad():
        _, x = layer.attention_input(model.body.fuse(batch.taps_TAH), head.embed_rows(batch.input_ids_T.roll(-1)))
        cos_sin = model.rotary.cos_sin(batch.position_ids_T)
        q, (k, v) = layer.self_attn.queries(x, cos_sin)[4:-2], layer.self_attn.keys_values(x, cos_sin)
        own_q = q.unflatten(1, (4, 2))[:, :, 0]
        scores = torch.einsum("mgd,tgd->gmt", own_q, k) / 8**0.5
        hidden = torch.arange(LENGTH)[None] > torch.arange(4, LENGTH - 2)[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    own = weights[:, torch.arange(LENGTH - 6), torch.arange(4, LENGTH - 2)]
    assert float(own.mean()) > 0.85
    heads = _own_column_heads(model.body, x).unflatten(1, (4, 2))
    torch.testing.assert_close(heads[:, :, 0], v)
    assert not heads[:, :, 1].any()


def hinting_world(documents: int, seed: int) -> tuple[TargetHead, list[TargetStates]]:
    """As ``world``, but what is added to a state is known a token ahead by another tap, and by that alone."""
    head, texts = world(documents, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    hinted = []
    for text in texts:
        hint = 1.5 * torch.randn(LENGTH, HIDDEN, generator=generator)
        last = text.last_hidden.clone()
        last[1:] += hint[:-1]
        hinted.append(replace(text, last_hidden=last, taps=torch.stack([hint, last], dim=1)))
    return head, hinted


@pytest.mark.parametrize("layer_type", ["llama", "qwen3"])
@pytest.mark.parametrize("switches", [{}, {"norm_before_residual": True}], ids=str)
def test_a_tap_that_knows_what_follows_is_used(layer_type: str, switches: dict[str, bool]) -> None:
    head, texts = hinting_world(64, seed=0)
    _, unseen = hinting_world(8, seed=7)
    found = {}
    for taps in ((2, 4), (4,)):
        shown, asked = ([replace(text, taps=text.taps[:, -len(taps) :]) for text in some] for some in (texts, unseen))
        model = drafter(layer_type, head, taps=taps, **switches)
        model.closed_form_init(batches(shown))
        found[taps] = agreement(model, head, pack_batch(asked))[0]
    # The hint is longer than the rest of a state: without it most of the state is not known.
    assert found[(4,)] < 0.88
    assert found[(2, 4)] > 0.9


COPY_LENGTH, COPY_HIDDEN, CYCLE = 40, 64, 10


def copying_world(documents: int, seed: int) -> tuple[TargetHead, list[TargetStates]]:
    """Every document goes round a cycle of its own, and a state says which token it holds and which follows."""
    generator = torch.Generator().manual_seed(seed)
    embed = 1.0 + torch.randn(VOCAB, COPY_HIDDEN, generator=torch.Generator().manual_seed(99))
    turn, _ = torch.linalg.qr(torch.randn(COPY_HIDDEN, COPY_HIDDEN, generator=torch.Generator().manual_seed(98)))
    head = TargetHead(HeadMath(FAMILIES["llama"], COPY_HIDDEN, 1e-6), embed, torch.ones(COPY_HIDDEN), None)
    texts = []
    for number in range(documents):
        cycle = torch.randperm(VOCAB, generator=generator)[:CYCLE]
        ids = cycle.repeat(COPY_LENGTH // CYCLE + 1)
        last = embed[ids[:-1]] + embed[ids[1:]] @ turn
        mask = (torch.arange(COPY_LENGTH) > CYCLE + 1).to(torch.uint8)
        last = last[:COPY_LENGTH]
        texts.append(
            TargetStates(
                *(ids[:COPY_LENGTH].int(), mask, last[:, None].clone(), last),
                *(torch.zeros(COPY_LENGTH), str(number), "train"),
            )
        )
    return head, texts


def copying_drafter(layer_type: str, head: TargetHead, heads: int) -> Eagle3:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    layer = LayerShape(layer_type, COPY_HIDDEN, 96, heads, 2, 32, 1e-6, rope, 128)
    torch.manual_seed(1)
    model = Eagle3(Eagle3Shape(layer, 1, (4,), VOCAB, VOCAB), full_vocab(VOCAB), DrafterConfig())
    model.attach(head)
    return model


@pytest.mark.parametrize("layer_type", ["llama", "qwen3"])
def test_second_head_of_each_group_finds_earlier_occurrences_of_its_token(layer_type: str) -> None:
    head, texts = copying_world(160, seed=0)
    _, unseen = copying_world(8, seed=7)
    model = copying_drafter(layer_type, head, 4)
    assert model.closed_form_init(batches(texts))
    layer, batch = model.body.layers[0], pack_batch(unseen[:1])
    ids, asked = unseen[0].input_ids, torch.arange(CYCLE, COPY_LENGTH - 1)
    with torch.no_grad():
        _, x = layer.attention_input(model.body.fuse(batch.taps_TAH), head.embed_rows(batch.input_ids_T.roll(-1)))
        cos_sin = model.rotary.cos_sin(batch.position_ids_T)
        q, (k, _) = layer.self_attn.queries(x, cos_sin)[asked], layer.self_attn.keys_values(x, cos_sin)
    scores = torch.einsum("mgd,tgd->gmt", q.unflatten(1, (2, 2))[:, :, 1], k) / 32**0.5
    weights = scores.masked_fill(torch.arange(COPY_LENGTH) > asked[:, None], float("-inf")).softmax(-1)
    same = (ids[None] == ids[asked + 1][:, None]) & (torch.arange(COPY_LENGTH) <= asked[:, None])
    assert float((weights * same).sum(-1).mean()) > 0.8
    # Which is what the token after the next one can be told from, at every step, and without which it cannot.
    copied = agreement(model, head, pack_batch(unseen))
    alone = copying_drafter(layer_type, head, 2)
    alone.closed_form_init(batches(texts))
    assert min(copied) > 0.9
    assert max(agreement(alone, head, pack_batch(unseen))) < 0.85


@pytest.mark.parametrize(("documents", "mean"), [(2, 2.0), (64, 0.0)], ids=["too little text", "nothing constant"])
def test_what_cannot_be_solved_leaves_the_drafter_as_it_was(documents: int, mean: float) -> None:
    head, texts = world(documents, mean=mean)
    model = drafter("llama", head)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert model.closed_form_init(batches(texts)) == 0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)


def test_scale_of_the_states_does_not_matter() -> None:
    x = torch.randn(5, HIDDEN)
    torch.testing.assert_close(unit(1000 * x), unit(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(unit(x).square().mean(-1), torch.ones(5), rtol=1e-4, atol=1e-4)
