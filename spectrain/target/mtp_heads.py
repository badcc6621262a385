"""Multi-token-prediction heads that targets bring along: where a family keeps its head in the checkpoint, and in what
order its parts compute.

A head is one decoder layer of the target's own kind between a projection of [token, hidden state] and a norm; embedding
and lm_head are the target's. Facts are those of vLLM's model files (``vllm/model_executor/models/*_mtp.py``), which is
what serves such a head: vLLM runs the first physical layer again for every draft, so that layer is the head here, and
further ones stay as they are. transformers drops these tensors on loading; they are read from the safetensors.

To add a family: an entry of ``MTP_HEADS``, and a case in ``tests/equivalence/test_mtp_families.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spectrain.errors import ConfigError, InputError
from spectrain.target.packed_weights import is_stored

_INDEXER = ".self_attn.indexer."


@dataclass(frozen=True)
class MtpHead:
    """Facts of one family. Names of tensors are those of the checkpoint behind ``prefix``, in which {N} is the number
    of the target's layers; ``layer`` is where the decoder layer's own tensors lie below it.

    ``reads_normed``: step 0 reads the target's last hidden state behind its final norm, else before it;
    ``embedding_first``: the projection reads [embedding; hidden state], else the other way round. ``feeds_normed``: the
    next step reads the normed output. ``zero_first``: the embedding at position 0 counts as zero. ``attention``: plain,
    gated (q_proj makes a gate for its heads, too) or latent (MLA). ``served_prefix``: as ``prefix``, of vLLM's modules
    where those are called otherwise; by these names they can be left unquantised. ``selects``: field of config.json
    with the number of keys that its attention reads, chosen by an indexer of its own; up to so many tokens these are
    all of them, which is what is computed here, and the indexer stays as it is.
    """

    prefix: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    output_norm: str
    layers_field: str  # of config.json: how many physical layers the head has
    layer: str = ""
    reads_normed: bool = True
    embedding_first: bool = True
    feeds_normed: bool = True
    zero_first: bool = True
    attention: str = "plain"
    qk_norm: bool = False  # always; else where config.json says so
    attention_bias: bool = False  # of q, k and v, always; else where config.json says so
    served_prefix: str = ""
    selects: str = ""

    def served_name(self, name: str, num_layers: int) -> str:
        """What vLLM calls a module of the checkpoint."""
        start = self.start(num_layers)
        served = (self.served_prefix or self.prefix).format(N=num_layers)
        return served + name.removeprefix(start)

    def stays(self, name: str) -> bool:
        """Whether a tensor of the layer is neither trained nor written: of an indexer."""
        return bool(self.selects) and _INDEXER in name

    @property
    def kept_part(self) -> str:
        """Below the prefix, the beginning of names of what ``stays``; empty: nothing does."""
        return f"{self.layer}{_INDEXER.removeprefix('.')}" if self.selects else ""

    def start(self, num_layers: int) -> str:
        """What the names of all its tensors begin with."""
        return self.prefix.format(N=num_layers)

    def found_in(self, names: Collection[str], num_layers: int) -> bool:
        """Whether a checkpoint with tensors of these names has such a head, packed or not."""
        return is_stored(names, f"{self.start(num_layers)}{self.projection}.weight")


_QWEN = MtpHead(
    prefix="mtp.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    output_norm="norm",
    layers_field="mtp_num_hidden_layers",
    layer="layers.0.",
    zero_first=False,
    attention="gated",
    qk_norm=True,
)
_QWEN_NEXT = replace(_QWEN, layers_field="num_nextn_predict_layers")
# GLM-4 is fed back the state before its norm, DeepSeek the one behind it: vLLM's files, which serve them, say so.
_DEEPSEEK = MtpHead(
    prefix="model.layers.{N}.",
    embedding_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    output_norm="shared_head.norm",
    layers_field="num_nextn_predict_layers",
    attention="latent",
)
_DEEPSEEK_SPARSE = replace(_DEEPSEEK, selects="index_topk")
_GLM = replace(_DEEPSEEK, attention="plain", feeds_normed=False)
_MIMO = MtpHead(
    prefix="model.mtp_layers.0.",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    output_norm="final_layernorm",
    layers_field="num_nextn_predict_layers",
    reads_normed=False,  # vLLM's MiMo gives its head what its layers give, and norms for its own logits alone
    embedding_first=False,
    attention_bias=True,
    served_prefix="model.layers.{N}.",
)

# Keyed by the language model's model_type, as ``families.FAMILIES``, or by the architecture where that says more.
MTP_HEADS: dict[str, MtpHead] = {
    "mimo": _MIMO,
    "MiMoForCausalLM": _MIMO,
    "qwen3_next": _QWEN_NEXT,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "glm4_moe": _GLM,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK_SPARSE,
}


def mtp_family(model_type: str, architectures: Iterable[str]) -> str:
    """The key of ``MTP_HEADS`` for a target. ConfigError for a family whose heads nothing is known of."""
    for name in (*architectures, model_type):
        if name in MTP_HEADS:
            return name
    known = ", ".join(sorted({key for key in MTP_HEADS if key.islower()}))
    raise ConfigError(
        f"drafter=mtp: targets of model type {model_type!r} have no multi-token-prediction head that is known here "
        f"(known are {known}): use another drafter, such as drafter=eagle3"
    )


def require_head(family: str, names: Collection[str], num_layers: int, where: str) -> None:
    """InputError if the checkpoint has no head to tune. ``where``: its folder."""
    head = MTP_HEADS[family]
    if not head.found_in(names, num_layers):
        raise InputError(
            f"the checkpoint in {where} has no multi-token-prediction head ({head.start(num_layers)}{head.projection}"
            f".weight is not there): start a new one from the target's last layer with drafter.init=last_layer, or use "
            f"a checkpoint with its head"
        )


def attention_sizes(family: str, text: Mapping[str, Any]) -> tuple[int, int, int]:
    """(size of a head as queries and keys have it, dimensions of it that turn, key-value heads) of the head's layer.
    ``text``: fields of the language model's configuration.
    """
    heads = int(text["num_attention_heads"])
    if MTP_HEADS[family].attention == "latent":
        turned = int(text["qk_rope_head_dim"])
        return int(text["qk_nope_head_dim"]) + turned, turned, heads
    size = int(text.get("head_dim") or text["hidden_size"] // heads)
    rope = text.get("rope_parameters") or {}
    share = float(rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1.0)
    return size, int(size * share), int(text.get("num_key_value_heads") or heads)
