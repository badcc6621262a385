"""Equipment for tests of block drafters: random ones of every kind, with their reference implementations. Float64
unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from block_reference import BlockReference
from drafter_tools import EPS, HIDDEN, THETA, Options, head_reference, random_head, random_vocab
from torch import Tensor

from spectrain.config.drafter_schema import BlockConfig, DrafterConfig, DSparkConfig, LossConfig
from spectrain.drafters.block.block_drafter import BlockDrafter
from spectrain.drafters.block.block_shape import BlockShape, ConvShape, MarkovShape, SelectorShape
from spectrain.drafters.layers import LayerShape
from spectrain.target.head import TargetHead

MASK_TOKEN = 5
RANK = 3


@dataclass(frozen=True)
class BlockOptions:
    """Everything that may differ between two block drafters."""

    method: str = "dflash"
    taps: tuple[int, ...] = (1, 3, 4)
    num_layers: int = 2
    block_size: int = 5
    reduced: bool = False
    window: int | None = None
    causal: bool = False
    anchor: bool = False  # sample_from_anchor
    markov: str | None = None
    confidence: bool = False
    confidence_with_markov: bool = False
    conv: int | None = None  # kernel size
    selector: int | None = None  # top_k
    family: str = "llama"
    block: BlockConfig = field(default_factory=BlockConfig)
    dspark: DSparkConfig = field(default_factory=DSparkConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    attention: str = "auto"

    @property
    def config(self) -> DrafterConfig:
        return DrafterConfig(
            method=self.method,
            block=self.block,
            dspark=self.dspark,
            loss=self.loss,
            attention=self.attention,  # type: ignore[arg-type]
        )

    @property
    def name(self) -> str:
        plain = BlockOptions()
        return (
            ",".join(f"{key}={value}" for key, value in vars(self).items() if value != getattr(plain, key)) or "default"
        )


DSPARK = BlockOptions(method="dspark", anchor=True, markov="vanilla", confidence=True, confidence_with_markov=True)
DFLASH2 = BlockOptions(method="dflash2", conv=3, selector=6)
# Together: both layouts of slots, every head, both vocabularies, windows with and without causality, 1, 3 and 5 taps, 1
# to 3 layers.
BLOCK_VARIANTS = [
    BlockOptions(),
    BlockOptions(reduced=True, num_layers=1, taps=(2,)),
    BlockOptions(window=4, causal=True, taps=(0, 1, 2, 3, 4), family="gemma2"),
    BlockOptions(window=3, num_layers=3, block_size=6),
    DSPARK,
    BlockOptions(method="dspark", markov="vanilla", reduced=True, confidence=True, window=6, causal=True),
    BlockOptions(method="dspark", anchor=True, markov="gated", confidence=True, family="gemma2"),
    BlockOptions(
        method="dspark",
        anchor=True,
        markov="rnn",
        reduced=True,
        num_layers=1,
        confidence=True,
        confidence_with_markov=True,
    ),
    DFLASH2,
    BlockOptions(method="dflash2", conv=4, selector=30, window=4, causal=True, family="gemma2", num_layers=1),
]


def block_shape(options: BlockOptions, vocab_size: int, draft_size: int) -> BlockShape:
    return BlockShape(
        method=options.method,
        layer=LayerShape("qwen3", HIDDEN, 20, 4, 2, 6, EPS, {"rope_type": "default", "rope_theta": THETA}, 128),
        num_layers=options.num_layers,
        taps=options.taps,
        target_vocab_size=vocab_size,
        draft_vocab_size=draft_size,
        block_size=options.block_size,
        mask_token_id=MASK_TOKEN,
        sample_from_anchor=options.anchor,
        sliding_window=options.window,
        causal=options.causal,
        markov=None if options.markov is None else MarkovShape(options.markov, RANK),
        confidence=options.confidence,
        confidence_with_markov=options.confidence_with_markov,
        conv=None if options.conv is None else ConvShape(options.conv, 4),
        selector=None if options.selector is None else SelectorShape(RANK, options.selector),
    )


def random_block_drafter(
    options: BlockOptions = BlockOptions(),
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    head: TargetHead | None = None,
) -> BlockDrafter:
    """Attached to a random head. Weights are wide enough that every tensor and switch matters; gains scatter
    around 1.
    """
    head = head or random_head(options.family, dtype=dtype)
    vocab = random_vocab(Options(reduced=options.reduced), head.vocab_size)
    shape = block_shape(options, head.vocab_size, len(vocab.ids_D))
    drafter = BlockDrafter(shape, vocab, options.config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(drafter.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim == 1 and not name.endswith("bias"):
                parameter.copy_(1 + 0.3 * noise)
            elif "conv" in name or "codebook" in name or parameter.ndim == 1:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
    drafter.attach(head)
    return drafter


def block_reference_of(drafter: BlockDrafter) -> BlockReference:
    """A reference implementation with weights of its own: float64 leaves that gather gradients."""
    shape = drafter.shape
    return BlockReference(
        tensors={
            name: tensor.detach().double().clone().requires_grad_() for name, tensor in block_tensors(drafter).items()
        },
        head=head_reference(drafter.head),
        draft_ids=drafter.vocab.ids_D.tolist(),
        num_layers=shape.num_layers,
        num_heads=shape.layer.num_attention_heads,
        num_kv_heads=shape.layer.num_key_value_heads,
        head_dim=shape.layer.head_dim,
        theta=THETA,
        eps=EPS,
        mask_token=shape.mask_token_id,
        sample_from_anchor=shape.sample_from_anchor,
        window=shape.sliding_window,
        causal=shape.causal,
        markov=None if shape.markov is None else shape.markov.kind,
        conv_group=None if shape.conv is None else shape.conv.group_size,
        top_k=None if shape.selector is None else shape.selector.top_k,
        confidence_with_markov=shape.confidence_with_markov,
    )


def block_tensors(drafter: BlockDrafter) -> dict[str, Tensor]:
    """Parameters by the names they have in the checkpoint."""
    return {name.removeprefix("body."): parameter for name, parameter in drafter.named_parameters()}
