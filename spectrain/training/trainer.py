"""The training loop: one function to read, whatever the drafter.

A step adds up (sum, count) pairs of its micro-batches on all ranks and divides once, so that how a global batch is
split into micro-batches and ranks changes nothing. Micro-batches come from a loader that makes them ahead, and nothing
here waits for the device between them. Before the optimiser moves, the step is checked: a loss that is not finite, or a
batch in which no position counts, stops the run with a diagnosis. The best drafter is chosen by the simulation's
acceptance length, the figure a server gives, and is written to its own folder, which checkpoint rotation never touches.

When a signal ends the command, the state after the last whole step is saved, whatever the step under way is at: only
``_update`` and what is decided by an evaluation change that state, and both are ``held``. So a step of many seconds
delays nothing and is made again, and an interrupted evaluation is made again before the next step: the end is that of a
run that was never disturbed. Several ranks finish the step first: each step asks whether any of them got a signal, on
whichever machine, and all save then what each has a share of (``_stop_together``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from spectrain import signals
from spectrain.config.schema import SpectrainConfig
from spectrain.console import ProgressBar, say
from spectrain.data.device_copies import DeviceBatches
from spectrain.data.hidden_states import HiddenStateSource
from spectrain.data.loader import BatchLoader, BatchRequest
from spectrain.data.packing import Draw, PackedBatch
from spectrain.drafters.compiled_pieces import compiled_pieces
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.drafter_folder import save_drafter
from spectrain.errors import RunError
from spectrain.files import plain
from spectrain.training.calibrate import calibrate_folder
from spectrain.training.checkpoint_writer import CheckpointWriter
from spectrain.training.checkpointing import TrainingState, load_checkpoint
from spectrain.training.distributed import ALONE, PATIENCE_S, Ranks
from spectrain.training.metrics import append_metrics, keep_metrics_up_to, simulation_metrics
from spectrain.training.optim import lr_factor, set_learning_rates
from spectrain.training.sampler import Position, StepSampler
from spectrain.training.served_drafter import ServedDrafter
from spectrain.training.simulated_acceptance import SimulatedAcceptance, simulate_heldout
from spectrain.training.step_sums import Step, StepSums, StepTotals
from spectrain.training.strategies import choose_strategy
from spectrain.training.trackers import Trackers, open_trackers

_DEVICE_WORKERS = 2  # loader workers where drafters are trained on an accelerator
_ALONE_AFTER_S = 10.0  # that ranks which could end alone are given to end together
_WAIT_TO_MENTION = 0.1  # share of a step spent waiting for data that the progress bar shows


@dataclass(frozen=True)
class FitPaths:
    """Where training writes."""

    checkpoints: Path
    drafter: Path  # the best one, servable as it is
    metrics: Path  # JSON lines


@dataclass(frozen=True)
class FitResult:
    steps: int
    best_step: int
    best_acceptance_length: float
    final_loss: float
    seconds: float  # of this process; a resumed run does not count what came before


class Trainer:
    """Trains ``drafter`` on documents ``train`` of ``source`` and simulates documents ``heldout``."""

    def __init__(
        self,
        config: SpectrainConfig,
        paths: FitPaths,
        drafter: Drafter,
        source: HiddenStateSource,
        train: Sequence[int],
        heldout: Sequence[int],
        eos_ids: Sequence[int],
        folder_metadata: dict[str, Any],
        accelerator: Accelerator | None = None,
        ranks: Ranks = ALONE,
        serving_dtype: torch.dtype = torch.float32,
    ) -> None:
        """``ranks`` train this drafter together. ``folder_metadata`` are keyword arguments of ``save_drafter``.
        ``serving_dtype``: what the drafter will be served in; it is evaluated in it.
        """
        self.config = config
        self.paths = paths
        self.source = source
        self.eos_ids = eos_ids
        self.folder_metadata = folder_metadata
        options = config.trainer
        self.train = train
        self.heldout = list(heldout[: options.eval_documents])
        self.all_heldout = list(heldout)
        if not self.train:
            raise RunError(
                "no training document has two generated tokens side by side within trainer.packed_length: let the "
                "target give longer answers "
                "(sampling.max_new_tokens), or raise trainer.packed_length"
            )
        self.accelerator = accelerator or Accelerator(
            # accelerate fixes it for the process, but the jobs of a sweep may differ: see _backward
            mixed_precision="no",
        )
        self.drafter = drafter
        self.drafter.temperatures = ()  # those of a drafter that training goes on from are not its own
        device = self.accelerator.device
        # Again: what was gathered from the head must follow it.
        head = drafter.head.to(device).held_in(options.head_precision_on(device.type != "cpu"))
        self.drafter.attach(head)
        self.ranks = ranks
        self.served = ServedDrafter(drafter, serving_dtype)
        self.strategy = choose_strategy(drafter, options, self.accelerator)
        self.sampler = self._sampler(Position())
        self.eval_every = options.eval_every_steps or max(1, self.sampler.steps_per_epoch[0])
        self.checkpoint_every = options.checkpoint_every_steps or self.eval_every
        self.best = {"step": 0, "acceptance_length": -1.0}
        self.trackers = Trackers()
        self.last_loss = float("nan")
        self.done = 0  # steps
        self.evaluated = False  # whether what is due after them has been found out
        self._saved = (0, False)  # (done, evaluated) of the newest checkpoint
        self.writer = CheckpointWriter(paths.checkpoints, options.keep_checkpoints)

    def _sampler(self, start: Position) -> StepSampler:
        lengths = np.asarray(self.source.lengths)[np.asarray(self.train)]
        rank, count = self.accelerator.process_index, self.accelerator.num_processes
        return StepSampler(lengths, self.config.trainer, rank, count, start)

    def fit(self) -> FitResult:
        """Train to the last step, resuming from the newest checkpoint. Raises RunError on non-finite loss or an
        all-zero mask.
        """
        started = time.monotonic()
        self._resume()
        self.strategy.begin()
        first, total = self.done, self.sampler.total_steps
        if self.accelerator.is_main_process:
            self.trackers = open_trackers(self.config, self.paths.metrics.parent, first)
        with (
            ProgressBar("fit", total=total, unit="steps", done=first) as bar,
            self._batches(first) as batches,
            self.ranks.keeping(self._keep),
            self._together(),
        ):
            if not self.evaluated:
                self._evaluate_and_save()
            for step in range(first, total):
                made = self._step(step, batches)
                if self.ranks.most(signals.asked()):
                    raise signals.StopAsked
                self._evaluate_and_save()
                bar.advance(1, note=self._note(made))
            self.writer.finish()
        self.strategy.end()
        self._calibrate(total)
        self.trackers.summarise({"fit": {**self.best, "steps": total, "loss": self.last_loss}}, total)
        self.trackers.finish()
        return FitResult(
            total, int(self.best["step"]), self.best["acceptance_length"], self.last_loss, time.monotonic() - started
        )

    def _batches(self, first: int) -> DeviceBatches:
        """Micro-batches of this rank from step ``first`` to the last one."""
        options, device = self.config.trainer, self.accelerator.device
        workers = options.loader_workers
        if workers is None:
            workers = 0 if device.type == "cpu" else _DEVICE_WORKERS
        if first >= self.sampler.total_steps:
            workers = 0  # nothing is left to do
        loader = BatchLoader(self.source, self._requests(first), device, workers, options.prefetch_batches)
        return DeviceBatches(loader, device)

    def _requests(self, first: int) -> Iterator[BatchRequest]:
        options = self.config.trainer
        for step in range(first, self.sampler.total_steps):
            for documents in self.sampler[step].micro_batches:
                # A rank with nothing left in this epoch runs some document, of which nothing counts: the others wait
                # for its gradients, and where layers are gathered, for each of its passes through one.
                numbers = tuple(self.train[d] for d in documents or [0])
                draw = Draw(options.seed, step, numbers, options.packed_length)
                yield BatchRequest(numbers, options.packed_length, draw)

    def _step(self, step: int, batches: DeviceBatches) -> Step:
        """Gradients of one global batch, checked, then one optimiser step and its line of metrics."""
        started, waited_s = time.monotonic(), batches.waited_s
        micro_batches, gathered = self.sampler[step].micro_batches, StepSums()
        with compiled_pieces(self.config.trainer.compile):
            for number, documents in enumerate(micro_batches):
                is_last = number == len(micro_batches) - 1
                self._backward(next(batches), gathered, counts=bool(documents), is_last=is_last)
                batches.copy_next()
        device_sums = gathered.over_ranks(self.accelerator)
        sums, norm = device_sums.read(self.strategy.clip(device_sums.weight))
        self._check(step, sums)
        with signals.held():
            norm = self._update(step, sums, norm)
            made = Step(sums, norm, time.monotonic() - started, batches.waited_s - waited_s)
            self.done, self.evaluated, self.last_loss = step + 1, False, sums.loss / sums.weight
            if self.done % self.config.trainer.log_every_steps == 0 or self.done == self.sampler.total_steps:
                self._log(self.done, self._step_metrics(step, made))
        return made

    def _update(self, step: int, sums: StepTotals, norm: float) -> float:
        """Move the optimisers; returns the norm of the gradient before it was clipped."""
        set_learning_rates(self.strategy.optimizers, lr_factor(step, self.sampler.total_steps, self.config.trainer))
        norm = self.strategy.move(sums.weight, norm)
        if not math.isfinite(norm):
            raise RunError(
                f"the gradient is not finite at step {step + 1} (loss {sums.loss / sums.weight:.4f}): lower "
                f"trainer.learning_rate"
            )
        return norm

    def _backward(self, batch: PackedBatch, sums: StepSums, counts: bool, is_last: bool) -> None:
        device = self.accelerator.device
        precision = self.config.trainer.precision_on(device.type != "cpu")
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            losses = self.strategy.losses(batch)
        losses = losses if counts else losses.times(0)
        sums.add(losses, batch.num_tokens if counts else 0)
        self.strategy.backward(losses.loss, is_last)

    def _check(self, step: int, sums: StepTotals) -> None:
        if sums.weight == 0:
            raise RunError(
                f"no position counts in the batch of step {step + 1}: the loss mask of its documents is all zero, or "
                f"every answer is one "
                f"token; look at them with `spectrain inspect responses run.dir={self.config.run.dir}`"
            )
        if not math.isfinite(sums.loss):
            raise RunError(
                f"the loss is not finite at step {step + 1}: lower trainer.learning_rate, or check the hidden "
                f"states with `spectrain capture` "
                f"(epoch {self.sampler[step].epoch + 1}, {sums.tokens} tokens)"
            )

    def _evaluate_and_save(self) -> None:
        """What is due after ``self.done`` steps; before the first one, too, an evaluation is."""
        step, is_last = self.done, self.done == self.sampler.total_steps
        due = step % self.eval_every == 0 or is_last
        saves = step > 0 and (step % self.checkpoint_every == 0 or is_last)
        with self.strategy.whole() if due else nullcontext(self.drafter) as drafter:
            result, seconds = self._simulate(drafter) if due and self.heldout else (None, 0.0)
            # What all ranks do together comes before what a signal waits for.
            tensors = self.strategy.state() if saves else None
            with signals.held():
                if result is not None:
                    self._log(step, simulation_metrics(result, seconds))
                if due:
                    length = float("nan") if result is None else result.stats.acceptance_length
                    # Also where there was no round to judge by: the latest, then.
                    if not length <= self.best["acceptance_length"]:
                        self._save_best(drafter, length)
                self.evaluated = True
                if tensors is not None:
                    self._checkpoint(tensors)

    def _simulate(self, drafter: Drafter) -> tuple[SimulatedAcceptance, float]:
        """Acceptance on the held-out documents, and the seconds that it took."""
        started = time.monotonic()
        options, most = self.config, drafter.training_steps
        packed_length = options.trainer.packed_length
        with ProgressBar("simulate", total=len(self.heldout), unit="documents") as bar:
            common = (self.source, self.heldout, options.decoding, self.eos_ids, packed_length, most)
            with self.served.like(drafter) as served:
                result = simulate_heldout(served, *common, advance=bar.advance, ranks=self.ranks)
        return result, time.monotonic() - started

    def _calibrate(self, step: int) -> None:
        """Let the best drafter's confidence head, where it has one, say what happens on all held-out documents."""
        if not self.drafter.has_confidence or not self.all_heldout:
            return
        options, head = self.config, self.drafter.head
        common = (self.source, self.all_heldout, options.decoding, self.eos_ids, options.trainer.packed_length)
        found = self.ranks.from_first(
            lambda: calibrate_folder(self.paths.drafter, head, self.accelerator.device, self.served.dtype, *common)
        )
        if found:
            self._log(step, found)

    def _save_best(self, drafter: Drafter, length: float) -> None:
        self.best = {"step": self.done, "acceptance_length": length}
        if self.accelerator.is_main_process:
            facts = {
                **self.folder_metadata.get("metadata", {}),
                "step": self.done,
                "simulated_acceptance_length": plain(length),
            }
            save_drafter(
                drafter,
                self.paths.drafter,
                num_speculative_tokens=self.config.decoding.num_speculative_tokens,
                **{**self.folder_metadata, "metadata": facts},
            )

    def _checkpoint(self, tensors: TrainingState, extra: bool = False) -> None:
        """Save the state of the steps so far; one rank writes it. ``extra``: not because it is due."""
        state = {
            **asdict(self.sampler.position(self.done)),
            "best": self.best,
            "last_loss": self.last_loss,
            "world_size": self.accelerator.num_processes,
            "evaluated": self.evaluated,
            "extra": extra,
        }
        if self.accelerator.is_main_process:
            self.writer.start(tensors, state)
        self._saved = (self.done, self.evaluated)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Inside, ranks end together. Where the first one has everything, it does not wait for a long step."""
        if self.ranks.count == 1:
            yield
            return
        alone = self.strategy.saves_alone and self.ranks.is_first
        with signals.together(_ALONE_AFTER_S if alone else PATIENCE_S):
            try:
                yield
            except signals.StopAsked:
                self._stop_together()

    def _stop_together(self) -> None:
        """Save the steps that were made, on all ranks, and end by the signal that one of them got."""
        number = self.ranks.most(signals.asked())
        if self.done and self._saved != (self.done, self.evaluated):
            tensors = self.strategy.state()
            with signals.held():
                self._checkpoint(tensors, extra=True)
            self.writer.settle()
        self.ranks.wait()
        signals.end_together(number)

    def _keep(self) -> str:
        """A signal ends the command: save what the steps have made, if one rank can, and finish what is written."""
        if not self.accelerator.is_main_process:
            return ""
        if self.strategy.saves_alone and self.done and self._saved != (self.done, self.evaluated):
            self._checkpoint(self.strategy.state(), extra=True)
        self.writer.finish()
        self.trackers.flush()
        return f"fit keeps {self._saved[0]} of {self.sampler.total_steps} steps; {signals.CONTINUES}"

    def _resume(self) -> None:
        state = self.ranks.first_then_all(
            lambda: load_checkpoint(self.paths.checkpoints, self.drafter, self.strategy.optimizers)
        )
        if state is not None:
            self.done = int(state["step"])
            self.best = state["best"]
            self.last_loss = state["last_loss"]
            self.evaluated = state.get("evaluated", True)
            self._saved = (self.done, self.evaluated)
            self.sampler = self._sampler(Position(self.done, int(state["epoch"]), int(state["consumed"])))
            if state["world_size"] != self.accelerator.num_processes:
                say(f"fit: goes on with {self.accelerator.num_processes} ranks where there were {state['world_size']}")
            say(f"fit: resuming after step {self.done} of {self.sampler.total_steps}")
        if self.accelerator.is_main_process:
            self.writer.goes_on_from(self.done, state is not None and bool(state.get("extra")))
            keep_metrics_up_to(self.paths.metrics, -1 if state is None else self.done, self.evaluated)

    def _note(self, made: Step) -> str:
        """Beside the progress bar."""
        best = self.best["acceptance_length"]
        parts = [f"loss {self.last_loss:.3f}", f"simulated τ {best:.3f}" if best > 0 else ""]
        if made.data_wait_share > _WAIT_TO_MENTION:
            parts.append(f"waiting for data {made.data_wait_share:.0%}")
        return "  ".join(filter(None, parts))

    def _step_metrics(self, step: int, made: Step) -> dict[str, Any]:
        return {
            "epoch": self.sampler.epoch_of(step) + 1,
            "loss": self.last_loss,
            **made.sums.metrics(),
            "lr": self.strategy.optimizers[-1].param_groups[0]["lr"],
            "gradient_norm": made.gradient_norm,
            "tokens_per_s": made.sums.tokens / made.seconds,
            "data_wait_share": made.data_wait_share,
        }

    def _log(self, step: int, values: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            append_metrics(self.paths.metrics, step, values)
        self.trackers.log(values, step)
