"""The training loop: what it logs, what it refuses before the optimiser moves, and which drafter it keeps."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_tools import (
    MemoryStore,
    Options,
    as_dtype,
    as_reference_document,
    fit,
    make_trainer,
    random_document,
    random_documents,
    random_drafter,
    reference_of,
    tensors_of,
    trainer_config,
)
from reference import brute_force_loss
from torch import Tensor

from spectrain.config.evaluation_schema import DecodingConfig
from spectrain.config.trainer_schema import TrainerConfig
from spectrain.data.hidden_states import TargetStates
from spectrain.drafters.autoregressive.eagle3 import Eagle3
from spectrain.drafters.drafter_folder import load_drafter
from spectrain.errors import RunError

OPTIONS = Options(reduced=True)


def lines(folder: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(drafter: Eagle3) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in tensors_of(drafter).items()}


def one_batch(**options: Any) -> Any:
    """Everything in one batch."""
    return trainer_config(**{"packed_length": 256, "epochs": 1, **options})


def heldout(documents: list[TargetStates]) -> list[TargetStates]:
    return [replace(states, split="heldout", key=f"held-{states.key}") for states in documents]


def test_the_first_line_is_the_untrained_drafters_brute_force_loss(tmp_path: Path) -> None:
    drafter = random_drafter(OPTIONS)
    documents = random_documents(OPTIONS, drafter.head)
    expected = brute_force_loss(
        reference_of(drafter), [as_reference_document(d) for d in documents], 3, OPTIONS.loss.weights, 0.8
    )
    result = fit(tmp_path, drafter, MemoryStore(documents), one_batch(learning_rate=1e-3, warmup_fraction=0.0))
    (line,) = [line for line in lines(tmp_path) if "loss" in line]
    assert line["step"] == 1 and line["epoch"] == 1
    assert line["loss"] == result.final_loss == pytest.approx(float(expected.loss.detach()) / expected.weight, rel=1e-5)
    assert line["positions"] == expected.count[0]
    assert line["lr"] == 1e-3
    for k in range(3):
        assert line["accuracy_per_step"][k] == pytest.approx(expected.hits[k] / expected.count[k])
        for name in ("ce", "tv"):
            assert line[f"{name}_per_step"][k] == pytest.approx(expected.terms[name][k] / expected.count[k], rel=1e-5)


def test_training_lowers_the_loss_and_writes_the_best_drafter(tmp_path: Path) -> None:
    drafter = random_drafter(OPTIONS)
    documents = random_documents(OPTIONS, drafter.head)
    config = one_batch(epochs=30, eval_every_steps=10, learning_rate=1e-2)
    result = fit(tmp_path, drafter, MemoryStore(documents + heldout(documents)), config)
    losses = [line["loss"] for line in lines(tmp_path) if "loss" in line]
    simulations = {
        line["step"]: line["simulated_acceptance_length"] for line in lines(tmp_path) if "simulated_rounds" in line
    }
    assert len(losses) == result.steps == 30
    assert losses[-1] < 0.8 * losses[0]
    assert set(simulations) == {0, 10, 20, 30}
    assert result.best_acceptance_length == max(simulations.values()) > 1.0
    assert simulations[result.best_step] == result.best_acceptance_length
    recorded = json.loads((tmp_path / "drafter" / "config.json").read_text())["spectrain"]
    assert (
        recorded["step"] == result.best_step
        and recorded["simulated_acceptance_length"] == result.best_acceptance_length
    )


def test_a_worse_drafter_never_replaces_a_better_one(tmp_path: Path) -> None:
    drafter = random_drafter(OPTIONS)
    documents = random_documents(OPTIONS, drafter.head)
    config = one_batch(epochs=8, eval_every_steps=1, learning_rate=1e-2, keep_checkpoints=1, schedule="constant")
    trainer = make_trainer(tmp_path, drafter, MemoryStore(documents + heldout(documents)), config)
    saved: dict[int, dict[str, Tensor]] = {}
    best = trainer.fit()
    simulations = [line["simulated_acceptance_length"] for line in lines(tmp_path) if "simulated_rounds" in line]
    first_best = simulations.index(max(simulations))
    assert best.best_step == first_best > 0  # of equals the first
    # What is kept is the drafter of that step, though checkpoints have rotated past it.
    again = random_drafter(OPTIONS)
    again_trainer = make_trainer(tmp_path / "again", again, MemoryStore(documents + heldout(documents)), config)
    for optimizer in again_trainer.strategy.optimizers[-1:]:
        optimizer.register_step_post_hook(lambda *_: saved.update({len(saved) + 1: weights(again)}))
    again_trainer.fit()
    kept = tensors_of(load_drafter(tmp_path / "drafter"))  # type: ignore[arg-type]
    assert all(torch.equal(kept[name], tensor) for name, tensor in saved[first_best].items())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000008"]


@pytest.mark.parametrize("masks", [[], ["00001"]], ids=["no held-out text", "held-out text without a round"])
def test_where_the_simulation_has_nothing_to_say_the_last_drafter_is_kept(tmp_path: Path, masks: list[str]) -> None:
    drafter = random_drafter(OPTIONS)
    documents = random_documents(OPTIONS, drafter.head)
    extra = heldout([random_document(mask, 3, 50 + i, drafter.head) for i, mask in enumerate(masks)])
    result = fit(tmp_path, drafter, MemoryStore(documents + extra), one_batch(epochs=3))
    assert result.best_step == 3 and math.isnan(result.best_acceptance_length)
    kept = tensors_of(load_drafter(tmp_path / "drafter"))  # type: ignore[arg-type]
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights(drafter).items())
    assert len([line for line in lines(tmp_path) if "loss" in line]) == 3
    assert "NaN" not in (tmp_path / "drafter" / "config.json").read_text()  # not JSON: other readers stumble over it


def stopped(tmp_path: Path, documents: list[TargetStates], message: str, **options: Any) -> None:
    drafter = random_drafter(OPTIONS)
    before = weights(drafter)
    trainer = make_trainer(tmp_path, drafter, MemoryStore(documents), one_batch(**options))
    with pytest.raises(RunError, match=message) as error:
        trainer.fit()
    assert error.value.exit_code == 1 and "\n" not in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(drafter).items())
    assert not any(optimizer.state for optimizer in trainer.strategy.optimizers)
    assert not list((tmp_path / "checkpoints").glob("*"))


@pytest.mark.parametrize("field", ["taps", "last_hidden"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_optimiser(tmp_path: Path, field: str, value: float) -> None:
    documents = random_documents(OPTIONS)
    broken = getattr(documents[0], field).clone()
    broken[4] = value
    stopped(tmp_path, [replace(documents[0], **{field: broken}), *documents[1:]], "not finite at step 1")


def test_a_batch_in_which_nothing_counts_stops_before_the_optimiser(tmp_path: Path) -> None:
    empty = [random_document(mask, 3, i) for i, mask in enumerate(["0000", "01", "00001"])]
    stopped(tmp_path, empty, "no position counts in the batch of step 1.*mask")


READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")  # these wait for a device


def test_nothing_is_read_from_the_device_between_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step with four micro-batches, all that the trainer reads is its sums, after the last backward pass, and the
    norm of the gradient. What drafters and losses read themselves is theirs.
    """
    events: list[str] = []
    for name in READS:
        real = getattr(Tensor, name)

        def spy(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            while frame is not None and "spectrain" not in frame.f_globals.get("__name__", ""):
                frame = frame.f_back
            if frame is not None and frame.f_globals["__name__"].startswith("spectrain.training"):
                events.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(Tensor, name, spy)
    drafter = random_drafter(OPTIONS)
    texts = [random_document("0001111", 3, i, drafter.head) for i in range(8)]
    config = trainer_config(packed_length=7, gradient_accumulation=4, epochs=2, log_every_steps=100)
    trainer = make_trainer(tmp_path, drafter, MemoryStore(texts), config)
    backward = trainer.accelerator.backward
    monkeypatch.setattr(trainer.accelerator, "backward", lambda loss: (events.append("backward"), backward(loss)))
    events.clear()
    with trainer._batches(0) as batches:
        for step in range(2):
            trainer._step(step, batches)
            assert events[:4] == ["backward"] * 4
            reads = events[4:]
            assert reads.count("cpu") == 1 and set(reads) <= {"cpu", "__float__", "__int__", "__bool__"}, reads
            assert len(reads) == 5, reads  # one transfer, three numbers of it, and whether the gradient is finite
            events.clear()


@pytest.mark.slow
def test_metrics_say_what_share_of_a_step_waited_for_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Slow(MemoryStore):
        seconds = 0.0

        def __getitem__(self, index: int) -> TargetStates:
            time.sleep(self.seconds)
            return super().__getitem__(index)

    documents = random_documents(OPTIONS)
    for seconds in (0.0, 0.2):
        source = Slow(documents)
        source.seconds = seconds
        fit(tmp_path / str(seconds), random_drafter(OPTIONS), source, one_batch(epochs=2))
        shares = [line["data_wait_share"] for line in lines(tmp_path / str(seconds)) if "loss" in line]
        assert len(shares) == 2 and all(0 < share < 1 for share in shares)
        assert not seconds or min(shares) > 0.5
        assert ("waiting for data" in capsys.readouterr().err) == (seconds > 0 or shares[-1] > 0.1)


def test_without_documents_there_is_no_trainer(tmp_path: Path) -> None:
    drafter = random_drafter(OPTIONS)
    with pytest.raises(RunError, match="no training document has two generated tokens"):
        make_trainer(tmp_path, drafter, MemoryStore(heldout(random_documents(OPTIONS))), one_batch())


def test_documents_longer_than_a_row_are_cut_not_dropped(tmp_path: Path) -> None:
    drafter = random_drafter(OPTIONS)
    fit(tmp_path, drafter, MemoryStore([random_document("0" * 4 + "1" * 20, 3, 0)]), one_batch(packed_length=10))
    (line,) = [line for line in lines(tmp_path) if "loss" in line]
    assert line["positions"] == 5  # of ten tokens, six generated: five pairs of them


def test_a_training_that_was_killed_before_its_first_checkpoint_logs_nothing_twice(tmp_path: Path) -> None:
    documents = random_documents(OPTIONS)
    store = MemoryStore(documents + heldout(documents))
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "simulated_rounds": 1}\n{"step": 1, "loss": 1.0}\n'
    )  # what the killed one left
    fit(tmp_path, random_drafter(OPTIONS), store, one_batch(epochs=2, eval_every_steps=2))
    assert [(line["step"], "loss" in line) for line in lines(tmp_path)] == [
        (0, False),
        (1, True),
        (2, True),
        (2, False),
    ]


def test_a_sampled_simulation_is_the_same_at_every_evaluation_of_the_same_weights(tmp_path: Path) -> None:
    drafter = random_drafter(OPTIONS)
    documents = random_documents(OPTIONS, drafter.head)
    decoding = DecodingConfig(temperature=1.0, proposal_policy="sample", num_speculative_tokens=2)
    config = trainer_config(
        decoding, packed_length=256, epochs=2, eval_every_steps=1, learning_rate=1e-12, warmup_fraction=0.0
    )
    fit(tmp_path, drafter, MemoryStore(documents + heldout(documents)), config)
    simulations = [
        {name: value for name, value in line.items() if name not in ("step", "simulation_s")}
        for line in lines(tmp_path)
        if "simulated_rounds" in line
    ]
    assert (
        len(simulations) == 3
        and simulations[0]["simulated_rounds"]
        == simulations[1]["simulated_rounds"]
        == simulations[2]["simulated_rounds"]
        > 0
    )
    assert len({simulate["simulated_acceptance_length"] for simulate in simulations}) == 1
    assert set(simulations[0]["simulated_acceptance_length_by_n"]) == {"1", "2", "3"}


def test_precision_by_itself_is_that_of_the_device(tmp_path: Path) -> None:
    """bfloat16 on an accelerator, float32 on a CPU, where auto is therefore float32 to the bit."""
    assert [TrainerConfig().precision_on(accelerator) for accelerator in (False, True)] == ["float32", "bfloat16"]
    assert [TrainerConfig().head_precision_on(accelerator) for accelerator in (False, True)] == ["float32", "bfloat16"]
    chosen = TrainerConfig(precision="float32", head_precision="tf32")
    assert (chosen.precision_on(True), chosen.head_precision_on(True)) == ("float32", "tf32")
    losses = []
    for precision in ("auto", "float32"):
        drafter = random_drafter(OPTIONS, dtype=torch.float32)
        store = MemoryStore([as_dtype(d, torch.float32) for d in random_documents(OPTIONS, drafter.head)])
        losses.append(fit(tmp_path / precision, drafter, store, one_batch(precision=precision)).final_loss)
    assert losses[0] == losses[1]


def test_a_teacher_in_bfloat16_teaches_nearly_the_same(tmp_path: Path) -> None:
    losses = {}
    for precision in ("float32", "bfloat16"):
        drafter = random_drafter(OPTIONS, dtype=torch.float32)
        store = MemoryStore([as_dtype(d, torch.float32) for d in random_documents(OPTIONS, drafter.head)])
        losses[precision] = fit(tmp_path / precision, drafter, store, one_batch(head_precision=precision)).final_loss
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["bfloat16"] != losses["float32"]


def test_bfloat16_computes_coarsely_and_keeps_float32_weights(tmp_path: Path) -> None:
    """Updates of a thousandth of a weight would round away in bfloat16."""
    losses = {}
    for precision in ("float32", "bfloat16"):
        drafter = random_drafter(OPTIONS, dtype=torch.float32)
        before = weights(drafter)
        store = MemoryStore([as_dtype(d, torch.float32) for d in random_documents(OPTIONS, drafter.head)])
        config = one_batch(precision=precision, learning_rate=1e-5, warmup_fraction=0.0)
        losses[precision] = fit(tmp_path / precision, drafter, store, config).final_loss
        after = weights(drafter)
        assert all(tensor.dtype == torch.float32 for tensor in after.values())
        assert all(not torch.equal(tensor, before[name]) for name, tensor in after.items())
        assert max(float((tensor - before[name]).abs().max()) for name, tensor in after.items()) < 2e-5
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)


def test_states_in_bfloat16_train_a_float32_drafter(tmp_path: Path) -> None:
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        drafter = random_drafter(OPTIONS, dtype=torch.float32)
        documents = [as_dtype(d, dtype) for d in random_documents(OPTIONS, drafter.head)]
        documents = [
            replace(d, log_normalizer=None) for d in documents
        ]  # it belongs to the states before they were rounded
        losses[dtype] = fit(tmp_path / str(dtype), drafter, MemoryStore(documents), one_batch()).final_loss
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=0.02)
