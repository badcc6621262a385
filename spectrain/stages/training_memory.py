"""How much memory a rank needs to train a drafter: an account of every tensor that is alive at the worst moment.

Parts that last (weights, moments, buckets, the target's two matrices) and parts of a pass. What a pass keeps for its
backward pass is counted tensor by tensor as autograd saves them (``_row_bytes``); tests compare that with a count of
real passes. There are three worst moments: the end of the forward pass, with all that was kept and a chunk of logits;
the end of the backward pass, with all gradients; and the evaluation, which keeps nothing but draws all anchors of its
documents at once.

Legend: H hidden, I width of the MLP, q and kv widths of all heads, N heads, b bytes of a number in the type of the
pass, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spectrain.drafters.key_ranges import BLOCK
from spectrain.drafters.layers import LayerShape
from spectrain.drafters.training_cost import TrainingRows

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")

_CHUNK_BYTES = {True: 1 << 29, False: 48 << 20}  # of logits, on an accelerator and on a CPU (losses/students.py)
_TILE_BYTES = 2 << 20  # of logits on a CPU (losses/fused.py)
_GROUP_ROWS = 256  # of a group of blocks (block_attention.py)
_RANGE_BYTES = 4 * 4  # of a query of flex attention: the ends of the keys that it sees
_TABLE_BYTES = 4 * 4  # of a block of its mask: by queries and by keys, those with a mask and those without


@dataclass(frozen=True)
class DrafterSize:
    """Numbers of a drafter. ``matrix_entries``: those that products multiply with, ``largest_layer``: entries of the
    largest piece that a sharding strategy gathers at a time.
    """

    layer: LayerShape
    num_layers: int
    num_taps: int
    parameters: int
    trained: int
    matrix_entries: int
    largest_layer: int
    momentum_only: int  # trained entries with one moment instead of two
    draft_vocab: int
    head_entries: int  # of the target's embedding and head
    owns_head: bool  # a matrix of its own, beside the target's rows that teach it
    trains_head: bool
    outside_layers: int = 0  # entries that a sharding strategy gathers for a whole pass
    kv_values: int = 0  # of a token: keys and values of the target
    target_hidden: int | None = None  # where the drafter has another
    head_bytes: int = 4  # of a number of the target's embedding and head

    @property
    def state_values(self) -> int:
        """Numbers that a token of a batch has: taps, last hidden state, keys and values."""
        return (self.num_taps + 1) * (self.target_hidden or self.layer.hidden_size) + self.kv_values


@dataclass(frozen=True)
class Pass:
    """One pass over a micro-batch. ``tokens`` of text; ``keys``: those that a row sees, in the mean; ``backend`` of its
    attention; ``state_bytes``: of a number of the stored hidden states."""

    rows: TrainingRows
    tokens: float
    keys: float
    backend: str
    number_bytes: int  # b
    state_bytes: int
    accelerator: bool
    recompute: bool = False  # what is inside a layer is made again in the backward pass


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, by part. ``lasting`` is there all the time, the others at their moments."""

    lasting: Mapping[str, float]
    gradients: float
    forward: Mapping[str, float]
    backward: Mapping[str, float]
    evaluation: Mapping[str, float]
    gradients_last: bool  # through several passes, or in shares that are never freed

    @property
    def moments(self) -> dict[str, float]:
        """Bytes at each of the worst moments."""
        base = sum(self.lasting.values())
        gradients = self.gradients
        return {
            "forward": base + sum(self.forward.values()) + gradients * self.gradients_last,
            "backward": base + sum(self.backward.values()) + gradients,
            "evaluation": base + sum(self.evaluation.values()),
        }

    @property
    def peak(self) -> float:
        return max(self.moments.values())


def rank_memory(
    size: DrafterSize, training: Pass, evaluation: Pass, ranks: int, strategy: str = "ddp", accumulation: int = 1
) -> RankMemory:
    """What one of ``ranks`` needs under ``strategy``, which shares out moments (zero1), gradients too (zero2), weights
    too (zero3, fsdp2: a layer at a time is gathered, what is outside of layers for a whole pass, all of it for an
    evaluation). DeepSpeed's optimiser moves a second copy of this rank's weights.
    """
    sharded = ranks > 1 and strategy in ("zero3", "fsdp2")
    shares = {"ddp": (1, 1, 1), "zero1": (1, 1, ranks), "zero2": (1, ranks, ranks)}.get(strategy, (ranks,) * 3)
    of_weights, of_gradients, of_moments = shares
    several = ranks > 1
    # One layer in use, the next on its way.
    gathered = 4.0 * (size.largest_layer * 2 + size.outside_layers) if sharded else 0.0
    copies = 2.0 * (size.largest_layer * 2 if of_weights > 1 else size.matrix_entries)
    kept, loss = kept_bytes(size, training), loss_bytes(size, training)
    casts = {"bfloat16 copies": copies} if training.number_bytes == 2 else {}
    lasting = {
        "weights": 4.0 * size.parameters / of_weights,
        "moments": 4.0 * (2 * size.trained - size.momentum_only) / of_moments,
        "buckets": 4.0 * size.trained if several and strategy in ("ddp", "zero1", "zero2") else 0.0,
        "engine's weights": 4.0 * size.trained / ranks if several and strategy.startswith("zero") else 0.0,
        "gathered layers": gathered,
        "embedding and head": float(size.head_bytes)
        * (size.head_entries + size.draft_vocab * size.layer.hidden_size * size.owns_head),
        # On a GPU the next batch is copied meanwhile.
        "hidden states": _batch_bytes(size, training) * (2 if training.accelerator else 1),
    }
    return RankMemory(
        lasting=lasting,
        gradients=4.0 * size.trained / of_gradients,
        forward={"activations": kept, **casts, "mask": mask_bytes(size, training), "loss": loss},
        backward={**casts, "backward of a layer": _backward_bytes(size, training)},
        evaluation={
            "whole weights": 4.0 * size.parameters if sharded else 0.0,
            "served weights": 2.0 * size.parameters if evaluation.number_bytes == 2 else 0.0,
            "mask": mask_bytes(size, evaluation),
            "simulation": simulation_bytes(size, evaluation) + _batch_bytes(size, evaluation),
        },
        gradients_last=accumulation > 1,
    )


# --- a pass ----------------------------------------------------------------------------------------------------------


def kept_bytes(size: DrafterSize, work: Pass) -> float:
    """That autograd keeps of a forward pass, logits aside: they are made by chunks."""
    rows, layers, h, b = work.rows, size.num_layers, size.layer.hidden_size, work.number_bytes
    whole = rows.layer_rows * layers + rows.inner_rows * (layers - 1)
    keys = rows.key_rows * (1 if rows.with_embedding else layers)  # inner rows have theirs in every other layer
    if work.recompute:  # what goes into a layer, and the keys that later steps of a drafter read
        kept = whole * (4 * h + 2 * b * _kv(size.layer) * rows.with_embedding)
        kept += keys * 2 * b * _kv(size.layer) * rows.with_embedding
    else:
        kept = whole * (_row_bytes(size, work) + _score_bytes(size, work)) + keys * _key_bytes(size.layer, work)
        kept += rows.copied_keys * layers * 2 * b * _kv(size.layer)
    if rows.with_embedding:
        doubled = 4 * h + (4 * h if b == 4 else 3 * 2 * h)  # the normed embedding, and an input twice as wide
        kept += rows.layer_rows * doubled + rows.key_rows * (12 * h + 2 * h * b)
    taps = 4 + b if rows.normed_taps else b if b != work.state_bytes else 0
    kept += work.tokens * h * (8 + b + taps * size.num_taps)
    kept += 8 * h * rows.layer_rows  # the last norm
    return kept + 2 * b * h * rows.students


def _recomputed_bytes(size: DrafterSize, work: Pass) -> float:
    """Of one call of one layer, kept while its backward pass runs. An autoregressive drafter calls it once a step."""
    rows = work.rows
    calls = rows.own_keys + 1 if rows.with_embedding else 1
    one = rows.layer_rows / calls * (_row_bytes(size, work) + _score_bytes(size, work))
    return (
        one + rows.key_rows * _key_bytes(size.layer, work) + rows.layer_rows * 2 * work.number_bytes * _kv(size.layer)
    )


def _row_bytes(size: DrafterSize, work: Pass) -> float:
    """Of a row in one layer. Norms keep their input and what they normed in float32; products their inputs, which in
    bfloat16 are cast for each product anew; attention its queries, keys, values and outputs.
    """
    layer, b = size.layer, work.number_bytes
    h, q, kv = layer.hidden_size, _q(layer), _kv(layer)
    norms, inputs = 2 * 8 * h + 4 * h * work.rows.extra_widths, 2 * 4 * h if b == 4 else 5 * 2 * h
    head_norms = (4 + b) * (q + kv) if layer.qk_norm else 0
    attention = 2 * b * q + 2 * b * _attended(layer, work) + 4 * layer.num_attention_heads
    return norms + inputs + head_norms + attention + 4 * b * layer.intermediate_size


def _key_bytes(layer: LayerShape, work: Pass) -> float:
    """Of a row of which a layer makes keys and values alone."""
    b = work.number_bytes
    return (4 + b) * _kv(layer) * layer.qk_norm + 2 * b * _attended(layer, work)


def _score_bytes(size: DrafterSize, work: Pass) -> float:
    """Of a row's attention: all probabilities where they are made at all, a document's or group's mask for sdpa."""
    rows, b = work.rows, work.number_bytes
    if work.backend == "eager":
        return b * size.layer.num_attention_heads * (work.keys + rows.own_keys)
    return b * _sdpa_keys(work) if work.backend == "sdpa" else 0


def _sdpa_keys(work: Pass) -> float:
    """Keys of a row's mask: those of its document, and those of the drafts of its group or document."""
    rows = work.rows
    own = work.keys * rows.own_keys / 2 if rows.with_embedding else min(rows.layer_rows, _GROUP_ROWS)
    return work.keys + own


def _attended(layer: LayerShape, work: Pass) -> int:
    """Width of keys as attention gets them: sdpa is given a copy for every head."""
    return _q(layer) if work.backend == "sdpa" else _kv(layer)


def mask_bytes(size: DrafterSize, work: Pass) -> float:
    """While the mask of a pass is made. Those of eager attention are small, a document's each."""
    rows = work.rows.layer_rows
    if work.backend == "flex":
        return _RANGE_BYTES * rows + _TABLE_BYTES * (rows / BLOCK) * ((work.tokens + rows) / BLOCK)
    if work.backend == "sdpa":
        return min(rows, _GROUP_ROWS) * _sdpa_keys(work)
    return 4 * rows * work.keys / max(1, work.rows.own_keys)


def loss_bytes(size: DrafterSize, work: Pass) -> float:
    """While the loss is made: logits, probabilities and their gradient of a chunk of students, its teachers, and the
    gradients that the chunks are added up in.
    """
    rows, d, h, b = work.rows, size.draft_vocab, size.layer.hidden_size, work.number_bytes
    chunk = min(rows.students, max(1, _CHUNK_BYTES[work.accelerator] // (4 * d)))
    tile = chunk if work.accelerator else min(chunk, max(1, _TILE_BYTES // (4 * d)))
    logits = 4.0 * d * (chunk + min(rows.teachers, chunk)) + d * max(2 * 4 * tile, (b == 2) * 2 * chunk)
    copied = b == 2 and (size.owns_head or size.head_bytes == 4)  # a head that is held in bfloat16 is read as it is
    matrix = d * h * ((b if size.trains_head else 0) + 2 * copied)
    return logits + matrix + 4 * h * rows.teachers


def _backward_bytes(size: DrafterSize, work: Pass) -> float:
    """The gradients that are on their way through one layer, and of its largest matrix before it is added."""
    layer, b, rows = size.layer, work.number_bytes, work.rows.layer_rows
    recomputed = 0.0
    if work.recompute:  # of the last call that is run again, most of what is kept is still there
        recomputed = _recomputed_bytes(size, work) + kept_bytes(size, work)
        rows /= work.rows.own_keys + 1 if work.rows.with_embedding else 1
    passing = rows * b * (3 * layer.intermediate_size + 2 * layer.hidden_size)
    return recomputed + passing + b * layer.intermediate_size * layer.hidden_size


def simulation_bytes(size: DrafterSize, work: Pass) -> float:
    """A forward pass that keeps nothing: one layer's work, keys of the text, and the scores of a chunk of slots."""
    rows, layer, b = work.rows, size.layer, work.number_bytes
    h, chunk = layer.hidden_size, max(1, _CHUNK_BYTES[work.accelerator] // (4 * size.draft_vocab))
    row = 4 * 3 * h + b * (2 * _q(layer) + 2 * _kv(layer) + 3 * layer.intermediate_size) + _score_bytes(size, work)
    keys = 2 * b * _kv(layer) * work.tokens * (size.num_layers if rows.with_embedding else 1)
    return rows.layer_rows * row + keys + 3 * 4.0 * size.draft_vocab * min(rows.students, chunk)


def _batch_bytes(size: DrafterSize, work: Pass) -> float:
    """What a micro-batch has of the target, as it is stored."""
    return work.tokens * size.state_values * work.state_bytes


def _q(layer: LayerShape) -> int:
    return layer.num_attention_heads * layer.head_dim


def _kv(layer: LayerShape) -> int:
    return layer.num_key_value_heads * layer.head_dim
