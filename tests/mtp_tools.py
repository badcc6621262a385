"""Tiny targets with multi-token-prediction heads, and a head's arithmetic written a second time: transformers' own
decoder layer, run over whole sequences, with names and order of each family by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from small_targets import MOTIFS, capture, periodic_text
from tiny import VOCAB_SIZE, tiny_target, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from spectrain.config.drafter_schema import AutoregressiveConfig, DrafterConfig
from spectrain.data.hidden_states import TargetStates
from spectrain.data.vocab import full_vocab
from spectrain.drafters.autoregressive.mtp import Mtp
from spectrain.drafters.build import build_drafter
from spectrain.target.families import head_math
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel
from spectrain.target.smoke_targets import add_mtp_head, change_config
from spectrain.target.spec import TargetSpec


@dataclass(frozen=True)
class Facts:
    """Of one family, as its model card and vLLM's model file say: prefix of the head, of its layer below it, norms of
    token, hidden state and output, projection, whether the token comes first in it, whether its output is normed before
    it is fed back, whether the token at position 0 counts as zero, and whether the target's state is read behind its
    norm.
    """

    prefix: str
    layer: str
    token_norm: str
    hidden_norm: str
    output_norm: str
    projection: str
    token_first: bool
    feeds_normed: bool
    zero_first: bool
    reads_normed: bool = True


_QWEN = Facts("mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc", True, True, False)
_DEEPSEEK = Facts("model.layers.4.", "", "enorm", "hnorm", "shared_head.norm", "eh_proj", True, True, True)
_GLM = Facts("model.layers.4.", "", "enorm", "hnorm", "shared_head.norm", "eh_proj", True, False, True)
_MIMO = Facts(
    "model.mtp_layers.0.",
    "",
    "token_layernorm",
    "hidden_layernorm",
    "final_layernorm",
    "input_proj",
    *(False, True, True, False),
)
FACTS: dict[str, Facts] = {
    "mimo": _MIMO,
    "qwen3_next": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "glm4_moe": _GLM,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
}
# Tensors of the layer that stay as they are.
KEPT = ".self_attn.indexer."
# Half of each head turns; yarn as DeepSeek has it.
EXTRA: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    },
    "deepseek_v32": {"index_topk": 64},  # keys that its attention reads: more than a text here has
}


def mtp_target(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """A tiny target with a head. MiMo is Qwen2 but for its architecture."""
    known = "qwen2" if family == "mimo" else family
    tiny_target(known, folder, seed=seed, **{**EXTRA.get(family, {}), **overrides})
    if family == "mimo":
        change_config(folder, architectures=["MiMoForCausalLM"])
    add_mtp_head(folder, seed)
    return folder


def questions(numbers: Iterable[int]) -> list[list[int]]:
    """Prompts, as a server renders them."""
    tokenizer = tiny_tokenizer()
    messages = [[{"role": "user", "content": f"Tell me about number {number}."}] for number in numbers]
    return [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in messages]


def taught_target(family: str, folder: Path, steps: int = 80, **overrides: Any) -> Path:
    """``mtp_target``, whose target has learned in some seconds to answer in periods (``periodic_text``). So there is
    something that its head, which was not taught, can be tuned to, and rounding changes no token.
    """
    tiny_target("qwen2" if family == "mimo" else family, folder, **{**EXTRA.get(family, {}), **overrides})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = [ids + periodic_text(n % len(MOTIFS), 0, 40) for n, ids in enumerate(questions(range(10, 34)))]
    ids = torch.tensor([text[: min(map(len, texts))] for text in texts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    if family == "mimo":
        change_config(folder, architectures=["MiMoForCausalLM"])
    add_mtp_head(folder)
    return folder


@dataclass
class MtpTarget:
    """A target with a head, loaded."""

    family: str
    folder: Path
    dtype: torch.dtype = torch.float64

    @cached_property
    def model(self) -> TargetModel:
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype, experts_implementation="eager")
        return TargetModel(model, tiny_tokenizer(), self.spec, head_math(model.config))

    @cached_property
    def spec(self) -> TargetSpec:
        return TargetSpec.from_folder(self.folder)

    @cached_property
    def head(self) -> TargetHead:
        return TargetHead.from_checkpoint(self.folder, dtype=self.dtype)

    def drafter(self, steps: int = 3, init: Any = "target", attention: Any = "auto") -> Mtp:
        config = DrafterConfig(
            "mtp", init=init, attention=attention, autoregressive=AutoregressiveConfig(ttt_steps=steps)
        )
        found = build_drafter(config, self.spec, full_vocab(self.spec.vocab_size), self.head, self.folder)
        assert isinstance(found, Mtp)
        found.to(self.dtype).eval()
        return found

    def document(self, mask: str, seed: int) -> TargetStates:
        """Random tokens with this loss mask, and what the target computes there."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, min(VOCAB_SIZE, self.spec.vocab_size), (len(mask),), generator=generator).tolist()
        states = capture(self.model, ids[:1], ids[1:], (), f"{mask}-{seed}", "train")
        states.loss_mask.copy_(torch.tensor([int(one) for one in mask], dtype=torch.uint8))
        return states


@dataclass
class Chain:
    """What a draft computes, step by step."""

    normed: list[Tensor]
    tokens: list[int]


class MtpReference:
    """A head computed by transformers' decoder layer over the whole sequence of columns at every step."""

    def __init__(self, target: MtpTarget) -> None:
        self.facts, hf = FACTS[target.family], target.model.model
        decoder: Any = hf.get_decoder()
        kinds = getattr(decoder.config, "layer_types", None) or ["full_attention"] * len(decoder.layers)
        last = max(index for index, kind in enumerate(kinds) if kind in ("full_attention", "indexed_attention"))
        self.layer = copy.deepcopy(decoder.layers[last])
        self.rotary, self.norm, self.hf = decoder.rotary_emb, copy.deepcopy(decoder.norm), hf
        stored = {
            name.removeprefix(self.facts.prefix): tensor.to(target.dtype)
            for name, tensor in load_file(target.folder / "model.safetensors").items()
            if name.startswith(self.facts.prefix)
        }
        start = self.facts.layer
        state = {name: self._found(stored, start + name) for name in self.layer.state_dict()}
        self.layer.load_state_dict(state)
        self.gains = {
            name: stored[f"{getattr(self.facts, name)}.weight"] for name in ("token_norm", "hidden_norm", "output_norm")
        }
        self.projection_HI = stored[f"{self.facts.projection}.weight"]
        self.config = decoder.config
        self.config._attn_implementation = "eager"

    @staticmethod
    def _found(stored: dict[str, Tensor], name: str) -> Tensor:
        """Experts are stored one by one, and stacked in transformers."""
        if name in stored:
            return stored[name]
        start, _, last = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
        count = len({key.split(".experts.")[1].split(".")[0] for key in stored if key.startswith(start)})
        return torch.stack([torch.cat([stored[f"{start}.{e}.{part}.weight"] for part in parts]) for e in range(count)])

    def _normed(self, x: Tensor, gain: str) -> Tensor:
        self.norm.weight.data = self.gains[gain]
        return self.norm(x)

    def _column(self, hidden_H: Tensor, token: int, position: int) -> Tensor:
        embedding_H = self.hf.get_input_embeddings().weight[token]
        if self.facts.zero_first and position == 0:
            embedding_H = torch.zeros_like(embedding_H)
        token_H, hidden_H = self._normed(embedding_H, "token_norm"), self._normed(hidden_H, "hidden_norm")
        both = [token_H, hidden_H] if self.facts.token_first else [hidden_H, token_H]
        return self.projection_HI @ torch.cat(both)

    @torch.no_grad()
    def chain(self, ids: list[int], hidden_SH: Tensor, steps: int, drafts: list[int] | None = None) -> Chain:
        """The draft behind ``ids``, whose last token is the anchor. ``hidden_SH``: the target's last hidden states
        before its norm. ``drafts``: what the drafted tokens are, the greedy ones where they are not given.
        """
        feature_SH = self.hf.get_decoder().norm(hidden_SH) if self.facts.reads_normed else hidden_SH
        columns = [self._column(feature_SH[t], ids[t + 1], t) for t in range(len(ids) - 1)]
        normed: list[Tensor] = []
        tokens: list[int] = []
        for step in range(steps):
            out_H = self._layer(torch.stack(columns))[-1]
            normed.append(self._normed(out_H, "output_norm"))
            logits = self.hf.get_output_embeddings().weight @ normed[-1]
            tokens.append(int(logits.argmax()) if drafts is None or step >= len(drafts) else drafts[step])
            fed = normed[-1] if self.facts.feeds_normed else out_H
            columns.append(self._column(fed, tokens[-1], len(columns)))
        return Chain(normed, tokens)

    def _layer(self, stream_SH: Tensor) -> Tensor:
        length = len(stream_SH)
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf"), dtype=stream_SH.dtype).triu(1)[None, None]
        out = self.layer(
            stream_SH[None],
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.rotary(stream_SH[None], positions),
        )
        return (out[0] if isinstance(out, tuple) else out)[0]
