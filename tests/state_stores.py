"""Documents and stores of hidden states, small and drawn at random."""

from __future__ import annotations

import dataclasses

import torch

from spectrain.data.hidden_states import StoreMeta, TargetStates, bytes_per_token
from spectrain.data.state_types import STATE_DTYPES

HIDDEN, LAYERS, TAPS = 16, 4, (0, 3)
LAST_IS_A_TAP = {"tap_ids": (1, LAYERS)}


def make_meta(dtype: str = "float32", **changes: object) -> StoreMeta:
    fields = {
        "target": "tiny",
        "target_revision": "r1",
        "config_digest": "c",
        "tokenizer_digest": "t",
        "template_digest": "p",
    }
    return StoreMeta(
        **(fields | {"tap_ids": TAPS, "hidden_size": HIDDEN, "num_layers": LAYERS, "dtype": dtype} | changes)
    )


def make_states(number: int, length: int, dtype: str = "float32") -> TargetStates:
    generator = torch.Generator().manual_seed(number)
    taps = torch.randn(length, len(TAPS), HIDDEN, generator=generator)
    last_hidden = torch.randn(length, HIDDEN, generator=generator)
    float_dtype = STATE_DTYPES[dtype] if dtype in ("float32", "bfloat16") else torch.float32
    return TargetStates(
        input_ids=torch.randint(0, 99, (length,), generator=generator, dtype=torch.int32),
        loss_mask=torch.randint(0, 2, (length,), generator=generator, dtype=torch.uint8),
        taps=taps.to(float_dtype),
        last_hidden=last_hidden.to(float_dtype),
        log_normalizer=torch.randn(length, generator=generator).where(torch.arange(length) % 2 == 0, torch.nan),
        key=f"key-{number:03d}",
        split="heldout" if number % 3 == 0 else "train",
    )


def with_last_tap(states: TargetStates) -> TargetStates:
    """The last hidden state is the second tap."""
    return dataclasses.replace(states, last_hidden=states.taps[:, 1].clone())


def assert_same(found: TargetStates, wanted: TargetStates) -> None:
    assert (found.key, found.split) == (wanted.key, wanted.split)
    for name in ("input_ids", "loss_mask", "taps", "last_hidden", "log_normalizer"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def shard_of_tokens(meta: StoreMeta, tokens: int) -> int:
    return bytes_per_token(meta) * tokens
