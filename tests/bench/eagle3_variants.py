"""What might make a drafter trained on little text better, tried one at a time: noise on the hidden states, weight
decay towards the initialisation, updates of low rank, another temperature of the teacher.

    python tests/bench/eagle3_variants.py --run DIR --out DIR [--variants plain noise=0.1 decay=20 …] \\
        -- recipe=quickstart data=jsonl data.train=A.jsonl … (the overrides that made --run)

Each variant is a `fit` of its own by the package's trainer on the responses and hidden states of ``--run``, and differs
from `plain` in one thing:

- ``noise=s``: every tap gets normal noise of s times its root mean square, anew in every step;
- ``decay=l``: after every update each weight moves ``lr · l`` of the way back to where it began;
- ``rank=r``: what has been added to a matrix is cut to its r largest singular directions after every update;
- ``teacher=T``: the teacher's distribution at temperature T, over the whole vocabulary.

None of them is an option of spectrain. Printed for each: τ over the held-out documents before training and after every
epoch, by the simulation that `fit` chooses its drafter by, with bootstrap intervals over documents.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from spectrain.cli import main as spectrain
from spectrain.data.packing import PackedBatch
from spectrain.drafters.losses.students import Teacher
from spectrain.training.trainer import Trainer


def noise(share: float) -> Iterator[None]:
    backward = Trainer._backward
    generator = torch.Generator().manual_seed(0)

    def noisy(trainer: Trainer, batch: PackedBatch, *args: Any, **kwargs: Any) -> None:
        taps_TAH = batch.taps_TAH.float()
        size_TA1 = taps_TAH.square().mean(-1, keepdim=True).sqrt()
        taps_TAH = taps_TAH + share * size_TA1 * torch.randn(taps_TAH.shape, generator=generator)
        backward(trainer, dataclasses.replace(batch, taps_TAH=taps_TAH), *args, **kwargs)

    with mock.patch.object(Trainer, "_backward", noisy):
        yield


def _after_updates(change: Any) -> Iterator[None]:
    """``change(parameter, where it began, learning rate)`` after every update."""
    update = Trainer._update
    began: dict[str, Tensor] = {}

    def changed(trainer: Trainer, step: int, *args: Any) -> float:
        if not began:
            began.update({name: p.detach().clone() for name, p in trainer.drafter.named_parameters()})
        norm = update(trainer, step, *args)
        rate = trainer.strategy.optimizers[-1].param_groups[0]["lr"]
        with torch.no_grad():
            for name, parameter in trainer.drafter.named_parameters():
                if parameter.requires_grad:
                    change(parameter, began[name], rate)
        return norm

    with mock.patch.object(Trainer, "_update", changed):
        yield


def decay(strength: float) -> Iterator[None]:
    return _after_updates(lambda parameter, began, rate: parameter.lerp_(began, min(1.0, rate * strength)))


def rank(size: float) -> Iterator[None]:
    def cut(parameter: Tensor, began: Tensor, rate: float) -> None:
        if parameter.ndim == 2 and min(parameter.shape) > size:
            left, values, right = torch.svd_lowrank(parameter - began, q=int(size) + 4, niter=1)
            kept = slice(int(size))
            parameter.copy_(began + (left[:, kept] * values[kept]) @ right[:, kept].T)

    return _after_updates(cut)


def teacher(temperature: float) -> Iterator[None]:
    def log_probs(self: Teacher, part: slice) -> Tensor:
        normed_CH = self.head.post_norm(self.last_hidden_UH[part])
        all_CV = self.head.transform_logits(self.head.product(normed_CH, self.head.lm_head_weight)) / temperature
        normalizer_C1 = all_CV.logsumexp(-1, keepdim=True)
        if self.rows_DH is None:
            return all_CV - normalizer_C1
        rows_CD = self.head.transform_logits(self.head.product(normed_CH, self.rows_DH)) / temperature
        return rows_CD - normalizer_C1

    with mock.patch.object(Teacher, "log_probs", log_probs):
        yield


KEYS = ("simulated_acceptance_length", "simulated_interval", "simulated_acceptance_per_position", "simulated_rounds")
VARIANTS = {"noise": noise, "decay": decay, "rank": rank, "teacher": teacher}


def fit(run: Path, folder: Path, variant: str, overrides: list[str]) -> dict[str, Any]:
    """The evaluations of a `fit` with ``variant``, by step."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(
        run,
        folder,
        copy_function=shutil.copy,
        ignore=shutil.ignore_patterns("checkpoints", "drafter", "metrics*", "eval"),
    )
    name, _, value = variant.partition("=")
    with contextmanager(VARIANTS[name])(float(value)) if value else mock.MagicMock():
        code = spectrain(["fit", *overrides, f"run.dir={folder}"])
    if code:
        raise SystemExit(f"{variant}: fit ended with {code}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: {key: line[key] for key in KEYS} for line in lines if KEYS[0] in line}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", default=["plain", "noise=0.1", "decay=20", "rank=32", "teacher=0.7"])
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    for variant in args.variants:
        found = fit(args.run, args.out / variant, variant, args.overrides)
        print(variant, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
