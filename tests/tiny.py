"""The tiny random targets of ``spectrain/target/tiny_targets.py``, by the short name that tests use."""

from pathlib import Path

from spectrain.target.tiny_targets import CONFIGS, VOCAB_SIZE, tiny_config, tiny_target, tiny_tokenizer

__all__ = ["CONFIGS", "VOCAB_SIZE", "smollm2_sized", "tiny_config", "tiny_target", "tiny_tokenizer"]


def smollm2_sized(folder: Path) -> Path:
    """A random target as large as SmolLM2-135M, for benches that measure seconds."""
    return tiny_target(
        "llama",
        folder,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_position_embeddings=2048,
    )
