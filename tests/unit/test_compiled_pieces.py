"""Norms, rotary phases and SwiGLU as compiled graphs: the same numbers, few graphs for all shapes, an error that says
what to do. Compiled by ``aot_eager``, which makes graphs forward and backward but no kernels.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafter_tools import Options, fit, random_documents, random_drafter, tensors_of, trainer_config, write_store
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from spectrain.drafters import compiled_pieces as pieces
from spectrain.drafters.layers import RMSNorm
from spectrain.errors import RunError


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(pieces, "BACKEND", counter)
    return counter


def _norm(x: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype).requires_grad_()
    return pieces.rms_norm(x, weight, 1e-5)


def _turn(x: Tensor) -> Tensor:
    phase = torch.arange(x.shape[-3], dtype=torch.float32)[:, None] * torch.linspace(0, 1, x.shape[-1])
    return pieces.turned(x, phase.cos(), phase.sin())


def _gate(x: Tensor) -> Tensor:
    return pieces.gated(x, x.flip(-1))


def _shapes(count: int) -> list[tuple[int, ...]]:
    draw = random.Random(3)
    heads = [(draw.randint(2, 400), draw.choice([2, 4]), 8) for _ in range(count)]
    return [shape for t, n, d in heads for shape in ((t, n, d), (1, t, n, d))]


@pytest.mark.slow
@pytest.mark.parametrize("piece", [_norm, _turn, _gate])
def test_the_same_forward_and_backward_by_few_graphs(
    piece: Callable[[Tensor], Tensor], compiler: CompileCounterWithBackend
) -> None:
    counts = []
    for shape in _shapes(25):
        found = []
        for on in (False, True):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
            with pieces.compiled_pieces(on):
                out = piece(x)
                found.append((out, *torch.autograd.grad(out.square().sum(), x)))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        counts.append(compiler.frame_count)
    assert 0 < counts[-1] <= 8  # by rank, and whether there is one head alone or several
    assert counts[10] == counts[-1]


@pytest.mark.slow
def test_a_training_comes_to_the_same_weights(tmp_path: Path, compiler: CompileCounterWithBackend) -> None:
    options = Options(layer_type="qwen3", num_layers=2, fc_norm=True)
    masks = ["0" * (1 + i % 4) + "1" * (3 + (5 * i) % 8) for i in range(12)]
    documents = random_documents(options, random_drafter(options).head, masks)
    store = write_store(tmp_path / "hidden_states", documents, options.taps)
    trained = []
    for on, again in ((False, False), (True, False), (True, True)):
        before = compiler.frame_count
        drafter = random_drafter(options, dtype=torch.float32)
        config = trainer_config(
            packed_length=14, epochs=2, learning_rate=1e-3, compile=on, gradient_checkpointing=again
        )
        fit(tmp_path / f"{on}-{again}", drafter, store, config)
        trained.append({name: p.detach() for name, p in tensors_of(drafter).items()})
        if not on:
            assert compiler.frame_count == before
    assert 0 < compiler.frame_count <= 3 * pieces.MOST_GRAPHS
    for other in trained[1:]:
        for name, tensor in trained[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    start = tensors_of(random_drafter(options, dtype=torch.float32))
    assert all(not torch.allclose(trained[0][name], start[name], rtol=1e-3) for name in ("fc.weight", "norm.weight"))


def test_what_cannot_be_compiled_says_which_key_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(graph: object, inputs: object) -> object:
        raise OSError("no compiler here")

    monkeypatch.setattr(pieces, "BACKEND", no_compiler)
    norm, x = RMSNorm(4, 1e-5), torch.ones(2, 4)
    with pieces.compiled_pieces(True), pytest.raises(RunError, match=r"trainer\.compile=false"):
        norm(x)
    torch.testing.assert_close(norm(x), x, rtol=0, atol=1e-4)  # and nothing is compiled outside
