"""The target, run in process by transformers, with its residual stream read by hooks.

Tap k is the residual stream after k decoder layers: k = 0 the (scaled) embeddings, k = N the input of the final norm.
That is ``hidden_states[k]`` of transformers for k < N; its ``hidden_states[N]`` is taken after the final norm and is no
tap. Only the asked taps are copied, all layers are never held at once, and logits exist only for the positions somebody
asks for: ``run`` stops at the final norm, ``logits`` does the rest.

Shape suffixes: B batch, S columns, A taps, H hidden, V vocabulary, G key-value heads, C slots of a cache, d size of a
head.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spectrain.config.target_schema import TargetConfig
from spectrain.console import quiet_transformers
from spectrain.errors import ConfigError, InputError, NotFiniteError, SpectrainError
from spectrain.target.checkpoint import CheckpointReader, check_experts, check_loading
from spectrain.target.cpu_kernels import speed_up
from spectrain.target.device_map import Placement, brought_to, check_devices, check_names, note_offloaded, runs_on
from spectrain.target.families import HeadMath, head_math
from spectrain.target.folder_files import load_tokenizer
from spectrain.target.quantization import Quantization, quantization_of, require_even_rows, require_readable
from spectrain.target.resolve import ResolvedTarget
from spectrain.target.served_rope import settle
from spectrain.target.spec import TargetSpec, causal_model_class, end_token_ids, has_own_code, load_config

_META = {"": "meta"}  # device map of a model that has shapes and no numbers


class CannotLoadError(InputError):
    """Transformers does not load a target, whatever its weights are."""


@dataclass(frozen=True)
class TargetOutput:
    """What one forward pass leaves: ``last_hidden_BSH`` before the final norm, ``taps_BSAH`` in the order asked for
    (None if none were), and ``target_kv``, keys and values of the layers asked for as their attention reads them: those
    of the pass [B, G, S, d], or with a cache all that it shows [B, G, C, d].
    """

    last_hidden_BSH: torch.Tensor
    taps_BSAH: torch.Tensor | None
    past_key_values: Any
    target_kv: Mapping[int, tuple[torch.Tensor, torch.Tensor]] | None = None


class TargetModel:
    """A frozen causal language model of transformers. Use ``TargetModel.load``; the constructor takes parts that are
    loaded already.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        spec: TargetSpec,
        math: HeadMath,
        placement: Placement | None = None,
        device: torch.device | None = None,
    ) -> None:
        """``device``: where everything that goes in and comes out lies; None: where the head does."""
        self._placement = placement  # holds on to what lies on the disk
        self._device = device
        self.model = model
        self.tokenizer = tokenizer
        self.spec = spec
        self._math = math
        self.model.eval().requires_grad_(False)
        speed_up(self.model)
        self.generation_config = model.generation_config
        family = math.family
        self._decoder = _decoder_of(model, family.prefixes, family.layers)
        self._layers: Sequence[nn.Module] = getattr(self._decoder, family.layers)
        self._final_norm: nn.Module = getattr(self._decoder, family.final_norm)
        self._lm_head: nn.Linear = model.get_output_embeddings()

    @classmethod
    def load(cls, resolved: ResolvedTarget, config: TargetConfig) -> TargetModel:
        """Loads tokenizer and weights of ``resolved.folder`` (safetensors only). Rotary embeddings that depend on the
        length served are those of ``target.max_length``; quantised weights are dequantised.

        Raises ``InputError`` for a family that is not known and does not fit the generic path, a quantisation that
        transformers does not read right, or a checkpoint that cannot be read or is not its configuration's;
        ``ConfigError`` for a device that is not there.
        """

        hf_config = load_config(resolved.folder, config.trust_remote_code)
        spec, math = TargetSpec.from_config(hf_config), head_math(hf_config)
        device = choose_device(config.device)
        tokenizer = load_tokenizer(resolved.folder, config.trust_remote_code)
        dtype = choose_dtype(config.dtype, device, spec)
        quantization = readable_quantization(hf_config, resolved.folder)
        placement = Placement.of(config, device)
        with _loading(resolved.folder, config.name):
            options = {"dtype": dtype, **placement.options()}
            model = _from_pretrained(resolved.folder, config, hf_config, quantization, options)
        note_offloaded(model, config.device_map)
        if quantization is not None:
            _finish_dequantising(model, dtype)
        target = cls(model, tokenizer, spec, math, placement, device)
        if math.family.found:
            from spectrain.target.generic_check import check_generic  # runs the model

            check_generic(target, resolved.folder, config.trust_remote_code)
        return target

    @property
    def device(self) -> torch.device:
        return self._lm_head.weight.device if self._device is None else self._device

    @property
    def has_own_code(self) -> bool:
        return has_own_code(self.model.config)

    @property
    def dtype(self) -> torch.dtype:
        return self._lm_head.weight.dtype

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, ascending (see ``end_token_ids``)."""
        return end_token_ids(self.tokenizer, self.generation_config)

    @torch.no_grad()  # not inference_mode: its tensors could never enter a training graph
    def run(
        self,
        input_ids_BS: torch.Tensor,
        position_ids_BS: torch.Tensor,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        past_key_values: Any = None,
        tap_ids: Sequence[int] = (),
        kv_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """One forward pass up to the input of the final norm.

        ``attention_mask`` is what transformers takes: [B, past + S] with 1 for real tokens, a 4-D mask, or one for each
        kind of layer; without one (and without a cache) positions that restart at 0 inside a row separate packed
        documents. ``past_key_values`` is extended in place. ``kv_layers``: layers (from 0) whose keys and values are
        handed out. ``ConfigError`` for a tap outside [0, N], or a layer that hands out nothing.
        """
        kinds = self._kinds_of(kv_layers)
        shared: UserDict[str, tuple[torch.Tensor, torch.Tensor]] = UserDict()
        sharing = {"shared_kv_states": shared} if kinds else {}
        entry = runs_on(self.model.get_input_embeddings(), self.device)
        input_ids_BS, position_ids_BS, attention_mask = brought_to(entry, input_ids_BS, position_ids_BS, attention_mask)
        with self._recording(input_ids_BS.shape, tap_ids) as record:
            self._decoder(
                input_ids=input_ids_BS,
                position_ids=position_ids_BS,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                use_cache=past_key_values is not None,
                **sharing,
            )
        target_kv = {layer: brought_to(self.device, *shared[kind]) for layer, kind in kinds.items()} or None
        return TargetOutput(record.last_hidden_BSH.to(self.device), record.taps_BSAH, past_key_values, target_kv)

    def _kinds_of(self, kv_layers: Sequence[int]) -> dict[int, str]:
        """Layer -> its kind, of layers that hand out keys and values."""
        sources = self.spec.kv_sources() if self._math.family.hands_out_kv else {}
        kinds = {layer: kind for kind, layer in sources.items() if layer in kv_layers}
        missing = [layer for layer in kv_layers if layer not in kinds]
        if missing:
            which = f"only its layers {sorted(sources.values())} do" if sources else "none of its layers does"
            raise ConfigError(
                f"target of model type {self.spec.model_type!r}: layer {missing[0]} does not hand out its keys and "
                f"values, {which}"
            )
        return kinds

    @torch.no_grad()
    def post_norm(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """Last hidden states [..., H] after the model's own final norm."""
        return self._final_norm(last_hidden.to(runs_on(self._final_norm, self.device), self.dtype)).to(self.device)

    @torch.no_grad()  # not inference_mode: its tensors could never enter a training graph
    def logits(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [..., V] of pre-final-norm states [..., H], by the model's own norm and lm_head.

        Costs V floats a position: select the positions first.
        """
        normed = self.post_norm(last_hidden).to(runs_on(self._lm_head, self.device))
        logits = self._math.transform_logits(self._lm_head(normed).to(self.device))
        if logits.numel():  # a logit of -inf is a token that cannot be; NaN is the greatest of all to torch
            self.require_finite(logits.amax(-1), "logits")
        return logits

    def require_finite(self, values: torch.Tensor, what: str) -> None:
        """``NotFiniteError`` unless all of ``values``, which the target computed and which are called ``what``, are."""
        if not all(bool(extreme.isfinite()) for extreme in values.aminmax()):
            raise NotFiniteError(what, str(self.dtype).removeprefix("torch."))

    @contextmanager
    def _recording(self, shape: torch.Size, tap_ids: Sequence[int]) -> Iterator[_Recorder]:
        outside = [tap for tap in tap_ids if not 0 <= tap <= self.spec.num_layers]
        if outside:
            raise ConfigError(
                f"drafter.taps: tap {outside[0]} lies outside [0, {self.spec.num_layers}], the layers of the target"
            )
        recorder = _Recorder(tuple(shape), len(tap_ids), self.device)
        handles = [self._final_norm.register_forward_pre_hook(recorder.last_hidden_hook)]
        for slot, tap in enumerate(tap_ids):
            # The input of layer k (0-based) is the residual stream after k layers; whatever a family does between
            # layers is in it.
            module = self._layers[tap] if tap < self.spec.num_layers else self._final_norm
            handles.append(module.register_forward_pre_hook(recorder.tap_hook(slot), with_kwargs=True))
        try:
            yield recorder
        finally:
            for handle in handles:
                handle.remove()


def check_weights(folder: Path, config: TargetConfig) -> None:
    """``InputError`` if ``TargetModel.load`` would refuse the checkpoint in ``folder``; reads headers alone."""
    hf_config = load_config(folder, config.trust_remote_code)
    head_math(hf_config)
    quantization = readable_quantization(hf_config, folder)
    reader = CheckpointReader(folder)
    check_experts(reader)
    if quantization is None:
        _refuse_codes(reader)
    elif quantization.method == "mxfp8":
        require_even_rows(reader)
    check_devices(config.device_map)
    with _loading(folder, config.name):
        options = {"dtype": torch.float32, "device_map": _META}
        model = _from_pretrained(folder, config, hf_config, quantization, options)
    check_names(config.device_map, model)


def readable_quantization(hf_config: Any, folder: Path) -> Quantization | None:
    """How the target is quantised. ``InputError`` for a scheme that transformers does not compute right."""
    quantization = quantization_of(hf_config, folder)
    if quantization is not None:
        require_readable(quantization, str(folder))
    return quantization


def _refuse_codes(reader: CheckpointReader) -> None:
    """A matrix of codes whose scales nothing names would be taken for the weights."""
    for name, dtype, _ in reader.described():
        if name.endswith("weight") and dtype not in ("F64", "F32", "F16", "BF16"):
            raise InputError(
                f"the checkpoint in {reader.folder}: tensor {name} is of type {dtype}, but its config.json names no "
                f"quantization_config: fetch config.json again, or use a copy of the target in 16 bits"
            )


def _from_pretrained(
    folder: Path, config: TargetConfig, hf_config: Any, quantization: Quantization | None, options: dict[str, Any]
) -> Any:
    """The model, with every tensor that its configuration asks for and no other. ``hf_config`` is changed."""
    settle(hf_config, config.max_length)
    on_meta = options["device_map"] == _META
    dequantise = {} if quantization is None else quantization.loading_options(shapes_only=on_meta)
    model, info = causal_model_class(hf_config).from_pretrained(
        str(folder),
        config=hf_config,
        attn_implementation=_attention(hf_config, config.attn_implementation),
        use_safetensors=True,
        trust_remote_code=config.trust_remote_code,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported instead
        **dequantise,
        **options,
    )
    text = hf_config.get_text_config(decoder=True)
    extra = getattr(text, "num_nextn_predict_layers", None) or 0
    check_loading(info, folder, text.num_hidden_layers, extra)
    return model


@contextmanager
def _loading(folder: Path, name: str) -> Iterator[None]:
    """Inside: no bars, and what transformers raises becomes an ``InputError``."""
    try:
        with quiet_transformers(), redirect_stderr(StringIO()):  # some bars heed no setting
            yield
    except SpectrainError:
        raise
    except Exception as error:  # of any type: what makes no sense fails wherever it is used
        reason = " ".join(str(error).split())[:400]
        message = f"target {name} in {folder} cannot be loaded ({type(error).__name__}: {reason})"
        if not isinstance(error, OSError | ValueError | KeyError | RuntimeError | ImportError):
            message += ": a field of its config.json makes no sense"
        raise CannotLoadError(message) from error


@torch.no_grad()
def _finish_dequantising(model: nn.Module, dtype: torch.dtype) -> None:
    """Plain layers in the type asked for: some matrices of experts come out in bfloat16, and compressed-tensors leaves
    layers that round their inputs to 8 bits.
    """
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.__dict__["quantization_enabled"] = False
            module.__dict__.pop("forward", None)
    for parameter in model.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.to(dtype)


def _attention(hf_config: Any, asked: str) -> str:
    """SDPA cannot cap attention scores, and transformers leaves the cap out rather than refuse (Gemma-2): such targets
    run eagerly.
    """
    capped = getattr(hf_config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return "eager" if capped and asked == "sdpa" else asked


class _Recorder:
    """Buffers of one forward pass, filled by pre-hooks."""

    def __init__(self, shape_BS: tuple[int, ...], num_taps: int, device: torch.device) -> None:
        self._device = device
        self._shape_BS = shape_BS
        self._num_taps = num_taps
        self.last_hidden_BSH: torch.Tensor = torch.empty(0)
        self.taps_BSAH: torch.Tensor | None = None

    def last_hidden_hook(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.last_hidden_BSH = args[0]

    def tap_hook(self, slot: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden_BSH = args[0] if args else kwargs["hidden_states"]
            if self.taps_BSAH is None:
                shape = (*self._shape_BS, self._num_taps, hidden_BSH.shape[-1])
                self.taps_BSAH = hidden_BSH.new_empty(shape, device=self._device)
            # Copied at once: a later layer may change its input in place.
            self.taps_BSAH[:, :, slot] = hidden_BSH

        return hook


def choose_device(name: str) -> torch.device:
    """``auto``: cuda where there is one, else cpu. ``ConfigError`` for a device that is unknown or not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"target.device={name} is no device: use auto, cpu or cuda") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count() > 0:
        raise ConfigError(f"target.device={name}: there are {torch.cuda.device_count()} devices here, counted from 0")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"target.device={name}: no CUDA or ROCm device is available here; use target.device=cpu")
    return device


def choose_dtype(name: str, device: torch.device, spec: TargetSpec) -> torch.dtype:
    """``auto``: float32 on a CPU (16-bit types are emulated on most), the checkpoint's own type elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else spec.dtype
    return getattr(torch, name)


def _decoder_of(model: nn.Module, prefixes: Sequence[str], layers: str) -> nn.Module:
    for prefix in prefixes:
        module: Any = model
        for name in prefix.removesuffix(".").split("."):
            module = getattr(module, name, None)
        if module is not None and hasattr(module, layers):
            return module
    raise InputError(
        f"{type(model).__name__} has no decoder at {', '.join(prefixes)}: correct its entry in "
        f"spectrain/target/families.py"
    )
