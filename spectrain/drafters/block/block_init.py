"""Closed-form initialisation of a block drafter: heads that look where the information is, and ridge regression for
what they carry.

Started from copied layers, a block drafter needs thousands of steps before its mask slots look at the two positions
that decide the next tokens: the anchor, and the last token of the context. Both can be had at once, and what is linear
from there can be solved for.

    keys      k_proj of rank 2: one part for the kind of input a key-value head looks at (the anchor, or the context),
              in fast rotary pairs, one for the others, in slow pairs. Directions u with u·x near 1 or 0 by kind are
              least squares; the key norm does the rest
    queries   a constant. Equal weights in log-spaced rotary pairs make scores fall with the logarithm of the distance,
              so the nearest key of the kind wins; the mask slots, always scored the same, win beyond a distance. Query
              heads that share keys differ in that distance: they are gates by slot number
    values    codes of the input from which the next hidden states are predicted best (reduced-rank regression, Izenman
              1975)
    outputs   o_proj, then down_proj, by ridge regression from what the heads and the MLP's units really are to the
              teacher's last hidden state at each slot, divided by its root mean square (the final norm undoes it).
              First for layer 0, then for layer 1 on what is left. Further layers start as the identity

Legend: R blocks, B slots, T tokens, H hidden, S counted rows (block, slot), I inputs, U units, N heads, G key-value
heads, M = N/G, d size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spectrain.data.packing import PackedBatch
from spectrain.drafters.block.block_attention import BlockLayout, block_attention
from spectrain.drafters.block.block_training import all_anchors, tokens_ahead
from spectrain.drafters.closed_form_size import CODED_DRAFTS, SOLVED_LAYERS, block_operations, most_blocks
from spectrain.drafters.drafter import Advance, Batches
from spectrain.drafters.init_from_target import RIDGE, Gram, unit
from spectrain.drafters.shared_solving import SharedText, shared

if TYPE_CHECKING:
    from spectrain.drafters.block.block_drafter import BlockDrafter
    from spectrain.drafters.block.block_model import BlockLayer

ANCHORS_LEAST_PER_DIM = 2
_LARGEST_STRIDE = 4
_PASSES = 4  # over the sample, a layer
_LEAD = 4.0  # score of the last context token over the one before, at the first mask slot
_SINK = 5.0  # score of a mask slot; of the other kind: minus this
_SLOWEST_FAST = 0.02  # radians a token


@dataclass
class Blocks:
    """Blocks of a batch on their way through the layers. ``x_RBH``: the residual stream; ``target_RBH``: what it should
    be, of size 1; ``weight_RB``: of a slot in the sums, 0 where nothing is known."""

    anchor_R: Tensor
    layout: BlockLayout
    context_TH: Tensor
    cos_sin_T: tuple[Tensor, Tensor]
    cos_sin_RB: tuple[Tensor, Tensor]
    x_RBH: Tensor
    target_RBH: Tensor
    weight_RB: Tensor

    @classmethod
    def build(cls, drafter: BlockDrafter, batch: PackedBatch, anchor_R: Tensor) -> Blocks:
        """A slot that does not draft (the anchor's) should carry what the first draft needs. ``anchor_R``: on the
        host.
        """
        body, shape, device = drafter.body, drafter.shape, batch.input_ids_T.device
        layout = BlockLayout.build(
            anchor_R, batch.host.document_ids_T, shape.block_size, shape.sliding_window, shape.causal, device
        )
        slot_B = torch.arange(shape.block_size, device=device)
        draft_B = (slot_B - shape.first_slot).clamp(min=0)
        counts_RB = tokens_ahead(batch, shape.num_drafts)[anchor_R].to(device)[:, None] > draft_B
        anchor_R = layout.anchor_R
        return cls(
            anchor_R=anchor_R,
            layout=layout,
            context_TH=body.fuse(batch.taps_TAH),
            cos_sin_T=drafter.rotary.cos_sin(batch.position_ids_T),
            cos_sin_RB=drafter.rotary.cos_sin(batch.position_ids_T[anchor_R][:, None] + slot_B),
            x_RBH=body.block_input(batch.input_ids_T[anchor_R], drafter.head),
            target_RBH=unit(batch.last_hidden_TH[(anchor_R[:, None] + draft_B).clamp(max=batch.num_tokens - 1)]),
            weight_RB=counts_RB * torch.exp(-draft_B / drafter.config.block.decay),
        )

    def heads(self, drafter: BlockDrafter, layer: BlockLayer) -> Tensor:
        """What the layer's attention gives before its output matrix, [R, B, N, d]. A convolution beside it, fresh, does
        nothing.
        """
        x_RBH, attention = layer.input_layernorm(self.x_RBH), layer.self_attn
        kv_RB = attention.keys_values(x_RBH, self.cos_sin_RB)
        kv_T = layer.context_kv(self.context_TH, self.cos_sin_T)
        backend = "eager" if x_RBH.device.type == "cpu" else "sdpa"
        return block_attention(attention.queries(x_RBH, self.cos_sin_RB), *kv_RB, *kv_T, self.layout, backend)


@torch.no_grad()
def init_blocks(drafter: BlockDrafter, batches: Batches, advance: Advance) -> int:
    """Set attention and MLP outputs of the first layers from training documents; returns the number of blocks used, 0
    if nothing was set.

    Nothing is set with a single key-value head in all, heads too small to hold fast and slow rotary pairs, or fewer
    blocks than unknowns. ``batches`` is called twice; ``advance`` is told about every percent of the work. Holds up to
    ``most_blocks`` in float32, three times [R, B, H].
    """
    shape, text = drafter.shape, shared(batches)
    hidden, pairs = shape.layer.hidden_size, _Pairs.build(drafter)
    least = ANCHORS_LEAST_PER_DIM * hidden
    most = text.at_most(most_blocks(shape.layer, shape.block_size), block_operations(shape.layer, shape.block_size))
    total = _count_anchors(text, _LARGEST_STRIDE * most)
    if pairs is None or shape.layer.num_key_value_heads * shape.num_layers < 2 or min(total, most) < least:
        return 0
    body = drafter.body
    body.fc.weight.zero_()
    # Taps ascend, so the deepest comes last. Turned round, because behind layer 0 the slots carry states too: keys must
    # tell them apart.
    body.fc.weight[:, -hidden:] = -torch.eye(hidden)
    body.hidden_norm.weight.fill_(1.0)
    for layer in body.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    sample = list(_sample(drafter, text, most, total))
    solved, coded = body.layers[:SOLVED_LAYERS], _coded_drafts(drafter, text, sample, least)

    def passed() -> Iterator[Blocks]:
        """The sample, in one of the passes over it."""
        for blocks in sample:
            yield blocks
            advance(100 / (_PASSES * len(solved) * len(sample)))

    for layer in solved:
        _solve(drafter, layer, pairs, coded, text, passed)
    return int(text.total(float(sum(len(blocks.anchor_R) for blocks in sample))))


def _count_anchors(text: SharedText, enough: int) -> int:
    """Of the whole text, or as many as are ``enough`` to know."""
    total = 0
    for batch in text.in_rounds():
        total += text.turn(0 if batch is None else len(all_anchors(batch)))[1]
        if total >= enough:
            break
    return total


def _sample(drafter: BlockDrafter, text: SharedText, most: int, total: int) -> Iterator[Blocks]:
    """Every so many-th block until there are enough: of all documents, or, where these are many, of the first ones."""
    stride = min(max(1, total // most), _LARGEST_STRIDE)
    seen = taken = 0
    for batch in text.in_rounds():
        anchor_R = torch.empty(0, dtype=torch.int64) if batch is None else all_anchors(batch)
        before, new = text.turn(len(anchor_R))
        anchor_R = anchor_R[-(seen + before) % stride :: stride]
        seen += new
        before, new = text.turn(len(anchor_R))
        if batch is not None and len(anchor_R) > 0 and taken + before < most:
            yield Blocks.build(drafter, batch, anchor_R)
        taken += new
        if taken >= most:
            return


def _coded_drafts(drafter: BlockDrafter, text: SharedText, sample: list[Blocks], least: int) -> int:
    """The drafts whose states choose the codes: those that at least so many blocks of the sample have, and the first
    one anyhow.
    """
    first, most = drafter.shape.first_slot, min(CODED_DRAFTS, drafter.shape.num_drafts)
    counts_J = torch.zeros(most, dtype=torch.float64, device=drafter.body.fc.weight.device)
    for blocks in sample:
        counts_J += (blocks.weight_RB[:, first : first + most] > 0).sum(0)
    return max(1, int((text.peers.summed(counts_J) >= least).sum()))


def _solve(
    drafter: BlockDrafter,
    layer: BlockLayer,
    pairs: _Pairs,
    coded: int,
    text: SharedText,
    sample: Callable[[], Iterator[Blocks]],
) -> None:
    """One layer, and the sample's residual streams behind it."""
    layer.input_layernorm.weight.fill_(1.0)
    _set_keys_and_values(drafter, layer, pairs, _Kinds(drafter, layer, coded, text, sample()))
    outputs, heads = Gram(text), []
    for blocks in sample():
        heads.append(blocks.heads(drafter, layer))
        _add(outputs, heads[-1].flatten(2), blocks)
    outputs.gather()
    layer.self_attn.o_proj.weight.copy_(outputs.solve().T)
    units = Gram(text)
    for blocks, heads_RBNd in zip(sample(), heads, strict=True):
        blocks.x_RBH = blocks.x_RBH + layer.self_attn.output(heads_RBNd)
        _add(units, layer.mlp.hidden(layer.post_attention_layernorm(blocks.x_RBH)), blocks)
    units.gather()
    layer.mlp.down_proj.weight.copy_(units.solve().T)
    for blocks in sample():
        blocks.x_RBH = blocks.x_RBH + layer.mlp(layer.post_attention_layernorm(blocks.x_RBH))


def _add(gram: Gram, inputs_RBI: Tensor, blocks: Blocks) -> None:
    """Rows that should give what the residual stream still lacks."""
    kept = blocks.weight_RB > 0
    root_S1 = blocks.weight_RB[kept].sqrt()[:, None]
    gram.add(inputs_RBI[kept] * root_S1, (blocks.target_RBH[kept] - blocks.x_RBH[kept]) * root_S1)


@dataclass
class _Pairs:
    """Which rotary pairs of a head do what: ``fast`` tell distances, ``level`` lift keys of the wanted kind, ``sink``
    is where mask slots (and, negative, the other kind) show. In the ``spare`` pair keys are 0, so that queries can have
    one length."""

    fast: Tensor
    level: Tensor
    sink: Tensor
    spare: int
    inv_freq: Tensor
    d: int

    @classmethod
    def build(cls, drafter: BlockDrafter) -> _Pairs | None:
        inv_freq = drafter.rotary.inv_freq.double().to(drafter.body.fc.weight.device)
        slow = torch.arange(len(inv_freq))[-max(2, len(inv_freq) // 4) :]
        spare = int(slow[0]) - 1
        fast = torch.nonzero(inv_freq[: max(spare, 0)] >= _SLOWEST_FAST)[:, 0]
        if len(fast) < 2:
            return None
        return cls(fast, slow[::2], slow[1::2], spare, inv_freq, drafter.shape.layer.head_dim)

    def closeness(self, distance: float) -> float:
        """Sum of cosines over the fast pairs: falls with the logarithm of the distance."""
        return float((self.inv_freq[self.fast] * distance).cos().sum())

    @property
    def slope(self) -> float:
        """Score of a fast pair at distance 0."""
        return _LEAD / (self.closeness(2) - self.closeness(3))

    def keys(self, wanted_H: Tensor, sink_H: Tensor) -> Tensor:
        """Rows [d, H] of k_proj."""
        k_dH = torch.zeros(self.d, len(wanted_H), dtype=wanted_H.dtype)
        k_dH[torch.cat([self.fast, self.level])] = wanted_H
        k_dH[self.sink] = sink_H
        return k_dH

    def query(self, edge: float | None, farthest: int, num_sinks: int) -> Tensor:
        """[d], before the norm: the nearest key wins up to the distance ``edge``, and the sinks beyond; None: up to
        ``farthest``.
        """
        own, sinks = math.sqrt(len(self.fast) + len(self.level)), len(self.sink)
        least = (
            min(self.closeness(distance) for distance in range(farthest + 1)) if edge is None else self.closeness(edge)
        )
        level = _SINK + math.log(num_sinks) - self.slope * least + (_LEAD if edge is None else 0.0)
        q_d = torch.zeros(self.d, dtype=torch.float64)
        q_d[self.fast] = self.slope * own
        q_d[self.level] = level * own / len(self.level)
        q_d[self.sink] = _SINK / math.sqrt(sinks)
        return q_d


def _set_keys_and_values(drafter: BlockDrafter, layer: BlockLayer, pairs: _Pairs, kinds: _Kinds) -> None:
    shape, attention = drafter.shape.layer, layer.self_attn
    groups, d, hidden = shape.num_key_value_heads, shape.head_dim, shape.hidden_size
    share = shape.num_attention_heads // groups
    # The anchor's embedding is read by layer 0, where nothing is added to it yet; the context by what is left of it and
    # by the next layer.
    alone = len(drafter.body.layers) == 1
    anchor_groups = 0 if layer.index > 0 else max(1, groups // 3 if alone else groups - max(1, groups // 3))
    codes = kinds.codes(anchor_groups * d, (groups - anchor_groups) * d)
    q_NdH = attention.q_proj.weight.view(-1, d, hidden)
    k_GdH = attention.k_proj.weight.view(groups, d, hidden)
    v_GdH = attention.v_proj.weight.view(groups, d, hidden)
    constant_H = kinds.direction({"anchor": 1.0, "mask": 1.0})
    queries = []
    for group in range(groups):
        own, other = ("anchor", "context") if group < anchor_groups else ("context", "anchor")
        wanted_H = kinds.direction({own: 1.0, other: 0.0, "mask": 0.0})
        # Behind layer 0 the anchor's slot is one of many.
        sink_H = kinds.direction({own: 0.0, other: -1.0 if layer.index == 0 else 1.0, "mask": 1.0})
        k_GdH[group] = pairs.keys(wanted_H, sink_H).to(k_GdH)
        number = group if own == "anchor" else group - anchor_groups
        part = codes[own][number * d : (number + 1) * d]
        v_GdH[group] = 0.0
        v_GdH[group, : len(part)] = part.to(v_GdH)
        for head in range(share):
            gate = (head if share > 1 else number) % drafter.shape.block_size
            behind = own == "context"  # the last context token is a step further away than the anchor
            edge = None if gate == 0 else drafter.shape.first_slot + gate - 0.5 + behind
            queries.append(pairs.query(edge, drafter.shape.block_size - 1 + behind, drafter.shape.block_size - 1))
    q_Nd = torch.stack(queries)
    longest = float(q_Nd.norm(dim=-1).max()) * 1.01
    q_Nd[:, pairs.spare] = (longest**2 - q_Nd.square().sum(-1)).sqrt()
    q_NdH.copy_(q_Nd[:, :, None] / longest * math.sqrt(d) * constant_H)
    if shape.qk_norm:
        attention.q_norm.weight.fill_(longest / math.sqrt(d))
        attention.k_norm.weight.fill_(1.0)


class _Kinds:
    """Second moments of what a layer's projections read: at anchors, at mask slots and in the context."""

    def __init__(
        self, drafter: BlockDrafter, layer: BlockLayer, coded: int, text: SharedText, sample: Iterable[Blocks]
    ) -> None:
        """``coded``: as many drafts, counted from the first, choose the codes."""
        self.xx: dict[str, Tensor] = {}
        self.mean: dict[str, Tensor] = {}
        self.state = Gram(text)
        counts: dict[str, int] = {}
        first = drafter.shape.first_slot
        for here in sample:
            x_RBH = layer.input_layernorm(here.x_RBH)
            for kind, rows in (
                ("anchor", x_RBH[:, 0]),
                ("mask", x_RBH[:, 1:].flatten(0, 1)),
                ("context", here.context_TH),
            ):
                self.xx[kind] = self.xx.get(kind, 0.0) + (rows.T @ rows).double()
                self.mean[kind] = self.mean.get(kind, 0.0) + rows.sum(0).double()
                counts[kind] = counts.get(kind, 0) + len(rows)
            target_RBH, weight_RB = here.target_RBH, here.weight_RB
            last = first + coded
            kept = (weight_RB[:, first:last] > 0).all(1)
            wanted_RJH = (target_RBH - here.x_RBH)[:, first:last] * weight_RB[:, first:last, None].sqrt()
            inputs_RI = torch.cat(
                [x_RBH[:, 0], here.context_TH[here.anchor_R - 1], torch.ones_like(x_RBH[:, 0, :1])], dim=1
            )
            self.state.add(inputs_RI[kept], wanted_RJH[kept].flatten(1))
        self.state.gather()
        for kind in ("anchor", "mask", "context"):
            count = text.total(float(counts.get(kind, 0)))
            self.xx[kind] = torch.as_tensor(text.total(self.xx.get(kind, 0.0))) / count
            self.mean[kind] = torch.as_tensor(text.total(self.mean.get(kind, 0.0))) / count

    def direction(self, values: dict[str, float]) -> Tensor:
        """[H]: u with u·x as near as can be to the value of x's kind."""
        xx = sum(self.xx[kind] for kind in values)
        xy = sum(value * self.mean[kind] for kind, value in values.items())
        assert isinstance(xx, Tensor) and isinstance(xy, Tensor)
        eye = torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
        return torch.linalg.solve(xx + 1e-4 * xx.diagonal().mean() * eye, xy)

    def codes(self, of_anchor: int, of_context: int) -> dict[str, Tensor]:
        """Rows [r, H] that map each kind's input to codes, of size about 1, from which the states are
        predicted best.
        """
        solution_IO = self.state.solve()
        xx = self.state.xx
        assert isinstance(xx, Tensor)
        hidden = len(self.mean["anchor"])
        result = {}
        for kind, part, rank in (
            ("anchor", slice(hidden), of_anchor),
            ("context", slice(hidden, 2 * hidden), of_context),
        ):
            own = xx[part, part] / self.count
            values, vectors = torch.linalg.eigh(
                own + RIDGE * own.diagonal().mean() * torch.eye(hidden, dtype=own.dtype)
            )
            root, inverse = (vectors * values.sqrt()) @ vectors.T, (vectors * values.rsqrt()) @ vectors.T
            fitted = root @ solution_IO[part]
            _, left = torch.linalg.eigh(fitted @ fitted.T)
            result[kind] = (inverse @ left[:, -min(rank, hidden) :].flip(1)).T if rank else inverse[:0]
        return result

    @property
    def count(self) -> float:
        assert isinstance(self.state.xx, Tensor)
        return float(self.state.xx[-1, -1])
