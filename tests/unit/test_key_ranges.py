"""Masks from ranges of keys, against masks of all pairs that say in words who sees whom."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from attention_shapes import run_random_shape

from spectrain.drafters import flex_kernels
from spectrain.drafters.autoregressive import column_attention
from spectrain.drafters.autoregressive.column_attention import ColumnLayout
from spectrain.drafters.block import block_attention
from spectrain.drafters.block.block_attention import BlockLayout
from spectrain.drafters.key_ranges import BLOCK, KeyRanges, bucket, sparse_mask
from spectrain.errors import RunError

CPU = torch.device("cpu")


def text(draw: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """(document of each token, some of the tokens)"""
    lengths = [draw.randrange(1, 400) for _ in range(draw.randrange(1, 5))]
    documents = np.repeat(np.arange(len(lengths)), lengths)
    return documents, np.array(sorted(draw.sample(range(len(documents)), draw.randrange(1, len(documents) // 2 + 2))))


def of_columns(draw: random.Random) -> tuple[KeyRanges, np.ndarray]:
    """(ranges, the mask of all pairs): a column sees those of its document up to itself."""
    documents, columns = text(draw)
    every = np.arange(len(documents))
    wanted = (documents[columns][:, None] == documents) & (every <= columns[:, None])
    return ColumnLayout.build(columns, documents).ranges(), wanted


def of_blocks(draw: random.Random, window: int | None, causal: bool) -> tuple[KeyRanges, np.ndarray]:
    """A slot sees what lies before its anchor in its document, and its own block."""
    documents, anchors = text(draw)
    slots, behind = draw.choice([1, 4, 5]), bucket(len(documents))
    wanted = np.zeros((len(anchors) * slots, behind + len(anchors) * slots), dtype=bool)
    for number, anchor in enumerate(anchors):
        for slot in range(slots):
            row = wanted[number * slots + slot]
            for key in range(anchor):
                row[key] = documents[key] == documents[anchor] and (window is None or anchor + slot - key < window)
            for other in range(slots):
                near = window is None or abs(slot - other) < window
                row[behind + number * slots + other] = near and (not causal or other <= slot)
    return BlockLayout.build(anchors, documents, slots, window, causal).ranges(behind), wanted


def cases(draw: random.Random) -> list[tuple[KeyRanges, np.ndarray]]:
    return [
        *(of_columns(draw) for _ in range(8)),
        *(of_blocks(draw, window, causal) for window in (None, 3, 150) for causal in (False, True)),
    ]


def test_the_mask_of_all_pairs_and_that_of_blocks_are_the_ranges() -> None:
    for ranges, wanted in cases(random.Random(3)):
        assert torch.equal(ranges.visible(CPU), torch.from_numpy(wanted))
        queries, keys = bucket(wanted.shape[0]), bucket(ranges.num_keys)
        padded = np.zeros((queries, keys), dtype=bool)
        padded[: wanted.shape[0], : wanted.shape[1]] = wanted
        padded[wanted.shape[0] :, 0] = True  # so that no softmax is empty
        mask = sparse_mask(ranges.padded(queries, keys), CPU)
        tiles = padded.reshape(queries // BLOCK, BLOCK, keys // BLOCK, BLOCK)
        some, full = tiles.any((1, 3)), tiles.all((1, 3))
        partial_tiles, full_tiles = (
            _tiles(*pair, keys // BLOCK)
            for pair in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
        )
        assert (partial_tiles | full_tiles == some).all()
        # A tile that two ranges fill together may ask them all the same.
        assert not (full_tiles & ~full).any() and not (partial_tiles & full_tiles).any()
        q, k = torch.arange(queries)[:, None], torch.arange(keys)
        assert torch.equal(mask.mask_mod(torch.tensor(0), torch.tensor(0), q, k), torch.from_numpy(padded))


def _tiles(count: torch.Tensor, index: torch.Tensor, columns: int) -> np.ndarray:
    found = np.zeros((count.shape[-1], columns), dtype=bool)
    for row, number in enumerate(count[0, 0].tolist()):
        found[row, index[0, 0, row, :number].tolist()] = True
    return found


def test_tiles_that_all_see_need_no_mask() -> None:
    """One document of four tiles, every token asks: six tiles lie below the diagonal."""
    documents = np.zeros(4 * BLOCK, dtype=np.int64)
    mask = sparse_mask(ColumnLayout.build(np.arange(4 * BLOCK), documents).ranges(), CPU)
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 2, 3]]] and mask.kv_num_blocks.tolist() == [[[1, 1, 1, 1]]]


def test_buckets_are_few_and_waste_little() -> None:
    counts = range(1, 1 << 15)
    sizes = [bucket(count) for count in counts]
    assert len(set(sizes)) <= 28 and all(size % BLOCK == 0 for size in sizes)
    assert all(count <= size < 1.25 * count + BLOCK for count, size in zip(counts, sizes, strict=True))


@pytest.mark.slow
def test_two_hundred_shapes_of_batches_share_a_few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    compiled = partial(flex_kernels.attend_sparsely, compiler="eager")
    for module in (column_attention, block_attention):
        monkeypatch.setattr(module, "attend_sparsely", compiled)
    torch._dynamo.reset()
    counters.clear()
    draw = random.Random(0)
    for _ in range(200):
        run_random_shape(draw, "cpu")
    assert 1 <= counters["stats"]["unique_graphs"] <= 8


def test_what_cannot_be_compiled_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would go on without its kernels, with all scores at once."""
    monkeypatch.setattr(flex_kernels, "MOST_GRAPHS", 1)
    torch._dynamo.reset()
    layout = ColumnLayout.build(np.arange(9), np.zeros(9, dtype=np.int64))
    mask = sparse_mask(layout.ranges().padded(BLOCK, BLOCK), CPU)

    def attend(heads: int) -> None:
        q, k = torch.randn(1, heads, BLOCK, 16), torch.randn(1, 1, BLOCK, 16)
        flex_kernels.attend_sparsely(q, k, k, mask, with_lse=heads > 1, compiler="eager")

    attend(1)
    with pytest.raises(RunError, match=r"drafter\.attention=sdpa"):
        attend(2)
    torch._dynamo.reset()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_fit_into_a_small_shared_memory(head_dim: int) -> None:
    """Of gfx942 a workgroup has 64 KiB: queries, keys and values in bfloat16 at a time."""
    options = flex_kernels.kernel_options(64 << 10, head_dim, 2)
    assert options is not None
    assert (options["BLOCK_M"] + 2 * options["BLOCK_N"]) * head_dim * 2 <= 64 << 10
    assert flex_kernels.kernel_options(228 << 10, head_dim, 2) is None
