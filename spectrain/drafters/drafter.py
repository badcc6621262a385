"""What every drafter offers: losses for training, scores for simulation, and a cache with ``observe`` and ``propose``
for decoding.

``observe`` and ``propose`` mirror what a server does with a drafter: verified tokens enter with what the target
computed for them, and drafting leaves no trace.

    DrafterShape   everything that decides parameters and arithmetic; what a folder's config.json describes
    Drafter        the module: a body with parameters, and the target's embedding and head, which it borrows
    DrafterMethod  (registry.py) a kind of drafter: how one is configured, built, stored and told to vLLM

Matrices of the target that come with a drafter's weights.

Most layouts carry the target's embedding and lm_head along. A drafter borrows them from its target instead, so they
must be the target's own; that is compared when both are there.

Keys and values of a drafter while a text grows, in buffers that every shape of drafter shares.

Legend: B rows, G key-value heads, d size of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectrain.config.drafter_schema import DrafterConfig, LossConfig
from spectrain.data.packing import PackedBatch
from spectrain.data.vocab import DraftVocab
from spectrain.decoding.proposers import Observation, Proposal
from spectrain.decoding.sampling import SamplingParams
from spectrain.drafters.layers import LayerShape, RMSNorm, VocabProjection
from spectrain.drafters.losses.reference import TERMS
from spectrain.drafters.losses.students import LossSums, Teacher
from spectrain.errors import InputError
from spectrain.target.head import TargetHead

Batches = Callable[[], Iterable[PackedBatch]]  # the same ones at every call
Advance = Callable[[float], None]  # told how much more of some work is done

_INIT_STD = 0.02


@dataclass
class DraftScores:
    """What one teacher-forced pass says about every anchor of a batch. R anchors, K slots.

    ``anchor_R`` are flat positions in the batch: the token there is committed, slot j (from 1) drafts the token j
    positions behind it. ``accept_RK`` is the probability that the server accepts the document's own token there, given
    that all slots before it were accepted: min(1, p/q); at temperature 0 it is 0 or 1. Slots beyond the document hold
    0. ``confidence_RK``: what a confidence head says of the same slots, in (0, 1) and before calibration, given the
    document's own tokens before them; None without such a head.
    """

    anchor_R: Tensor
    accept_RK: Tensor
    confidence_RK: Tensor | None = None


class DrafterShape:
    """Base of what decides a drafter's parameters and arithmetic: a frozen dataclass with at least these fields."""

    taps: tuple[int, ...]  # of the target, ascending; empty where none are read
    target_vocab_size: int
    draft_vocab_size: int

    @property
    def hidden_size(self) -> int:
        """The target's hidden size, which the drafter shares."""
        raise NotImplementedError

    @property
    def owns_head(self) -> bool:
        """A full-vocabulary drafter shares the target's lm_head."""
        return self.draft_vocab_size < self.target_vocab_size

    @property
    def owns_matrix(self) -> bool:
        """Whether its output matrix is its own to train."""
        return self.owns_head

    @property
    def most_context(self) -> int | None:
        """Tokens of a text up to which it computes here what it is served as; None: any number."""
        return None

    @property
    def max_drafts(self) -> int | None:
        """Drafts of a round at most; None: drafting can always go on."""
        return None

    @property
    def has_confidence(self) -> bool:
        """Whether it estimates how likely each draft is to be accepted."""
        return False

    def closed_form_size(self, config: DrafterConfig) -> tuple[int, float]:
        """(positions of the text that a closed-form initialisation uses at most, operations for each), roughly."""
        return 0, 0.0


class Drafter(nn.Module, ABC):
    """Base of all drafters, and a ``Proposer``. ``vocab``: the tokens it can draft; ``taps``: the target's auxiliary
    hidden-state layers that it reads, ascending.

    ``body`` holds the parameters, under the names they have in the drafter's folder. ``config`` matters to training
    only: its loss, attention kernels, and what else its kind's sections say of training.
    """

    taps: tuple[int, ...]
    vocab: DraftVocab
    body: Any
    reads_last_hidden = False  # the target's last hidden state, after its final norm, beside the taps
    reads_before_norm = False  # that state as it is before the norm
    kv_layers: tuple[int, ...] = ()  # of the target, from 0, whose keys and values it reads
    has_closed_form = False  # whether ``closed_form_init`` is there
    solves_together = False  # whether several processes may share it: its batches know of others' then
    copies: TargetCopies | None = None  # matrices of its target that came with its weights, until they are compared
    folder: Path | None = None  # that it was read from
    temperatures: tuple[float, ...] = ()  # calibration of a confidence head, one a slot; empty: none
    draft_ids_D: Tensor
    target_to_draft_V: Tensor

    def __init__(self, shape: DrafterShape, vocab: DraftVocab, config: DrafterConfig | None = None) -> None:
        super().__init__()
        if (len(vocab.ids_D), vocab.target_size) != (shape.draft_vocab_size, shape.target_vocab_size):
            kept = f"{len(vocab.ids_D)} of {vocab.target_size} tokens"
            raise ValueError(f"the vocabulary keeps {kept}, the shape says {shape.draft_vocab_size}")
        self.shape: Any = shape
        self.vocab = vocab
        self.taps = shape.taps
        self.config = config or DrafterConfig()
        self.register_buffer("draft_ids_D", vocab.ids_D.clone(), persistent=False)
        self.register_buffer("target_to_draft_V", vocab.target_to_draft(), persistent=False)

    @property
    @abstractmethod
    def method(self) -> str:
        """The name of its kind, in ``drafter.method`` of the configuration and in its folder."""

    @property
    @abstractmethod
    def training_steps(self) -> int:
        """Draft positions that training teaches: the length of its losses per step."""

    @property
    def length_matters(self) -> bool:
        """Whether the first drafts of a round depend on how many are asked for."""
        return False

    @property
    def has_confidence(self) -> bool:
        return bool(self.shape.has_confidence)

    @property
    def loss(self) -> LossConfig:
        return self.config.loss

    @property
    def loss_terms(self) -> list[str]:
        """Names of the terms in ``LossSums.terms_K``."""
        return [name for name in TERMS if self.loss.weights.get(name)]

    @property
    def lm_head_DH(self) -> Tensor:
        """Its own output matrix with a reduced vocabulary, else the target's."""
        return self.body.lm_head.weight if self.shape.owns_head else self.head.lm_head_weight

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Random weights: linear ones N(0, 0.02), gains of norms 1."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, _INIT_STD, generator=generator)
            elif isinstance(module, RMSNorm):
                module.weight.fill_(1.0)

    def hidden_matrices(self) -> list[Tensor]:
        """Weights of the linear layers between hidden features: what Muon may take. Neither tables of tokens
        (embeddings, codebooks, every ``VocabProjection``) nor single rows (a confidence head).
        """
        layers = [m for m in self.modules() if isinstance(m, nn.Linear) and not isinstance(m, VocabProjection)]
        return [layer.weight for layer in layers if min(layer.weight.shape) > 1]

    def attach(self, head: TargetHead) -> Drafter:
        """Lend the target's embedding and head, which a drafter shares and never owns. Needed before ``observe`` and
        ``propose``.

        Raises InputError where the drafter came with another embedding or head.
        """
        if self.copies is not None:
            self.copies.check(head)
            self.copies = None
        object.__setattr__(self, "_head", head)  # not a submodule: its weights are neither trained nor saved
        # The target's own rows of the draft vocabulary: what every teacher reads, gathered once.
        rows_DH = head.lm_head_weight[self.draft_ids_D.to(head.lm_head_weight.device)] if self.shape.owns_head else None
        self.__dict__["_teacher_rows_DH"] = rows_DH
        return self

    @property
    def head(self) -> TargetHead:
        head = self.__dict__.get("_head")
        if head is None:
            raise RuntimeError("call drafter.attach(head) first: a drafter borrows the target's embedding")
        return head

    def teacher(self, batch: PackedBatch, teacher_U: Tensor) -> Teacher:
        """The target's distributions at the flat positions ``teacher_U`` of a batch."""
        return Teacher(
            head=self.head,
            last_hidden_UH=batch.last_hidden_TH[teacher_U],
            log_normalizer_U=None if batch.log_normalizer_T is None else batch.log_normalizer_T[teacher_U],
            rows_DH=self.__dict__["_teacher_rows_DH"],
        )

    def attention_backend(self, batch: PackedBatch) -> str:
        """Which attention a training pass uses: eager, sdpa or flex."""
        if self.config.attention != "auto":
            return self.config.attention
        return "flex" if batch.input_ids_T.is_cuda else "eager"

    def forward(self, batch: PackedBatch) -> LossSums:
        """``train_losses``, under the name that data-parallel wrappers intercept."""
        return self.train_losses(batch)

    @abstractmethod
    def train_losses(self, batch: PackedBatch) -> LossSums:
        """Loss sums and counts of a packed batch."""

    def closed_form_init(self, batches: Batches, advance: Advance = lambda percent: None) -> int:
        """Solve for initial weights on training documents; returns the positions of the text used, 0 if it cannot be
        solved. Kinds that have one say so by ``has_closed_form``.
        """
        return 0

    @abstractmethod
    def score(
        self, batch: PackedBatch, num_tokens: int, sampling: SamplingParams, draft_sampling: SamplingParams
    ) -> DraftScores:
        """Acceptance of the document's own tokens under the target's sampling distribution, teacher forced: what
        simulated acceptance is made of.
        """

    @abstractmethod
    def new_cache(self, batch_size: int) -> Any: ...

    @abstractmethod
    def observe(self, cache: Any, observation: Observation) -> None:
        """Take in verified tokens and what the target computed there."""

    @abstractmethod
    def propose(
        self,
        cache: Any,
        anchor_B: Tensor,
        n: int,
        sampling: SamplingParams,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Proposal:
        """Draft n tokens behind the committed ``anchor_B``, whose taps do not exist yet. Leaves the cache as it was.

        Greedy ``sampling`` drafts argmaxes; any other draws, row b from ``generators[b]`` alone.
        """

    @abstractmethod
    def select(self, cache: Any, rows: Tensor) -> Any:
        """The cache of these rows of the batch, in this order; the old one is not used again."""


_START_SLOTS = 64


class KeyValueCache:
    """Per layer keys and values [B, capacity, G, d]; row b holds ``columns_B[b]`` columns, what lies behind them is
    scratch.
    """

    def __init__(self, layer: LayerShape, num_layers: int, batch_size: int, weight: Tensor) -> None:
        """``weight`` lends its type and device."""
        shape = (batch_size, _START_SLOTS, layer.num_key_value_heads, layer.head_dim)
        self.keys = [weight.new_zeros(shape) for _ in range(num_layers)]
        self.values = [weight.new_zeros(shape) for _ in range(num_layers)]
        self.columns_B = torch.zeros(batch_size, dtype=torch.long, device=weight.device)

    def reserve(self, slots: int) -> None:
        """Make room for ``slots`` columns a row, growing by doubling."""
        have = self.keys[0].shape[1]
        if slots > have:
            extra = max(slots, 2 * have) - have
            self.keys = [F.pad(k, (0, 0, 0, 0, 0, extra)) for k in self.keys]
            self.values = [F.pad(v, (0, 0, 0, 0, 0, extra)) for v in self.values]

    def select(self, rows_B: Tensor) -> None:
        self.keys = [k[rows_B] for k in self.keys]
        self.values = [v[rows_B] for v in self.values]
        self.columns_B = self.columns_B[rows_B]


def draft_uniforms(generators: Sequence[torch.Generator] | None, n: int, like: Any) -> Tensor:
    """[B, n] numbers that drafts are drawn by, each row from its own stream, on the device of ``like``."""
    if generators is None:
        raise ValueError("sampled drafts need a random generator per row")
    return torch.stack([torch.rand(n, generator=generator, dtype=torch.float64) for generator in generators]).to(
        like.device
    )


_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_ROWS = 8192  # of a matrix that is compared
_ROUNDING = 0.01  # relative: bfloat16 rounds by less than half a percent


@dataclass(frozen=True)
class TargetCopies:
    """The matrices that were found in a drafter's file.

    ``path``: the file, for errors. ``tensors``: by the names they have there.
    """

    path: str
    tensors: dict[str, Tensor]

    @classmethod
    def taken_from(cls, tensors: dict[str, Tensor], owns_head: bool, path: str) -> TargetCopies:
        """Moves them out of ``tensors``. ``owns_head``: the lm_head there is the drafter's own, of a reduced
        vocabulary.
        """
        names = [name for name in (_EMBEDDING, *(() if owns_head else (_HEAD,))) if name in tensors]
        return cls(path, {name: tensors.pop(name) for name in names})

    def check(self, head: TargetHead) -> None:
        """Raises InputError where one is not the target's, up to rounding: such a drafter computes what this package
        does not.
        """
        for name, ours in ((_EMBEDDING, head.embed_weight), (_HEAD, head.lm_head_weight)):
            if name in self.tensors and not _same(self.tensors[name], ours):
                raise InputError(
                    f"{self.path}: tensor '{name}' is not the target's: this version reads drafters that share it"
                )


def _same(theirs: Tensor, ours: Tensor) -> bool:
    if theirs.shape != ours.shape:
        return False
    difference = total = 0.0
    for rows, own_rows in zip(theirs.split(_ROWS), ours.split(_ROWS), strict=True):  # whole matrices may be gigabytes
        wide = own_rows.float().cpu()
        difference += float((rows.float().cpu() - wide).square().sum())
        total += float(wide.square().sum())
    return difference <= _ROUNDING**2 * total
