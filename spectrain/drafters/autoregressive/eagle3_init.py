"""Closed-form initialisation of EAGLE-3: ridge regression instead of the first hundreds of steps.

The target's own head reads y, its last hidden state. If the drafter's residual stream carried y_t when it enters a
column and y_{t+1} when it leaves, the target's norm and head would turn it into the right prediction, and the next step
would find what it expects. Much of the way from y_t to y_{t+1} is linear in y_t and in the embedding of x_{t+1}, and
much of the rest is copied from earlier text. So it can be solved for, from the front to the back:

    feature     fc(taps) = y_t                     ridge regression; exact where tap N is among the taps and normed
    values      y_{t+1} − y_t = M [norm(e_{t+1}); norm(f_t)]: reduced-rank regression of rank (key/value heads · head
                size). The first query head of each key/value head looks at its own column only and carries M
    feature     again: taps below N know more of y_{t+1} than y_t does. Which feature would bring the first step there
                through M? fc moves towards it, as far as ``_NEARNESS`` allows: later steps are fed the drafter's own
                output, which resembles y
    matches     further query heads of each key/value head look at the columns behind earlier occurrences of their
                own token: the values there say how the text went on
    outputs     of attention, then of the MLP (gate and up as they are): what is left, over all K steps, from what the
                heads and the hidden units really are; the MLP's twice, the second time with the features that the first
                solution feeds back
    the rest    output matrices of further layers are zero: they start as the identity

A head that looks at its own column: there is a direction w with w·x almost 1 for every input x (again regression).
Queries and keys that are this constant times a vector in the fastest rotary pairs score by cos(θ·distance) alone, which
peaks at distance 0.

A head that finds its token: column s holds x_{s+1} and, in its feature, traces of x_s. Whitened principal components of
the embeddings are a code of tokens in which different ones are nearly orthogonal. Queries are the code of the column's
token, keys what can be told of the code of x_s from the column's input (again regression), both in the
slower rotary pairs, where distance matters little.

All y are divided by their root mean square (the norm before the head undoes it), so that no token outweighs another.
Costs seven passes over at most ``MAX_COLUMNS_PER_DIM``·2H columns and, a column, ``column_operations`` for the sums of
squares, which several processes share (``shared_solving.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spectrain.data.packing import PackedBatch
from spectrain.drafters.autoregressive.unroll import ColumnLayout, Columns, unrolled_attention
from spectrain.drafters.closed_form_size import MAX_COLUMNS_PER_DIM, column_operations
from spectrain.drafters.drafter import Advance, Batches
from spectrain.drafters.init_from_target import Gram, unit
from spectrain.drafters.layers import Rotary
from spectrain.drafters.shared_solving import SharedText, shared
from spectrain.target.head import TargetHead

if TYPE_CHECKING:
    from spectrain.drafters.autoregressive.eagle3 import Eagle3Body

_PASSES = 7  # over the text
# Price of a feature's distance from y_t, against the error of the first step: at 0 the features of the first step lie
# where those of later steps never do, and one attention cannot serve both.
_NEARNESS = 0.3
_SIZE_ROUNDS = 3
_FAST_PAIRS = 4
_LEAST_CONSTANT = 0.9  # mean of w·x below which no head could be made to look at its own column
_SHARPNESS = 5.0  # lead of the own column's score over its neighbour's
_SLOW = 1 / 16  # radians a token: rotary pairs that turn less carry codes, and prefer late occurrences to early ones
_MATCHES = (8.0, 32.0)  # mean scores of a column whose token was found, by a head that weighs many and a sharp one
_ONLY_MATCH = 16.0  # where there is one such head, or q/k norms make all alike
_CODE_SHARE = 0.25  # with q/k norms: squared size of a key's code, as a share of that of its constant


@dataclass(frozen=True)
class InitText:
    """What is solved on: training documents (``batches``, the same ones at every call), of which at most ``most``
    columns count. ``advance`` is told about every percent of the work.
    """

    head: TargetHead
    batches: SharedText
    most: int
    advance: Advance

    def columns(self, steps: int = 1) -> Iterator[tuple[PackedBatch, Columns]]:
        """One pass: this process's batches with their counted columns, until all have seen ``most`` columns."""
        seen = 0
        for batch in self.batches.in_rounds():
            columns = None if batch is None else Columns.build(batch, steps)
            before, new = self.batches.turn(0 if columns is None else len(columns.query_M))
            if batch is not None and columns is not None and len(columns.query_M) and seen + before < self.most:
                yield batch, columns
            new = min(new, self.most - seen)
            seen += new
            self.advance(100 / _PASSES * new / self.most)
            if seen >= self.most:
                return
        self.advance(100 / _PASSES * (1 - seen / self.most))

    def gram(self) -> Gram:
        """Of sums over the text."""
        return Gram(self.batches)

    def embeddings(self, batch: PackedBatch, positions: Tensor) -> Tensor:
        """Of the tokens there."""
        return self.head.embed_rows(batch.input_ids_T[positions]).float()


def init_text(body: Eagle3Body, head: TargetHead, batches: Batches, steps: int, advance: Advance) -> InitText:
    """The text for a body: as many columns as the solution is worth, or as there are operations for."""
    text, each = shared(batches), column_operations(body.shape.layer, body.fc.in_features, steps)
    width = body.layers[0].self_attn.q_proj.in_features
    return InitText(head, text, text.at_most(MAX_COLUMNS_PER_DIM * width, each), advance)


@torch.no_grad()
def init_eagle3(
    body: Eagle3Body, rotary: Rotary, head: TargetHead, batches: Batches, steps: int, decay: float, advance: Advance
) -> int:
    """Set fc, the first layer's attention and its MLP's output from training documents; returns the number of columns
    used.

    ``batches`` is called seven times; ``advance`` is told about every percent of the work. ``steps`` and ``decay``
    weigh the regressions of outputs as training will. With fewer columns than unknowns, or where no direction of the
    inputs is nearly constant, nothing is set and 0 is returned.
    """
    layer = body.layers[0]
    width = layer.self_attn.q_proj.in_features
    text = init_text(body, head, batches, steps, advance)
    fuse, used = text.gram(), 0
    for batch, columns in text.columns():
        t_P = columns.query_M
        y_PH = unit(batch.last_hidden_TH[t_P])
        fuse.add(_tap_inputs(body, batch, t_P), body.feed_back(y_PH, body.norm(y_PH)))
        used += len(t_P)
    used = int(text.batches.total(float(used)))
    if used < width:
        return 0
    fuse.gather()
    fc_before = body.fc.weight.clone()
    body.fc.weight.copy_(fuse.solve().T)

    change = text.gram()
    for batch, columns in text.columns():
        t_P = columns.query_M
        residual_PH, x_PI = _column_input(body, text, batch, t_P)
        one_P1 = torch.ones_like(residual_PH[:, :1])
        change.add(x_PI, torch.cat([unit(batch.last_hidden_TH[t_P + 1]) - residual_PH, one_P1], dim=1))
    change.gather()
    map_IO = change.solve()
    assert isinstance(change.xy, Tensor)
    sum_I, constant_I = change.xy[:, -1], map_IO[:, -1]
    if float(sum_I @ constant_I) < _LEAST_CONSTANT * used:
        body.fc.weight.copy_(fc_before)
        return 0
    _set_attention(body, map_IO[:, :-1], constant_I, change.xx)
    _move_feature(body, text, fuse, used)
    _match_tokens(body, rotary, text, constant_I, sum_I / used, used)
    _solve_outputs(body, rotary, text, steps, decay)
    return used


def _column_input(body: Eagle3Body, text: InitText, batch: PackedBatch, t_P: Tensor) -> tuple[Tensor, Tensor]:
    """(residual stream, what q, k and v read) of columns t_P at step 0."""
    feature_PH = body.fuse(batch.taps_TAH[t_P])
    return body.layers[0].attention_input(feature_PH, text.embeddings(batch, t_P + 1))


def _tap_inputs(body: Eagle3Body, batch: PackedBatch, t_P: Tensor) -> Tensor:
    """What fc reads."""
    return body.normed_taps(batch.taps_TAH[t_P].to(body.fc.weight.dtype)).flatten(-2)


def _move_feature(body: Eagle3Body, text: InitText, fuse: Gram, used: int) -> None:
    """Move fc to where the first step predicts best through the attention that there is. ``fuse``: the sums by which fc
    was solved for.

    With norm(f) taken as f divided by the features' root mean square, the output of the first step is linear in f: f T
    plus the embedding's part. So f T should be what the embedding leaves, as far as the taps tell it.
    """
    layer, hidden = body.layers[0], body.shape.hidden_size
    through_e_HH, through_f_HH = _own_column_map(body).split(hidden)
    left = text.gram()
    for batch, columns in text.columns():
        t_P = columns.query_M
        embedding_PH = layer.input_layernorm(text.embeddings(batch, t_P + 1))
        left.xy = left.xy + _product(
            _tap_inputs(body, batch, t_P), unit(batch.last_hidden_TH[t_P + 1]) - embedding_PH @ through_e_HH
        )
    left.gather()
    left.xx = fuse.xx
    assert isinstance(fuse.xx, Tensor)
    wanted_IH, fc_IH = left.solve(), body.fc.weight.T.double()
    one_HH = torch.eye(hidden, dtype=fc_IH.dtype, device=fc_IH.device)
    moved_IH = fc_IH
    for _ in range(_SIZE_ROUNDS):  # the features' size depends on where fc moves to
        size = math.sqrt(float((moved_IH * (fuse.xx @ moved_IH)).sum()) / (used * hidden))
        step_HH = through_f_HH.double() / size + (one_HH / size if body.shape.norm_before_residual else one_HH)
        square_HH = step_HH @ step_HH.T
        price_HH = _NEARNESS * square_HH.diagonal().mean() * one_HH
        missing_IH = wanted_IH - fc_IH @ step_HH
        moved_IH = fc_IH + torch.linalg.solve(square_HH + price_HH, step_HH @ missing_IH.T).T
    body.fc.weight.copy_(moved_IH.T)


def _match_tokens(
    body: Eagle3Body, rotary: Rotary, text: InitText, constant_I: Tensor, mean_I: Tensor, used: int
) -> None:
    """Queries and keys of further heads of each group: keys say which token their column's feature belongs to,
    queries which token their column holds. Nothing where there is one head a group, or no slow
    rotary pair.

    ``mean_I`` is the mean of the columns' inputs, of which ``constant_I`` makes 1: it is taken off every code.
    """
    shape, layer = body.shape.layer, body.layers[0]
    attention, hidden, d = layer.self_attn, shape.hidden_size, shape.head_dim
    groups, half = shape.num_key_value_heads, shape.head_dim // 2
    slow = [pair for pair in range(_own_pairs(body), half) if float(rotary.inv_freq[pair]) < _SLOW]
    entries = torch.tensor([*slow, *(pair + half for pair in slow)])
    if shape.num_attention_heads == groups or not slow:
        return
    told = text.gram()
    squares_HH = torch.zeros(hidden, hidden, dtype=torch.float64, device=attention.k_proj.weight.device)
    mean_H = mean_I[:hidden].float()
    for batch, columns in text.columns():
        t_P = columns.query_M
        _, x_PI = _column_input(body, text, batch, t_P)
        own_PH = layer.input_layernorm(text.embeddings(batch, t_P)) - mean_H
        told.add(x_PI, own_PH)
        squares_HH = squares_HH + _product(own_PH, own_PH)
    told.gather()
    squares_HH = text.batches.peers.summed(squares_HH)
    assert isinstance(told.xx, Tensor)
    # Unlike tokens have nearly orthogonal codes, of squared length C on average.
    values_H, vectors_HH = torch.linalg.eigh(squares_HH / used)
    size = min(len(entries), hidden)
    code_HC = vectors_HH[:, -size:] / values_H[-size:].clamp(min=1e-12).sqrt()
    key_IC = told.solve() @ code_HC
    query_IC = -torch.outer(constant_I, mean_H.to(code_HC) @ code_HC)
    query_IC[:hidden] += code_HC
    # Mean of what a key and its own token's code have in common.
    agreement = float((key_IC * (told.xx @ key_IC)).sum()) / used
    entries = entries[:size]
    q_GRdI = attention.q_proj.weight.view(groups, -1, d, 2 * hidden)
    k_GdI = attention.k_proj.weight.view(groups, d, 2 * hidden)
    q_GRdI[:, 1:, entries] = 0.0  # heads beyond share the keys and are left to training
    if shape.qk_norm:  # the length of a query does not matter, nor that of a key but for the parts it consists of
        matches: tuple[float, ...] = (_ONLY_MATCH,)
        key_scale = math.sqrt(_CODE_SHARE * float(_own_column_vector(body).square().sum()) / agreement)
        attention.k_norm.weight[entries] = _ONLY_MATCH / math.sqrt(d * _CODE_SHARE / (1 + _CODE_SHARE))
        attention.k_norm.weight[: _own_pairs(body)] *= math.sqrt(1 + _CODE_SHARE)  # beside the code it is shorter
    else:
        matches = _MATCHES if q_GRdI.shape[1] > len(_MATCHES) else (_ONLY_MATCH,)
        key_scale = math.sqrt(_ONLY_MATCH * math.sqrt(d) / agreement)
    k_GdI[:, entries] = key_scale * key_IC.T.to(k_GdI)
    for number, match in enumerate(matches, start=1):
        q_GRdI[:, number] = 0.0
        q_GRdI[:, number, entries] = match * math.sqrt(d) / (agreement * key_scale) * query_IC.T.to(q_GRdI)


def _solve_outputs(body: Eagle3Body, rotary: Rotary, text: InitText, steps: int, decay: float) -> None:
    """Output matrices of attention and MLP, for all steps together."""
    layer = body.layers[0]
    layer.mlp.down_proj.weight.zero_()
    for later in body.layers[1:]:
        later.self_attn.o_proj.weight.zero_()
        later.mlp.down_proj.weight.zero_()
    outputs = text.gram()
    for batch, columns in text.columns(steps):
        for step, (residual_PH, heads_PO, y_PH) in enumerate(_chain(body, rotary, text, batch, columns)):
            weight = math.sqrt(decay**step)
            outputs.add(weight * heads_PO, weight * (y_PH - residual_PH))
    outputs.gather()
    layer.self_attn.o_proj.weight.copy_(outputs.solve().T)
    for _ in range(2):
        mlp = text.gram()
        for batch, columns in text.columns(steps):
            for step, (residual_PH, heads_PO, y_PH) in enumerate(_chain(body, rotary, text, batch, columns)):
                middle_PH = residual_PH + layer.self_attn.o_proj(heads_PO)
                units_PU = layer.mlp.hidden(layer.post_attention_layernorm(middle_PH))
                weight = math.sqrt(decay**step)
                mlp.add(weight * units_PU, weight * (y_PH - middle_PH))
        mlp.gather()
        layer.mlp.down_proj.weight.copy_(mlp.solve().T)


def _chain(
    body: Eagle3Body, rotary: Rotary, text: InitText, batch: PackedBatch, columns: Columns
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """At every step of the drafter's own chain, for the columns that count: residual stream [P, H], heads [P, N·d], and
    the y [P, H] that the output should be. As ``unroll``, with one layer.
    """
    layer, query_M = body.layers[0], columns.query_M
    attention, backend = layer.self_attn, "eager" if query_M.device.type == "cpu" else "sdpa"
    layout = ColumnLayout.build(columns.host_query_M, batch.host.document_ids_T, query_M.device, body.window)
    every_T = torch.arange(batch.num_tokens, device=query_M.device)
    feature_TH = body.fuse(batch.taps_TAH)
    _, x_TI = layer.attention_input(feature_TH, text.embeddings(batch, every_T.roll(-1)))
    k_TGd, v_TGd = attention.keys_values(x_TI, rotary.cos_sin(batch.position_ids_T))
    feature_MH = feature_TH[query_M]
    own_k: list[Tensor] = []
    own_v: list[Tensor] = []
    for step, valid_M in enumerate(columns.valid_KM):
        ahead_M = (query_M + 1 + step).clamp(max=batch.num_tokens - 1)
        residual_MH, x_MI = layer.attention_input(feature_MH, text.embeddings(batch, ahead_M))
        cos_sin_M = rotary.cos_sin(batch.position_ids_T[query_M] + step)
        if step:
            k_MGd, v_MGd = attention.keys_values(x_MI, cos_sin_M)
            own_k.append(k_MGd)
            own_v.append(v_MGd)
        heads_MNd = unrolled_attention(attention.queries(x_MI, cos_sin_M), k_TGd, v_TGd, own_k, own_v, layout, backend)
        yield residual_MH[valid_M], heads_MNd[valid_M].flatten(-2), unit(batch.last_hidden_TH[ahead_M[valid_M]])
        out_MH = layer.finish(residual_MH, heads_MNd)
        feature_MH = body.feed_back(out_MH, body.norm(out_MH))


def _own_column_map(body: Eagle3Body) -> Tensor:
    """[2H, H]: what the own column's input adds to the residual stream."""
    x_II = torch.eye(body.layers[0].self_attn.v_proj.in_features, device=body.fc.weight.device)
    return body.layers[0].self_attn.output(_own_column_heads(body, x_II))


def _product(x_PI: Tensor, y_PO: Tensor) -> Tensor:
    return (x_PI.T @ y_PO).double()


def _own_column_heads(body: Eagle3Body, x_PI: Tensor) -> Tensor:
    """Attention output [P, N, d] if the first head of each group sees its own column alone and the others nothing."""
    shape = body.shape.layer
    groups, d = shape.num_key_value_heads, shape.head_dim
    heads_PGRd = x_PI.new_zeros(len(x_PI), groups, shape.num_attention_heads // groups, d)
    heads_PGRd[:, :, 0] = body.layers[0].self_attn.v_proj(x_PI).unflatten(-1, (groups, d))
    return heads_PGRd.flatten(1, 2)


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


def _own_pairs(body: Eagle3Body) -> int:
    """How many of the fastest rotary pairs carry the constant."""
    return min(_FAST_PAIRS, body.shape.layer.head_dim // 2)


def _lead(body: Eagle3Body) -> tuple[int, float]:
    """(pairs used, by how much distance 0 beats distance 1 for entries of size 1)."""
    shape = body.shape.layer
    pairs = _own_pairs(body)
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
