"""Closed-form initialisation of EAGLE-3: ridge regression instead of the first hundreds of steps.

The target's own head reads y, its last hidden state. If the drafter's residual stream carried y_t when it enters a
column and y_{t+1} when it leaves, the target's norm and head would turn it into the right prediction, and the next step
would find what it expects. Much of the way from y_t to y_{t+1} is linear in y_t and in the embedding of x_{t+1}, so it
can be solved for, from the front to the back:

    feature     fc(taps) = y_t                     ridge regression; exact where tap N is among the taps and normed
    attention   y_{t+1} − y_t = O V [norm(e_{t+1}); norm(f_t)]: reduced-rank regression of rank (key/value heads · head
                size); one query head per key/value head looks at its own column only
    mlp         what is left, over all K steps, from the hidden units of the MLP (gate and up as they are): ridge
                regression of its output matrix; twice, the second time with the features that the first solution
                feeds back
    the rest    output matrices of further layers are zero: they start as the identity

A head that looks at its own column: there is a direction w with w·x almost 1 for every input x (again regression).
Queries and keys that are this constant times a vector in the fastest rotary pairs score by cos(θ·distance) alone, which
peaks at distance 0.

All y are divided by their root mean square (the norm before the head undoes it), so that no token outweighs another.
Costs four passes over at most ``MAX_COLUMNS_PER_DIM``·2H columns and, a column, 2·((A·H)² + (2H)² + 2·K·I²) operations
for the sums of squares (I: MLP units).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spectrain.data.packing import PackedBatch
from spectrain.drafters.autoregressive.unroll import Columns
from spectrain.drafters.drafter import Advance, Batches
from spectrain.drafters.init_from_target import Gram, unit
from spectrain.target.head import TargetHead

if TYPE_CHECKING:
    from spectrain.drafters.autoregressive.eagle3 import Eagle3Body

MAX_COLUMNS_PER_DIM = 64
_PASSES = 4  # over the text
_FAST_PAIRS = 4
_LEAST_CONSTANT = 0.9  # mean of w·x below which no head could be made to look at its own column
_SHARPNESS = 5.0  # lead of the own column's score over its neighbour's


@torch.no_grad()
def init_eagle3(
    body: Eagle3Body, head: TargetHead, batches: Batches, steps: int, decay: float, advance: Advance
) -> int:
    """Set fc, the first layer's attention and its MLP's output from training documents; returns the number of columns
    used.

    ``batches`` is called four times; ``advance`` is told about every percent of the work. ``steps`` and ``decay`` weigh
    the MLP's regression as training will. With fewer columns than unknowns, or where no direction of the inputs is
    nearly constant, nothing is set and 0 is returned.
    """
    layer = body.layers[0]
    width = layer.self_attn.q_proj.in_features
    most = MAX_COLUMNS_PER_DIM * width
    fuse, used = Gram(), 0
    for batch, columns in _limited(batches(), most, advance):
        t_P = columns.query_M
        y_PH = unit(batch.last_hidden_TH[t_P])
        fuse.add(_tap_inputs(body, batch.taps_TAH[t_P]), body.feed_back(y_PH, body.norm(y_PH)))
        used += len(t_P)
    if used < width:
        return 0
    fc_before = body.fc.weight.clone()
    body.fc.weight.copy_(fuse.solve().T)

    change = Gram()
    for batch, columns in _limited(batches(), most, advance):
        t_P = columns.query_M
        residual_PH, x_PI = _column_input(body, head, batch, t_P, body.fuse(batch.taps_TAH[t_P]), 0)
        change.add(
            x_PI,
            torch.cat([unit(batch.last_hidden_TH[t_P + 1]) - residual_PH, torch.ones_like(residual_PH[:, :1])], dim=1),
        )
    solution_IO = change.solve()
    assert isinstance(change.xy, Tensor)
    if float(change.xy[:, -1] @ solution_IO[:, -1]) < _LEAST_CONSTANT * used:
        body.fc.weight.copy_(fc_before)
        return 0
    _set_attention(body, solution_IO[:, :-1], solution_IO[:, -1], change.xx)

    layer.mlp.down_proj.weight.zero_()
    for later in body.layers[1:]:
        later.self_attn.o_proj.weight.zero_()
        later.mlp.down_proj.weight.zero_()
    for _ in range(2):
        mlp = Gram()
        for batch, columns in _limited(batches(), most, advance, steps):
            _add_mlp_columns(mlp, body, head, batch, columns, decay)
        layer.mlp.down_proj.weight.copy_(mlp.solve().T)
    return used


def _add_mlp_columns(
    mlp: Gram, body: Eagle3Body, head: TargetHead, batch: PackedBatch, columns: Columns, decay: float
) -> None:
    """Hidden units of the MLP and what its output should be, at every step of the counted columns, in the drafter's own
    chain.
    """
    layer = body.layers[0]
    feature_MH = body.fuse(batch.taps_TAH[columns.query_M])
    for step, valid_M in enumerate(columns.valid_KM):
        t_P = columns.query_M[valid_M]
        residual_PH, x_PI = _column_input(body, head, batch, t_P, feature_MH[valid_M], step)
        middle_PH = residual_PH + layer.self_attn.output(_own_column_heads(body, x_PI))
        units_PU = layer.mlp.hidden(layer.post_attention_layernorm(middle_PH))
        weight = math.sqrt(decay**step)
        mlp.add(weight * units_PU, weight * (unit(batch.last_hidden_TH[t_P + 1 + step]) - middle_PH))
        out_PH = middle_PH + layer.mlp.down_proj(units_PU)
        feature_MH = feature_MH.clone()
        feature_MH[valid_M] = body.feed_back(out_PH, body.norm(out_PH))


def _column_input(
    body: Eagle3Body, head: TargetHead, batch: PackedBatch, t_P: Tensor, feature_PH: Tensor, step: int
) -> tuple[Tensor, Tensor]:
    embedding_PH = head.embed_rows(batch.input_ids_T[t_P + 1 + step]).to(feature_PH.dtype)
    return body.layers[0].attention_input(feature_PH, embedding_PH)


def _own_column_heads(body: Eagle3Body, x_PI: Tensor) -> Tensor:
    """Attention output [P, N, d] if the first head of each group sees its own column alone and the others nothing."""
    shape = body.shape.layer
    groups, d = shape.num_key_value_heads, shape.head_dim
    heads_PGRd = x_PI.new_zeros(len(x_PI), groups, shape.num_attention_heads // groups, d)
    heads_PGRd[:, :, 0] = body.layers[0].self_attn.v_proj(x_PI).unflatten(-1, (groups, d))
    return heads_PGRd.flatten(1, 2)


def _limited(
    batches: Iterable[PackedBatch], most: int, advance: Advance, steps: int = 1
) -> Iterable[tuple[PackedBatch, Columns]]:
    """Batches with their counted columns, until ``most`` columns have been seen: one of the passes over the text."""
    seen = 0
    for batch in batches:
        columns = Columns.build(batch, steps)
        if len(columns.query_M):
            yield batch, columns
        new = min(len(columns.query_M), most - seen)
        seen += new
        advance(100 / _PASSES * new / most)
        if seen >= most:
            return
    advance(100 / _PASSES * (1 - seen / most))


def _tap_inputs(body: Eagle3Body, taps_PAH: Tensor) -> Tensor:
    """What fc reads."""
    return body.normed_taps(taps_PAH.to(body.fc.weight.dtype)).flatten(-2)


def _set_attention(body: Eagle3Body, map_IH: Tensor, constant_I: Tensor, xx: Tensor | float) -> None:
    """v and o from the rank-limited map; queries and keys that look at their own column."""
    shape, attention = body.shape.layer, body.layers[0].self_attn
    d, groups = shape.head_dim, shape.num_key_value_heads
    heads_per_group = shape.num_attention_heads // groups
    assert isinstance(xx, Tensor)
    # Reduced-rank regression: keep the directions in which the fitted outputs vary most (Izenman 1975).
    rank = min(groups * d, shape.hidden_size)
    _, vectors_HH = torch.linalg.eigh(map_IH.T @ xx @ map_IH)
    kept_HR = vectors_HH[:, -rank:]
    v_RI = (map_IH @ kept_HR).T
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:rank].copy_(v_RI)

    own = _own_column_vector(body).to(attention.q_proj.weight)
    q_GRdI = attention.q_proj.weight.view(groups, heads_per_group, d, -1)
    k_GdI = attention.k_proj.weight.view(groups, d, -1)
    o_HGRd = attention.o_proj.weight.view(-1, groups, heads_per_group, d)
    q_GRdI[:, 0] = torch.outer(own, constant_I.to(own))
    # Other heads of the group share these keys: they ignore the rotary pairs that carry the constant.
    q_GRdI[:, 1:, own != 0] = 0.0
    k_GdI[:, own != 0] = torch.outer(own[own != 0], constant_I.to(own))
    if shape.qk_norm:
        attention.k_norm.weight[own != 0] = _norm_gain(body)
    o_HGRd.zero_()
    for group in range(groups):
        part_HR = kept_HR[:, group * d : (group + 1) * d]
        o_HGRd[:, group, 0, : part_HR.shape[1]] = part_HR.to(o_HGRd)


def _lead(body: Eagle3Body) -> tuple[int, float]:
    """(pairs used, by how much distance 0 beats distance 1 for entries of size 1)."""
    shape = body.shape.layer
    pairs = min(_FAST_PAIRS, shape.head_dim // 2)
    theta = float(shape.rope_parameters.get("rope_theta", 10000.0)) ** (-2 * torch.arange(pairs) / shape.head_dim)
    return pairs, float((1 - theta.cos()).sum())


def _own_column_vector(body: Eagle3Body) -> Tensor:
    """[d]: equal entries in the first element of the fastest rotary pairs, zero elsewhere, as long as ``_SHARPNESS``
    needs.
    """
    d = body.shape.layer.head_dim
    pairs, lead = _lead(body)
    own = torch.zeros(d)
    # With q/k norms only the direction counts: make these entries dominate the head.
    own[:pairs] = 10.0 if body.shape.layer.qk_norm else math.sqrt(_SHARPNESS * math.sqrt(d) / lead)
    return own


def _norm_gain(body: Eagle3Body) -> float:
    """Gain of the key norm on those entries: after both norms they have size sqrt(d / pairs)."""
    d = body.shape.layer.head_dim
    pairs, lead = _lead(body)
    return _SHARPNESS * math.sqrt(d) / (lead * d / pairs)
