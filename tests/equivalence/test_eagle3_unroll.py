"""Training = serving: column t, step k of the packed unroll is step k of the chain a server would draft after observing
x_0 … x_t.

The reference implementation recomputes everything token by token in float64. What training skips (queries of prompts,
keys of other columns' later steps) and what it adds (packing, several documents, several turns) must not show.
"""

from __future__ import annotations

import pytest
import torch
from drafter_tools import (
    MASKS,
    VARIANTS,
    Options,
    packed,
    random_document,
    random_documents,
    random_drafter,
    reference_of,
    split_by_document,
    students,
)
from reference import counts


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: options.name)
def test_every_student_is_the_servers_draft(options: Options) -> None:
    drafter = random_drafter(options)
    reference = reference_of(drafter)
    documents = random_documents(options)
    found = students(drafter, packed(documents))
    expected = 0
    for states, start in zip(documents, split_by_document(documents), strict=True):
        ids, mask = states.input_ids.tolist(), states.loss_mask.tolist()
        for t in range(len(ids)):
            counted = [k for k in range(options.steps) if counts(mask, t, k)]
            if not counted:
                continue
            with torch.no_grad():
                chain = reference.chain(ids[: t + 2], states.taps, counted[-1] + 1, drafts=ids[t + 2 :])
            for k in counted:
                torch.testing.assert_close(
                    found[start + t, k],
                    chain.normed[k],
                    rtol=1e-9,
                    atol=1e-10,
                    msg=lambda m, t=t, k=k: f"({t}, {k}): {m}",
                )
            expected += len(counted)
    assert len(found) == expected  # nothing else counts


def test_counted_columns_of_a_written_out_example() -> None:
    # x_2 is the first generated token, x_5 the end of turn: column 1 holds x_2 and trains, column 4 holds the end of
    # turn and does not.
    drafter = random_drafter(Options(steps=3))
    found = students(drafter, packed([random_document("0011110", 3, seed=0)]))
    assert set(found) == {(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (1, 2)}


def test_students_of_a_far_position_differ_from_those_of_a_near_one() -> None:
    """The position enters: the same document behind a longer prompt of the same content gives other outputs."""
    options = Options()
    drafter = random_drafter(options)
    states = random_document("000111", 3, seed=5)
    near = students(drafter, packed([states]))
    shifted = packed([states])
    shifted.position_ids_T = shifted.position_ids_T * 3
    far = students(drafter, shifted)
    assert all((near[key] - far[key]).abs().max() > 1e-3 for key in near)


def test_the_masks_of_these_tests_hold_the_hard_cases() -> None:
    assert any("0" not in mask[:-1] for mask in MASKS)
    assert any("1" not in mask for mask in MASKS)
    assert any("101" in mask for mask in MASKS)
