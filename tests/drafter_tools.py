"""Equipment for drafter tests: random drafters with their reference implementations, target heads, documents with
states, stores and trainers, all tiny.

Everything is float64 unless said otherwise, so that tolerances can be so small that no wrong number hides in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from accelerate.state import AcceleratorState
from reference import Eagle3Reference, HeadReference, PlainDocument
from torch import Tensor

from spectrain.config.drafter_schema import AutoregressiveConfig, DrafterConfig, LossConfig
from spectrain.config.evaluation_schema import DecodingConfig
from spectrain.config.schema import SpectrainConfig
from spectrain.config.trainer_schema import TrainerConfig
from spectrain.data.hidden_states import StoredHiddenStates, StoreMeta, TargetStates
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.packing import PackedBatch, pack_batch
from spectrain.data.vocab import DraftVocab, full_vocab
from spectrain.decoding.proposers import Observation
from spectrain.drafters.autoregressive import autoregressive_drafter as drafter_module
from spectrain.drafters.autoregressive.eagle3 import Eagle3, Eagle3Shape
from spectrain.drafters.autoregressive.peagle import PEagleShape
from spectrain.drafters.autoregressive.unroll import Columns
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.drafter_folder import save_drafter
from spectrain.drafters.layers import LayerShape
from spectrain.drafters.losses import draft_loss
from spectrain.drafters.registry import find_method
from spectrain.target.families import FAMILIES, HeadMath
from spectrain.target.head import TargetHead
from spectrain.training.trainer import FitPaths, FitResult, Trainer

HIDDEN, VOCAB, EPS, THETA = 16, 23, 1e-5, 100.0
DRAFT_IDS = (0, 2, 3, 7, 8, 11, 15, 16, 22)
SOFT_CAP = 4.0


@dataclass(frozen=True)
class Options:
    """Everything that may differ between two drafters. ``family``: of the target's head (gemma2: 1 + w gain, embedding
    scale, soft-cap).
    """

    layer_type: str = "llama"
    taps: tuple[int, ...] = (1, 3, 4)
    num_layers: int = 1
    reduced: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    family: str = "llama"
    steps: int = 3
    step_decay: float = 0.8
    attention: str = "auto"
    window: int | None = None
    mask_token: int | None = None  # P-EAGLE: the token of its mask slots
    loss: LossConfig = field(default_factory=LossConfig)

    @property
    def method(self) -> str:
        return "eagle3" if self.mask_token is None else "peagle"

    @property
    def config(self) -> DrafterConfig:
        return DrafterConfig(
            method=self.method,
            loss=self.loss,
            attention=self.attention,  # type: ignore[arg-type]
            autoregressive=AutoregressiveConfig(ttt_steps=self.steps, step_decay=self.step_decay),
        )

    @property
    def name(self) -> str:
        return (
            ",".join(f"{key}={value}" for key, value in vars(self).items() if value != getattr(Options(), key))
            or "default"
        )


# Together: both layer types, 1, 2, 3 and 5 taps, every switch on and off, two layers, both vocabularies, two kinds of
# head.
VARIANTS = [
    Options(),
    Options(layer_type="qwen3", taps=(2,), reduced=True),
    Options(taps=(0, 4), norm_before_residual=True, reduced=True),
    Options(taps=(0, 1, 2, 3, 4), norm_before_fc=True, layer_type="qwen3"),
    Options(fc_norm=True, norm_output=True, family="gemma2"),
    Options(num_layers=2, norm_output=True, reduced=True),
    Options(
        num_layers=2,
        layer_type="qwen3",
        norm_before_residual=True,
        fc_norm=True,
        norm_before_fc=True,
        family="gemma2",
        reduced=True,
    ),
    Options(taps=(3,), norm_before_residual=True, norm_output=True, fc_norm=True, steps=5),
    Options(num_layers=2, window=3, reduced=True),
    Options(layer_type="qwen3", window=2, steps=4, norm_output=True),  # steps beyond it see keys of their own alone
    Options(mask_token=5),
    Options(mask_token=22, num_layers=2, layer_type="qwen3", taps=(0, 4), reduced=True, norm_before_fc=True, steps=4),
    Options(mask_token=0, num_layers=2, norm_before_residual=True, family="gemma2"),
    Options(mask_token=5, num_layers=2, window=3),
]


def random_head(
    family: str = "llama", vocab: int = VOCAB, seed: int = 100, dtype: torch.dtype = torch.float64
) -> TargetHead:
    facts = FAMILIES[family]
    generator = torch.Generator().manual_seed(seed)
    math = HeadMath(
        family=facts,
        hidden_size=HIDDEN,
        eps=EPS,
        embed_scale=HIDDEN**0.5 if facts.embed_scale else 1.0,
        soft_cap=SOFT_CAP if facts.soft_cap else None,
    )
    embed_VH, lm_head_VH = (torch.randn(vocab, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    norm_H = 0.3 * torch.randn(HIDDEN, generator=generator, dtype=torch.float64) + (0.0 if facts.one_plus else 1.0)
    return TargetHead(math, embed_VH.to(dtype), norm_H.to(dtype), (lm_head_VH * 0.6).to(dtype))


def head_reference(head: TargetHead) -> HeadReference:
    """The same head by the numbers that act, for the two families used here."""
    gemma = head.math.soft_cap is not None
    return HeadReference(
        embed_VH=head.embed_weight.double(),
        gain_H=head.norm_weight.double() + (1.0 if gemma else 0.0),
        lm_head_VH=head.lm_head_weight.double(),
        eps=EPS,
        soft_cap=SOFT_CAP if gemma else None,
    )


def random_vocab(options: Options, vocab: int = VOCAB) -> DraftVocab:
    return (
        DraftVocab(torch.tensor([i for i in DRAFT_IDS if i < vocab]), vocab, 0.5)
        if options.reduced
        else full_vocab(vocab)
    )


def shape_of(options: Options, layer: LayerShape, target_vocab_size: int, draft_vocab_size: int) -> Eagle3Shape:
    """The shape of EAGLE-3, or with a mask token of P-EAGLE."""
    names = ("num_layers", "taps", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    fields = {"layer": layer, "target_vocab_size": target_vocab_size, "draft_vocab_size": draft_vocab_size}
    fields |= {name: getattr(options, name) for name in names} | {"sliding_window": options.window}
    if options.mask_token is None:
        return Eagle3Shape(**fields)
    return PEagleShape(**fields, mask_token_id=options.mask_token)


def random_drafter(
    options: Options = Options(),
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    head: TargetHead | None = None,
    wide: float = 1.5,
) -> Eagle3:
    """Attached to a random head. Weights are wide enough that every tensor and switch matters; gains scatter
    around 1.
    """
    head = head or random_head(options.family, dtype=dtype)
    vocab = random_vocab(options, head.vocab_size)
    shape = shape_of(
        options,
        layer=LayerShape(
            layer_type=options.layer_type,
            hidden_size=HIDDEN,
            intermediate_size=20,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=6,
            rms_norm_eps=EPS,
            rope_parameters={"rope_type": "default", "rope_theta": THETA},
            max_position_embeddings=128,
        ),
        target_vocab_size=head.vocab_size,
        draft_vocab_size=len(vocab.ids_D),
    )
    drafter = find_method(options.method).build(shape, vocab, options.config).to(dtype)
    assert isinstance(drafter, Eagle3)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(drafter.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else wide * noise / parameter.shape[1] ** 0.5)
    drafter.attach(head)
    return drafter


def tensors_of(drafter: Eagle3) -> dict[str, Tensor]:
    """Parameters by the names they have in the checkpoint."""
    return {name.removeprefix("body."): parameter for name, parameter in drafter.named_parameters()}


def reference_of(drafter: Eagle3) -> Eagle3Reference:
    """A reference implementation with weights of its own: float64 leaves that gather gradients."""
    shape = drafter.shape
    return Eagle3Reference(
        tensors={
            name: tensor.detach().double().clone().requires_grad_() for name, tensor in tensors_of(drafter).items()
        },
        head=head_reference(drafter.head),
        draft_ids=drafter.vocab.ids_D.tolist(),
        num_layers=shape.num_layers,
        num_taps=len(shape.taps),
        num_heads=shape.layer.num_attention_heads,
        num_kv_heads=shape.layer.num_key_value_heads,
        head_dim=shape.layer.head_dim,
        theta=THETA,
        eps=EPS,
        qk_norm=shape.layer.layer_type == "qwen3",
        norm_before_residual=shape.norm_before_residual,
        norm_before_fc=shape.norm_before_fc,
        fc_norm=shape.fc_norm,
        norm_output=shape.norm_output,
        window=shape.sliding_window,
        mask_token=getattr(shape, "mask_token_id", None),
    )


def random_document(
    mask: str, num_taps: int, seed: int, head: TargetHead | None = None, vocab: int = VOCAB, split: str = "train"
) -> TargetStates:
    """A document whose loss mask is written as a string, ``0001111``. Its first token is an attention sink, with states
    a hundred times larger. With a head, the log normaliser is there: NaN, as in a store, where the next token was not
    generated."""
    generator = torch.Generator().manual_seed(1000 + seed)
    length = len(mask)
    taps = torch.randn(length, num_taps, HIDDEN, generator=generator, dtype=torch.float64)
    last_hidden = torch.randn(length, HIDDEN, generator=generator, dtype=torch.float64)
    taps[0] *= 100
    last_hidden[0] *= 100
    mask_S = torch.tensor([int(m) for m in mask], dtype=torch.uint8)
    normalizer = None
    if head is not None:
        reference = head_reference(head)
        normalizer = torch.stack([torch.logsumexp(reference.logits(y), 0) for y in last_hidden])
        generated_next = torch.cat([mask_S[1:], mask_S.new_zeros(1)]) == 1
        normalizer = normalizer.where(generated_next, torch.nan)
    return TargetStates(
        input_ids=torch.randint(0, vocab, (length,), generator=generator, dtype=torch.int32),
        loss_mask=mask_S,
        taps=taps,
        last_hidden=last_hidden,
        log_normalizer=normalizer,
        key=f"doc-{seed:04d}",
        split=split,
    )


def as_reference_document(states: TargetStates) -> PlainDocument:
    return PlainDocument(
        states.input_ids.tolist(), states.loss_mask.tolist(), states.taps.double(), states.last_hidden.double()
    )


# A prompt with an answer, an answer from the first token on, several turns (one of a single token, one gap shorter than
# an unroll), no generated token at all, a document too short to count, an answer that is all prompt but its last token.
MASKS = ("000111110", "11110", "0011011101001111", "0000", "01", "00001", "0001111")


def random_documents(
    options: Options, head: TargetHead | None = None, masks: Sequence[str] = MASKS, seed: int = 0
) -> list[TargetStates]:
    return [random_document(mask, len(options.taps), seed + i, head) for i, mask in enumerate(masks)]


def students(drafter: Eagle3, batch: PackedBatch) -> dict[tuple[int, int], Tensor]:
    """(flat column, step) -> the normed output that the loss scores, for every counted student of a training pass."""
    with patch.object(drafter_module, "draft_loss", wraps=draft_loss) as spy, torch.no_grad():
        drafter.train_losses(batch)
    arguments = dict(
        zip(("hidden_KUH", "lm_head_DH", "teacher", "target_U", "weight_KU"), spy.call_args.args, strict=False)
    )
    arguments |= spy.call_args.kwargs
    columns = Columns.build(batch, drafter.training_steps)
    counted = [(int(t), k) for k, row in enumerate(columns.valid_KM) for t in columns.query_M[row]]
    teachers = sorted({t + 1 + k for t, k in counted})
    place = {position: u for u, position in enumerate(teachers)}
    assert int((arguments["weight_KU"] > 0).sum()) == len(counted)
    return {(t, k): arguments["hidden_KUH"][k, place[t + 1 + k]] for t, k in counted}


class MemoryStore:
    """Documents in memory, in any dtype, where a ``StoredHiddenStates`` is expected."""

    def __init__(self, documents: Sequence[TargetStates]) -> None:
        self.documents = list(documents)
        self.keys = [d.key for d in documents]
        self.splits = [d.split for d in documents]
        self.lengths = np.array([len(d.input_ids) for d in documents])
        self.loss_counts = np.array([int(d.loss_mask.sum()) for d in documents])

    def indices(self, split: str) -> list[int]:
        return [number for number, name in enumerate(self.splits) if name == split]

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> TargetStates:
        return self.documents[index]

    def as_stored(self, index: int) -> TargetStates:
        return self[index]


def as_dtype(states: TargetStates, dtype: torch.dtype) -> TargetStates:
    normalizer = None if states.log_normalizer is None else states.log_normalizer.to(dtype)
    return replace(
        states, taps=states.taps.to(dtype), last_hidden=states.last_hidden.to(dtype), log_normalizer=normalizer
    )


def write_store(
    folder: Path, documents: Sequence[TargetStates], taps: tuple[int, ...], dtype: str = "float32"
) -> StoredHiddenStates:
    """A real store on disk."""
    meta = StoreMeta("tiny", "r", "c", "t", "p", tap_ids=taps, hidden_size=HIDDEN, num_layers=5, dtype=dtype)
    with HiddenStatesWriter(folder, meta) as writer:
        for states in documents:
            writer.add(as_dtype(states, torch.float32))
    return StoredHiddenStates(folder)


def trainer_config(decoding: DecodingConfig | None = None, **options: Any) -> SpectrainConfig:
    return SpectrainConfig(trainer=TrainerConfig(**options), decoding=decoding or DecodingConfig())


def make_trainer(
    folder: Path, drafter: Eagle3, store: Any, config: SpectrainConfig, eos_ids: Sequence[int] = (), **extra: Any
) -> Trainer:
    """A trainer on the documents of the store's splits, writing below ``folder``."""
    if "accelerator" not in extra:
        AcceleratorState._reset_state(reset_partial_state=True)
    return Trainer(
        config,
        FitPaths(folder / "checkpoints", folder / "drafter", folder / "metrics.jsonl"),
        drafter,
        store,
        store.indices("train"),
        store.indices("heldout"),
        eos_ids,
        {"target": "tiny", "target_architectures": ("LlamaForCausalLM",)},
        **extra,
    )


def fit(folder: Path, drafter: Eagle3, store: Any, config: SpectrainConfig, **extra: Any) -> FitResult:
    return make_trainer(folder, drafter, store, config, **extra).fit()


def packed(documents: Sequence[TargetStates]) -> PackedBatch:
    return pack_batch(documents)


def split_by_document(documents: Sequence[TargetStates]) -> list[int]:
    """First flat position of each document of a packed batch."""
    return np.cumsum([0, *[len(d.input_ids) for d in documents]]).tolist()[:-1]


def gradients(drafter: Eagle3) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone() for name, parameter in tensors_of(drafter).items() if parameter.grad is not None
    }


def save(drafter: Drafter, folder: Path, **facts: Any) -> Path:
    save_drafter(
        drafter,
        folder,
        target="org/target",
        target_architectures=("LlamaForCausalLM",),
        num_speculative_tokens=4,
        metadata=facts or None,
    )
    return folder


class Texts:
    """Random texts of different lengths; the last token of each is the anchor, of which there are no taps."""

    sink = 1.0  # scale of the first token's taps, which an attention sink has large

    def __init__(self, options: Any, lengths: Sequence[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]
        self.taps = [
            torch.randn(length, len(options.taps), HIDDEN, generator=generator, dtype=torch.float64)
            for length in lengths
        ]
        for taps in self.taps:
            taps[0] *= self.sink

    def observe(self, drafter: Drafter, cache: object, first: Sequence[int], counts: Sequence[int]) -> None:
        """Show row b the tokens first[b] … first[b] + counts[b] − 1, padded with rubbish to the longest row."""
        longest = max(counts)
        ids_BT = torch.full((len(counts), longest), VOCAB - 1)
        taps_BTAH = torch.full((len(counts), longest, *self.taps[0].shape[1:]), 1e3, dtype=torch.float64)
        for b, (start, count) in enumerate(zip(first, counts, strict=True)):
            ids_BT[b, :count] = self.ids[b][start : start + count]
            taps_BTAH[b, :count] = self.taps[b][start : start + count]
        drafter.observe(cache, Observation(ids_BT, torch.tensor(counts), taps_BTAH))

    @property
    def anchors(self) -> Tensor:
        return torch.stack([ids[-1] for ids in self.ids])

    @property
    def observed(self) -> list[int]:
        return [len(ids) - 1 for ids in self.ids]
