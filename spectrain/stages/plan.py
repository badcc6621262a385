"""What a command would do and cost, before it starts: ``spectrain plan`` and ``--dry-run``.

Estimates are simple on purpose: tokens from characters and limits, disk and memory from shapes, time from counted floating-point
operations over the speed of this machine, measured for a blink. They are right within a factor of two or so, which is what one needs to
decide between an afternoon and a week.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass

from rich import box
from rich.table import Table

from spectrain.console import say, stdout
from spectrain.data.prompts import Conversation
from spectrain.data.states import StoreMeta, bytes_per_token
from spectrain.run_dir import Decision
from spectrain.stages.context import Context
from spectrain.target.spec import TargetSpec

_CHARS_PER_TOKEN = 3.5
_TEMPLATE_TOKENS = 16  # of a turn
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Shares of the measured peak that a stage reaches. Decoding is bound by reading weights rather than by arithmetic, see _decode_s.
_FORWARD_SHARE, _TRAIN_SHARE = 0.6, 0.35


@dataclass(frozen=True)
class Estimate:
    """Upper bounds of tokens and bytes, rough seconds. None where prompts or the target's dimensions are not known."""

    documents: int
    tokens: int  # of all responses, prompts included
    generated_tokens: int
    states_bytes: int
    target_bytes: int
    drafter_parameters: int
    train_bytes: int


def estimate(context: Context) -> Estimate:
    """Counts from the prompts, the configuration and the target's dimensions; no weights, no tokenizer."""
    config, spec = context.config, context.spec
    conversations = [*context.prompts.train, *context.prompts.heldout]
    lengths = [_tokens(conversation, config.sampling.max_new_tokens) for conversation in conversations]
    tokens = sum(min(prompt + answer, config.target.max_length) for prompt, answer in lengths)
    drafter = drafter_parameters(context)
    # Weights, gradients and two moments in float32; the batch's taps, and activations of a few H- and D-wide rows per token and step.
    row_tokens = config.trainer.row_tokens * config.trainer.rows_per_batch
    activations = row_tokens * 4 * (spec.hidden_size * (len(context.taps) + 1) + config.drafter.unroll_steps * 12 * spec.hidden_size)
    head_bytes = 4 * spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)
    return Estimate(
        documents=len(conversations),
        tokens=tokens,
        generated_tokens=sum(answer for _, answer in lengths),
        states_bytes=tokens * bytes_per_token(_meta(context)),
        target_bytes=target_parameters(spec) * _DTYPE_BYTES.get(context.dtype_name, 4),
        drafter_parameters=drafter,
        train_bytes=16 * drafter + activations + head_bytes,
    )


def target_parameters(spec: TargetSpec) -> int:
    """Parameters of a dense decoder of these dimensions (experts beyond the first are not counted)."""
    return spec.num_layers * _layer_parameters(spec, spec.hidden_size) + spec.vocab_size * spec.hidden_size * (
        1 if spec.tie_word_embeddings else 2
    )


def drafter_parameters(context: Context) -> int:
    """Trained parameters of an EAGLE-3 drafter: fc, layers (the first is 2H wide), and its own head if the vocabulary is reduced."""
    spec, drafter = context.spec, context.config.drafter
    hidden = spec.hidden_size
    layers = _layer_parameters(spec, 2 * hidden) + (drafter.num_layers - 1) * _layer_parameters(spec, hidden)
    head = hidden * drafter.draft_vocab_size if drafter.draft_vocab_size not in (None, spec.vocab_size) else 0
    return len(context.taps) * hidden * hidden + layers + head


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
    return StoreMeta("", "", "", "", "", tap_ids=context.taps, hidden_size=context.spec.hidden_size, dtype=context.states_dtype)


# --- time ------------------------------------------------------------------------------------------------------------------------


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

    return MachineSpeed(2 * size**3 / seconds(lambda: square @ square), wide.numel() * wide.element_size() / seconds(lambda: wide @ vector))


def stage_seconds(context: Context, numbers: Estimate, speed: MachineSpeed) -> dict[str, float]:
    """Rough seconds of each stage."""
    config, weights = context.config, target_parameters(context.spec)
    forward = 2 * weights * numbers.tokens / (speed.flops_per_s * _FORWARD_SHARE)
    decode_steps = numbers.generated_tokens / config.engine.batch_size
    train_share = len(context.prompts.train) / max(numbers.documents, 1)
    counted = numbers.generated_tokens * train_share * config.trainer.epochs
    vocabulary = config.drafter.draft_vocab_size or context.spec.vocab_size
    per_position = 6 * config.drafter.unroll_steps * numbers.drafter_parameters + 2 * vocabulary * context.spec.hidden_size
    answers = config.suite.max_prompts * (config.suite.max_new_tokens or config.sampling.max_new_tokens)
    return {
        "generate": forward + decode_steps * _decode_s(numbers, speed, config.engine.batch_size, weights),
        "capture": forward,
        "fit": counted * per_position / (speed.flops_per_s * _TRAIN_SHARE),
        "eval": (len(config.suite.baselines) + 1)
        * answers
        / config.suite.concurrency
        * _decode_s(numbers, speed, config.suite.concurrency, weights),
    }


def _decode_s(numbers: Estimate, speed: MachineSpeed, batch: int, weights: int) -> float:
    """One decoding step: all weights are read once, and multiplied with every row of the batch."""
    return max(numbers.target_bytes / speed.bytes_per_s, 2 * weights * batch / (speed.flops_per_s * _FORWARD_SHARE))


# --- showing it ------------------------------------------------------------------------------------------------------------------


def show_plan(context: Context, verb: str) -> None:
    """Print what ``verb`` would do here (``plan``: the whole pipeline) and what it would take."""
    config = context.config
    lines = [("run directory", str(context.run_dir.path)), ("target", f"{config.target.name}: {context.source.summary}")]
    if context.spec_or_none is not None:
        spec, size = context.spec, config.drafter.draft_vocab_size or context.spec.vocab_size
        lines.append(("", f"{spec.num_layers} layers, hidden size {spec.hidden_size}, {spec.vocab_size:,} tokens, {context.dtype_name}"))
        source = f"draft vocabulary of {size:,}" if config.drafter.path is None else f"from {config.drafter.path}"
        lines.append(("drafter", f"{config.drafter.method}, taps {list(context.taps)}, {source}"))
    if context.prompts_or_none is not None:
        lines.append(("prompts", f"{len(context.prompts.train):,} training, {len(context.prompts.heldout):,} held out"))
    if verb in ("eval", "run", "plan"):
        lines.append(("suite", f"{config.suite.name}: {config.suite.prompts}, at most {config.suite.max_prompts} prompts"))
    lines += [("stage", str(decision)) for decision in _decisions(context, verb)]
    if verb != "eval" and context.spec_or_none is not None and context.prompts_or_none is not None:
        lines += _cost_lines(context)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for name, text in lines:
        table.add_row(name, text)
    stdout.print(table)
    say("everything that can be checked before work starts has been checked; nothing was written")


def _decisions(context: Context, verb: str) -> list[Decision]:
    """What each stage of ``verb`` would do; none where the target has to be fetched first."""
    from spectrain.stages import capture, fit, generate

    if context.source.folder is None or context.prompts_or_none is None:
        return []
    stages = {"generate": generate.decide, "capture": capture.decide, "fit": fit.decide}
    upto = {"generate": 1, "capture": 2, "eval": 0}.get(verb, 3)
    return [decide(context) for decide in list(stages.values())[:upto]]


def _cost_lines(context: Context) -> list[tuple[str, str]]:
    numbers = estimate(context)
    seconds = stage_seconds(context, numbers, measure_speed(context))
    folder = context.data_dir.path
    while not folder.exists():
        folder = folder.resolve().parent
    free = shutil.disk_usage(folder).free
    return [
        ("tokens", f"at most {numbers.tokens:,}, of which {numbers.generated_tokens:,} generated"),
        ("disk", f"{_gb(numbers.states_bytes)} of states at most ({context.states_dtype}), {_gb(free)} free"),
        ("memory", f"target {_gb(numbers.target_bytes)}, training {_gb(numbers.train_bytes)}"),
        ("drafter", f"{numbers.drafter_parameters / 1e6:,.1f} M trained parameters"),
        (
            "time",
            ", ".join(f"{name} {_duration(value)}" for name, value in seconds.items())
            + f"; about {_duration(sum(seconds.values()))} in all",
        ),
    ]


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"
