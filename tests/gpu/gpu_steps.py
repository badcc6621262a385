"""Training steps on a device: the numbers of a CPU, without waiting for the device, how fast, and how large.

Sizes on a GPU are those of drafters of Qwen3-8B with packed sequences of 4,096 tokens; of a CPU, which runs this only
in tests, tiny.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import cast

import torch
from gpu_table import SKIPPED, Row, judged
from host_synchronisations import HostSynchronisations, as_on_a_device
from tensor_memory import TensorMemory
from torch.utils.flop_counter import FlopCounterMode
from training_step import QWEN3_8B, Text, TrainingStep

from spectrain.config.plan_schema import DEVICES
from spectrain.data.device_copies import DeviceBatches
from spectrain.data.loader import BatchLoader
from spectrain.data.packing import PackedBatch
from spectrain.stages.closed_form import solve_on

KINDS = ("eagle3", "peagle", "dflash", "dspark", "dflash2")
_BLOCKS = ("drafter.block.block_size=8", "drafter.block.anchors=128", "drafter.dspark.markov_rank=32")
_LARGE_BLOCKS = ("drafter.block.block_size=8", "drafter.block.anchors=512")
_ROUNDING = 2e-3  # relative, float32 with products in TF32 at most
_BFLOAT16_ROUNDING = 2e-2  # relative: gradients of logits are rounded once more or less
_SOLVED_ALIKE = 5e-2  # relative: eigenvectors of float32 sums
_PLAN_ERROR = 0.3  # relative
_STEPS, _WARM_UP = 5, 3


def arguments(kind: str, *more: str, large: bool = False) -> tuple[str, ...]:
    blocks = _LARGE_BLOCKS if large else _BLOCKS
    return (f"drafter={kind}", *(blocks if kind.startswith("d") else ()), *more)


def large_step(kind: str, device: str, *more: str) -> TrainingStep:
    """Of the size that is measured; of one kind always with the same weights and text."""
    if device == "cpu":
        return TrainingStep(arguments(kind, *more))
    return TrainingStep(arguments(kind, *more, large=True), QWEN3_8B, Text(4096, 4), device)


def check_training(device: str) -> Iterator[Row]:
    """Loss and gradients in float32, against those of plain products on a CPU."""
    for kind in KINDS:
        step, plain = (
            TrainingStep(arguments(kind, "trainer.precision=float32", *more), device=where)
            for where, more in ((device, ()), ("cpu", ("drafter.loss.implementation=reference",)))
        )
        plain.drafter.load_state_dict(step.drafter.state_dict())
        plain.drafter.attach(step.drafter.head.to("cpu"))
        plain.batch = step.batch.to("cpu")
        wanted = _loss_and_gradients(plain)
        step.drafter.attach(step.drafter.head.to(device))
        found = _loss_and_gradients(step)
        worst = max(
            float((one - other).norm() / other.norm().clamp(min=1e-12))
            for one, other in zip(found, wanted, strict=True)
        )
        yield judged(f"losses of {kind}", worst <= _ROUNDING, f"loss and gradients differ from a CPU's by {worst:.1e}")


def check_copies(device: str) -> Iterator[Row]:
    """Batches copied ahead of a busy device are those that were read."""
    where, taps = torch.device(device), (4096, 4, 4096) if device == "cuda" else (64, 4, 32)
    work = torch.randn(taps[2], taps[2], device=device)

    def batches() -> list[PackedBatch]:
        made = [TrainingStep(arguments("eagle3"), text=Text(taps[0], 4)).batch for _ in range(4)]
        for number, batch in enumerate(made):
            batch.taps_TAH = torch.full(taps, float(number), dtype=torch.bfloat16)
        return [batch.pin_memory() if device == "cuda" else batch for batch in made]

    sums = []
    with DeviceBatches(cast(BatchLoader, _Given(batches())), where) as ahead:
        for batch in ahead:
            for _ in range(20):
                work = (work @ work).clamp(-1, 1)
            sums.append(batch.taps_TAH.float().mean())
            del batch
            ahead.copy_next()
    found = [float(total) for total in sums]
    yield judged("batches copied ahead", found == [0.0, 1.0, 2.0, 3.0], f"means of four batches: {found}")


class _Given:
    """A loader of what is there."""

    waited_s = 0.0

    def __init__(self, batches: list[PackedBatch]) -> None:
        self._batches = iter(batches)

    def __next__(self) -> PackedBatch:
        return next(self._batches)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def check_triton_loss(device: str) -> Iterator[Row]:
    """Loss and gradients of the Triton kernel against those of the same step without it, and how long a step takes."""
    for kind in ("eagle3", "dspark"):
        if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            yield Row(f"Triton loss of {kind}", SKIPPED, "Triton compiles for a GPU alone")
            continue
        steps = [large_step(kind, device, f"drafter.loss.implementation={way}") for way in ("fused", "triton")]
        plain, kernel = (_loss_and_gradients(step) for step in steps)
        worst = max(
            float((one - other).norm() / other.norm().clamp(min=1e-12))
            for one, other in zip(kernel, plain, strict=True)
        )
        seconds = []
        for step in steps:
            for _ in range(_WARM_UP):
                step.run()
            seconds.append(_seconds(step, device))
        figure = f"differs from fused by {worst:.1e}, steps take {seconds[1] / seconds[0]:.0%} of its time"
        yield judged(f"Triton loss of {kind}", worst <= _BFLOAT16_ROUNDING, figure)
        del steps, step


def check_closed_form(device: str) -> Iterator[Row]:
    """Initial weights solved for on the device, against those of a CPU."""
    for kind in ("eagle3", "dflash"):
        steps = [TrainingStep(arguments(kind, "trainer.precision=float32"), text=Text(8192, 32)) for _ in range(2)]
        for step in steps:  # as hidden states do, they have a mean: EAGLE-3's heads are built on it
            step.batch.taps_TAH += 2.0
            step.batch.last_hidden_TH += 2.0
        used = [
            solve_on(torch.device(where), step.drafter, lambda step=step: [step.batch], lambda percent: None)
            for step, where in zip(steps, (device, "cpu"), strict=True)
        ]
        if used == [0, 0]:
            yield Row(f"closed form of {kind}", SKIPPED, "nothing can be solved for with these random states")
            continue
        found, wanted = ({name: p.detach() for name, p in step.drafter.named_parameters()} for step in steps)
        worst = max(float((found[n] - wanted[n]).norm() / wanted[n].norm().clamp(min=1e-6)) for n in wanted)
        good = used[0] == used[1] > 0 and worst <= _SOLVED_ALIKE
        yield judged(f"closed form of {kind}", good, f"{used[0]} positions, weights differ from a CPU's by {worst:.1e}")


def check_synchronisations(device: str) -> Iterator[Row]:
    """Forward and backward ask the device for nothing. On a GPU torch itself raises where one would wait."""
    for kind in KINDS:
        step = TrainingStep(arguments(kind, "drafter.attention=sdpa"), device=device)
        step.batch = as_on_a_device(step.batch)
        step.run()  # what is made once
        with HostSynchronisations() as counted:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                step.forward().loss.backward()
            finally:
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        waits = len(counted.found)
        yield judged(f"synchronisations of {kind}", not waits, f"{waits} in forward and backward")


def check_speed(device: str) -> Iterator[Row]:
    """Tokens/s of optimiser steps, and the share of the peak that their matrix products reach."""
    peak = _measured_peak(device)
    named = _data_sheet(device)
    yield judged("matrix products", True, f"{peak / 1e12:.3g} TFLOPS measured in the type of training{named}")
    for kind in KINDS:
        step = large_step(kind, device)
        for _ in range(_WARM_UP):
            step.run()
        seconds = _seconds(step, device)
        with FlopCounterMode(display=False) as counter:
            step.run()
        share = counter.get_total_flops() / seconds / peak
        tokens = step.text.tokens / seconds
        yield judged(f"speed of {kind}", True, f"{tokens:,.0f} tokens/s, products at {share:.0%} of the measured peak")
        del step


def check_memory(device: str) -> Iterator[Row]:
    """Peak of a step beside what ``plan`` says."""
    for kind in KINDS:
        step = large_step(kind, device)
        if device == "cuda":
            step.run()
            torch.cuda.reset_peak_memory_stats()
            step.run()
            found = float(torch.cuda.max_memory_allocated())
        else:
            with TensorMemory(*step.given) as memory:
                step.run()
                memory.restart()
                step.run()
            found = float(memory.peak)
        moments = step.planned().moments
        planned = max(moments["forward"], moments["backward"])
        error = found / planned - 1
        figure = f"{found / 1e9:.3g} GB, plan says {planned / 1e9:.3g} GB ({error:+.0%})"
        yield judged(f"memory of {kind}", abs(error) <= _PLAN_ERROR, figure)
        del step


def _loss_and_gradients(step: TrainingStep) -> list[torch.Tensor]:
    losses = step.forward()
    losses.loss.backward()
    return [t.detach().cpu() for t in (losses.loss, *(p.grad for p in step.drafter.parameters() if p.grad is not None))]


def _seconds(step: TrainingStep, device: str) -> float:
    """Of one step, in the mean."""
    _wait(device)
    started = time.perf_counter()
    for _ in range(_STEPS):
        step.run()
    _wait(device)
    return (time.perf_counter() - started) / _STEPS


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _measured_peak(device: str) -> float:
    """Operations/s of a large product, bfloat16 on a GPU and float32 on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (256, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(8):
        _wait(device)
        started = time.perf_counter()
        a @ a
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def _data_sheet(device: str) -> str:
    if device != "cuda":
        return ""
    name = torch.cuda.get_device_name(0).lower()
    known = [entry for key, entry in DEVICES.items() if key.partition("_")[0] in name]
    return f", {known[0].bfloat16_flops / 1e12:,.0f} by the data sheet" if known else ""
