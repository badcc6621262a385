"""Stage ``generate``: the target answers the prompts. Writes ``responses/``.

Responses are stored under a key made of prompt, sampling and target, so any set of prompts can be asked for later and
only what is missing is generated.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from dataclasses import asdict

from spectrain import signals
from spectrain.console import ProgressBar, say
from spectrain.data.prompts import Conversation
from spectrain.data.responses import Response, ResponseStore
from spectrain.engines.check_states import DOCUMENTS
from spectrain.engines.vllm.engine import VLLMEngine
from spectrain.stages import array_tasks
from spectrain.stages.context import Context
from spectrain.stages.run_dir import Decision, Inputs

# A part file is written after so many responses or seconds; a kill loses what is newer.
_PART_RESPONSES, _PART_S = 256, 15.0


def decide(context: Context) -> Decision:
    """Whether there is anything to generate."""
    sampling = asdict(context.sampling)
    growing = {
        **context.named_prompts,
        **{f"sampling.{name}": value for name, value in sampling.items()},
    }

    def lacking() -> str:
        stored = ResponseStore(context.data_dir.responses).key_column()
        return "" if stored.hold(context.asked.keys) else "outputs are missing"

    return context.data_dir.decide("generate", Inputs(context.target_inputs(), growing), lacking)


def generate(context: Context) -> None:
    """Answer every prompt that has no stored answer yet."""
    _set_aside_damaged(context)
    array_tasks.take_share(context)
    decision = decide(context)
    if decision.skip:
        say(str(decision))
        return
    with context.data_dir.running(decision) as outputs:
        store = ResponseStore(context.data_dir.responses)
        array_tasks.bring_responses(context)
        if array_tasks.has_work(context):
            array_tasks.merge_responses(context, store)
        missing_D = store.key_column().places_of(context.asked.keys) < 0
        if missing_D.any():  # else no prompt has to be read
            conversations = [*context.prompts.train, *context.prompts.heldout]
            asked = zip(conversations, context.splits.values(), missing_D.tolist(), strict=True)
            todo = [(conversation, split) for conversation, split, missing in asked if missing]
            if len(todo) < len(conversations) and context.sampling.temperature and context.engine.stored_together == 1:
                say(
                    "note: sampled answers that vLLM draws in other batches, as after an interruption, have the same "
                    "distribution, but need not be the same tokens"
                )
            _generate(context, store, todo, len(conversations))
        documents = context.asked.with_further(store.key_column())
        counts = store.counts(documents.keys)
        outputs |= {"responses": len(context.asked), "documents": len(documents), **counts}
        outputs |= {} if context.drawn is None else {"sources": context.drawn.record}
    made = f"{outputs['responses']} responses, {outputs['generated_tokens']:,} generated tokens"
    say(f"generate: {made}, {outputs['cut_off']} answers cut off at the limit")
    if outputs["documents"] > outputs["responses"]:
        say(
            f"note: the chat template shows earlier turns otherwise than they were answered, so a conversation's "
            f"further turns are documents of their own: {outputs['documents']:,} documents"
        )


def _set_aside_damaged(context: Context) -> None:
    """Answers of damaged parts are made again; the files are kept, for whoever can mend them."""
    if context.data_dir.writable:
        for path in ResponseStore(context.data_dir.responses).set_aside_damaged():
            part = path.with_suffix("")
            say(f"generate: {part} is damaged: its prompts are answered again, it is kept as {path.name}")


def _generate(context: Context, store: ResponseStore, todo: list[tuple[Conversation, str]], total: int) -> None:
    start_s, tokens = time.monotonic(), 0
    with ProgressBar("generate", total=total, unit="responses", done=total - len(todo)) as bar:

        def on_tokens(count: int) -> None:
            nonlocal tokens
            tokens += count
            bar.advance(0, note=f"{tokens / (time.monotonic() - start_s):,.0f} tokens/s")

        # Greedy answers do not depend on their company, beyond rounding.
        together = context.engine.stored_together if context.sampling.temperature else 1
        part = _Part(store, together, context.splits.keys())

        def keep() -> str:
            part.store()
            return f"{len(store.keys() & context.splits.keys())} of {total} responses are stored; {signals.CONTINUES}"

        try:
            with signals.keeping(keep):
                for response in _responses(context, todo, on_tokens):
                    with signals.held():
                        complete = part.add(response)
                    bar.advance(complete)
                with signals.held():
                    part.close_group()
                    part.store()
        except BaseException:
            with signals.held(), suppress(Exception):  # the first error says more
                part.store()
            raise


class _Part:
    """Responses that are not stored yet. Groups of conversations that share batches are stored whole or not at all, so
    that the batches are the same when a killed run is resumed.
    """

    def __init__(self, store: ResponseStore, together: int, conversations: Set[str]) -> None:
        self._store = store
        self._together = together
        self._conversations = conversations
        self._answered = 0
        self._group: list[Response] = []
        self._whole: list[Response] = []
        self._since_s = time.monotonic()

    def add(self, response: Response) -> int:
        """Returns how many conversations are complete with it: 1, or 0 for a further document."""
        self._group.append(response)
        if response.key not in self._conversations:
            return 0
        self._answered += 1
        if self._answered % self._together == 0:
            self.close_group()
            if len(self._whole) >= _PART_RESPONSES or time.monotonic() - self._since_s > _PART_S:
                self.store()
        return 1

    def close_group(self) -> None:
        self._whole += self._group
        self._group = []

    def store(self) -> None:
        """Write the groups that are whole."""
        self._store.append(self._whole)
        self._whole, self._since_s = [], time.monotonic()


def _responses(
    context: Context, todo: list[tuple[Conversation, str]], on_tokens: Callable[[int], None]
) -> Iterator[Response]:
    """From the engine; with ``capture.during_generation`` it leaves the hidden states of what it generates for the
    stage ``capture``.
    """
    if not context.config.capture.during_generation:
        return context.engine.generate(todo, context.sampling, on_tokens)
    from spectrain.engines.vllm.engine import OnePass

    shortest = heapq.nsmallest(
        DOCUMENTS, (conversation for conversation, _ in todo), key=lambda conversation: len(conversation.turns[0])
    )
    prompts = [
        (f"prompt {conversation.id}", context.template.first_prompt_ids(conversation)) for conversation in shortest
    ]
    one_pass = OnePass(
        context.capturing,
        context.store_meta(),
        context.config.hidden_states.shard_bytes,
        context.data_dir.hidden_states,
        prompts,
    )
    length = context.config.target.max_length
    engine = VLLMEngine(context.target, context.template, context.eos_ids, length, one_pass.open_vllm)
    return engine.generate(todo, context.sampling, on_tokens, states_for=one_pass.states_for)
