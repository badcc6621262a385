"""Training of block drafters: anchors, and that every block of a packed pass is the server's block at that anchor.

The reference implementation recomputes one block at a time in float64 from the definitions. What training shares
(context keys) and adds (packing, many blocks) must not show. The losses are in ``test_block_losses.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from block_tools import BLOCK_VARIANTS, DFLASH2, DSPARK, BlockOptions, block_reference_of, random_block_drafter
from drafter_tools import MASKS, VOCAB, gradients, packed, random_document, split_by_document
from torch import Tensor

from spectrain.data.hidden_states import TargetStates
from spectrain.data.packing import Draw, PackedBatch, pack_batch
from spectrain.decoding.sampling import SamplingParams
from spectrain.drafters.block import block_attention as geometry
from spectrain.drafters.block import block_training as training
from spectrain.drafters.block.block_attention import BlockLayout, block_attention
from spectrain.drafters.block.block_drafter import BlockDrafter
from spectrain.drafters.block.block_training import all_anchors, draw_anchors

KINDS = [BlockOptions(), DSPARK, DFLASH2]


def texts(
    options: BlockOptions, drafter: BlockDrafter | None = None, masks: Sequence[str] = MASKS
) -> list[TargetStates]:
    head = None if drafter is None else drafter.head
    return [random_document(mask, len(options.taps), i, head) for i, mask in enumerate(masks)]


# ---- anchors and slots


def ahead(mask: list[int], a: int) -> int:
    """Drafts of a block at ``a`` that count: generated tokens in a row behind a generated anchor."""
    length = 0
    while mask[a] and a + 1 + length < len(mask) and mask[a + 1 + length]:
        length += 1
    return length


def test_anchors_are_generated_tokens_before_generated_tokens() -> None:
    documents = texts(BlockOptions(), masks=(*MASKS, "0111", "1101"))
    expected = []
    for states, start in zip(documents, split_by_document(documents), strict=True):
        mask = states.loss_mask.tolist()
        expected += [start + a for a in range(len(mask)) if ahead(mask, a)]
    assert all_anchors(packed(documents)).tolist() == expected
    assert draw_anchors(packed(documents), per_row=1).tolist() == expected  # without a draw, nothing is left to chance


def drawn(
    documents: list[TargetStates],
    numbers: Sequence[int],
    per_row: int,
    step: int = 0,
    packed_length: int = 40,
    seed: int = 0,
) -> list:
    """Drawn anchors of each document, as positions inside it."""
    batch = pack_batch([documents[n] for n in numbers], draw=Draw(seed, step, tuple(numbers), packed_length))
    starts = split_by_document([documents[n] for n in numbers])
    found: list[list[int]] = [[] for _ in numbers]
    anchors = draw_anchors(batch, per_row).tolist()
    assert anchors == sorted(set(anchors))
    for anchor in anchors:
        owner = max(i for i, start in enumerate(starts) if start <= anchor)
        found[owner].append(anchor - starts[owner])
    return found


def test_drawn_anchors_depend_on_seed_step_and_document_alone() -> None:
    documents = [random_document("0" * (2 + i) + "1" * (14 - i), 1, i) for i in range(5)]
    together = drawn(documents, range(5), 20)
    for number in range(5):
        candidates = [a for a in range(16) if ahead(documents[number].loss_mask.tolist(), a)]
        assert set(together[number]) < set(candidates)
        assert len(together[number]) == round(20 * 16 / 40)
        assert drawn(documents, [number], 20) == [together[number]]
    assert drawn(documents, [3, 0, 4], 20) == [together[3], together[0], together[4]]
    assert drawn(documents, range(5), 20, step=1) != together
    assert drawn(documents, range(5), 20, seed=1) != together
    assert drawn(documents, [0], 1) != [[]]  # a document trains by one block at least
    assert drawn(documents, [0], 4000) == [list(range(2, 15))]  # and by all it has at most


def test_every_anchor_is_drawn_as_often() -> None:
    document = [random_document("00" + "1" * 9, 1, 0)]
    times = dict.fromkeys(range(2, 10), 0)
    steps = 600
    for step in range(steps):
        (anchors,) = drawn(document, [0], 3, step=step, packed_length=11)
        assert len(anchors) == 3
        for anchor in anchors:
            times[anchor] += 1
    spread = math.sqrt(steps * 3 / 8 * 5 / 8)
    assert all(abs(count - steps * 3 / 8) < 4.5 * spread for count in times.values())


# ---- training = serving


def blocks(drafter: BlockDrafter, batch: PackedBatch, n: int | None = None) -> dict[int, Tensor]:
    """Anchor -> hidden states [J, H] of its block, for all anchors."""
    anchors = all_anchors(batch)
    with torch.no_grad():
        return dict(
            zip(
                anchors.tolist(),
                training.run_blocks(drafter, batch, anchors, n or drafter.shape.num_drafts),
                strict=True,
            )
        )


@pytest.mark.parametrize("options", BLOCK_VARIANTS, ids=lambda options: options.name)
def test_every_block_is_the_servers_draft(options: BlockOptions) -> None:
    drafter = random_block_drafter(options)
    reference, documents, first = block_reference_of(drafter), texts(options), drafter.shape.first_slot
    found = blocks(drafter, packed(documents))
    expected = 0
    for states, start in zip(documents, split_by_document(documents), strict=True):
        ids, mask = states.input_ids.tolist(), states.loss_mask.tolist()
        for a in (a for a in range(len(ids)) if ahead(mask, a)):
            with torch.no_grad():
                hidden = reference.hidden(ids[a], a, states.taps, options.block_size)[first:]
            torch.testing.assert_close(found[start + a], torch.stack(hidden), rtol=1e-9, atol=1e-10)
            expected += 1
    assert len(found) == expected > 15


@pytest.mark.parametrize("options", BLOCK_VARIANTS, ids=lambda options: options.name)
def test_scores_are_those_of_the_servers_draft(options: BlockOptions) -> None:
    """min(1, p/q) of the document's own tokens, until one certainly falls, and what the confidence head says
    of them.
    """
    drafter = random_block_drafter(options)
    reference, documents, n, sampling = (
        block_reference_of(drafter),
        texts(options, drafter, MASKS[:3]),
        drafter.shape.num_drafts,
        SamplingParams(temperature=1.0),
    )
    scores = drafter.score(packed(documents), n, sampling, sampling)
    assert (scores.confidence_RK is not None) == options.confidence
    row = 0
    for states, start in zip(documents, split_by_document(documents), strict=True):
        ids, mask = states.input_ids.tolist(), states.loss_mask.tolist()
        for a in (a for a in range(len(ids)) if ahead(mask, a)):
            with torch.no_grad():
                draft = reference.draft(ids[: a + 1], states.taps, n, drafts=(ids + [0] * n)[a + 1 : a + 1 + n])
            accept, counted = [0.0] * n, min(n, ahead(mask, a))
            for k, token in enumerate(ids[a + 1 : a + 1 + counted]):
                accept[k] = min(
                    1.0,
                    float(draft.log_probs[k].exp()[token] / reference.head.sampling(states.last_hidden[a + k])[token]),
                )
                if accept[k] == 0:
                    break
            assert scores.anchor_R[row] == start + a
            assert scores.accept_RK[row].tolist() == pytest.approx(accept, rel=1e-5, abs=1e-7)
            if scores.confidence_RK is not None:
                expected = torch.stack(draft.confidence[:counted])
                torch.testing.assert_close(scores.confidence_RK[row, :counted], expected, rtol=1e-8, atol=1e-8)
            row += 1
    assert row == len(scores.anchor_R) > 5


@pytest.mark.parametrize("options", BLOCK_VARIANTS[:5], ids=lambda options: options.name)
def test_a_document_alone_is_the_same_document_among_others(options: BlockOptions) -> None:
    drafter, documents = random_block_drafter(options), texts(options)
    together = blocks(drafter, packed(documents))
    for order in ([3, 6, 0, 2, 5, 1, 4], *([i] for i in (0, 1, 2, 4, 5, 6))):
        chosen = [documents[i] for i in order]
        starts = split_by_document(documents)
        found = blocks(drafter, packed(chosen))
        for i, start in zip(order, split_by_document(chosen), strict=True):
            for a in range(len(documents[i].input_ids)):
                if starts[i] + a in together:
                    torch.testing.assert_close(found[start + a], together[starts[i] + a], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "options", [BlockOptions(), BlockOptions(window=4, causal=True), DFLASH2], ids=lambda options: options.name
)
def test_nothing_from_the_anchor_on_leaks_into_its_block(options: BlockOptions, attention: str) -> None:
    """A block knows its anchor's token and the taps before it. Anything else may change without changing a bit; those
    may not.
    """
    drafter = random_block_drafter(replace(options, attention=attention))
    documents = texts(options, masks=("0011", "00011111110", "011"))
    batch, (_, start, end) = packed(documents), split_by_document(documents)
    before = blocks(drafter, batch)
    generator = torch.Generator().manual_seed(9)
    kept = changed = 0
    for cut in range(start, end):  # taps at cut and tokens behind it are other ones
        ids, taps = batch.input_ids_T.clone(), batch.taps_TAH.clone()
        ids[cut + 1 : end] = (
            ids[cut + 1 : end] + 1 + torch.randint(0, VOCAB - 1, ids[cut + 1 : end].shape, generator=generator)
        ) % VOCAB
        taps[cut:end] = torch.randn(taps[cut:end].shape, generator=generator, dtype=taps.dtype) * 50
        after = blocks(drafter, replace(batch, input_ids_T=ids, taps_TAH=taps))
        for anchor, hidden in before.items():
            if anchor <= cut or anchor >= end:
                assert torch.equal(after[anchor], hidden), (cut, anchor)
                kept += 1
            else:
                assert (after[anchor] - hidden).abs().amax(-1).min() > 1e-9, (cut, anchor)  # every slot sees it
                changed += 1
    assert kept > 50 and changed > 20


def test_the_window_ends_where_it_should() -> None:
    options = BlockOptions(window=4, causal=True, num_layers=1)
    drafter = random_block_drafter(options)
    batch = packed([random_document("000000111111", 3, 0)])
    batch.taps_TAH.requires_grad_()
    hidden_JH = training.run_blocks(drafter, batch, torch.tensor([8]), drafter.shape.num_drafts)[
        0
    ]  # drafting slots at positions 9 … 12
    for hidden_H, seen in zip(hidden_JH, ([6, 7], [7], [], []), strict=True):
        (gradient,) = torch.autograd.grad(hidden_H.sum(), batch.taps_TAH, retain_graph=True)
        assert gradient.abs().amax(dim=(1, 2)).nonzero()[:, 0].tolist() == seen


# ---- attention paths

GEOMETRIES = [(None, False), (3, True), (3, False), (7, False), (7, True)]


@pytest.mark.parametrize(("window", "causal"), GEOMETRIES)
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_paths_agree(window: int | None, causal: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a document's blocks do not fit into one group, begin at its first token, or are none."""
    monkeypatch.setattr(geometry, "_GROUP_ROWS", 12)
    device = "cpu"
    results = []
    for path in ("eager", backend):
        generator = torch.Generator().manual_seed(0)
        document_T = torch.tensor([0] * 9 + [1] * 4 + [2] * 14)
        anchor_R = torch.tensor([0, 3, 4, 8, 14, 15, 19, 20, 21, 26])
        r, b = len(anchor_R), 4
        q, k, v = (torch.randn(r, b, heads, 6, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
        ck, cv = (torch.randn(27, 2, 6, generator=generator, dtype=torch.float64) for _ in range(2))
        inputs = [x.to(device).requires_grad_(path == "eager" or backend != "flex") for x in (q, k, v, ck, cv)]
        layout = BlockLayout.build(anchor_R, document_T, b, window, causal)
        out = block_attention(*inputs, layout, path)
        gradient = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        results.append((out.detach(), torch.autograd.grad(out, inputs, gradient) if out.requires_grad else None))
    (eager, eager_gradients), (other, other_gradients) = results
    torch.testing.assert_close(other, eager, rtol=1e-9, atol=1e-10)
    assert eager_gradients is not None
    if other_gradients is not None:
        torch.testing.assert_close(other_gradients, eager_gradients, rtol=1e-9, atol=1e-10)
    assert all(bool((g != 0).any()) for g in eager_gradients)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_groups_that_backward_does_again_are_the_same_to_the_bit(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of long documents, so that not all their scores are kept."""
    results = []
    for most in (1 << 20, 1):
        monkeypatch.setattr(geometry, "_MOST_SCORES", most)
        drafter = random_block_drafter(BlockOptions(window=6, causal=True, attention=attention))
        sums = drafter.train_losses(packed(texts(BlockOptions())))
        sums.loss.backward()
        results.append((sums.loss.detach(), gradients(drafter)))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("options", [BlockOptions(), BlockOptions(window=1), DSPARK], ids=lambda options: options.name)
def test_blocks_without_any_context_train(options: BlockOptions) -> None:
    """Alone in their document, at its first token; or behind a window that ends before the context."""
    results = []
    for attention in ("eager", "sdpa"):
        drafter = random_block_drafter(replace(options, attention=attention))
        sums = drafter.train_losses(
            packed([random_document(mask, 3, i, drafter.head) for i, mask in enumerate(("11", "0110", "0"))])
        )
        sums.loss.backward()
        results.append((sums.loss.detach(), gradients(drafter)))
    assert int(sums.count_K[0]) == 2
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "options", [BlockOptions(), BlockOptions(window=4, causal=True)], ids=lambda options: options.name
)
def test_flex_trains_as_eager_does(options: BlockOptions) -> None:
    results = []
    for attention in ("eager", "flex"):
        drafter = random_block_drafter(replace(options, attention=attention), dtype=torch.float32).to("cuda")
        drafter.attach(drafter.head.to("cuda"))
        sums = drafter.train_losses(packed(texts(options)).to("cuda"))
        sums.loss.backward()
        results.append((sums.loss.detach(), gradients(drafter)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)
