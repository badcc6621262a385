"""Single tensors of a checkpoint in full precision, whatever they are stored in: ``read_weight`` is what all copies of
a target's weights go through (its head, layers that a drafter begins with, heads that draft).

Matrices whose codes share words are read here: packed integers (compressed-tensors, GPTQ, AWQ) and four-bit floats
(ModelOpt, compressed-tensors), with a scale for each group of a row.

Only what is written down here is read. A scheme that has more (zero points of GPTQ, another order of columns, a matrix
that inputs are multiplied by) is refused by its name: half of it would give weights that look right and are not.

Legend: N outputs and K inputs of a matrix, G groups of inputs, W words of a row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from spectrain.errors import InputError
from spectrain.target.checkpoint import CheckpointReader
from spectrain.target.quantization import Quantization, full_precision, power_of_two

# What lies beside the codes of a matrix, by their name. A bias is read by itself; scales of activations and of a K/V
# cache do not change weights.
_BESIDE = frozenset(
    {"bias", "input_scale", "input_global_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale"}
)
_PARTS = {
    "weight": frozenset({"weight_scale", "weight_scale_2"}),
    "weight_packed": frozenset({"weight_scale", "weight_global_scale", "weight_shape", "weight_zero_point"}),
    "qweight": frozenset({"qzeros", "scales", "g_idx"}),
}
_NUMBERS = ("weight_shape", "g_idx")  # parts whose numbers decide whether a matrix can be read
_SCALES = frozenset({torch.float8_e4m3fn, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64})
_ENDS_REMEDY = "use a checkpoint whose embeddings and head have 16 or 32 bits"
# The sixteen values of a four-bit float (E2M1: OCP MX 1.0, section 5.3.3), by code.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_FLOAT_GROUPS = {torch.float8_e4m3fn: 16, torch.uint8: 32}  # NVFP4 and MXFP4, by the type of their scales
_WORD_BITS = 32
_GPTQ_BITS = (2, 4, 8)  # three bits lie across words
# Where AWQ's kernels look for the eight outputs of a word, as places of four bits.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_ROWS = 1 << 13  # dequantised at a time: bounds what is held beside the result


class ShapesReader(CheckpointReader):
    """A checkpoint whose matrices have shapes and no numbers (meta tensors). What is read of it costs next to nothing,
    and is refused where it would be refused of the whole.
    """

    def get(self, name: str) -> Tensor:
        tensor = super().get(name)
        return tensor if name.endswith(_NUMBERS) else tensor.to("meta")


def is_stored(names: Collection[str], name: str) -> bool:
    """Whether the checkpoint has the matrix ``name`` (that ends with ``weight``), whatever its codes are called."""
    return any(_module(name) + codes in names for codes in _PARTS)


def scheme_of(quantization: Quantization | None) -> str:
    """What a person would call it."""
    return "a scheme that config.json does not name" if quantization is None else quantization.name


class NotReadError(InputError):
    """A tensor in a scheme that is not read here: ``what`` it is, and what to do."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}: {remedy}")
        self.what = what


def read_weight(
    reader: CheckpointReader, name: str, quantization: Quantization | None, remedy: str = _ENDS_REMEDY
) -> Tensor:
    """What the tensors of ``name`` stand for, a matrix [N, K] or a tensor of another shape that is not packed: as
    stored where it is in 16 bits or more, else float32.

    Raises ``InputError`` where it is missing or damaged, ``NotReadError`` where it is quantised in a way that is not
    read here. ``remedy``: what to do then.
    """
    parts = _parts(reader, name)
    found = full_precision(reader, name, quantization) if name in reader.names or not parts else None
    if found is None:
        found = _dequantised(reader, parts, quantization)
    if found is None:
        what = f"tensor {name} in {reader.folder} is quantised by {scheme_of(quantization)}{_more_to_it(reader, parts)}"
        raise NotReadError(f"{what}, which is not read here", remedy)
    return found


def _module(name: str) -> str:
    return name.removesuffix("weight")


def _parts(reader: CheckpointReader, name: str) -> dict[str, str]:
    """Part -> name of the tensors that make the matrix ``name``."""
    if not name.endswith(".weight"):
        return {}
    module = _module(name)
    found = {one.removeprefix(module): one for one in reader.of_module(module.removesuffix("."))}
    return {part: one for part, one in found.items() if part not in _BESIDE}


def _more_to_it(reader: CheckpointReader, parts: Mapping[str, str]) -> str:
    """What, of the parts of a matrix, is not read: an order of its columns, or parts that are not known."""
    codes = next((one for one in _PARTS if one in parts), None)
    if codes is None:
        return ""
    more = sorted(set(parts) - {codes} - _PARTS[codes])
    if {"g_idx", "scales"} <= set(parts) and not _in_order(
        reader.get(parts["g_idx"]), len(reader.get(parts["scales"]))
    ):
        more.append("g_idx: columns in an order of their own")
    return f" with {', '.join(more)}" if more else ""


def _dequantised(
    reader: CheckpointReader, parts: Mapping[str, str], quantization: Quantization | None
) -> Tensor | None:
    codes = next((one for one in _PARTS if one in parts), None)
    if codes is None or quantization is None or not quantization.scales_alone:
        return None
    if not set(parts) <= {codes} | _PARTS[codes]:
        return None
    tensors = {part: reader.get(name) for part, name in parts.items()}
    for part, tensor in tensors.items():
        problem = _problem(part, tensor, is_codes=part == codes)
        if problem:
            raise InputError(
                f"tensor {parts[part]} in {reader.folder} {problem}: the checkpoint is damaged, or is not what "
                f"config.json says ({quantization.name})"
            )
    if codes == "qweight":
        return _gptq(tensors, quantization) if quantization.is_gptq else _awq(tensors, quantization)
    return _floats(tensors, codes) if tensors[codes].dtype == torch.uint8 else _integers(tensors, quantization)


def _problem(part: str, tensor: Tensor, is_codes: bool) -> str:
    """What no scheme's part is: codes in no matrix, scales that are no numbers."""
    if part in _NUMBERS:
        fits = tensor.ndim == 1 and tensor.dtype in (torch.int32, torch.int64)
    elif is_codes:
        fits = tensor.ndim == 2
    elif part in ("qzeros", "weight_zero_point"):
        fits = tensor.ndim == 2 and tensor.dtype == torch.int32
    else:
        fits = tensor.dtype in _SCALES and (tensor.ndim == 2 or part != "scales")
    if not fits or not tensor.numel():
        return f"is of type {tensor.dtype} and of shape {tuple(tensor.shape)}"
    if is_codes or tensor.is_meta or tensor.dtype not in _SCALES:
        return ""
    scale = power_of_two(tensor) if tensor.dtype == torch.uint8 else tensor.float()
    return "" if scale.isfinite().all() else "holds values that are not finite"


def _integers(tensors: Mapping[str, Tensor], quantization: Quantization) -> Tensor | None:
    """``pack-quantized``: the first code of a word in its lowest bits; a row's last word may not be full."""
    packed_NW, scale, shape = (tensors.get(f"weight_{part}") for part in ("packed", "scale", "shape"))
    if packed_NW is None or scale is None or shape is None or packed_NW.dtype != torch.int32 or shape.numel() != 2:
        return None
    outputs, inputs = shape.tolist()
    fitting = [bits for bits in quantization.integer_bits if _words(inputs, bits) == packed_NW.shape[-1]]
    if len(fitting) != 1 or packed_NW.shape[0] != outputs:
        return None
    scale_NG = scale.reshape(1, 1).expand(outputs, 1) if scale.numel() == 1 else scale
    group = _group(scale_NG, (outputs, inputs), quantization.groups_of(inputs))
    if group is None:
        return None
    zero_NG: Tensor | int = 1 << (fitting[0] - 1)
    if quantization.zero_points not in (None, "weight_zero_point" in tensors):
        return None
    if "weight_zero_point" in tensors:  # packed as the codes are, along the outputs
        packed_WG = tensors["weight_zero_point"]
        if packed_WG.dtype != torch.int32 or packed_WG.shape != (_words(outputs, fitting[0]), scale_NG.shape[1]):
            return None
        zero_NG = _unpacked(packed_WG.T, fitting[0], outputs).T
    return _scaled(_unpacked(packed_NW, fitting[0], inputs), scale_NG, group, zero_NG)


def _gptq(tensors: Mapping[str, Tensor], quantization: Quantization) -> Tensor | None:
    """Words of inputs, an output each column; the zero point is the middle of the codes, as ``sym`` says."""
    words_WN, scale_GN, zeros_GW = (tensors.get(part) for part in ("qweight", "scales", "qzeros"))
    if words_WN is None or scale_GN is None or zeros_GW is None or not quantization.symmetric:
        return None
    outputs = scale_GN.shape[1]
    bits = next((bits for bits in _GPTQ_BITS if _words(outputs, bits) == zeros_GW.shape[1]), None)
    if bits is None or words_WN.dtype != torch.int32 or words_WN.shape[1] != outputs:
        return None
    inputs = words_WN.shape[0] * _WORD_BITS // bits
    group = _group(scale_GN.T, (outputs, inputs), _described(quantization, inputs, scale_GN.shape[0]))
    order = tensors.get("g_idx")
    if group is None or (order is not None and not _in_order(order, scale_GN.shape[0])):
        return None
    return _scaled(_unpacked(words_WN.T, bits, inputs), scale_GN.T, group, 1 << (bits - 1))


def _in_order(group_K: Tensor, groups: int) -> bool:
    """Whether the group of each input is what it is without ``desc_act``."""
    inputs = len(group_K)
    return torch.equal(group_K.long(), torch.arange(inputs) // -(-inputs // groups))


def _awq(tensors: Mapping[str, Tensor], quantization: Quantization) -> Tensor | None:
    """Words of eight outputs, in an order of their own, an input each row (version ``gemm``)."""
    words_KW, scale_GN, zeros_GW = (tensors.get(part) for part in ("qweight", "scales", "qzeros"))
    if words_KW is None or scale_GN is None or zeros_GW is None or not quantization.is_awq_gemm:
        return None
    inputs, outputs = words_KW.shape[0], scale_GN.shape[1]
    group = _group(scale_GN.T, (outputs, inputs), _described(quantization, inputs, scale_GN.shape[0]))
    if group is None or words_KW.dtype != torch.int32 or words_KW.shape[1] * 8 != outputs:
        return None
    if zeros_GW.shape != (scale_GN.shape[0], words_KW.shape[1]):
        return None
    codes_KN, zero_GN = (_unpacked(words, 4, outputs, _AWQ_PLACES) for words in (words_KW, zeros_GW))
    return _scaled(codes_KN.T.contiguous(), scale_GN.T, group, zero_GN.T)


def _floats(tensors: Mapping[str, Tensor], codes: str) -> Tensor | None:
    """NVFP4 and MXFP4: two codes a byte, the first in the lower half. Of NVFP4 a scale of a group goes with one of the
    matrix, which ModelOpt multiplies by and compressed-tensors divides by.
    """
    scale_NG, divisor, factor = (tensors.get(f"weight_{part}") for part in ("scale", "global_scale", "scale_2"))
    if scale_NG is None or scale_NG.dtype not in _FLOAT_GROUPS or "weight_zero_point" in tensors:
        return None
    packed = tensors[codes]
    shape = (packed.shape[0], packed.shape[-1] * 2)
    group = _group(scale_NG, shape, (_FLOAT_GROUPS[scale_NG.dtype],))
    of_matrix = factor if divisor is None else divisor
    if group != _FLOAT_GROUPS[scale_NG.dtype] or (of_matrix is None) != (scale_NG.dtype == torch.uint8):
        return None
    if of_matrix is not None and of_matrix.numel() != 1:
        return None
    scale_NG = power_of_two(scale_NG) if scale_NG.dtype == torch.uint8 else scale_NG.float()
    scale_NG = scale_NG if factor is None else scale_NG * factor.float()
    scale_NG = scale_NG if divisor is None else scale_NG / divisor.float()
    codes_NK = torch.stack((packed & 0xF, packed >> 4), -1).view(shape)
    return _scaled(codes_NK, scale_NG, group, 0, _E2M1)


def _words(codes: int, bits: int) -> int:
    """That so many codes take, as many whole ones in each word as there is room for."""
    return -(-codes // (_WORD_BITS // bits))


def _unpacked(words_RW: Tensor, bits: int, count: int, places: tuple[int, ...] = ()) -> Tensor:
    """``count`` codes [R, count] of 8 bits out of words [R, W] of 32. ``places``: where in a word its codes lie, the
    lowest bits being 0; in order if empty.
    """
    in_word = _WORD_BITS // bits
    codes = words_RW.new_empty((words_RW.shape[0], words_RW.shape[1] * in_word), dtype=torch.uint8)
    for index, place in enumerate(places or tuple(range(in_word))):
        codes[:, index::in_word] = (words_RW >> (bits * place)) & ((1 << bits) - 1)
    return codes[:, :count]


def _group(scale_NG: Tensor, shape: tuple[int, int], sizes: Collection[int]) -> int | None:
    """How many inputs share a scale; None if the scales do not fit a matrix of this shape [N, K]."""
    outputs, inputs = shape
    if scale_NG.ndim != 2 or scale_NG.shape[0] != outputs:
        return None
    fitting = {size for size in sizes if size > 0 and -(-inputs // size) == scale_NG.shape[1]}
    return fitting.pop() if len(fitting) == 1 else None


def _described(quantization: Quantization, inputs: int, groups: int) -> tuple[int, ...]:
    """Sizes of groups of GPTQ and AWQ: what config.json says, else what the number of groups says."""
    size = quantization.group_size
    return (inputs // groups if size is None else inputs if size == -1 else size,)


def _scaled(
    codes_NK: Tensor, scale_NG: Tensor, group: int, zero_NG: Tensor | int, values: Tensor | None = None
) -> Tensor:
    """(value of the code - zero) · scale, float32 [N, K]. ``values``: by code; the codes themselves if None."""
    inputs, result = codes_NK.shape[1], torch.empty(codes_NK.shape, dtype=torch.float32, device=codes_NK.device)
    values = None if values is None else values.to(codes_NK.device)
    for start in range(0, codes_NK.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        part = codes_NK[rows].float() if values is None else values[codes_NK[rows].int()]
        zero = zero_NG if isinstance(zero_NG, int) else _spread(zero_NG[rows], group, inputs)
        result[rows] = (part - zero) * _spread(scale_NG[rows], group, inputs)
    return result


def _spread(of_group_NG: Tensor, group: int, inputs: int) -> Tensor:
    return of_group_NG.float().repeat_interleave(group, 1)[:, :inputs]
