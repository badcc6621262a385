"""Configuration of the drafter: which one, how it is built, and what it learns from (group ``drafter``)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from spectrain.config.rules import one_of as _one_of
from spectrain.config.rules import require as _require

LOSS_NAMES = ("ce", "kl", "tv", "lk")  # in the order of the sums that drafters/losses.py keeps


@dataclass(frozen=True)
class LossConfig:
    """Weights of the loss terms (defined in ``drafters/losses.py``), and of the unrolled steps."""

    weights: dict[str, float] = field(default_factory=lambda: {"ce": 0.1, "tv": 0.9})
    step_decay: float = 0.8  # weight of autoregressive step k is step_decay ** k

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            _one_of("drafter.loss.weights: loss name", name, LOSS_NAMES)
            _require(weight >= 0, f"drafter.loss.weights.{name}={weight} must be 0 or more")
        _require(sum(self.weights.values()) > 0, "drafter.loss.weights are all zero: nothing would be trained")
        _require(0 < self.step_decay <= 1, f"drafter.loss.step_decay={self.step_decay} must lie in (0, 1]")


METHODS = ("eagle3", "dflash", "dspark", "dflash2")
BLOCK_METHODS = METHODS[1:]
MARKOV_KINDS = ("none", "vanilla", "gated", "rnn")


@dataclass(frozen=True)
class BlockConfig:
    """What only block drafters have. ``None``: by method, or as said."""

    block_size: int = 8  # slots, the anchor's included
    mask_token_id: int | None = (
        None  # token whose embedding stands for what is not known yet; None: one that the training text never uses
    )
    sample_from_anchor: bool | None = None  # slot 0 drafts too (dspark), or only the masks do (dflash, dflash2)
    sliding_window: int | None = None  # tokens that a slot sees, itself included; None: all
    causal: bool = True  # with a sliding window: a slot sees no later slots of its block
    anchors: int = 128  # blocks trained in a row of trainer.packed_length, where there are so many
    markov: str | None = None  # dspark's sequential head: vanilla (what vLLM serves), gated, rnn, none
    markov_rank: int = 256
    confidence: bool | None = None  # dspark's confidence head
    confidence_with_markov: bool = True  # it reads the token before, too
    confidence_detach: bool = True  # its loss trains the head alone, not the backbone
    confidence_weight: float = 1.0
    conv_kernel_size: int = 4  # dflash2: slots that a convolution mixes
    conv_group_size: int | None = (
        None  # dflash2: channels that share a dynamic coefficient; None: 64, or what divides the width
    )
    selector_rank: int = 64  # dflash2
    selector_top_k: int = 16  # dflash2: candidates of a slot
    decay: float = 4.0  # slot j weighs exp(-j / decay), j = 0 for the first that drafts
    d_pace: bool = False  # weigh slots by how often drafting gets so far and goes on, instead
    d_pace_smoothing: float = (
        0.5  # share of certainty mixed into the acceptance probabilities that d_pace multiplies; 0: none
    )

    def __post_init__(self) -> None:
        _require(self.block_size >= 2, f"drafter.block.block_size={self.block_size} must be at least 2")
        for name in ("anchors", "markov_rank", "conv_kernel_size", "selector_rank", "selector_top_k"):
            _require(getattr(self, name) >= 1, f"drafter.block.{name}={getattr(self, name)} must be at least 1")
        for name in ("sliding_window", "conv_group_size"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"drafter.block.{name}={value} must be at least 1")
        mask = self.mask_token_id
        _require(mask is None or mask >= 0, f"drafter.block.mask_token_id={mask} must be 0 or more")
        _one_of("drafter.block.markov", self.markov, (None, *MARKOV_KINDS))
        _require(
            self.confidence_weight >= 0, f"drafter.block.confidence_weight={self.confidence_weight} must be 0 or more"
        )
        _require(self.decay > 0, f"drafter.block.decay={self.decay} must be positive")
        _require(
            0 <= self.d_pace_smoothing < 1,
            f"drafter.block.d_pace_smoothing={self.d_pace_smoothing} must be at least 0 and below 1",
        )


# What a method does not have must be left alone: a knob without effect is a misunderstanding.
_AUTOREGRESSIVE_KNOBS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "ttt_steps")
# Of block drafters: knobs that say nothing when another one is so.
_IDLE_KNOBS: tuple[tuple[str, object, tuple[str, ...]], ...] = (
    ("d_pace", True, ("decay",)),
    ("d_pace", False, ("d_pace_smoothing",)),
    ("markov", "none", ("markov_rank",)),
    ("confidence", False, ("confidence_with_markov", "confidence_detach", "confidence_weight")),
)
_DSPARK_KNOBS = (
    "markov",
    "markov_rank",
    "confidence",
    "confidence_with_markov",
    "confidence_detach",
    "confidence_weight",
)
_DFLASH2_KNOBS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter (group ``drafter``): autoregressive (eagle3) or block (dflash, dspark, dflash2)."""

    method: str = "eagle3"
    path: str | None = (
        # folder to measure (eval), or to go on from (fit: its shape, taps and vocabulary stand, init does not run)
        None
    )
    taps: tuple[int, ...] | None = (
        None  # residual stream after so many layers; None: (2, N//2, N-3) made distinct, or five evenly (block)
    )
    layer_type: str | None = None  # llama or qwen3 (q/k norm); None: as the target (block: always qwen3)
    num_layers: int = 1
    intermediate_size: int | None = None  # None: as the target
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    draft_vocab_size: int | None = None  # None: the target's whole vocabulary
    norm_before_residual: bool = False  # eagle3: the residual stream is the normed feature
    norm_before_fc: bool = False  # eagle3: one norm over the concatenated taps
    fc_norm: bool = False  # eagle3: one norm per tap
    norm_output: bool = False  # eagle3: feed back the normed output instead of the residual stream
    ttt_steps: int = 3  # eagle3: training-time steps K
    attention: str = "auto"  # eager, sdpa, flex; auto: eager on CPU, flex elsewhere
    init: str = "closed_form"  # solved in closed form on training states; target: copies parts of it alone; random
    train_head: bool = True  # train the lm_head of a reduced vocabulary; false: it keeps the target's rows
    loss: LossConfig = field(default_factory=LossConfig)
    block: BlockConfig = field(default_factory=BlockConfig)

    @property
    def is_block(self) -> bool:
        return self.method in BLOCK_METHODS

    @property
    def samples_from_anchor(self) -> bool:
        """Whether slot 0 of a block drafts."""
        return self.method == "dspark" if self.block.sample_from_anchor is None else self.block.sample_from_anchor

    @property
    def most_drafts(self) -> int | None:
        """Drafts that a block of this configuration gives; None for an autoregressive drafter, which can
        always go on.
        """
        return self.block.block_size - (not self.samples_from_anchor) if self.is_block else None

    def __post_init__(self) -> None:
        _one_of("drafter.method", self.method, METHODS)
        _one_of("drafter.layer_type", self.layer_type, (None, "llama", "qwen3"))
        _one_of("drafter.init", self.init, ("closed_form", "target", "random"))
        _one_of("drafter.attention", self.attention, ("auto", "eager", "sdpa", "flex"))
        if self.taps is not None:
            _require(len(self.taps) > 0, "drafter.taps is empty: name at least one layer")
            _require(len(set(self.taps)) == len(self.taps), f"drafter.taps={list(self.taps)} names a layer twice")
            _require(min(self.taps) >= 0, f"drafter.taps={list(self.taps)} must be 0 or more")
            # vLLM concatenates taps in ascending order, so training does too.
            object.__setattr__(self, "taps", tuple(sorted(self.taps)))
        _require(self.num_layers >= 1, f"drafter.num_layers={self.num_layers} must be at least 1")
        _require(self.ttt_steps >= 1, f"drafter.ttt_steps={self.ttt_steps} must be at least 1")
        _require(
            self.draft_vocab_size is None or self.draft_vocab_size >= 1,
            f"drafter.draft_vocab_size={self.draft_vocab_size} must be at least 1",
        )
        self._check_method()

    def _check_method(self) -> None:
        """Settings that the method does not have are as they were."""
        block, plain = self.block, BlockConfig()
        if not self.is_block:
            changed = [f"block.{name}" for name, value in vars(block).items() if value != getattr(plain, name)]
            self._refuse(changed, "a block drafter's (dflash, dspark, dflash2)")
            return
        defaults = {entry.name: entry.default for entry in fields(DrafterConfig)}
        self._refuse(
            [name for name in _AUTOREGRESSIVE_KNOBS if getattr(self, name) != defaults[name]],
            "an autoregressive drafter's (eagle3)",
        )
        _require(
            self.loss.step_decay == LossConfig().step_decay,
            f"drafter.loss.step_decay is an autoregressive drafter's (eagle3): the slots of {self.method} weigh by "
            f"drafter.block.decay",
        )
        for method, knobs in (("dspark", _DSPARK_KNOBS), ("dflash2", _DFLASH2_KNOBS)):
            if self.method != method:
                self._refuse(
                    [f"block.{name}" for name in knobs if getattr(block, name) != getattr(plain, name)], f"{method}'s"
                )
        for switch, value, names in _IDLE_KNOBS:
            idle = [
                name
                for name in names
                if getattr(block, switch) == value and getattr(block, name) != getattr(plain, name)
            ]
            _require(
                not idle,
                f"drafter.block.{idle[0] if idle else ''} has no effect with drafter.block.{switch}={value}: leave it "
                f"out",
            )
        _require(
            self.layer_type != "llama",
            f"drafter.layer_type=llama: the layers of {self.method} are qwen3's, with norms on q and k",
        )
        _require(
            self.method == "dspark" or not block.sample_from_anchor,
            f"drafter.block.sample_from_anchor=true: only dspark drafts from the anchor's slot, not {self.method}",
        )
        _require(
            self.method != "dspark" or block.sliding_window is None or block.causal,
            "drafter.block.causal=false: a dspark drafter with a sliding window is causal, vLLM knows no other",
        )
        _require(
            self.method != "dflash2" or self.draft_vocab_size is None,
            "drafter.draft_vocab_size: dflash2 drafts from the whole vocabulary, leave it at null",
        )

    def _refuse(self, names: list[str], whose: str) -> None:
        _require(
            not names,
            f"drafter.{names[0] if names else ''} is {whose}, drafter.method={self.method} has no such thing: leave "
            f"it out",
        )
