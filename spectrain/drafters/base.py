"""What every drafter offers: losses for training, scores for the simulation, and a cache with ``observe`` and
``propose`` for decoding.

``observe`` and ``propose`` mirror what a server does with a drafter: verified tokens enter with the target's features,
and drafting leaves no trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spectrain.config.drafter_schema import LOSS_NAMES, LossConfig
from spectrain.data.packing import PackedBatch
from spectrain.data.vocab import DraftVocab
from spectrain.decoding.proposers import Observation, Proposal
from spectrain.decoding.sampling import SamplingParams
from spectrain.drafters.foreign_checkpoints import Copies
from spectrain.drafters.layers import LayerShape, VocabProjection
from spectrain.drafters.losses.fused import LossSums, Teacher
from spectrain.target.head import TargetHead

Batches = Callable[[], Iterable[PackedBatch]]  # the same ones at every call
Advance = Callable[[float], None]  # told how much more of some work is done


@dataclass
class DraftScores:
    """What one teacher-forced pass says about every anchor of a batch. R anchors, K slots.

    ``anchor_R`` are flat positions in the batch: the token there is committed, slot j (from 1) drafts the token j
    places behind it. ``accept_RK`` is the probability that the server accepts the document's own token there, given
    that all slots before it were
    accepted: min(1, p/q); at temperature 0 it is 0 or 1. Slots beyond the document hold 0.
    ``confidence_RK``: what a confidence head says of the same slots, in (0, 1) and before calibration, given the
    document's own tokens before them; None without such a head.
    """

    anchor_R: Tensor
    accept_RK: Tensor
    confidence_RK: Tensor | None = None


class DrafterShape(Protocol):
    """What every architecture's shape says."""

    @property
    def layer(self) -> LayerShape: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def taps(self) -> tuple[int, ...]: ...
    @property
    def target_vocab_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def owns_head(self) -> bool: ...


class Drafter(nn.Module, ABC):
    """Base of all drafters, and a ``Proposer``. ``vocab``: the tokens it can draft; ``taps``: the target's layers it
    reads, ascending.

    ``body`` holds the parameters, under the names they have in the drafter's folder. ``loss`` and ``attention`` matter
    to training only.
    """

    taps: tuple[int, ...]
    vocab: DraftVocab
    body: Any
    copies: Copies | None = None  # matrices of its target that came with its weights, until they are compared
    reads_last_hidden = False  # the target's last hidden state, after its final norm, beside the taps
    temperatures: tuple[float, ...] = ()  # calibration of a confidence head, one a slot; empty: none
    draft_ids_D: Tensor
    target_to_draft_V: Tensor

    def __init__(self, shape: DrafterShape, vocab: DraftVocab, loss: LossConfig | None, attention: str) -> None:
        super().__init__()
        if (len(vocab.ids_D), vocab.target_size) != (shape.draft_vocab_size, shape.target_vocab_size):
            raise ValueError(
                f"the vocabulary keeps {len(vocab.ids_D)} of {vocab.target_size} tokens, the shape says "
                f"{shape.draft_vocab_size}"
            )
        self.shape: Any = shape
        self.vocab = vocab
        self.taps = shape.taps
        self.loss = loss or LossConfig()
        self.attention = attention
        self.register_buffer("draft_ids_D", vocab.ids_D.clone(), persistent=False)
        self.register_buffer("target_to_draft_V", vocab.target_to_draft(), persistent=False)

    @property
    @abstractmethod
    def method(self) -> str:
        """Its name: what ``drafter.method`` of the configuration and the folder call it."""

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
        """Whether it says of each draft how likely that is to stand."""
        return False

    @property
    def loss_terms(self) -> list[str]:
        """Names of the terms in ``LossSums.terms_K``."""
        return [name for name in LOSS_NAMES if self.loss.weights.get(name)]

    @property
    def lm_head_DH(self) -> Tensor:
        """Its own output matrix with a reduced vocabulary, else the target's."""
        return self.body.lm_head.weight if self.shape.owns_head else self.head.lm_head_weight

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
        if self.attention != "auto":
            return self.attention
        return "flex" if batch.input_ids_T.is_cuda else "eager"

    @property
    def head(self) -> TargetHead:
        head = self.__dict__.get("_head")
        if head is None:
            raise RuntimeError("call drafter.attach(head) first: a drafter borrows the target's embedding")
        return head

    def forward(self, batch: PackedBatch) -> LossSums:
        """``train_losses``, under the name that data-parallel wrappers intercept."""
        return self.train_losses(batch)

    @abstractmethod
    def train_losses(self, batch: PackedBatch) -> LossSums:
        """Loss sums and counts of a packed batch."""

    @abstractmethod
    def closed_form_init(self, batches: Batches, advance: Advance = lambda percent: None) -> int:
        """Solve for closed-form initialisation on training documents; returns the places of the text used, 0 if it
        cannot be solved.
        """

    @abstractmethod
    def score(
        self, batch: PackedBatch, num_tokens: int, sampling: SamplingParams, draft_sampling: SamplingParams
    ) -> DraftScores:
        """Acceptance of the document's own tokens under the target's sampling distribution, teacher forced (input of
        the simulation).
        """

    @abstractmethod
    def new_cache(self, batch_size: int) -> Any: ...

    @abstractmethod
    def observe(self, cache: Any, observation: Observation) -> None:
        """Take in verified tokens and the target's taps at the same positions. Rows are padded on the right; row b has
        ``lengths_B[b]``.
        """

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

        A greedy ``sampling`` drafts argmax; any other draws, row b from ``generators[b]`` alone.
        """

    @abstractmethod
    def select(self, cache: Any, rows: Tensor) -> Any:
        """The cache of these rows of the batch, in this order; the old one is not used again."""
