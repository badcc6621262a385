"""Configuration of the drafter: which kind, how it is built, and what it learns from (group ``drafter``).

Keys of ``drafter`` itself are every kind's. What only some kinds have is in sections of its own, which the others do
not read: a recipe may set ``drafter.eagle3.fc_norm`` and still be run with ``drafter=dflash``. (On the command line a
key that the chosen kind does not read is refused, ``stages/drafter_checks.py``.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from spectrain.config.keys import Section, key, refuse_dash, require, split_revision

# Beyond what any drafter has; what a machine can hold, stages/checks.py asks.
_WIDTH, _VOCABULARY = 1 << 16, 1 << 24
_COEFFICIENT = 1e6


@dataclass(frozen=True)
class LossConfig(Section, name="drafter.loss"):
    """What is minimised."""

    weights: dict[str, float] = key(
        make=lambda: {"ce": 0.1, "tv": 0.9},
        help="coefficient of each loss term: ce, kl, tv, lk, or one that was added to drafters/losses/reference.py; "
        "the default suits temperatures 0 to 1, ce alone 0, tv alone 1; a term that is not named keeps its coefficient",
        example="{ce: 0.0, tv: 0.0, kl: 1.0}",
        at_least=0,
        at_most=_COEFFICIENT,
    )
    implementation: Literal["fused", "triton", "reference"] = key(
        "fused",
        "fused: loss and gradient in one pass, no [tokens, vocabulary]; triton: the same with a kernel of its own for "
        "what follows the products, on a GPU (not run on one yet: `make gpu-check` compares both); reference: plain "
        "torch, all logits at once",
    )

    def _check(self) -> None:
        require(sum(self.weights.values()) > 0, "drafter.loss.weights are all zero: nothing would be trained")


@dataclass(frozen=True)
class AutoregressiveConfig(Section, name="drafter.autoregressive"):
    """What all autoregressive drafters have (eagle3, peagle, mtp, gemma4_mtp)."""

    ttt_steps: int = key(
        3,
        "training-time-test steps: how many draft steps are unrolled in training; of peagle, positions that it drafts "
        "in one pass",
        at_least=1,
        at_most=64,
    )
    step_decay: float = key(0.8, "weight of step k in the loss is step_decay ** k", above=0, at_most=1)


def _window() -> int | None:
    return key(
        None, "tokens that a column sees, its own included, in all layers; null: all", at_least=1, at_most=1 << 24
    )


@dataclass(frozen=True)
class Eagle3Config(Section, name="drafter.eagle3"):
    """What only EAGLE-3 has."""

    norm_before_residual: bool = key(False, "the residual stream starts from the normed feature")
    norm_before_fc: bool = key(False, "one norm over the concatenated taps, before fc")
    fc_norm: bool = key(False, "one norm per tap, before fc")
    norm_output: bool = key(False, "the next step is fed the normed output instead of the residual stream")
    sliding_window: int | None = _window()


@dataclass(frozen=True)
class PEagleConfig(Section, name="drafter.peagle"):
    """What only P-EAGLE has."""

    mask_token_id: int | None = key(
        None,
        "token that stands in slots whose token is not known yet; null: one that the training text never uses",
        at_least=0,
        at_most=_VOCABULARY,
    )
    norm_before_residual: bool = key(False, "the residual stream starts from the normed feature")
    norm_before_fc: bool = key(False, "one norm over the concatenated taps, before fc")
    sliding_window: int | None = _window()


@dataclass(frozen=True)
class Gemma4MTPConfig(Section, name="drafter.gemma4_mtp"):
    """What only a Gemma-4 assistant has."""

    hidden_size: int | None = key(
        None, "its width; null: a quarter of the target's, in steps of 64", at_least=8, at_most=_WIDTH
    )
    num_centroids: int = key(
        0,
        "clusters of tokens, of which only the nearest are scored when drafting; 0: all tokens are scored",
        at_least=0,
        at_most=_WIDTH,
    )
    centroid_top_k: int = key(32, "clusters whose tokens are scored", at_least=1, at_most=_WIDTH)
    centroid_weight: float = key(
        1.0, "coefficient of the loss that teaches which clusters to score", at_least=0, at_most=_COEFFICIENT
    )

    def _check(self) -> None:
        _refuse_idle(self, "num_centroids", 0, ("centroid_top_k", "centroid_weight"))
        require(
            self.num_centroids == 0 or self.centroid_top_k <= self.num_centroids,
            f"drafter.gemma4_mtp.centroid_top_k={self.centroid_top_k} exceeds num_centroids={self.num_centroids}",
        )


@dataclass(frozen=True)
class BlockConfig(Section, name="drafter.block"):
    """What all block drafters have (dflash, dspark, dflash2)."""

    block_size: int = key(8, "slots of a block, the anchor's included", at_least=2, at_most=1024)
    mask_token_id: int | None = key(
        None,
        "token whose embedding stands for what is not known yet; null: one that the training text never uses",
        at_least=0,
        at_most=_VOCABULARY,
    )
    sliding_window: int | None = key(
        None, "tokens that a slot sees, itself included; null: all", at_least=1, at_most=1 << 24
    )
    causal: bool = key(True, "with a sliding window: a slot sees no later slots of its block")
    anchors: int = key(
        128,
        "blocks trained in a packed sequence of trainer.packed_length tokens, if it has so many",
        at_least=1,
        at_most=1 << 20,
    )
    decay: float = key(4.0, "slot j weighs exp(-j / decay), j = 0 for the first that drafts", above=0, at_most=1e6)
    d_pace: bool = key(False, "weigh slots by how often drafting gets so far and goes on, instead of by decay")
    d_pace_smoothing: float = key(
        0.5,
        "share of certainty mixed into the acceptance probabilities that d_pace multiplies; 0: none",
        at_least=0,
        below=1,
    )

    def _check(self) -> None:
        _refuse_idle(self, "d_pace", True, ("decay",))
        _refuse_idle(self, "d_pace", False, ("d_pace_smoothing",))


@dataclass(frozen=True)
class DSparkConfig(Section, name="drafter.dspark"):
    """What only DSpark has."""

    sample_from_anchor: bool = key(True, "slot 0, the anchor's, drafts too; false: only the masks do, as in dflash")
    markov: Literal["vanilla", "gated", "rnn", "none"] = key(
        "vanilla", "sequential head that knows the token before; vLLM serves vanilla alone"
    )
    markov_rank: int = key(256, "rank of that head", at_least=1, at_most=_WIDTH)
    confidence: bool = key(True, "a head that estimates the chance that each draft is accepted")
    confidence_with_markov: bool = key(True, "it reads the token before, too")
    confidence_detach: bool = key(True, "its loss trains the head alone, not the layers below")
    confidence_weight: float = key(1.0, "coefficient of its loss", at_least=0, at_most=_COEFFICIENT)

    def _check(self) -> None:
        _refuse_idle(self, "markov", "none", ("markov_rank",))
        _refuse_idle(self, "confidence", False, ("confidence_with_markov", "confidence_detach", "confidence_weight"))


@dataclass(frozen=True)
class DFlash2Config(Section, name="drafter.dflash2"):
    """What only DFlash2 has."""

    conv_kernel_size: int = key(4, "slots that a convolution mixes", at_least=1, at_most=1024)
    conv_group_size: int | None = key(
        None,
        "channels that share a dynamic coefficient; null: 64, or what divides the width",
        at_least=1,
        at_most=_WIDTH,
    )
    selector_rank: int = key(64, "rank of the candidate selector's codebooks", at_least=1, at_most=_WIDTH)
    selector_top_k: int = key(16, "candidates of a slot", at_least=1, at_most=_WIDTH)


@dataclass(frozen=True)
class DrafterConfig(Section, name="drafter"):
    """A drafter (group ``drafter``)."""

    method: str = key(
        "eagle3",
        "kind of drafter: eagle3, peagle, mtp, gemma4_mtp, dflash, dspark, dflash2, or one that drafter.module "
        "registers",
    )
    module: str | None = key(
        None,
        "Python module that registers a kind of drafter of your own; null: the kinds that ship, and those of "
        "installed packages",
        example="my_pkg.my_drafter",
    )
    path: str | None = key(
        None,
        "folder or Hub id (also as ORG/NAME@REVISION) of a drafter to measure (eval), or to train further (fit: its "
        "shape, taps and vocabulary stay, init does not run); null: the run's own drafter, and a fresh one for fit",
    )
    revision: str | None = key(
        None, "revision of a drafter.path on the Hub; null: the default branch, or what is in the Hub's cache of it"
    )
    taps: tuple[int, ...] | None = key(
        None,
        "auxiliary hidden-state layers: the residual stream after so many layers of the target, which the drafter "
        "reads; null: the kind's default (eagle3, peagle: 2, N//2, N-3; block drafters: five, evenly spread)",
        at_least=0,
        at_most=10_000,
    )
    layer_type: Literal["llama", "qwen3"] | None = key(
        None, "style of its decoder layers (qwen3: with norms on q and k); null: the target's, for block drafters qwen3"
    )
    num_layers: int = key(1, "its decoder layers", at_least=1, at_most=128)
    intermediate_size: int | None = key(None, "width of its MLP; null: the target's", at_least=1, at_most=1 << 20)
    num_attention_heads: int | None = key(
        None, "its attention heads; null: as many as the target has", at_least=1, at_most=_WIDTH
    )
    num_key_value_heads: int | None = key(
        None, "its key-value heads; null: as many as the target has", at_least=1, at_most=_WIDTH
    )
    head_dim: int | None = key(None, "size of a head; null: the target's", at_least=1, at_most=_WIDTH)
    draft_vocab_size: int | None = key(
        None,
        "tokens it can draft, the target's most frequent ones on the training text; null: the whole vocabulary",
        at_least=1,
        at_most=_VOCABULARY,
    )
    attention: Literal["auto", "eager", "sdpa", "flex"] = key(
        "auto", "attention kernels of training; auto: eager on a CPU, flex on a GPU"
    )
    init: Literal["closed_form", "target", "last_layer", "random"] = key(
        "closed_form",
        "closed_form: copies parts of the target and solves for the rest by ridge regression on hidden "
        "states of the training text; target: copies alone (mtp: the target's own head); last_layer: of mtp, a new "
        "head from the target's last layer; random",
    )
    init_seconds: float | None = key(
        None,
        "time for init=closed_form: it uses as much text as the devices' measured speed is expected to allow, so its "
        "result depends on the machine; null: as much as the solution is worth (spectrain plan says how long)",
        above=0,
        at_most=1e6,
    )
    train_head: bool = key(True, "train the lm_head of a reduced vocabulary; false: it keeps the target's rows")
    loss: LossConfig = key(make=LossConfig)
    autoregressive: AutoregressiveConfig = key(make=AutoregressiveConfig)
    eagle3: Eagle3Config = key(make=Eagle3Config)
    peagle: PEagleConfig = key(make=PEagleConfig)
    gemma4_mtp: Gemma4MTPConfig = key(make=Gemma4MTPConfig)
    block: BlockConfig = key(make=BlockConfig)
    dspark: DSparkConfig = key(make=DSparkConfig)
    dflash2: DFlash2Config = key(make=DFlash2Config)
    options: dict[str, Any] = key(
        make=dict, help="what a kind registered by drafter.module reads, by its own names", example="{depth: 2}"
    )

    def _check(self) -> None:
        if self.path is not None:
            path, revision = split_revision("drafter", self.path, self.revision)
            object.__setattr__(self, "path", path)
            object.__setattr__(self, "revision", revision)
        refuse_dash("drafter.revision", self.revision)
        if self.taps is not None:
            require(len(self.taps) > 0, "drafter.taps is empty: name at least one layer")
            require(len(set(self.taps)) == len(self.taps), f"drafter.taps={list(self.taps)} names a layer twice")
            # vLLM concatenates taps in ascending order, so training does too.
            object.__setattr__(self, "taps", tuple(sorted(self.taps)))


def _refuse_idle(section: Section, switch: str, value: object, names: tuple[str, ...]) -> None:
    """A key that says nothing where another one is as it is, is a misunderstanding."""
    if getattr(section, switch) == value:
        plain = {name: field.default for name, field in type(section).__dataclass_fields__.items()}
        idle = [name for name in names if getattr(section, name) != plain[name]]
        path = section.section_name
        require(not idle, f"{path}.{idle[0] if idle else ''} has no effect with {path}.{switch}={value}: leave it out")
