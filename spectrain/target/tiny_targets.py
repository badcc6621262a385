"""Tiny random targets of every family spectrain knows, with a tokenizer and a chat template, written in a tenth of a
second: what ``run.smoke=true`` runs, and tests.

``tiny_target("qwen3", folder)`` gives a folder that ``TargetModel.load`` and vLLM alike can open; ``config_like`` the
configuration of one with the architecture of a given target. Weights are drawn from a seed, and wide enough that the
final norm's gain, logit scales and soft-caps all matter: who compares logits notices when one of them is left out.

To add a family: what its configuration needs beyond ``_BASE`` goes into ``CONFIGS``; a wrapper has a line in
``_VISION`` as well, and a switch that changes which matrices there are, a name in ``_SWITCHES``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedTokenizerFast

from spectrain.console import quiet_transformers
from spectrain.errors import InputError
from spectrain.target.model import causal_model_class

VOCAB_SIZE = 304
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "What is the capital of France? The capital of France is Paris.",
    "user assistant system",
    "Add 17 and 25, then say the sum: 42.",
    "def f(x): return x",
)

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
_SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
}
_GRANITE: dict[str, Any] = {
    "logits_scaling": 3.0,
    "embedding_multiplier": 5.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
_GEMMA4: dict[str, Any] = {
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "global_head_dim": 16,
    "num_kv_shared_layers": 2,
    "final_logit_softcapping": 3.0,
}
_TOWER: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_TOWER: dict[str, Any] = {
    **_TOWER,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_VISION: dict[str, dict[str, Any]] = {
    "gemma3": {**_TOWER, "image_size": 28, "patch_size": 14},
    "gemma4": {**_TOWER, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 8},
    "qwen3_5": _QWEN_TOWER,
    "qwen3_5_moe": _QWEN_TOWER,
    "minimax_m3_vl": {**_TOWER, "image_size": 28, "patch_size": 14},
    "kimi_k25": {**_TOWER, "pos_emb_height": 4, "pos_emb_width": 4},
}

_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "num_key_value_heads": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
_MINIMAX_M3: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "dense_intermediate_size": 48,
    "shared_intermediate_size": 16,
    "intermediate_size": 16,
    "rotary_dim": 4,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
}

# Family -> what its configuration needs beyond _BASE. Wrappers, which have a tower for images, put it into text_config.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "ministral3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"pad_token_id": 0},
    "olmo2": {},
    "smollm3": {"pad_token_id": 0},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **_SLIDING},
    "deepseek_v3": _DEEPSEEK,
    # Scores of keys pass a ReLU: with few heads most are 0, and which of equal ones are the best hangs on what else is
    # computed at once.
    "deepseek_v32": {**_DEEPSEEK, "index_n_heads": 16, "index_head_dim": 8, "index_topk": 4},
    "kimi_k25": {**_DEEPSEEK, "model_type": "kimi_k2"},
    "minimax_m3_vl": _MINIMAX_M3,
    "minimax_m3_vl_text": _MINIMAX_M3,
    "qwen2": {},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 16},
    "qwen3": {},
    "qwen3_moe": {**_MOE, "decoder_sparse_step": 1},
    "qwen3_next": {**_MOE, **_LINEAR, "shared_expert_intermediate_size": 16},
    "qwen3_5": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe": {**_MOE, **_LINEAR, "shared_expert_intermediate_size": 16},
    "qwen3_5_moe_text": {**_MOE, **_LINEAR, "shared_expert_intermediate_size": 16},
    "gemma": {},
    "gemma2": {**_SLIDING, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "gemma3": {**_SLIDING, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_SLIDING, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "gemma4": {**_SLIDING, **_GEMMA4},
    "gemma4_text": {**_SLIDING, **_GEMMA4},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, **_SLIDING},
    "granite": _GRANITE,
    "granitemoe": {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
}


# Fields that decide which matrices a layer has, and so must be as the target's that is imitated.
_SWITCHES = (
    *("attention_k_eq_v", "enable_moe_block", "use_qk_norm", "attention_bias", "final_logit_softcapping"),
    "tie_word_embeddings",
)
# Gemma-4's tables and shared keys: none where the target has none.
_OPTIONAL = ("hidden_size_per_layer_input", "num_kv_shared_layers")
_GEMMA4_MOE = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16, "num_global_key_value_heads": 1}
_LAYERS = 8  # enough for five taps


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with ChatML special tokens: any text, 304 ids at most, lossless decoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
    )


def tiny_config(family: str, **overrides: Any) -> Any:
    """A transformers configuration; ``overrides`` replace fields of the language model."""
    tokenizer = tiny_tokenizer()
    special = {
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    fields = {**_BASE, **special, **CONFIGS[family], **overrides}
    config_class = CONFIG_MAPPING[family]
    if family not in _VISION:
        return config_class(**fields)
    return config_class(
        text_config=fields, vision_config=_VISION[family], tie_word_embeddings=fields["tie_word_embeddings"]
    )


def config_like(config: Any) -> Any:
    """A tiny transformers configuration of the architecture of ``config``: its class, kinds of layers and switches,
    other sizes. ``InputError`` for a family that is not in ``CONFIGS``.
    """
    text, family = config.get_text_config(decoder=True), config.model_type
    if family not in CONFIGS:
        raise InputError(
            f"there is no tiny checkpoint of model type {family!r} to try the run on: known are {', '.join(CONFIGS)}"
        )
    fields: dict[str, Any] = {"num_hidden_layers": _LAYERS, "max_position_embeddings": 8192}
    fields |= {name: getattr(text, name) for name in _SWITCHES if getattr(text, name, None) is not None}
    fields |= {name: 0 for name in _OPTIONAL if getattr(text, name, None) == 0}
    for name in ("layer_types", "mlp_layer_types"):
        if name in CONFIGS[family]:
            fields[name] = list(getattr(text, name))[:_LAYERS]
    if family.startswith("gemma"):  # the last one attends to everything
        fields["layer_types"][-1] = "full_attention"
    if fields.get("enable_moe_block"):
        fields |= _GEMMA4_MOE
    fields["tie_word_embeddings"] = bool(config.tie_word_embeddings or fields.get("tie_word_embeddings"))
    return tiny_config(family, **fields)


def tiny_target(
    family: str,
    folder: Path,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Writes a random target of ``family`` into ``folder`` (made if need be) and returns it.

    ``overrides`` are fields of the language model's configuration, such as ``num_hidden_layers=6`` or
    ``tie_word_embeddings=True``; ``shard_size`` (say "20KB") makes a sharded checkpoint.
    """
    write_target(tiny_config(family, **overrides), folder, seed, dtype, shard_size)
    return Path(folder)


def write_target(
    config: Any, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, shard_size: str = "1GB"
) -> None:
    """Writes a random target of this configuration, with its tokenizer, into ``folder``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = causal_model_class(config).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            # Gains scatter around their initial value (0 or 1), matrices have entries near 1/√32.
            parameter.add_(0.3 * noise) if parameter.ndim == 1 else parameter.copy_(0.2 * noise)
    tokenizer = tiny_tokenizer()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    with quiet_transformers():
        model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    tokenizer.save_pretrained(folder)
