"""The closed-form initialisation of block drafters: heads look where they should, and what they carry predicts a world
that is linear.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from spectrain.config.drafter_schema import BlockConfig, DrafterConfig
from spectrain.data.hidden_states import TargetStates
from spectrain.data.packing import PackedBatch, pack_batch
from spectrain.data.vocab import full_vocab
from spectrain.drafters.block.block_drafter import BlockDrafter
from spectrain.drafters.block.block_init import Blocks
from spectrain.drafters.block.block_shape import BlockShape, ConvShape, MarkovShape, SelectorShape
from spectrain.drafters.block.block_training import all_anchors, run_blocks, tokens_ahead
from spectrain.drafters.layers import LayerShape
from spectrain.target.families import FAMILIES, HeadMath
from spectrain.target.head import TargetHead

HIDDEN, VOCAB, LENGTH, MASK, BLOCK = 64, 40, 32, 39, 5


def world(documents: int, seed: int = 0) -> tuple[TargetHead, list[TargetStates]]:
    """y_{t+1} = 0.6 R y_t + e(x_{t+1}) + b, and nine times of ten x_{t+1} is the successor of x_t.

    As in language models, the states have a mean b that embeddings lack, so that one can tell them apart.
    """
    generator = torch.Generator().manual_seed(seed)
    embed = 1.0 + torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(99))
    turn, _ = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(98)))
    head = TargetHead(HeadMath(FAMILIES["llama"], HIDDEN, 1e-6), embed, torch.ones(HIDDEN), None)
    mean = 2.0 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(97))
    texts = []
    for number in range(documents):
        ids = torch.randint(0, MASK, (LENGTH,), generator=generator)
        for t in range(1, LENGTH):
            if torch.rand((), generator=generator) < 0.9:
                ids[t] = (ids[t - 1] + 1) % MASK
        y = [embed[ids[0]] + mean + torch.randn(HIDDEN, generator=generator)]
        for t in range(1, LENGTH):
            y.append(0.6 * turn @ y[-1] + embed[ids[t]] + mean)
        last = torch.stack(y)
        mask = torch.tensor([0] * 4 + [1] * (LENGTH - 4), dtype=torch.uint8)
        taps = torch.stack([torch.randn(LENGTH, HIDDEN, generator=generator), last], dim=1)
        texts.append(TargetStates(ids.int(), mask, taps, last, torch.zeros(LENGTH), str(number), "train"))
    return head, texts


def drafter(head: TargetHead, method: str = "dflash", heads: tuple[int, int] = (6, 3), d: int = 64) -> BlockDrafter:
    layer = LayerShape("qwen3", HIDDEN, 48, *heads, d, 1e-6, {"rope_type": "default", "rope_theta": 10000.0}, 128)
    shape = BlockShape(
        method, layer, 2, (2, 4), VOCAB, VOCAB, BLOCK, MASK, method == "dspark",
        markov=MarkovShape("vanilla", 4) if method == "dspark" else None,
        conv=ConvShape(4, 8) if method == "dflash2" else None,
        selector=SelectorShape(4, 4) if method == "dflash2" else None,
    )  # fmt: skip
    model = BlockDrafter(
        shape, full_vocab(VOCAB), DrafterConfig(method=shape.method, block=BlockConfig(block_size=BLOCK))
    )
    model.reset(torch.Generator().manual_seed(0))
    model.attach(head)
    return model


def batches(texts: list[TargetStates]) -> Callable[[], Iterator[PackedBatch]]:
    return lambda: (pack_batch(texts[i : i + 8]) for i in range(0, len(texts), 8))


@torch.no_grad()
def agreement(model: BlockDrafter, batch: PackedBatch) -> list[float]:
    """Mean cosine between each draft's state and the target's."""
    drafts = model.shape.num_drafts
    anchor = torch.nonzero(tokens_ahead(batch, drafts) >= drafts)[:, 0]
    hidden = run_blocks(model, batch, anchor, drafts)
    truth = batch.last_hidden_TH[anchor[:, None] + torch.arange(drafts)]
    return torch.cosine_similarity(hidden, truth, dim=-1).mean(0).tolist()


@pytest.mark.parametrize("method", ["dflash", "dspark", "dflash2"])
@pytest.mark.parametrize("heads", [(6, 3), (4, 2), (3, 3)], ids=str)
def test_predicts_unseen_text_of_a_linear_world(method: str, heads: tuple[int, int]) -> None:
    head, texts = world(64)
    unseen = pack_batch(world(8, seed=7)[1])
    model = drafter(head, method, heads)
    before = agreement(model, unseen)
    assert model.closed_form_init(batches(texts)) > 400
    after = agreement(model, unseen)
    assert all(new > old for new, old in zip(after, before, strict=True))
    assert (
        max(before[model.shape.sample_from_anchor :]) < 0.5
    )  # the anchor's own slot holds its embedding, which is near
    assert after[0] > 0.8 and min(after[:3]) > 0.7
    model.train_losses(unseen).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name
        if ("layers" in name and "conv" not in name) or name.endswith("fc.weight"):
            assert bool(parameter.grad.any()), name


@pytest.mark.parametrize("answer", [2, 3])
def test_answers_shorter_than_the_coded_drafts(answer: int) -> None:
    head, texts = world(160)
    mask = torch.tensor([0] * (LENGTH - answer) + [1] * answer, dtype=torch.uint8)
    model = drafter(head)
    before = agreement(model, pack_batch(world(8, seed=7)[1]))
    assert model.closed_form_init(batches([replace(text, loss_mask=mask) for text in texts])) == 160 * (answer - 1)
    assert agreement(model, pack_batch(world(8, seed=7)[1]))[0] > before[0] + 0.3


@pytest.mark.parametrize("method", ["dflash", "dspark"])
@pytest.mark.parametrize("number", [0, 1], ids=["layer 0", "layer 1"])
def test_heads_look_at_the_anchor_and_the_last_context_token(method: str, number: int) -> None:
    head, texts = world(64)
    model = drafter(head, method)
    model.closed_form_init(batches(texts))
    batch = pack_batch(texts[:1])
    blocks = Blocks.build(model, batch, all_anchors(batch)[8:])
    layer = model.body.layers[number]
    with torch.no_grad():
        if number == 1:
            first = model.body.layers[0]
            middle = blocks.x_RBH + first.self_attn.output(blocks.heads(model, first))
            blocks.x_RBH = middle + first.mlp(first.post_attention_layernorm(middle))
        x = layer.input_layernorm(blocks.x_RBH)
        q, (k, _) = layer.self_attn.queries(x, blocks.cos_sin_RB), layer.self_attn.keys_values(x, blocks.cos_sin_RB)
        context_k, _ = layer.context_kv(blocks.context_TH, blocks.cos_sin_T)
    k, context_k = k.repeat_interleave(2, 2), context_k.repeat_interleave(2, 1)
    own = torch.einsum("rbnd,rsnd->rnbs", q, k)
    far = torch.einsum("rbnd,tnd->rnbt", q, context_k)
    far = far.masked_fill(torch.arange(LENGTH) >= blocks.anchor_R[:, None, None, None], float("-inf"))
    weights = (torch.cat([far, own], -1) / 8).softmax(-1)
    at_anchor = weights[..., LENGTH].mean(0)  # [N, B]
    at_last = weights.gather(-1, (blocks.anchor_R - 1)[:, None, None, None].expand(-1, 6, BLOCK, 1))[..., 0].mean(0)
    gate = model.shape.first_slot + 1  # the first slot that is behind the gate of every second head
    if number == 0:
        for head_number in (0, 2):
            assert float(at_anchor[head_number].min()) > 0.95
            assert (
                float(at_anchor[head_number + 1, :gate].min()) > 0.6
                and float(at_anchor[head_number + 1, gate + 1 :].max()) < 0.1
            )
    for head_number in (4,) if number == 0 else (0, 2, 4):
        # Scores fall with the logarithm of the distance: late slots spread over the last few tokens.
        assert float(at_last[head_number, :2].min()) > (0.95 if number == 0 else 0.7)
        assert float(at_last[head_number + 1, gate + 1 :].max()) < 0.1


@pytest.mark.parametrize(("documents", "d"), [(1, 64), (64, 4)], ids=["too little text", "heads too small"])
def test_what_cannot_be_solved_leaves_the_drafter_as_it_was(documents: int, d: int) -> None:
    head, texts = world(documents)
    model = drafter(head, d=d)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert model.closed_form_init(batches(texts)) == 0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)
