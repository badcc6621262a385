"""``trainer.strategy=zero1``, ``zero2``, ``zero3``: DeepSpeed's ZeRO. Each rank holds a share of the moments (1), of
gradients, too (2), and of weights (3), which are gathered before the module that needs them runs.

The engine is DeepSpeed's own. Accelerate would put it together alike, but lets it make its step inside the backward
pass of the last micro-batch, before anybody has seen whether the loss is finite, and goes around it on a CPU. What it
would fill in is said here: accumulation is counted by the trainer, whose last step of an epoch may be shorter, so
boundaries are set one by one and the engine divides by nothing but its loss scale, which is the weight of the batch.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from spectrain.data.packing import PackedBatch
from spectrain.drafters.drafter import Drafter
from spectrain.drafters.losses.fused import LossSums
from spectrain.training.checkpointing import TrainingState, named_moments, on_host
from spectrain.training.optim import build_optimizers
from spectrain.training.strategies import (
    Strategy,
    WholeCopy,
    share_weights,
)

_MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, beside the number of its steps
_STEP = "step"
_LOCAL_RANK = "LOCAL_RANK"


class _Flat(nn.Module):
    """Returns a tuple of tensors, in which DeepSpeed finds what backward begins with. Not through the drafter's own
    ``forward``: parameters that no module of their own reads (lm_head in the loss) are gathered for backward by the
    hooks of the module that was called.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, batch: PackedBatch) -> tuple[Tensor, ...]:
        sums = self.drafter.train_losses(batch)
        self.terms = tuple(sums.terms_K)
        return sums.loss, sums.weight, sums.hits_K, sums.count_K, *sums.terms_K.values()


class Zero(Strategy):
    """Stage 1, 2 or 3, by the name of the strategy."""

    @property
    def stage(self) -> int:
        return int(self.config.strategy.removeprefix("zero"))

    def begin(self) -> None:
        before = {name: dict(moments) for _, name, moments in named_moments(self.drafter, self.optimizers)}
        self.drafter.to(self.accelerator.device)
        share_weights(self.drafter)
        if self.stage == 3:
            self._copy = WholeCopy(self.drafter)
        self._flat = _Flat(self.drafter)
        self.optimizers = build_optimizers(self.drafter, self.config)
        warnings.filterwarnings(
            "ignore", category=FutureWarning, module="torch.distributed"
        )  # what DeepSpeed calls there
        # DeepSpeed reads the device's number from a launcher's variable, again and again; ``joined`` has taken it away.
        os.environ[_LOCAL_RANK] = str(self.accelerator.local_process_index)
        if self.accelerator.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        with _quiet():
            import deepspeed  # type: ignore[import-untyped,import-not-found,unused-ignore]

            # It would be compiled at first use: minutes, and a compiler, for what gloo does already.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            self._deepspeed = deepspeed
            self.engine, *_ = deepspeed.initialize(
                model=self._flat, optimizer=self.optimizers[0], config=self._settings(), dist_init_required=False
            )
        self._place(before)

    def _settings(self) -> dict[str, Any]:
        config = self.config
        bfloat16 = config.precision_on(self.accelerator.device.type != "cpu") == "bfloat16"
        return {
            "train_micro_batch_size_per_gpu": config.micro_batch_size,
            "gradient_accumulation_steps": config.gradient_accumulation,
            "gradient_clipping": config.max_grad_norm,
            "zero_optimization": {"stage": self.stage},
            # The engine turns off a context that is not its own. What is reduced over ranks stays float32.
            "torch_autocast": {"enabled": bfloat16, "dtype": "bfloat16", "lower_precision_safe_modules": []},
        }

    def losses(self, batch: PackedBatch) -> LossSums:
        loss, weight, hits_K, count_K, *terms = self.engine(batch)
        return LossSums(loss, weight, dict(zip(self._flat.terms, terms, strict=True)), hits_K, count_K)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.engine.optimizer.override_loss_scale(1.0)
        self.engine.backward(loss, scale_wrt_gas=False)
        if not is_last:
            self.engine.step()  # counts the micro-batch

    def clip(self, weight: Tensor) -> Tensor:
        return weight.new_zeros(())  # the engine does it in its step

    def move(self, weight: float, norm: float) -> float:
        # The mean over ranks was taken; gradients are divided by the scale, and clipped then.
        self.engine.optimizer.override_loss_scale(weight / self.accelerator.num_processes)
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def whole(self) -> AbstractContextManager[Drafter]:
        if self.stage == 3:
            return self._copy.lent(self._weights())
        return nullcontext(self.drafter)

    def _weights(self) -> Iterator[Tensor]:
        for parameter in self.drafter.parameters():
            with self._deepspeed.zero.GatheredParameters([parameter], enabled=self.stage == 3):
                yield parameter.detach().clone()

    def state(self) -> TrainingState:
        from deepspeed.utils import safe_get_full_optimizer_state  # type: ignore

        state, writes = TrainingState(), self.accelerator.is_main_process
        step = max(moments[_STEP] for moments in self._partitioned().state.values())
        kind = type(self.optimizers[0]).__name__
        for (name, parameter), weight in zip(self.drafter.named_parameters(), self._weights(), strict=True):
            if writes:
                state.weights[name] = on_host(weight)
            if not parameter.requires_grad:
                continue
            for key in _MOMENTS:
                whole = safe_get_full_optimizer_state(parameter, key)
                if writes:
                    state.moments[f"{kind}/{name}/{key}"] = on_host(whole)
            if writes:
                state.moments[f"{kind}/{name}/{_STEP}"] = on_host(step)
        return state

    def _partitioned(self) -> torch.optim.Optimizer:
        """torch's optimiser, whose parameters are this rank's partitions now."""
        return self.engine.optimizer.optimizer

    def _place(self, moments: dict[str, dict[str, Tensor]]) -> None:
        """Put whole moments of every parameter into this rank's partitions; where there are none yet, zeros.

        Without that DeepSpeed would make them group by group in its first step, and know of the first group's alone.
        """
        from deepspeed.utils import (
            safe_set_full_optimizer_state,
            safe_set_local_optimizer_state,
        )

        zero = self.engine.optimizer
        flat = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        step = next(iter(moments.values()))[_STEP] if moments else torch.zeros(())
        for partition in flat:
            zeros = {key: torch.zeros_like(partition) for key in _MOMENTS}
            self._partitioned().state[partition] = {_STEP: step.to(partition.device, copy=True), **zeros}
        if self.stage < 3:
            zero._lazy_init_hp_params_optimizer_state()
        rank, count = self.accelerator.process_index, self.accelerator.num_processes
        for name, parameter in self.drafter.named_parameters():
            for key in _MOMENTS if name in moments else ():
                value = moments[name][key].to(self.accelerator.device)
                if self.stage < 3:
                    safe_set_full_optimizer_state(parameter, value, key)
                    continue
                part = -(-value.numel() // count)  # the last rank's is filled up
                padded = torch.nn.functional.pad(value.flatten(), (0, part * count - value.numel()))
                safe_set_local_optimizer_state(parameter, padded[rank * part : (rank + 1) * part], key)

    def end(self) -> None:
        os.environ.pop(_LOCAL_RANK, None)


@contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed tells what it finds and builds; what goes wrong is an exception."""
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        yield
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
