"""The ``Family`` of a target whose model type nothing is known of, made from what is found in its own code.

Its model is built without weights, its two ends get small random ones, and its own ``forward`` is run around them: from
token ids to the input of the first decoder layer, through the final norm alone, and from normed states to logits. What
these compute is told as numbers of a ``Family``, and must be that to rounding; what is not (learned positions added to
the embeddings, a norm with a bias, logits scaled token by token) is refused with the part that differs. No weight of
the target is read, so a plan and a trainer, which has its head alone, find the same.

What lies between the ends, the layers, is compared when the weights are loaded (``generic_check.py``).

Legend: B batch, T tokens, V rows of a vocabulary, H hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.console import quiet_transformers
from spectrain.errors import InputError
from spectrain.target.families import SQRT_HIDDEN, Family, HeadMath
from spectrain.target.spec import causal_model_class, has_own_code

_ROWS, _TOKENS = 64, 24  # of the small vocabulary, and of the sequence that goes through
_ROUNDING = 2e-5  # of the largest entry, in float32
_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")  # what a norm calls its own
# Where a number was found, these fields of config.json are named if one holds it: the first that does.
_EMBED_FIELDS = ("embedding_multiplier", "scale_emb", "embedding_multiplier_scale")
_LOGIT_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier_scale")
_LOGIT_DIVISORS = ("logits_scaling",)
_CAP_FIELDS = ("final_logit_softcapping", "logits_soft_cap")


def unknown(model_type: str, reason: str) -> InputError:
    """The refusal of a target that the generic path does not describe."""
    return InputError(
        f"target of model type {model_type!r}, which is not among the known ones, does not fit the generic path: "
        f"{reason}; add an entry to FAMILIES in spectrain/target/families.py (the top of that file says how)"
    )


def find_family(hf_config: Any) -> Family:
    """What the model of a transformers configuration does at its two ends. ``InputError`` that names the part where it
    does what no ``Family`` says.
    """
    return _find(_Key(hf_config))


class _Key:
    """A configuration as a key: equal ones describe the same model."""

    def __init__(self, hf_config: Any) -> None:
        self.config = hf_config
        self._text = f"{type(hf_config)}{hf_config.to_json_string(use_diff=False)}"

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._text == other._text


@lru_cache(maxsize=8)
def _find(key: _Key) -> Family:
    text = key.config.get_text_config(decoder=True)
    random_state = torch.get_rng_state()  # a model's constructor draws numbers
    try:
        return _Ends(key.config, text).family()
    finally:
        torch.set_rng_state(random_state)


class _Ends:
    """A model without weights, and the names of its parts."""

    def __init__(self, hf_config: Any, text: Any) -> None:
        self._text = text
        self._generator = torch.Generator().manual_seed(0)
        with self._own_code("its model cannot be built from its config.json"):
            self._model = _without_weights(hf_config)
        names = {module: name for name, module in self._model.named_modules()}
        self._embedding = self._matrix("input", self._model.get_input_embeddings())
        self._lm_head = self._matrix("output", self._model.get_output_embeddings())
        self._embedding_name, self._head_name = names[self._embedding], names[self._lm_head]
        layers_name, self._layers = self._find_layers()
        self._prefix, _, self._layers_attribute = layers_name.rpartition(".")
        self._decoder = self._model.get_submodule(self._prefix)
        self._norm_name, norm = self._find_norm()
        self._norm: Any = norm

    def family(self) -> Family:
        prefix = f"{self._prefix}."
        one_plus, norm, eps = self._norm_math()
        scale, cap = self._logit_math()
        factor, divisor = self._named_logit_scale(scale)
        plain = Family()
        return Family(
            norm=norm,
            one_plus=one_plus,
            eps_field=self._field_with(eps, _eps_fields(self._text)) or eps,
            embed_scale=self._embed_scale(),
            soft_cap=cap,
            prefixes=(prefix, *(other for other in plain.prefixes if other != prefix)),
            embeddings=self._embedding_name.removeprefix(prefix),
            layers=self._layers_attribute,
            final_norm=self._norm_name,
            lm_heads=tuple(dict.fromkeys((f"{self._head_name}.weight", *plain.lm_heads))),
            found=True,
            logit_multiplier=factor,
            logit_divisor=divisor,
        )

    # --- parts -----------------------------------------------------------------------------------------------------

    def _matrix(self, end: str, module: Any) -> Any:
        weight = getattr(module, "weight", None)
        if weight is None or weight.ndim != 2:
            raise self._refused(f"it has no {end} embedding that is one matrix (get_{end}_embeddings)")
        if weight.shape[1] != self._text.hidden_size:
            raise self._refused(f"its {end} embedding is {weight.shape[1]} wide, its layers {self._text.hidden_size}")
        if getattr(module, "bias", None) is not None:
            raise self._refused(f"its {end} embedding has a bias, which heads of drafters have not")
        return module

    def _find_layers(self) -> tuple[str, nn.ModuleList]:
        number = self._text.num_hidden_layers
        found = [
            (name, module)
            for name, module in self._model.named_modules()
            if isinstance(module, nn.ModuleList)
            and len(module) == number
            and "." in name
            and self._embedding_name.startswith(f"{name.rpartition('.')[0]}.")
        ]
        if len(found) != 1:
            names = ", ".join(name for name, _ in found) or "none"
            raise self._refused(
                f"one list of its {number} decoder layers is asked for beside its input embedding "
                f"({self._embedding_name}), found: {names}"
            )
        return found[0]

    def _find_norm(self) -> tuple[str, nn.Module]:
        """The last module beside the layers that has a gain for every channel."""
        found = [
            (name, module)
            for name, module in self._decoder.named_children()
            if module is not self._embedding and tuple(getattr(_weight(module), "shape", ())) == self._width
        ]
        if not found:
            raise self._refused(f"no norm with a gain lies beside its layers in {self._prefix}")
        name, norm = found[-1]
        if getattr(norm, "bias", None) is not None:
            raise self._refused(
                f"its final norm {self._prefix}.{name} ({type(norm).__name__}) has a bias, which heads of drafters "
                f"have not"
            )
        return name, norm

    @property
    def _width(self) -> tuple[int]:
        return (self._text.hidden_size,)

    # --- what they compute -----------------------------------------------------------------------------------------

    def _norm_math(self) -> tuple[bool, str, float]:
        """Of the four kinds of norm the one that this is, and its epsilon."""
        gain_H = self._random(*self._width)
        norm = copy.deepcopy(self._norm)
        norm.weight = nn.Parameter(gain_H, requires_grad=False)
        # A mean that is not zero tells the kinds apart, small entries the epsilon.
        x_TH = torch.cat([self._random(4, *self._width) + 0.5, 1e-3 * (self._random(4, *self._width) + 0.5)])
        with self._own_code(f"its final norm {self._norm_name} could not be run"):
            own_TH = norm(x_TH)
        epsilons = [float(getattr(norm, name)) for name in _EPSILONS if isinstance(getattr(norm, name, None), float)]
        epsilons += [getattr(self._text, name) for name in _eps_fields(self._text)]
        kinds = {
            _difference(
                HeadMath(Family(norm=norm, one_plus=one_plus), *self._width, eps).normalise(x_TH, gain_H), own_TH
            ): (one_plus, norm, eps)
            for one_plus, norm, eps in product((False, True), ("rms", "layer"), epsilons)
        }
        self._require(f"the final norm ({type(norm).__name__})", min(kinds, default=torch.inf))
        return kinds[min(kinds)]

    def _embed_scale(self) -> str | float | None:
        """What the rows of the embedding are multiplied by before they enter the first layer."""
        rows_VH = self._random(_ROWS, *self._width)
        ids_1T = torch.randint(0, _ROWS, (1, _TOKENS), generator=self._generator)
        entered: list[Tensor] = []

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            entered.append((args[0] if args else kwargs["hidden_states"]).clone())
            raise _EnteredError

        handle = self._layers[0].register_forward_pre_hook(stop, with_kwargs=True)
        part = "what lies between its input embedding and its first layer"
        try:
            with self._own_code(f"{part} cannot be run without more of its weights"), _lent(self._embedding, rows_VH):
                self._decoder(
                    input_ids=ids_1T, position_ids=torch.arange(_TOKENS)[None], attention_mask=None, use_cache=False
                )
        except _EnteredError:
            pass
        finally:
            handle.remove()
        if not entered or entered[0].shape != (1, _TOKENS, *self._width):
            raise self._refused(f"{part} does not give one vector of hidden_size for each token")
        asked_1TH = rows_VH[ids_1T]
        scale = _ratio(entered[0], asked_1TH)
        self._require(
            "what enters the first layer (as a multiple of the embedding)", _difference(scale * asked_1TH, entered[0])
        )
        if _close(scale, 1.0):
            return None
        if _close(scale, self._text.hidden_size**0.5):
            return SQRT_HIDDEN
        return self._field_with(scale, _EMBED_FIELDS) or scale

    def _logit_math(self) -> tuple[float, str | None]:
        """The factor on the logits, and the field with the cap on them."""
        weight_VH = self._random(_ROWS, *self._width)
        normed_1TH = self._random(1, _TOKENS, *self._width) / self._text.hidden_size**0.5
        # Small ones, which no cap bends, tell the factor.
        small_1TV, small = normed_1TH @ weight_VH.T * 1e-3, self._own_logits(normed_1TH * 1e-3, weight_VH)
        large_1TV, large = normed_1TH @ weight_VH.T * 20, self._own_logits(normed_1TH * 20, weight_VH)
        scale = _ratio(small, small_1TV)
        caps: dict[str | None, float | None] = {None: None}
        caps |= {name: cap for name in _CAP_FIELDS if (cap := getattr(self._text, name, None))}
        errors: dict[str | None, float] = {}
        for name, cap in caps.items():
            math = HeadMath(Family(), self._text.hidden_size, 0.0, 1.0, scale, cap)
            errors[name] = max(
                _difference(math.transform_logits(raw), own) for raw, own in ((small_1TV, small), (large_1TV, large))
            )
        best = min(errors, key=lambda name: errors[name])
        self._require("its logits (as a multiple of the output embedding's products)", errors[best])
        return scale, best

    def _own_logits(self, normed_1TH: Tensor, weight_VH: Tensor) -> Tensor:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        def instead(*args: Any, **kwargs: Any) -> Any:
            return MoeModelOutputWithPast(last_hidden_state=normed_1TH)

        self._decoder.forward = instead
        ids_1T = torch.zeros(1, _TOKENS, dtype=torch.long)
        try:
            with (
                self._own_code("what makes logits of its final norm cannot be run without more of its weights"),
                _lent(self._lm_head, weight_VH),
            ):
                logits = self._model(input_ids=ids_1T, use_cache=False).logits
        finally:
            del self._decoder.forward
        if logits.shape != (1, _TOKENS, _ROWS):
            raise self._refused("its logits are not one for each row of its output embedding")
        return logits.float()

    def _named_logit_scale(self, scale: float) -> tuple[str | float | None, str | None]:
        """The factor on the logits, and the divisor, by the field that holds it; a number where none does."""
        if _close(scale, 1.0):
            return None, None
        factor = self._field_with(scale, _LOGIT_FACTORS)
        divisor = None if factor else self._field_with(1.0 / scale, _LOGIT_DIVISORS)
        return (None, divisor) if divisor else (factor or scale, None)

    # --- tools -----------------------------------------------------------------------------------------------------

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _field_with(self, value: float, names: tuple[str, ...]) -> str | None:
        holds = (getattr(self._text, name, None) for name in names)
        return next((name for name, held in zip(names, holds, strict=True) if _close(held, value)), None)

    def _require(self, part: str, difference: float) -> None:
        if not difference <= _ROUNDING:  # in this form NaN is a difference too
            raise self._refused(
                f"{part}: the nearest of what a Family can say is off by {difference:.2g} of the largest entry"
            )

    def _refused(self, reason: str) -> InputError:
        return unknown(self._text.model_type, reason)

    @contextmanager
    def _own_code(self, part: str) -> Iterator[None]:
        """Around code of the target's, which may raise anything."""
        try:
            with torch.no_grad(), quiet_transformers():
                yield
        except (_EnteredError, InputError):
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise self._refused(f"{part} ({type(error).__name__}: {reason})") from error


class _EnteredError(Exception):
    """What enters the first layer is known, the rest need not run."""


def _without_weights(hf_config: Any) -> Any:
    """Parameters on the meta device; buffers, which phases of positions and factors are, with their numbers."""
    from accelerate import init_empty_weights

    options = {"trust_remote_code": True} if has_own_code(hf_config) else {}
    with init_empty_weights(include_buffers=False):
        model = causal_model_class(hf_config).from_config(
            copy.deepcopy(hf_config), dtype=torch.float32, attn_implementation="eager", **options
        )
    return model.eval()


@contextmanager
def _lent(module: Any, weight: Tensor) -> Iterator[None]:
    """The module has another, small matrix for a while."""
    own, padding = module.weight, getattr(module, "padding_idx", None)
    module.weight = nn.Parameter(weight, requires_grad=False)
    if padding is not None:
        module.padding_idx = None
    try:
        yield
    finally:
        module.weight = own
        if padding is not None:
            module.padding_idx = padding


def _weight(module: nn.Module) -> Tensor | None:
    found = getattr(module, "weight", None)
    return found if isinstance(found, Tensor) else None


def _eps_fields(text: Any) -> tuple[str, ...]:
    fields: Mapping[str, Any] = text.to_dict()
    usual = Family().eps_field
    named = [name for name, value in fields.items() if name.endswith(("eps", "epsilon")) and isinstance(value, float)]
    return tuple(sorted(named, key=lambda name: (name != usual, name)))


def _ratio(own: Tensor, asked: Tensor) -> float:
    return float((own.double() * asked.double()).sum() / asked.double().square().sum())


def _difference(ours: Tensor, own: Tensor) -> float:
    return float((ours - own).abs().max() / own.abs().max())


def _close(held: Any, value: float) -> bool:
    return isinstance(held, int | float) and abs(held - value) <= _ROUNDING * abs(value)


def describe(math: HeadMath, model_type: str) -> str:
    """One line: that a target takes the generic path, and what was found."""
    family = math.family
    gain = "1 + w" if family.one_plus else "w"
    cap = "" if math.soft_cap is None else f", capped at {math.soft_cap:g}"
    return (
        f"model type {model_type!r} is not among the known ones and takes the generic path; found: layers "
        f"{family.prefixes[0]}{family.layers}, {family.norm} norm {family.final_norm} with gain {gain}, embedding "
        f"{family.embeddings} × {math.embed_scale:.6g}, logits of {family.lm_heads[0]} × {math.logit_scale:.6g}{cap}"
    )
