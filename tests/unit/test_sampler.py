"""Which documents each rank trains at each step: all of them, once an epoch, whatever the number of ranks and
micro-batches.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spectrain.config.trainer_schema import TrainerConfig
from spectrain.training.sampler import Position, StepSampler

LENGTHS = [5, 9, 13, 7, 11, 6, 8, 12, 10, 4, 14, 3, 9]


def samplers(world: int, lengths: list[int] = LENGTHS, **options: Any) -> list[StepSampler]:
    config = TrainerConfig(**{"packed_length": 16, "epochs": 2, **options})
    return [StepSampler(lengths, config, rank, world) for rank in range(world)]


def test_many_epochs_and_a_few_steps_are_planned_as_a_few_steps() -> None:
    (few,), (many,) = samplers(1, epochs=4, max_steps=5), samplers(1, epochs=10**4, max_steps=5)
    assert many.total_steps == 5
    assert [many[step] for step in range(5)] == [few[step] for step in range(5)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_every_epoch_has_every_document_once(
    lengths: list[int], world: int, accumulation: int, rows: int, epochs: int
) -> None:
    ranks = samplers(world, lengths, gradient_accumulation=accumulation, micro_batch_size=rows, epochs=epochs)
    assert len({tuple(r.steps_per_epoch) for r in ranks}) == 1
    seen = {epoch: Counter() for epoch in range(epochs)}
    for step in range(ranks[0].total_steps):
        plans = [rank[step] for rank in ranks]
        assert len({plan.epoch for plan in plans}) == 1
        # Ranks take part in the same number of passes: one that had more would wait for the others for ever.
        assert len({len(plan.micro_batches) for plan in plans}) == 1
        assert 1 <= len(plans[0].micro_batches) <= accumulation
        # The first rank always has something to do: a pass without any rows at all would be wasted.
        assert all(plans[0].micro_batches)
        for plan in plans:
            seen[plan.epoch].update(d for micro in plan.micro_batches for d in micro)
    for counter in seen.values():
        assert counter == Counter(range(len(lengths)))


def step_sets(world: int, **options: Any) -> list[Counter]:
    ranks = samplers(world, **options)
    return [
        Counter(d for rank in ranks for micro in rank[step].micro_batches for d in micro)
        for step in range(ranks[0].total_steps)
    ]


def test_a_global_batch_does_not_depend_on_how_it_is_split() -> None:
    whole = step_sets(1, micro_batch_size=4)
    for world, accumulation, rows in ((1, 4, 1), (1, 2, 2), (2, 2, 1), (4, 1, 1), (2, 1, 2)):
        assert step_sets(world, gradient_accumulation=accumulation, micro_batch_size=rows) == whole


def test_epochs_differ_and_a_step_needs_no_history() -> None:
    (sampler,) = samplers(1)
    first, second = sampler.steps_per_epoch
    assert [sampler[step].epoch for step in range(first + second)] == [0] * first + [1] * second
    assert [sampler[step] for step in range(first)] != [sampler[step] for step in range(first, 2 * first)]
    (again,) = samplers(1)
    assert again[first + 1] == sampler[first + 1]


@pytest.mark.parametrize(("max_steps", "expected"), [(3, 3), (10_000, None), (None, None)])
def test_max_steps_cuts_and_never_extends(max_steps: int | None, expected: int | None) -> None:
    (sampler,) = samplers(1, max_steps=max_steps)
    assert sampler.total_steps == (sum(sampler.steps_per_epoch) if expected is None else expected)


@example([16] * 12, [(1, 2), (2, 2)], 1)  # twice within an epoch
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_a_training_that_goes_on_with_other_ranks_sees_every_document_once_an_epoch(
    lengths: list[int], legs: list[tuple[int, int]], accumulation: int
) -> None:
    """Each leg: a number of ranks, and of steps that they make before they are killed."""
    config = TrainerConfig(packed_length=16, epochs=2, gradient_accumulation=accumulation)
    seen = {epoch: Counter() for epoch in range(2)}
    position = Position()
    for world, steps in [*legs, (2, 10**6)]:
        ranks = [StepSampler(lengths, config, rank, world, position) for rank in range(world)]
        end = min(position.step + steps, ranks[0].total_steps)
        for step in range(position.step, end):
            for plan in (rank[step] for rank in ranks):
                seen[plan.epoch].update(d for micro in plan.micro_batches for d in micro)
        position = ranks[0].position(end)
        assert position.step == end
    assert seen == {epoch: Counter(range(len(lengths))) for epoch in range(2)}


def test_a_position_of_the_same_ranks_is_the_place_in_the_whole_plan() -> None:
    (whole,) = samplers(2, epochs=3)[:1]
    config = TrainerConfig(packed_length=16, epochs=3)
    for done in range(whole.total_steps):
        rest = StepSampler(LENGTHS, config, 0, 2, whole.position(done))
        assert rest.total_steps == whole.total_steps
        assert [rest[step] for step in range(done, whole.total_steps)] == [
            whole[step] for step in range(done, whole.total_steps)
        ]
