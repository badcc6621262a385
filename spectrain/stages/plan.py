"""What a run would take: tokens, disk, operations and seconds, for ``spectrain plan``, ``--dry-run`` and the checks.

Tokens come from characters and limits, disk and memory from shapes (``training_memory.py`` says what a rank needs, in
detail), time from counted floating-point operations over the speed of a device: that of this machine, measured for a
blink, or a share of the peak of a named one (``plan.device``, ``plan.utilisation``). Times are right within a factor of
two or so, which is what one needs to decide between an afternoon and a week.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spectrain.config.schema import EngineConfig
from spectrain.data.hidden_states import StoreMeta, bytes_per_token
from spectrain.data.prompts import Conversation, PromptSplit
from spectrain.stages.closed_form import closed_form_work
from spectrain.stages.context import Context
from spectrain.stages.plan_states import engine_devices, target_passes
from spectrain.stages.target_size import active_parameters, target_bytes, target_parameters

if TYPE_CHECKING:
    from spectrain.drafters.training_cost import BatchSize, TrainingCost
    from spectrain.stages.training_memory import DrafterSize, Pass, RankMemory

_CHARS_PER_TOKEN = 3.5
_TEMPLATE_TOKENS = 16  # of a turn
_VLLM_SEQUENCES = 256  # requests that vLLM runs together where nobody says
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
# Shares of the measured peak that a stage reaches. Decoding is bound by reading weights rather than by arithmetic, see
# _decode_s.
_FORWARD_SHARE, _TRAIN_SHARE = 0.6, 0.5
_BANDWIDTH_SHARE = 0.7  # of a named device's peak


@dataclass(frozen=True)
class Estimate:
    """Upper bounds of tokens and bytes, rough seconds. None where prompts or the target's dimensions are not known."""

    documents: int
    tokens: int  # of all responses, prompts included
    generated_tokens: int
    states_bytes: int
    target_bytes: int
    drafter_parameters: int  # entries of its matrices, its own head included if the vocabulary is reduced
    train_bytes: int  # of a rank
    training_cost: TrainingCost


def estimate(context: Context) -> Estimate:
    """Counts from the prompts, the configuration and the target's dimensions; no weights, no tokenizer."""
    config, spec, scale = context.config, context.spec, _scale(context)
    prompts = _prompts(context)
    conversations = [*prompts.train, *prompts.heldout]
    lengths = [_tokens(conversation, config.sampling.max_new_tokens) for conversation in conversations]
    tokens = int(most_tokens(context, conversations) * scale)
    matrices = {name: size for name, (size, dimensions) in drafter_parameters(context).items() if dimensions > 1}
    generated = int(sum(answer for _, answer in lengths) * scale)
    return Estimate(
        documents=round(len(conversations) * scale),
        tokens=tokens,
        generated_tokens=generated,
        states_bytes=int(states_bytes(context, conversations) * scale),
        target_bytes=int(target_bytes(spec, _DTYPE_BYTES.get(context.dtype_name, 4))),
        drafter_parameters=sum(matrices.values()),
        train_bytes=int(training_memory(context).peak),
        training_cost=_training_cost(context, matrices, tokens, generated),
    )


def _scale(context: Context) -> float:
    """How many times the prompts that there are ``plan`` reckons with."""
    wanted = context.config.plan.prompts if context.command.looks_only else None
    return 1.0 if wanted is None else wanted / max(len(_prompts(context).train), 1)


def _prompts(context: Context) -> PromptSplit:
    return context.prompts_to_plan or context.prompts


def most_tokens(context: Context, conversations: Iterable[Conversation]) -> int:
    """That these conversations have with their answers, at most."""
    lengths = (_tokens(conversation, context.config.sampling.max_new_tokens) for conversation in conversations)
    return sum(min(prompt + answer, context.config.target.max_length) for prompt, answer in lengths)


def states_bytes(context: Context, conversations: Iterable[Conversation]) -> int:
    """That their hidden states take, at most."""
    return most_tokens(context, conversations) * bytes_per_token(_meta(context))


# --- parameters ----------------------------------------------------------------------------------------------------


def drafter_parameters(context: Context) -> dict[str, tuple[int, int]]:
    """Name -> (entries, dimensions) of each parameter of the drafter."""
    import torch

    from spectrain.drafters.registry import find_method

    method = find_method(context.config.drafter.method)
    with torch.device("meta"):
        body = method.body(method.shape(context.config.drafter, context.spec))
    return {name: (p.numel(), p.ndim) for name, p in body.named_parameters()}


# --- memory of a rank ----------------------------------------------------------------------------------------------


def planned_ranks(context: Context) -> int:
    """``trainer.devices``; of a named device, ``auto`` is a whole node."""
    wanted, device = context.config.trainer.devices, context.planned_device
    if wanted != "auto":
        return int(wanted)
    if device is not None:
        return device.per_node
    from spectrain.training.distributed import count_devices

    return count_devices(wanted)


def training_memory(context: Context, strategy: str | None = None) -> RankMemory:
    """What one rank of ``fit`` needs; ``strategy``: None: ``trainer.strategy``."""
    from spectrain.stages.training_memory import rank_memory

    size, trainer = drafter_size(context), context.config.trainer
    ranks, strategy = planned_ranks(context), strategy or trainer.strategy
    return rank_memory(size, *training_passes(context), ranks, strategy, trainer.gradient_accumulation)


def drafter_size(context: Context) -> DrafterSize:
    from spectrain.drafters.layers import layer_shape
    from spectrain.drafters.registry import find_method
    from spectrain.stages.training_memory import DrafterSize

    config, spec = context.config.drafter, context.spec
    shape, parameters = find_method(config.method).shape(config, spec), drafter_parameters(context)
    pieces: dict[str, int] = {}
    for name, (size, _) in parameters.items():
        piece = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name
        pieces[piece] = pieces.get(piece, 0) + size
    of_layers = [size for piece, size in pieces.items() if piece.startswith("layers.")]
    matrices = {name: size for name, (size, dimensions) in parameters.items() if dimensions > 1}
    frozen = 0 if config.train_head or not shape.owns_head else parameters["lm_head.weight"][0]
    muon = context.config.trainer.optimizer == "muon"
    every = sum(size for size, _ in parameters.values())
    return DrafterSize(
        layer=getattr(shape, "layer", None) or layer_shape(config, spec, "llama"),
        num_layers=config.num_layers,
        num_taps=len(context.taps),
        parameters=every,
        trained=every - frozen,
        matrix_entries=sum(matrices.values()) - shape.owns_head * matrices.get("lm_head.weight", 0),
        largest_layer=max(of_layers, default=0),
        momentum_only=sum(n for name, n in matrices.items() if name.startswith(("layers.", "fc."))) * muon,
        draft_vocab=shape.draft_vocab_size,
        head_entries=spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2),
        owns_head=shape.owns_head,
        trains_head=shape.owns_matrix and config.train_head,
        outside_layers=every - sum(of_layers),
        kv_values=sum(2 * heads * size for _, heads, size in context.kv_shapes),
        target_hidden=spec.hidden_size,
        head_bytes=2 if context.config.trainer.head_precision_on(on_accelerator(context)) == "bfloat16" else 4,
    )


def training_passes(context: Context) -> tuple[Pass, Pass]:
    """(a training pass over a micro-batch, a pass of the evaluation over documents of one packed sequence)."""
    from spectrain.drafters.registry import find_method
    from spectrain.drafters.training_cost import BatchSize
    from spectrain.stages.training_memory import Pass

    config, batch = context.config, _micro_batch(context)
    trainer, drafter, method = config.trainer, config.drafter, find_method(config.drafter.method)
    drafts = max(config.decoding.num_speculative_tokens, method.max_drafts(drafter) or 0)
    one = BatchSize(batch.tokens / trainer.micro_batch_size, batch.generated_tokens / trainer.micro_batch_size)
    one = max(one, *_heldout(context), key=lambda size: size.tokens)  # a longer document is scored whole and alone
    accelerator, state_bytes = on_accelerator(context), 2 if context.states_dtype == "bfloat16" else 4
    keys = _mean_keys(context)
    backend = drafter.attention if drafter.attention != "auto" else "flex" if accelerator else "eager"
    number_bytes = _DTYPE_BYTES[trainer.precision_on(accelerator)]
    rows = method.training_rows(drafter, trainer, batch)
    common = (keys, backend, number_bytes, state_bytes, accelerator)
    training = Pass(rows, batch.tokens, *common, trainer.gradient_checkpointing)
    scored = method.simulated_rows(drafter, drafts, one)
    served_bytes = _DTYPE_BYTES.get(context.dtype_name, 4)
    evaluation = Pass(scored, one.tokens, keys, backend, served_bytes, state_bytes, accelerator)
    return training, evaluation


def on_accelerator(context: Context) -> bool:
    """Whether training is planned for one."""
    if context.planned_device is not None:
        return True
    import torch

    return context.config.plan.device != "cpu" and torch.cuda.is_available()


def _document_tokens(context: Context) -> list[tuple[int, int]]:
    """(prompt, answer) tokens of each document as far as it is trained on."""
    config = context.config
    longest = min(config.trainer.packed_length, config.target.max_length)
    found = []
    prompts = _prompts(context)
    for conversation in (*prompts.train, *prompts.heldout):
        prompt, answer = _tokens(conversation, config.sampling.max_new_tokens)
        found.append((min(prompt, longest - 1), max(1, min(answer, longest - prompt))))
    return found


def _heldout(context: Context) -> list[BatchSize]:
    """Every document that an evaluation scores."""
    from spectrain.drafters.training_cost import BatchSize

    config, most = context.config, context.config.target.max_length
    scored = _prompts(context).heldout[: config.trainer.eval_documents]
    lengths = (_tokens(conversation, config.sampling.max_new_tokens) for conversation in scored)
    return [BatchSize(min(prompt + answer, most), min(answer, most)) for prompt, answer in lengths]


def _micro_batch(context: Context) -> BatchSize:
    """A full one, with the mean share of generated tokens."""
    from spectrain.drafters.training_cost import BatchSize

    trainer, documents = context.config.trainer, _document_tokens(context)
    every, generated = sum(p + a for p, a in documents), sum(a for _, a in documents)
    tokens = min(trainer.packed_length * trainer.micro_batch_size, every)
    return BatchSize(tokens, tokens * generated / every)


def _mean_keys(context: Context) -> float:
    """Keys of its document that a generated token sees, in the mean."""
    documents = _document_tokens(context)
    return sum(a * (p + a / 2) for p, a in documents) / sum(a for _, a in documents)


def host_bytes(context: Context) -> float:
    """Of one rank's process on an accelerator: the target's two matrices before they are moved, batches made ahead, a
    copy of the state for a checkpoint, and the runtime.
    """
    size, (training, _) = drafter_size(context), training_passes(context)
    trainer = context.config.trainer
    workers = 2 if trainer.loader_workers is None else trainer.loader_workers
    batch = training.tokens * size.state_values * training.state_bytes
    # Each made ahead, one being made and one pinned.
    return (
        4.0 * size.head_entries + batch * (workers * (trainer.prefetch_batches + 1) + 1) + 12.0 * size.parameters + 3e9
    )


# --- operations ----------------------------------------------------------------------------------------------------


def _training_cost(context: Context, matrices: Mapping[str, int], tokens: int, generated_tokens: int) -> TrainingCost:
    from spectrain.drafters.registry import find_method
    from spectrain.drafters.training_cost import CorpusSize

    config, corpus, experts = context.config, CorpusSize(tokens, generated_tokens), context.spec.experts
    if experts is not None:  # of a drafter's, too, a token meets the active ones alone
        matrices = {
            name: size * experts.active // experts.count if ".experts." in name else size
            for name, size in matrices.items()
        }
    return find_method(config.drafter.method).training_cost(config.drafter, config.trainer, matrices, corpus)


def fit_flops(context: Context, numbers: Estimate) -> float:
    """Of one epoch over all documents: a multiply-add is two operations forward, and four backward where a matrix is
    trained.

    The head meets each output (twice forward, as its logits are made anew for the backward pass, and once backward),
    and once each token whose distribution is the teacher's. Tables that are looked up cost nothing.
    """
    drafter, cost = context.config.drafter, numbers.training_cost
    vocabulary = (drafter.draft_vocab_size or context.spec.vocab_size) * context.spec.hidden_size
    layers = 6 * (cost.token_entries * numbers.tokens + cost.output_entries * cost.outputs)
    students = vocabulary if cost.head_entries is None else cost.head_entries
    return layers + 2 * (3 * students * cost.outputs + vocabulary * numbers.generated_tokens)


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
    sizes = (spec.hidden_size, spec.num_layers, context.states_dtype)
    return StoreMeta("", "", "", "", "", context.taps, *sizes, kv_layers=context.kv_shapes)


# --- time ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MachineSpeed:
    """What a device does: multiply-adds count as two operations. ``train_flops_per_s``: in the type of training, where
    that is another. The shares are those of the peak that are reached.
    """

    flops_per_s: float
    bytes_per_s: float
    train_flops_per_s: float | None = None
    forward_share: float = _FORWARD_SHARE
    train_share: float = _TRAIN_SHARE


def device_speed(context: Context) -> MachineSpeed:
    """Of the planned device, by its data sheet; else measured."""
    device, share = context.planned_device, context.config.plan.utilisation
    if device is None:
        return measure_speed(context)
    peak, training = map(device.peak_flops, (context.dtype_name, context.config.trainer.precision_on(True)))
    return MachineSpeed(peak, device.bytes_per_s * _BANDWIDTH_SHARE, training, share, share)


def measure_speed(context: Context) -> MachineSpeed:
    """A matrix product for arithmetic, a matrix-vector product for memory; a few tenths of a second."""
    import torch

    from spectrain.target.model import choose_device

    device = torch.device("cpu") if context.config.plan.device == "cpu" else choose_device(context.config.target.device)
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
    """Rough seconds of each stage, on the devices that the configuration gives it."""
    config, active = context.config, active_parameters(context.spec)
    devices, ranks = engine_devices(config), planned_ranks(context)
    forward = 2 * active * numbers.tokens / (speed.flops_per_s * speed.forward_share) / devices
    copies = max(1, devices // (config.engine.tensor_parallel_size * config.engine.pipeline_parallel_size))
    decode_steps = numbers.generated_tokens / (_requests_together(config.engine) * copies)
    epochs = training_epochs(context)
    captured, asked = target_passes(context, epochs, ranks)
    train_flops_per_s = (speed.train_flops_per_s or speed.flops_per_s) * speed.train_share * ranks
    init = closed_form_work(context, numbers.generated_tokens, speed, ranks)
    answers = config.suite.max_prompts * (config.suite.max_new_tokens or config.sampling.max_new_tokens)
    return {
        "generate": forward + decode_steps * _decode_s(context, numbers, speed, _requests_together(config.engine)),
        "capture": forward * captured,
        "fit": fit_flops(context, numbers) * epochs / train_flops_per_s + forward * asked + init.seconds,
        "eval": (len(config.suite.baselines) + 1)
        * answers
        / config.suite.concurrency
        * _decode_s(context, numbers, speed, config.suite.concurrency),
    }


def training_epochs(context: Context) -> float:
    """How often ``fit`` sees all documents, where it sees the held-out ones never."""
    train, heldout = len(_prompts(context).train), len(_prompts(context).heldout)
    return context.config.trainer.epochs * train / max(train + heldout, 1)


def _requests_together(engine: EngineConfig) -> int:
    """Conversations that are decoded together."""
    if engine.name == "hf":
        return engine.batch_size
    running = engine.max_num_seqs or _VLLM_SEQUENCES
    return min(running, engine.concurrency) if engine.name == "vllm_server" else running


def _decode_s(context: Context, numbers: Estimate, speed: MachineSpeed, batch: int) -> float:
    """One decoding step: all weights are read once (of experts, those that some row of the batch meets), and multiplied
    with every row of the batch.
    """
    engine, active = context.config.engine, active_parameters(context.spec)
    share = min(1.0, active * batch / target_parameters(context.spec))
    split = 1 if engine.name == "hf" else engine.tensor_parallel_size * engine.pipeline_parallel_size
    reading = numbers.target_bytes * share / speed.bytes_per_s
    return max(reading, 2 * active * batch / (speed.flops_per_s * speed.forward_share)) / split
