"""Loss masks as ranges and back, and the positions that predict generated tokens."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch

from spectrain.data.loss_mask import generated_ranges, mask_of_ranges, predicts_generated


@pytest.mark.parametrize("as_given", [list, tuple, lambda mask: np.array(mask, dtype=np.uint8)])
def test_ranges_are_the_runs_of_generated_tokens(as_given):
    assert generated_ranges(as_given([0, 0, 1, 1, 0, 1])) == [(2, 4), (5, 6)]
    assert generated_ranges(as_given([1, 1, 1])) == [(0, 3)]
    assert generated_ranges(as_given([0, 0, 0, 0])) == []


def test_every_short_mask_comes_back_from_its_ranges():
    for length in range(1, 9):
        for mask in product((0, 1), repeat=length):
            ranges = generated_ranges(mask)
            assert all(start < end for start, end in ranges)
            assert all(before[1] < after[0] for before, after in pairwise(ranges))
            rebuilt = mask_of_ranges(ranges, length)
            assert rebuilt.dtype == torch.uint8 and rebuilt.tolist() == list(mask)
            predicting = predicts_generated(rebuilt).tolist()
            assert predicting == [position + 1 < length and mask[position + 1] == 1 for position in range(length)]
