"""The embedded engine: the target in this process, run by transformers. No server, no network; one CPU or one GPU.

Generation is in ``hf_generate.py``, capture in ``hf_capture.py``; here they get what they need to know of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from spectrain.config.schema import EngineConfig
from spectrain.data.chat import ChatTemplate
from spectrain.data.hidden_states import TargetStates
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, Sampling, response_key
from spectrain.engines.hf_capture import capture_states
from spectrain.engines.hf_generate import ResponseGenerator
from spectrain.target.end_tokens import end_token_ids
from spectrain.target.head import TargetHead
from spectrain.target.model import TargetModel
from spectrain.target.resolve import ResolvedTarget


class HFEngine:
    """``Engine`` on a loaded target. ``max_length`` bounds prompt and answers together, in tokens
    (``target.max_length``).
    """

    def __init__(self, target: TargetModel, resolved: ResolvedTarget, config: EngineConfig, max_length: int) -> None:
        self.target = target
        self.resolved = resolved
        self.config = config
        self.max_length = max_length
        self.end_ids = end_token_ids(target.tokenizer, target.generation_config)
        self.template = ChatTemplate(target.tokenizer, self.end_ids)

    def response_key(self, conversation: Conversation, sampling: Sampling) -> str:
        return response_key(conversation, sampling, self.resolved.id, self.resolved.revision)

    def generate(
        self,
        conversations: Sequence[tuple[Conversation, str]],
        sampling: Sampling,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Iterator[Response]:
        limits = (self.max_length, self.config.batch_size, self.config.capture_tokens)
        generator = ResponseGenerator(self.target, self.template, self.end_ids, sampling, *limits, on_tokens)
        keys = [self.response_key(conversation, sampling) for conversation, _ in conversations]
        return generator.run(generator.prepare(conversations, keys))

    def capture(
        self, responses: Sequence[Response], tap_ids: Sequence[int], states_dtype: str = "float32"
    ) -> Iterator[TargetStates]:
        # The trainer's head, not the model's: the log-normalizer must be that of the logits the trainer will compute.
        head = TargetHead.from_checkpoint(self.resolved.folder, dtype=torch.float32, device=self.target.device)
        return capture_states(self.target, head, responses, tuple(tap_ids), self.config.capture_tokens, states_dtype)
