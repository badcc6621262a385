"""The tiny random targets of ``spectrain/target/tiny_targets.py``, by the short name that tests use."""

from spectrain.target.tiny_targets import CONFIGS, VOCAB_SIZE, tiny_config, tiny_target, tiny_tokenizer

__all__ = ["CONFIGS", "VOCAB_SIZE", "tiny_config", "tiny_target", "tiny_tokenizer"]
