"""The closed-form initialisation: good where the target's states are linear in what the drafter sees, and each part
does what it was solved for.
"""

from collections.abc import Callable, Iterator

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


def drafter(layer_type: str, head: TargetHead, num_layers: int = 1, **switches: bool) -> Eagle3:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    layer = LayerShape(layer_type, HIDDEN, 48, 8, 4, 8, 1e-6, rope, 128)
    torch.manual_seed(1)
    model = Eagle3(Eagle3Shape(layer, num_layers, (4,), VOCAB, VOCAB, **switches), full_vocab(VOCAB), DrafterConfig())
    model.attach(head)
    return model


def batches(texts: list[TargetStates]) -> Callable[[], Iterator[PackedBatch]]:
    return lambda: (pack_batch(texts[i : i + 8]) for i in range(0, len(texts), 8))


def agreement(model: Eagle3, head: TargetHead, batch: PackedBatch) -> list[float]:
    """Mean cosine between the drafter's state after each step and the target's state there."""
    columns = Columns.build(batch, 3)
    with torch.no_grad():
        hidden_KMH = unroll(model.body, model.rotary, head, batch, columns, "eager")
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
