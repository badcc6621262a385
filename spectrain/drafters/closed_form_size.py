"""How much text a closed-form initialisation is worth, and how many operations a position of it takes.

A drafter's matrices are solved for by least squares: so many positions for each unknown of a row, beyond which the
solution hardly moves. What costs is to add up squares of inputs, which grow with the square of the width. Both numbers
are for ``plan``, and for whoever gives the initialisation a time (``drafter.init_seconds``).
"""

from __future__ import annotations

from spectrain.drafters.layers import LayerShape

MAX_COLUMNS_PER_DIM = 64  # columns of an autoregressive drafter, for each of its first layer's 2H inputs
ANCHORS_PER_DIM = 16  # blocks of a block drafter, for each of H
SOLVED_LAYERS = 2  # of a block drafter
CODED_DRAFTS = 3  # drafts whose states choose a block drafter's codes, if answers are long enough to have them
_SAMPLE_BYTES = 8 << 30  # that the sampled blocks may take
_OUTPUT_PASSES = 3  # over the text, for the output matrices


def column_operations(layer: LayerShape, taps_width: int, steps: int) -> float:
    """Of one column, a multiply-add counted twice: the sums of squares that it is added to, and the products that it
    passes on its way to those of the outputs.
    """
    hidden, heads, kv = layer.hidden_size, layer.num_attention_heads, layer.num_key_value_heads
    inputs, attended, units = 2 * hidden, heads * layer.head_dim, layer.intermediate_size
    features = taps_width * (taps_width + 2 * hidden) + 2 * inputs * (inputs + hidden)
    outputs = attended * (attended + hidden) + 2 * units * (units + hidden)
    passed = inputs * (attended + 2 * kv * layer.head_dim) + hidden * (attended + 3 * units)
    return 2.0 * (features + steps * (outputs + _OUTPUT_PASSES * passed))


def most_blocks(layer: LayerShape, block_size: int) -> int:
    """That a solution is worth, or that there is room for."""
    hidden = layer.hidden_size
    return min(ANCHORS_PER_DIM * hidden, _SAMPLE_BYTES // (3 * 4 * block_size * hidden))


def block_operations(layer: LayerShape, block_size: int) -> float:
    """Of one block, a multiply-add counted twice: the sums of squares that it is added to, and the products that it
    passes on its way, in the layers that are solved.
    """
    hidden, attended = layer.hidden_size, layer.num_attention_heads * layer.head_dim
    units, kv = layer.intermediate_size, layer.num_key_value_heads * layer.head_dim
    inputs = 2 * hidden * (2 * hidden + CODED_DRAFTS * hidden) + block_size * hidden * hidden
    outputs = attended * (attended + hidden) + units * (units + hidden)
    passed = hidden * (2 * attended + 2 * kv) + 2 * 3 * hidden * units
    return 2.0 * SOLVED_LAYERS * (inputs + block_size * (outputs + passed))
