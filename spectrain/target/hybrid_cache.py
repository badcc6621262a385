"""Caches of hybrid targets, which carry a recurrent state (linear attention, Mamba, convolutions).

Such a state cannot be cropped, and cropping only the keys and values beside it would leave a state that has seen
rejected tokens. The state before a verification is kept; where drafts fail, it is put back and the accepted tokens run
again. Padding would enter the state, so only rows that bring equally many tokens run together: in a verification that
is all of them, and those that accepted equally many in what runs again.

Legend: B batch, T new tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from spectrain.errors import ConfigError
from spectrain.target.model import TargetModel, TargetOutput
from spectrain.target.slot_cache import RECURRENT_KINDS, SlotCache, SlotLayer


def takes_turns(target: TargetModel) -> bool:
    """Whether every layer of a hybrid target either attends to all positions or is linear attention."""
    return set(target.spec.layer_types) <= {"full_attention", *RECURRENT_KINDS}


class HybridCache(SlotCache):
    """Linear attention in turn with full attention: states by row beside slots by row."""

    def __init__(self, target: TargetModel, batch_size: int) -> None:
        super().__init__(target, batch_size)
        stock = DynamicCache(config=target.model.config.get_text_config(decoder=True)).layers
        self.layers = [layer if isinstance(layer, LinearAttentionLayer) else SlotLayer(self) for layer in stock]
        self._ids_BT = torch.empty(batch_size, 0, dtype=torch.long)
        self._entered = [0] * batch_size  # tokens of the last pass, by row
        self._before: HybridCache | None = None  # the states before it; none if nothing of it can be taken back

    def forward(
        self, ids_BT: Tensor, lengths_B: Sequence[int], taps: Sequence[int], kv_layers: Sequence[int] = ()
    ) -> TargetOutput:
        if kv_layers:
            raise ConfigError("the drafter reads keys and values of the target, whose recurrent layers have none")
        self._ids_BT, self._entered = ids_BT, list(lengths_B)
        # The first pass is the prompt, and a single token is always kept: neither can be taken back.
        revocable = max(self._lengths) > 0 and max(lengths_B) > 1
        self._before = self._part(range(self.batch_size), with_slots=False) if revocable else None
        groups = _by_value(lengths_B)
        if len(groups) == 1:
            return _widened(self._pass(ids_BT[:, : lengths_B[0]], taps), ids_BT.shape[1], self)
        parts = [self._part(rows) for rows in groups.values()]
        outputs = [
            _widened(part._pass(ids_BT[rows, :length], taps), ids_BT.shape[1], self)
            for part, (length, rows) in zip(parts, groups.items(), strict=True)
        ]
        return self._joined(parts, outputs, [row for rows in groups.values() for row in rows])

    def _pass(self, ids_BT: Tensor, taps: Sequence[int]) -> TargetOutput:
        return super().forward(ids_BT, [ids_BT.shape[1]] * len(ids_BT), taps)

    def _joined(self, parts: list[HybridCache], outputs: list[TargetOutput], rows: list[int]) -> TargetOutput:
        """One's rows are those of ``parts``, which hold ``rows``, one part after the other; so are the outputs."""
        joined, *others = parts
        for other in others:
            joined.extend(other)
        order = sorted(range(len(rows)), key=rows.__getitem__)
        joined.select(order)
        self._take_layers(joined)
        found = _stacked(outputs, self)
        return TargetOutput(
            found.last_hidden_BSH[order], None if found.taps_BSAH is None else found.taps_BSAH[order], self
        )

    def keep(self, counts_B: Sequence[int]) -> None:
        for count, found in _by_value(counts_B).items():
            rows = [row for row in found if count < self._entered[row]]
            if not rows:
                continue
            # Keys and values of what is kept are right already: they hang on nothing that comes after them.
            part = self._part(rows, states=self._before)
            part._pass(self._ids_BT[rows, :count], ())
            for mine, theirs in zip(self.layers, part.layers, strict=True):
                if isinstance(mine, LinearAttentionLayer):
                    _put_states(mine, theirs, rows)
        self._before = None
        super().keep(counts_B)

    def select(self, rows: Sequence[int]) -> None:
        part = self._part(rows)
        self._lengths = part._lengths
        self._take_layers(part)

    def extend(self, other: HybridCache) -> None:
        self._lengths += other._lengths
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if isinstance(mine, LinearAttentionLayer):
                _append_states(mine, theirs)
            else:
                mine.append(theirs)

    def _part(self, rows: Sequence[int], states: HybridCache | None = None, with_slots: bool = True) -> HybridCache:
        """Copies of these rows. ``states``: whose recurrent states, if not one's own."""
        part = HybridCache(self._target, len(rows))
        part._lengths = [self._lengths[row] for row in rows]
        index = torch.tensor(list(rows), device=self._target.device)
        sources = (self if states is None else states).layers
        for layer, slots, recurrent in zip(part.layers, self.layers, sources, strict=True):
            if isinstance(layer, LinearAttentionLayer):
                vars(layer).update(_rows_of(recurrent, index))
            elif with_slots and slots.is_initialized:
                layer.copy_rows(slots, index)
        return part

    def _take_layers(self, other: HybridCache) -> None:
        self.layers = other.layers
        for layer in self.layers:
            if isinstance(layer, SlotLayer):
                layer.move_to(self)


def _rows_of(layer: LinearAttentionLayer, index: Tensor) -> dict[str, Any]:
    """The attributes of a layer's cache, its states (tensors in dictionaries) those of some rows."""
    return {
        name: {
            key: entry.index_select(0, index.to(entry.device)) if isinstance(entry, Tensor) else entry
            for key, entry in value.items()
        }
        if isinstance(value, dict)
        else value
        for name, value in vars(layer).items()
    }


def _put_states(layer: LinearAttentionLayer, other: LinearAttentionLayer, rows: list[int]) -> None:
    """The states of some rows become those of another cache, which holds just these rows."""
    for mine, theirs in _states(layer, other):
        for key, state in theirs.items():
            if state is not None:
                mine[key][rows] = state


def _append_states(layer: LinearAttentionLayer, other: LinearAttentionLayer) -> None:
    for mine, theirs in _states(layer, other):
        for key, state in theirs.items():
            if state is not None:
                mine[key] = torch.cat([mine[key], state])


def _states(layer: LinearAttentionLayer, other: LinearAttentionLayer) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    return [(layer.conv_states, other.conv_states), (layer.recurrent_states, other.recurrent_states)]


def _by_value(values: Sequence[int]) -> dict[int, list[int]]:
    """Value -> where it is."""
    found: dict[int, list[int]] = {}
    for index, value in enumerate(values):
        found.setdefault(value, []).append(index)
    return found


def _widened(output: TargetOutput, width: int, cache: Any) -> TargetOutput:
    taps_BTAH = None if output.taps_BSAH is None else _padded(output.taps_BSAH, width)
    return TargetOutput(_padded(output.last_hidden_BSH, width), taps_BTAH, cache)


def _stacked(outputs: Sequence[TargetOutput], cache: Any) -> TargetOutput:
    """Outputs of one width, one below the other."""
    taps_BTAH = [output.taps_BSAH for output in outputs if output.taps_BSAH is not None]
    return TargetOutput(
        torch.cat([output.last_hidden_BSH for output in outputs]), torch.cat(taps_BTAH) if taps_BTAH else None, cache
    )


class SnapshotCache:
    """One transformers cache per row, put back as it was and run again where drafts failed."""

    def __init__(self, target: TargetModel, batch_size: int) -> None:
        self._target = target
        self._rows = [_SnapshotRow(target) for _ in range(batch_size)]

    def forward(
        self, ids_BT: Tensor, lengths_B: Sequence[int], taps: Sequence[int], kv_layers: Sequence[int] = ()
    ) -> TargetOutput:
        if kv_layers:
            raise ConfigError("the drafter reads keys and values of the target, whose recurrent layers have none")
        outputs = [
            _widened(row.forward(ids_BT[b : b + 1, :length], taps), ids_BT.shape[1], self)
            for b, (row, length) in enumerate(zip(self._rows, lengths_B, strict=True))
        ]
        return _stacked(outputs, self)

    def keep(self, counts_B: Sequence[int]) -> None:
        for row, count in zip(self._rows, counts_B, strict=True):
            row.keep(count)

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def extend(self, other: SnapshotCache) -> None:
        self._rows += other._rows


class _SnapshotRow:
    def __init__(self, target: TargetModel) -> None:
        self._target = target
        self._cache = DynamicCache(config=target.model.config.get_text_config(decoder=True))
        self._length = 0
        self._ids_1T = torch.empty(1, 0, dtype=torch.long)
        self._layers_before: list[Any] = []

    def forward(self, ids_1T: Tensor, taps: Sequence[int]) -> TargetOutput:
        self._ids_1T = ids_1T
        # The first forward is the prompt, and a single token is always kept: neither can be taken back.
        self._layers_before = (
            [_snapshot(layer) for layer in self._cache.layers] if self._length and ids_1T.shape[1] > 1 else []
        )
        return self._run(ids_1T, taps)

    def keep(self, count: int) -> None:
        if count < self._ids_1T.shape[1]:
            self._cache.layers = self._layers_before
            self._run(self._ids_1T[:, :count], ())
        self._length += count
        self._layers_before = []

    def _run(self, ids_1T: Tensor, taps: Sequence[int]) -> TargetOutput:
        positions_1T = torch.arange(self._length, self._length + ids_1T.shape[1], device=ids_1T.device)[None]
        return self._target.run(ids_1T, positions_1T, past_key_values=self._cache, tap_ids=taps)


def _snapshot(layer: Any) -> Any:
    """The layer's state at this moment. Recurrent states (tensors in dictionaries) change in place and are copied; keys
    and values are replaced by longer ones at every step, so a reference to the present ones is enough."""
    copied = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(
                copied,
                name,
                {key: entry.clone() if isinstance(entry, Tensor) else entry for key, entry in value.items()},
            )
    return copied


def _padded(tensor_BT: Tensor, width: int) -> Tensor:
    batch, length, *rest = tensor_BT.shape
    return (
        torch.cat([tensor_BT, tensor_BT.new_zeros(batch, width - length, *rest)], dim=1)
        if length < width
        else tensor_BT
    )
