"""What training a drafter does and holds, as a kind of drafter counts it for ``plan``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingCost:
    """What training does, for ``plan``. ``outputs``: hidden states that meet the head, of all documents once;
    ``batch_outputs``: of one micro-batch; ``token_entries``, ``output_entries``: matrix entries that each token of the
    text, and each output, is multiplied with; ``head_entries``: of an output matrix that is not rows of the target's.
    """

    outputs: float
    batch_outputs: float
    token_entries: int
    output_entries: int
    head_entries: int | None = None


@dataclass(frozen=True)
class CorpusSize:
    """Tokens of all documents, and how many of them were generated."""

    tokens: int
    generated_tokens: int


@dataclass(frozen=True)
class BatchSize:
    """A micro-batch: its tokens, and how many of them were generated."""

    tokens: float
    generated_tokens: float


@dataclass(frozen=True)
class TrainingRows:
    """What passes through a drafter in one training pass over a micro-batch, for ``plan``.

    ``layer_rows``: hidden states that pass a whole layer; ``inner_rows``: those that do so in all layers but the last,
    beside them; ``key_rows``: those of which each layer makes keys and values alone; ``copied_keys``: rows whose keys
    and values are copied once more; ``own_keys``: keys that a row sees beside those of the text; ``students`` are
    compared with ``teachers``. ``with_embedding``: the first layer reads a token's embedding beside the feature;
    ``normed_taps``: taps are normed before they are fused; ``extra_widths``: float32 copies of a row that a layer keeps
    beyond the usual ones.
    """

    layer_rows: float
    students: float
    teachers: float
    inner_rows: float = 0.0
    key_rows: float = 0.0
    copied_keys: float = 0.0
    own_keys: int = 0
    with_embedding: bool = False
    normed_taps: bool = False
    extra_widths: float = 0.0
