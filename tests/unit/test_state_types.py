"""8 bits a value: what is read back is as near as its format allows, row for row and group for group."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from state_stores import (
    LAST_IS_A_TAP,
    make_meta,
    make_states,
)

from spectrain.data.hidden_states import StoredHiddenStates, bytes_per_token
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.state_types import as_stored, dequantize, quantize


@pytest.mark.parametrize("last", [{}, LAST_IS_A_TAP], ids=["apart", "last layer is a tap"])
def test_int8_keeps_every_row_although_an_attention_sink_stands_beside_it(
    tmp_path: Path, last: dict[str, object]
) -> None:
    states = make_states(0, 64)
    taps, last_hidden = states.taps * 6, states.last_hidden * 6
    taps[0] *= 24894 / taps[0].abs().amax(dim=-1, keepdim=True)
    last_hidden[0] *= 24894 / last_hidden[0].abs().max()
    last_hidden[5] = 0
    if last:
        taps[:, 1] = last_hidden
    states = dataclasses.replace(states, taps=taps, last_hidden=last_hidden)
    with HiddenStatesWriter(tmp_path, make_meta("int8", **last)) as writer:
        writer.add(states)
    found = StoredHiddenStates(tmp_path)[0]
    for ours, wanted in ((found.taps, taps), (found.last_hidden, last_hidden)):
        assert ours.dtype == torch.float32
        largest = wanted.abs().amax(dim=-1, keepdim=True)
        assert bool(((ours - wanted).abs() <= largest * (0.5 / 127 + 1e-6)).all())
        assert bool(((ours - wanted).norm(dim=-1) <= 0.01 * wanted.norm(dim=-1)).all())
        assert ours[0].abs().max().item() == pytest.approx(24894, rel=1e-6)
        torch.testing.assert_close(ours, as_stored(wanted, "int8"), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["int8", "int8_grouped", "float8_e4m3"])
@pytest.mark.parametrize("width", [32, 64, 200])
def test_quantisation_is_stable_when_repeated(dtype: str, width: int) -> None:
    x = torch.randn(100, width, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 100)[:, None]
    once, scale = quantize(x, dtype)
    again, _ = quantize(dequantize(once, scale), dtype)
    assert torch.equal(once.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.parametrize("last", [{}, LAST_IS_A_TAP], ids=["apart", "last layer is a tap"])
@pytest.mark.parametrize("width", [128, 200])  # 200: the last group has 8 channels
def test_in_groups_an_outlier_channel_spoils_its_own_group_alone(
    tmp_path: Path, width: int, last: dict[str, object]
) -> None:
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(20, 2, width, generator=generator)
    taps[:, :, 3] = 2000.0
    states = dataclasses.replace(make_states(0, 20), taps=taps, last_hidden=taps[:, 1].clone())
    errors = {}
    for dtype in ("int8", "int8_grouped"):
        folder = tmp_path / dtype
        meta = make_meta(dtype, hidden_size=width, **last)
        with HiddenStatesWriter(folder, meta) as writer:
            writer.add(states)
        store = StoredHiddenStates(folder)
        assert (store.shards[0].record.bytes // 20) in range(bytes_per_token(meta), bytes_per_token(meta) + 60)
        errors[dtype] = (store[0].taps - taps).abs().double()
        assert torch.equal(store[0].last_hidden, store[0].taps[:, 1])
    # By hand: half a step is 2000 / 254 beside the outlier, and the group's largest value / 254 elsewhere.
    assert float(errors["int8"].max()) > 0.7  # nearly all that the other channels hold
    assert float(errors["int8_grouped"][..., :64].max()) > 0.7
    for first in range(64, width, 64):
        group = slice(first, min(first + 64, width))
        most = taps[..., group].abs().amax(-1, keepdim=True) / 254 * 1.001
        assert bool((errors["int8_grouped"][..., group] <= most).all())


def test_float8_keeps_three_bits_of_every_value_from_its_largest_down(tmp_path: Path) -> None:
    states = make_states(0, 16)
    with HiddenStatesWriter(tmp_path, make_meta("float8_e4m3")) as writer:
        writer.add(states)
    store = StoredHiddenStates(tmp_path)
    wanted, found = states.taps.double(), store[0].taps.double()
    # OCP 8-bit floats, E4M3: 3 bits of fraction, so half a unit in the last place is 1/16; below 2^-6 steps of 2^-9.
    largest = wanted.abs().amax(-1, keepdim=True)
    most = torch.maximum(wanted.abs() / 16, largest / 448 * 2.0**-10) * 1.001
    assert bool(((found - wanted).abs() <= most).all())
    assert float(((found - wanted).abs() / wanted.abs()).max()) > 0.05
    torch.testing.assert_close(found.abs().amax(-1, keepdim=True), largest, rtol=1e-6, atol=0)
    assert store.as_stored(0).taps.dtype == torch.float8_e4m3fn
