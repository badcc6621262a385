"""What a command would do and cost, before it starts: ``spectrain plan`` and ``--dry-run``.

Estimates are simple on purpose: tokens from characters and limits, disk and memory from shapes, time from counted
floating-point operations over the speed of this machine, measured for a blink. They are right within a factor of two or
so, which is what one needs to decide between an afternoon and a week.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from spectrain.config.schema import EngineConfig
from spectrain.console import say, stdout
from spectrain.data.hidden_states import StoreMeta, bytes_per_token
from spectrain.data.prompts import Conversation
from spectrain.files import bytes_text, free_bytes
from spectrain.stages.context import Context
from spectrain.stages.run_dir import Decision
from spectrain.target.spec import TargetSpec

if TYPE_CHECKING:
    from spectrain.drafters.registry import TrainingCost

_CHARS_PER_TOKEN = 3.5
_TEMPLATE_TOKENS = 16  # of a turn
_VLLM_SEQUENCES = 256  # requests that vLLM runs together where nobody says
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Shares of the measured peak that a stage reaches. Decoding is bound by reading weights rather than by arithmetic, see
# _decode_s.
_FORWARD_SHARE, _TRAIN_SHARE = 0.6, 0.5


@dataclass(frozen=True)
class Estimate:
    """Upper bounds of tokens and bytes, rough seconds. None where prompts or the target's dimensions are not known."""

    documents: int
    tokens: int  # of all responses, prompts included
    generated_tokens: int
    states_bytes: int
    target_bytes: int
    drafter_parameters: int  # entries of its matrices, its own head included if the vocabulary is reduced
    train_bytes: int
    training_cost: TrainingCost


def estimate(context: Context) -> Estimate:
    """Counts from the prompts, the configuration and the target's dimensions; no weights, no tokenizer."""
    config, spec = context.config, context.spec
    conversations = [*context.prompts.train, *context.prompts.heldout]
    lengths = [_tokens(conversation, config.sampling.max_new_tokens) for conversation in conversations]
    tokens = most_tokens(context, conversations)
    matrices = _matrices(context)
    drafter = sum(matrices.values())
    generated = sum(answer for _, answer in lengths)
    cost = _training_cost(context, matrices, tokens, generated)
    # Weights, gradients and two moments in float32.
    head_bytes = 4 * spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)
    return Estimate(
        documents=len(conversations),
        tokens=tokens,
        generated_tokens=generated,
        states_bytes=states_bytes(context, conversations),
        target_bytes=target_parameters(spec) * _DTYPE_BYTES.get(context.dtype_name, 4),
        drafter_parameters=drafter,
        train_bytes=16 * drafter + int(_activation_bytes(context, cost)) + head_bytes,
        training_cost=cost,
    )


def most_tokens(context: Context, conversations: Iterable[Conversation]) -> int:
    """That these conversations have with their answers, at most."""
    lengths = (_tokens(conversation, context.config.sampling.max_new_tokens) for conversation in conversations)
    return sum(min(prompt + answer, context.config.target.max_length) for prompt, answer in lengths)


def states_bytes(context: Context, conversations: Iterable[Conversation]) -> int:
    """That their hidden states take, at most."""
    return most_tokens(context, conversations) * bytes_per_token(_meta(context))


def _activation_bytes(context: Context, cost: TrainingCost) -> float:
    """Of one forward pass: the batch's taps, and what the drafter's layers keep for their backward pass. Logits are
    made by tiles.
    """
    config, spec = context.config, context.spec
    drafter, tokens = config.drafter, config.trainer.packed_length * config.trainer.micro_batch_size
    # Rows kept in a layer: four as wide as the stream, queries and heads, keys and values, and three of the MLP.
    heads = 2 * spec.head_dim * (spec.num_attention_heads + spec.num_key_value_heads)
    layer = 4 * spec.hidden_size + heads + 3 * (drafter.intermediate_size or spec.intermediate_size)
    kept = cost.batch_outputs * drafter.num_layers * layer * _DTYPE_BYTES[config.trainer.precision]
    return tokens * 4 * spec.hidden_size * (len(context.taps) + 1) + kept


def target_parameters(spec: TargetSpec) -> int:
    """Parameters of a dense decoder of these dimensions (experts beyond the first are not counted)."""
    return spec.num_layers * _layer_parameters(spec, spec.hidden_size) + spec.vocab_size * spec.hidden_size * (
        1 if spec.tie_word_embeddings else 2
    )


def _matrices(context: Context) -> dict[str, int]:
    """Name -> entries of each matrix of the drafter."""
    import torch

    from spectrain.drafters.registry import find_method

    method = find_method(context.config.drafter.method)
    with torch.device("meta"):
        body = method.body(method.shape(context.config.drafter, context.spec))
    return {name: p.numel() for name, p in body.named_parameters() if p.ndim > 1}


def _training_cost(context: Context, matrices: Mapping[str, int], tokens: int, generated_tokens: int) -> TrainingCost:
    from spectrain.drafters.registry import CorpusSize, find_method

    config, corpus = context.config, CorpusSize(tokens, generated_tokens)
    return find_method(config.drafter.method).training_cost(config.drafter, config.trainer, matrices, corpus)


def _fit_flops(context: Context, numbers: Estimate) -> float:
    """Of one epoch over all documents: a multiply-add is two operations forward, and four backward where a matrix is
    trained.

    The head meets each output (twice forward, as its logits are made anew for the backward pass, and once backward),
    and once each token whose distribution is the teacher's. Tables that are looked up cost nothing.
    """
    drafter, cost = context.config.drafter, numbers.training_cost
    vocabulary = (drafter.draft_vocab_size or context.spec.vocab_size) * context.spec.hidden_size
    layers = 6 * (cost.token_entries * numbers.tokens + cost.output_entries * cost.outputs)
    return layers + 2 * vocabulary * (3 * cost.outputs + numbers.generated_tokens)


def _layer_parameters(spec: TargetSpec, input_size: int) -> int:
    attention = (
        input_size * spec.head_dim * (spec.num_attention_heads + 2 * spec.num_key_value_heads)
        + spec.num_attention_heads * spec.head_dim * spec.hidden_size
    )
    return attention + 3 * spec.hidden_size * spec.intermediate_size


def _tokens(conversation: Conversation, max_new_tokens: int) -> tuple[int, int]:
    """(prompt tokens, answer tokens at most) of one conversation."""
    texts = [conversation.system or "", *conversation.turns]
    prompt = int(sum(len(text.encode()) for text in texts) / _CHARS_PER_TOKEN) + _TEMPLATE_TOKENS * (len(texts) + 1)
    if conversation.answers is not None:
        return prompt, int(sum(len(answer.encode()) for answer in conversation.answers) / _CHARS_PER_TOKEN)
    return prompt, max_new_tokens * len(conversation.turns)


def _meta(context: Context) -> StoreMeta:
    """Enough of a store's description to know the size of its tokens."""
    spec = context.spec
    return StoreMeta("", "", "", "", "", context.taps, spec.hidden_size, spec.num_layers, context.states_dtype)


# --- time ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MachineSpeed:
    """What the target's device does: multiply-adds count as two operations."""

    flops_per_s: float
    bytes_per_s: float


def measure_speed(context: Context) -> MachineSpeed:
    """A matrix product for arithmetic, a matrix-vector product for memory; a few tenths of a second."""
    import torch

    from spectrain.target.model import choose_device

    device = choose_device(context.config.target.device)
    size = 1024 if device.type == "cpu" else 8192
    dtype = getattr(torch, context.dtype_name)
    square, vector = torch.randn(size, size, device=device, dtype=dtype), torch.randn(size, device=device, dtype=dtype)
    wide = square.repeat(16, 1)  # larger than the caches

    def seconds(work: object) -> float:
        best = float("inf")
        for _ in range(8):
            start = time.perf_counter()
            work()  # type: ignore[operator]
            if device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best

    return MachineSpeed(
        2 * size**3 / seconds(lambda: square @ square),
        wide.numel() * wide.element_size() / seconds(lambda: wide @ vector),
    )


def stage_seconds(context: Context, numbers: Estimate, speed: MachineSpeed) -> dict[str, float]:
    """Rough seconds of each stage."""
    config, weights = context.config, target_parameters(context.spec)
    forward = 2 * weights * numbers.tokens / (speed.flops_per_s * _FORWARD_SHARE)
    together = _requests_together(config.engine)
    decode_steps = numbers.generated_tokens / together
    train_share = len(context.prompts.train) / max(numbers.documents, 1)
    epochs = train_share * config.trainer.epochs
    answers = config.suite.max_prompts * (config.suite.max_new_tokens or config.sampling.max_new_tokens)
    return {
        "generate": forward + decode_steps * _decode_s(numbers, speed, together, weights),
        "capture": 0.0 if config.capture.during_generation else forward,
        "fit": epochs * _fit_flops(context, numbers) / (speed.flops_per_s * _TRAIN_SHARE),
        "eval": (len(config.suite.baselines) + 1)
        * answers
        / config.suite.concurrency
        * _decode_s(numbers, speed, config.suite.concurrency, weights),
    }


def _requests_together(engine: EngineConfig) -> int:
    """Conversations that are decoded together."""
    if engine.name == "hf":
        return engine.batch_size
    running = engine.max_num_seqs or _VLLM_SEQUENCES
    return min(running, engine.concurrency) if engine.name == "vllm_server" else running


def _decode_s(numbers: Estimate, speed: MachineSpeed, batch: int, weights: int) -> float:
    """One decoding step: all weights are read once, and multiplied with every row of the batch."""
    return max(numbers.target_bytes / speed.bytes_per_s, 2 * weights * batch / (speed.flops_per_s * _FORWARD_SHARE))


# --- showing it ----------------------------------------------------------------------------------------------------


def show_plan(context: Context) -> None:
    """Print what the context's command would do here (``plan``: the whole pipeline) and what it would take."""
    config, command = context.config, context.command
    lines = [
        ("run directory", str(context.run_dir.path)),
        ("target", f"{config.target.name}: {context.source.summary}"),
    ]
    if context.spec_or_none is not None:
        spec = context.spec
        lines.append(
            (
                "",
                f"{spec.num_layers} layers, hidden size {spec.hidden_size}, {spec.vocab_size:,} tokens, "
                f"{context.dtype_name}",
            )
        )
        lines += _drafter_lines(context)
    if context.prompts_or_none is not None:
        lines.append(("prompts", f"{len(context.prompts.train):,} training, {len(context.prompts.heldout):,} held out"))
    if "eval" in command.stages:
        lines.append(
            ("suite", f"{config.suite.name}: {config.suite.prompts}, at most {config.suite.max_prompts} prompts")
        )
        batches, policies = (", ".join(map(str, several)) for several in (config.batch_sizes, config.draft_policies))
        lines.append(("", f"conversations at a time: {batches}; draft policy: {policies}"))
    if context.spec_or_none is None:
        lines.append(("", "its dimensions are not known here, so neither are disk, memory and time"))
    decisions = _decisions(context)
    lines += [("stage", str(decision)) for decision in decisions]
    if command.needs_prompts and context.spec_or_none is not None and context.prompts_or_none is not None:
        lines += _cost_lines(context, {decision.name for decision in decisions if decision.skip})
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for name, text in lines:
        table.add_row(name, text)
    stdout.print(table)
    say("everything that can be checked before work starts has been checked; nothing was written")


def _drafter_lines(context: Context) -> list[tuple[str, str]]:
    """What is trained or measured, and how it drafts."""
    from spectrain.drafters.drafter_folder import read_method, read_shape
    from spectrain.drafters.registry import find_method

    config, folder = context.config, context.config.drafter.path
    most = find_method(config.drafter.method).max_drafts(config.drafter)
    if context.command.needs_drafter:
        folder = str(context.measured_drafter)
    if folder is None:
        method, size = config.drafter.method, config.drafter.draft_vocab_size or context.spec.vocab_size
        lines = [("drafter", f"{method}, taps {list(context.taps)}, draft vocabulary of {size:,}")]
    else:
        shape = read_shape(folder, context.spec.default_taps())
        most = shape.max_drafts
        lines = [("drafter", f"{read_method(folder)}, taps {list(shape.taps)}, from {folder}")]
    n = config.decoding.num_speculative_tokens
    blocks = f" of the {most} that it can give" if most is not None and n < most else ""
    return [*lines, ("", f"drafts {n} tokens a round{blocks}, judged at temperature {config.decoding.temperature:g}")]


def _decisions(context: Context) -> list[Decision]:
    """What each stage of the command would do; none where the target has to be fetched first."""
    from spectrain.stages import capture, fit, generate

    if context.source.folder is None or context.prompts_or_none is None:
        return []
    stages = {"generate": generate.decide, "capture": capture.decide, "fit": fit.decide}
    return [decide(context) for name, decide in stages.items() if name in context.command.stages]


def _cost_lines(context: Context, skipped: set[str]) -> list[tuple[str, str]]:
    numbers = estimate(context)
    every = stage_seconds(context, numbers, measure_speed(context))
    seconds = {name: value for name, value in every.items() if name in context.command.stages and name not in skipped}
    free = free_bytes(context.data_dir.path)
    short = numbers.states_bytes > free and "capture" not in skipped
    return [
        ("tokens", f"at most {numbers.tokens:,}, of which {numbers.generated_tokens:,} generated"),
        (
            "disk",
            f"{bytes_text(numbers.states_bytes)} of hidden states at most ({context.states_dtype}), "
            f"{bytes_text(free)} free",
        ),
        *(
            [("", "MORE THAN IS FREE: hidden_states.dtype=int8, data.max_train or sampling.max_new_tokens lower it")]
            if short
            else []
        ),
        ("memory", f"target {bytes_text(numbers.target_bytes)}, training {bytes_text(numbers.train_bytes)}"),
        ("drafter", f"{numbers.drafter_parameters / 1e6:,.1f} M trained parameters"),
        (
            "time",
            ", ".join(f"{name} {_duration(value)}" for name, value in seconds.items())
            + f"; about {_duration(sum(seconds.values()))} in all",
        ),
    ]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"
