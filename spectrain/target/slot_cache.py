"""The cache of a target whose layers all attend.

Slot s of the key/value buffers always holds position s, and each row of the batch has its own length, so rows may
accept different counts without padding or shifting. Taking tokens out lowers a length and copies nothing: stale slots
lie beyond what the mask shows and are overwritten by the next tokens at those positions.

Legend: B batch, T new tokens, C slots shown to attention, N heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from spectrain.errors import ConfigError, InputError
from spectrain.target.cpu_kernels import CPU_SDPA, RaggedRows, ragged_rows, takes_ragged_rows
from spectrain.target.model import TargetModel, TargetOutput

CAPACITY_STEP = 64  # buffers hold a multiple of so many slots
# Layers without a mask of their own: every token of a row enters, in order.
RECURRENT_KINDS = ("linear_attention",)


class SlotCache(Cache):
    """Key/value cache with slot = position and a length per row. Sliding-window layers keep all slots too; their mask
    forgets.
    """

    def __init__(self, target: TargetModel, batch_size: int) -> None:
        self._write = SlotWrite(torch.zeros(batch_size, 0, dtype=torch.long), shared_start=0, visible=0)
        super().__init__(layer_class_to_replicate=lambda: SlotLayer(self))
        self._target = target
        self._masks = AttentionMasks(target)
        self._lengths = [0] * batch_size

    @property
    def batch_size(self) -> int:
        return len(self._lengths)

    @property
    def write(self) -> SlotWrite:
        """Where the tokens of the forward pass under way go."""
        return self._write

    def forward(
        self, ids_BT: Tensor, lengths_B: Sequence[int], taps: Sequence[int], kv_layers: Sequence[int] = ()
    ) -> TargetOutput:
        # Padding is written too: beyond its row's length, where nothing looks before real tokens have overwritten it.
        width, device = ids_BT.shape[1], self._target.device
        start_B1 = torch.tensor(self._lengths, device=device)[:, None]
        positions_BT = start_B1 + torch.arange(width, device=device)
        shared_start = self._lengths[0] if len(set(self._lengths)) == 1 else None
        self._write = SlotWrite(positions_BT, shared_start, visible=max(self._lengths) + width)
        mask: Any = self._masks.build(positions_BT, self._write.visible)
        if len(set(lengths_B)) > 1 and takes_ragged_rows(self._target.model):
            output = self._forward_ragged(ids_BT, positions_BT, lengths_B, mask, taps, kv_layers)
        else:
            output = self._target.run(
                ids_BT, positions_BT, attention_mask=mask, past_key_values=self, tap_ids=taps, kv_layers=kv_layers
            )
        return output if output.target_kv is None else _with_new_slots(output, positions_BT)

    def _forward_ragged(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        lengths_B: Sequence[int],
        mask: Any,
        taps: Sequence[int],
        kv_layers: Sequence[int],
    ) -> TargetOutput:
        """The real tokens alone, as one row; what comes out is laid back into the rectangle, zeros elsewhere."""
        batch, width = ids_BT.shape
        real_BT = torch.arange(width, device=ids_BT.device) < torch.tensor(lengths_B, device=ids_BT.device)[:, None]
        rows = RaggedRows(batch, width, real_BT.flatten().nonzero()[:, 0])
        self._write = replace(self._write, places=rows.places_R, shared_start=None)
        with ragged_rows(rows):
            output = self._target.run(
                rows.gather(ids_BT),
                rows.gather(positions_BT),
                attention_mask=mask,
                past_key_values=self,
                tap_ids=taps,
                kv_layers=kv_layers,
            )
        taps_BTAH = None if output.taps_BSAH is None else rows.spread(output.taps_BSAH)
        return TargetOutput(rows.spread(output.last_hidden_BSH), taps_BTAH, self, output.target_kv)

    def keep(self, counts_B: Sequence[int]) -> None:
        self._lengths = [length + count for length, count in zip(self._lengths, counts_B, strict=True)]

    def take_back(self, counts_B: Sequence[int]) -> None:
        """The last ``counts_B[b]`` tokens of row b go again, though they were kept."""
        self._lengths = [length - count for length, count in zip(self._lengths, counts_B, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        self._lengths = [self._lengths[row] for row in rows]
        for layer in self.layers:
            layer.batch_select_indices(torch.tensor(rows, device=layer.keys.device))

    def extend(self, other: SlotCache) -> None:
        self._lengths += other._lengths
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.append(theirs)


@dataclass(frozen=True)
class SlotWrite:
    """One forward pass's place in the buffers: the slots of its tokens [B, T], their common first slot if all rows have
    the same length, and how many slots attention is shown. ``places``: only these of the B·T tokens are there, as one
    row."""

    slots: Tensor
    shared_start: int | None
    visible: int
    places: Tensor | None = None


class SlotLayer(CacheLayerMixin):
    """The buffers of one layer, made at its first use with that layer's own head count and dimension."""

    is_sliding = False

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch = self._owner.batch_size
        self.keys, self.values = (
            new.new_zeros(batch, new.shape[1], 0, new.shape[3]) for new in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values [B, N, T, D] and return those of all visible slots [B, N, C, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        write = self._owner.write
        self.keys = _written(self.keys, key_states, write)
        self.values = _written(self.values, value_states, write)
        return self.keys[:, :, : write.visible], self.values[:, :, : write.visible]

    def batch_select_indices(self, indices: Tensor) -> None:
        self.keys, self.values = self.keys.index_select(0, indices), self.values.index_select(0, indices)

    def append(self, other: SlotLayer) -> None:
        self.keys, self.values = _stacked(self.keys, other.keys), _stacked(self.values, other.values)

    def copy_rows(self, other: SlotLayer, indices: Tensor) -> None:
        indices = indices.to(other.keys.device)
        self.keys, self.values = other.keys.index_select(0, indices), other.values.index_select(0, indices)
        self.is_initialized = True

    def move_to(self, owner: SlotCache) -> None:
        self._owner = owner

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.write.visible, 0

    def get_seq_length(self) -> int:
        return self._owner.write.visible - self._owner.write.slots.shape[1]

    def get_max_length(self) -> int:
        return -1


def _written(buffer_BNCD: Tensor, new_BNTD: Tensor, write: SlotWrite) -> Tensor:
    """The buffer with the new entries in their slots; a larger one if they do not fit (at least doubled: growth costs
    O(1) a token).
    """
    batch, heads, capacity, dim = buffer_BNCD.shape
    if write.visible > capacity:
        larger = -(-max(write.visible, 2 * capacity) // CAPACITY_STEP) * CAPACITY_STEP
        grown_BNCD = new_BNTD.new_zeros(
            batch, heads, larger, dim
        )  # zeros: a masked NaN would still spoil the softmax's product
        grown_BNCD[:, :, :capacity] = buffer_BNCD
        buffer_BNCD = grown_BNCD
    if write.shared_start is not None:
        buffer_BNCD[:, :, write.shared_start : write.shared_start + new_BNTD.shape[2]] = new_BNTD
    elif write.places is not None:
        rows_R, slots_R = write.places // write.slots.shape[1], write.slots.flatten()[write.places]
        buffer_BNCD[rows_R, :, slots_R] = new_BNTD[0].transpose(0, 1)
    else:
        rows_B1 = torch.arange(batch, device=buffer_BNCD.device)[:, None]
        slots_BT = write.slots.to(buffer_BNCD.device)  # of a layer that lies elsewhere
        buffer_BNCD[rows_B1, :, slots_BT] = new_BNTD.transpose(1, 2)
    return buffer_BNCD


def _with_new_slots(output: TargetOutput, slots_BT: Tensor) -> TargetOutput:
    """Of the keys and values that a cache showed, those of the pass: copies, as slots are overwritten later."""
    rows_B1 = torch.arange(len(slots_BT), device=slots_BT.device)[:, None]
    new = {
        layer: (keys_BGCd[rows_B1, :, slots_BT].transpose(1, 2), values_BGCd[rows_B1, :, slots_BT].transpose(1, 2))
        for layer, (keys_BGCd, values_BGCd) in (output.target_kv or {}).items()
    }
    return replace(output, target_kv=new)


def _stacked(first_BNCD: Tensor, second_BNCD: Tensor) -> Tensor:
    """Rows of both, with the larger of their capacities."""
    batch, heads, capacity, dim = first_BNCD.shape
    both_BNCD = first_BNCD.new_zeros(batch + second_BNCD.shape[0], heads, max(capacity, second_BNCD.shape[2]), dim)
    both_BNCD[:batch, :, :capacity] = first_BNCD
    both_BNCD[batch:, :, : second_BNCD.shape[2]] = second_BNCD
    return both_BNCD


class AttentionMasks:
    """4-D masks that show each token the slots up to its own position, and no more than its layer's window.

    Built here because transformers derives masks from one common length, while rows have different lengths. A target
    whose layers all look alike gets one tensor; one with several kinds gets a dictionary by layer type, as its
    ``generate`` would make it.
    """

    def __init__(self, target: TargetModel) -> None:
        config = target.model.config.get_text_config(decoder=True)
        self._additive = _needs_additive_mask(config._attn_implementation)
        self._dtype = target.dtype
        window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
        uniform = (
            "sliding_attention"
            if window is not None
            else "chunked_attention"
            if chunk is not None
            else "full_attention"
        )
        kinds = set(getattr(config, "layer_types", None) or [uniform])
        self._unmasked = kinds.intersection(RECURRENT_KINDS)
        self._kinds = sorted(kinds - self._unmasked)
        self._reach = {"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}
        unknown = [kind for kind in self._kinds if kind not in self._reach]
        if unknown:
            raise InputError(
                f"target of model type {config.model_type!r}: the mask of its layers of type {unknown[0]} is not known"
            )

    def build(self, positions_BT: Tensor, visible: int) -> Tensor | dict[str, Tensor | None]:
        slots_C = torch.arange(visible, device=positions_BT.device)
        positions_B1T1 = positions_BT[:, None, :, None]
        masks = {kind: self._mask(kind, positions_B1T1, slots_C) for kind in self._kinds}
        if len(masks) == 1 and not self._unmasked:
            return next(iter(masks.values()))
        return {**masks, **dict.fromkeys(self._unmasked)}

    def _mask(self, kind: str, positions_B1T1: Tensor, slots_C: Tensor) -> Tensor:
        mask_B1TC = slots_C <= positions_B1T1
        reach = self._reach[kind]
        if kind == "sliding_attention" and reach is not None:
            mask_B1TC &= slots_C > positions_B1T1 - reach
        if kind == "chunked_attention" and reach is not None:
            mask_B1TC &= slots_C // reach == positions_B1T1 // reach
        if not self._additive:
            return mask_B1TC
        zeros_B1TC = torch.zeros(mask_B1TC.shape, dtype=self._dtype, device=mask_B1TC.device)
        return zeros_B1TC.masked_fill_(~mask_B1TC, torch.finfo(self._dtype).min)


def _needs_additive_mask(attn_implementation: str) -> bool:
    if attn_implementation not in ("eager", "sdpa", CPU_SDPA):
        raise ConfigError(
            f"target.attn_implementation={attn_implementation} takes no 4-D mask, which rows of different lengths "
            f"need: use sdpa or eager"
        )
    return attn_implementation == "eager"
