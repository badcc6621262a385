"""The two ends of a target, alone: embedding, final norm and lm_head, read straight from its checkpoint.

Training a drafter needs the target's hidden states (from the store), its embeddings and its head, never its layers. For
Qwen3-8B that is 2.5 GB in bfloat16 instead of 16.

Shape suffixes: T tokens, H hidden, V vocabulary, D selected vocabulary. ``last_hidden`` is always the state *before*
the final norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from spectrain.config.trainer_schema import HeadPrecision
from spectrain.errors import InputError
from spectrain.target.checkpoint import CheckpointReader
from spectrain.target.families import Family, HeadMath, head_math
from spectrain.target.packed_weights import is_stored, read_weight
from spectrain.target.quantization import quantization_of
from spectrain.target.spec import TargetSpec, load_config
from spectrain.target.wide_products import tf32, wide_product

# Logits that log_normalizer holds at a time: 2²⁵ floats, 128 MiB.
_CHUNK_LOGITS = 1 << 25


class TargetHead(nn.Module):
    """Frozen. Its tensors are buffers that no state_dict contains, so it can live inside a module that is saved.

    ``lm_head_weight`` [V, H] and ``embed_weight`` [V, H] are one tensor where the target ties them; ``norm_weight`` [H]
    is as stored (see ``one_plus``).
    """

    embed_weight: torch.Tensor
    norm_weight: torch.Tensor
    _untied_weight: torch.Tensor | None
    in_tf32 = False  # whether products with a float32 head are computed in TF32

    def __init__(
        self,
        math: HeadMath,
        embed_VH: torch.Tensor,
        norm_H: torch.Tensor,
        lm_head_VH: torch.Tensor | None,
        kv_sources: Mapping[str, int] | None = None,
    ) -> None:
        """``lm_head_VH`` None: tied to the embeddings. ``kv_sources``: as ``TargetSpec.kv_sources``, of a target that
        hands out keys and values.
        """
        super().__init__()
        self.math = math
        self.kv_sources: Mapping[str, int] = kv_sources or {}
        self.register_buffer("embed_weight", embed_VH, persistent=False)
        self.register_buffer("norm_weight", norm_H, persistent=False)
        self.register_buffer("_untied_weight", lm_head_VH, persistent=False)
        for name, weight, shape in (
            ("embedding", embed_VH, (embed_VH.shape[0], math.hidden_size)),
            ("final norm", norm_H, (math.hidden_size,)),
            ("lm_head", self.lm_head_weight, (self.lm_head_weight.shape[0], math.hidden_size)),
        ):
            if tuple(weight.shape) != shape:
                raise InputError(
                    f"the target's {name} has shape {tuple(weight.shape)} where its config.json says {shape}: one of "
                    f"them is not its own"
                )

    @classmethod
    def from_checkpoint(
        cls,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
    ) -> TargetHead:
        """Reads the three tensors (two if tied) of a safetensors folder, sharded or not; nothing else is touched.

        Raises ``InputError`` that names the tensor if one is missing, and for a family whose facts are not known.
        """
        math, embed_VH, norm_H, lm_head_VH = _read_ends(folder, trust_remote_code)
        shares = math.family.hands_out_kv
        sources = TargetSpec.from_folder(folder, trust_remote_code).kv_sources() if shares else None
        own_head_VH = None if lm_head_VH is None else lm_head_VH.to(device, dtype)
        return cls(math, embed_VH.to(device, dtype), norm_H.to(device, dtype), own_head_VH, sources)

    @property
    def lm_head_weight(self) -> torch.Tensor:
        return self.embed_weight if self._untied_weight is None else self._untied_weight

    @property
    def vocab_size(self) -> int:
        return self.lm_head_weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.math.hidden_size

    @property
    def eps(self) -> float:
        return self.math.eps

    @property
    def one_plus(self) -> bool:
        """True where the final norm's gain is 1 + ``norm_weight``."""
        return self.math.family.one_plus

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] ids to [..., H] as they enter the residual stream, the family's embedding scale included
        (``embed_weight`` lacks it).
        """
        return self.math.scale_embeddings(functional.embedding(ids, self.embed_weight))

    def embed_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] ids to plain rows of ``embed_weight`` [..., H], without the family's scale: what vLLM lends to a
        drafter.
        """
        return functional.embedding(ids, self.embed_weight)

    def post_norm(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """The final norm: [..., H] to [..., H], computed in float32, in the head's own type."""
        return self.math.normalise(last_hidden, self.norm_weight)

    def hidden_to_logits(self, last_hidden: torch.Tensor, vocab_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Float32 logits [..., V], or [..., D] of the tokens ``vocab_ids`` [D]. Differentiable in ``last_hidden``."""
        weight = self.lm_head_weight if vocab_ids is None else self.lm_head_weight[vocab_ids]
        return self.transform_logits(self.product(self.post_norm(last_hidden), weight))

    def product(self, normed: torch.Tensor, rows_DH: torch.Tensor) -> torch.Tensor:
        """Raw products [..., D] of normed states and rows of ``lm_head_weight``, float32 where it is a teacher's."""
        with tf32(self.in_tf32):
            return wide_product(normed, rows_DH)

    def held_in(self, precision: HeadPrecision) -> TargetHead:
        """For training: embedding and head in this type from now on, and products in it. The norm keeps its own."""
        self.in_tf32 = precision == "tf32"
        if precision == "bfloat16":
            untied = self._untied_weight
            self.embed_weight = self.embed_weight.to(torch.bfloat16)
            self._untied_weight = None if untied is None else untied.to(torch.bfloat16)
        return self

    def transform_logits(self, raw: torch.Tensor) -> torch.Tensor:
        """Raw products with rows of ``lm_head_weight`` to float32 logits: the family's scale and soft-cap,
        elementwise.
        """
        return self.math.transform_logits(raw)

    @torch.no_grad()
    def log_normalizer(self, last_hidden_TH: torch.Tensor) -> torch.Tensor:
        """log Σ exp over the whole vocabulary, [T] float32; holds 128 MiB of logits (or one token's) at a time, never
        [T, V].
        """
        rows = max(1, _CHUNK_LOGITS // self.vocab_size)
        chunks = [self.hidden_to_logits(chunk_CH).logsumexp(-1) for chunk_CH in last_hidden_TH.split(rows)]
        return torch.cat(chunks) if chunks else last_hidden_TH.new_empty(0, dtype=torch.float32)


def check_head(folder: Path, trust_remote_code: bool = False) -> None:
    """``InputError`` if ``TargetHead.from_checkpoint`` would refuse the checkpoint; reads next to nothing."""
    _read_ends(folder, trust_remote_code)


def _read_ends(
    folder: Path, trust_remote_code: bool
) -> tuple[HeadMath, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The family's facts, embeddings [V, H], final norm [H] and lm_head [V, H], as stored, which costs no memory until
    they are used; the last None if tied.
    """
    hf_config = load_config(folder, trust_remote_code)
    math, text = head_math(hf_config), hf_config.get_text_config(decoder=True)
    reader, quantization = CheckpointReader(folder), quantization_of(hf_config, folder)
    embed, norm, lm_head = _find_tensors(reader, math.family)
    tied = any(getattr(config, "tie_word_embeddings", False) for config in (hf_config, text))
    names = [embed, norm, *([lm_head] if is_stored(reader.names, lm_head) or not tied else [])]
    tensors = [read_weight(reader, name, quantization) for name in names]
    for name, tensor in zip(names, tensors, strict=True):
        asked = (math.hidden_size,) if name == norm else (text.vocab_size, math.hidden_size)
        if tuple(tensor.shape) != asked:
            raise InputError(
                f"the checkpoint in {folder}: tensor {name} has shape {tuple(tensor.shape)}, config.json asks for "
                f"{asked}: one of them is not the other's, fetch both again"
            )
    embed_VH, norm_H, *rest = tensors
    if not rest or (tied and torch.equal(rest[0], embed_VH)):  # not stored, or stored twice
        return math, embed_VH, norm_H, None
    return math, embed_VH, norm_H, rest[0]


def _find_tensors(reader: CheckpointReader, family: Family) -> tuple[str, str, str]:
    """Names of embedding, final norm and lm_head; the last may be absent from the checkpoint, if tied."""
    embeds = [f"{prefix}{family.embeddings}.weight" for prefix in family.prefixes]
    prefix = next(
        (prefix for prefix, name in zip(family.prefixes, embeds, strict=True) if is_stored(reader.names, name)), None
    )
    if prefix is None:
        raise InputError(
            f"the checkpoint in {reader.folder} has no embedding: none of the tensors {', '.join(embeds)} is there"
        )
    lm_head = next((name for name in family.lm_heads if is_stored(reader.names, name)), family.lm_heads[0])
    norm = f"{prefix}{family.final_norm}.weight"
    for name in (norm, lm_head):
        bias = name.removesuffix("weight") + "bias"
        if bias in reader.names:
            raise InputError(f"the checkpoint in {reader.folder} has {bias}: heads with a bias are not supported")
    return f"{prefix}{family.embeddings}.weight", norm, lm_head
