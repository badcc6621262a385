"""Attention while unrolling: every backend against a loop over queries that collects the keys each may see."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spectrain.drafters.autoregressive import column_attention
from spectrain.drafters.autoregressive.column_attention import ColumnLayout, unrolled_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
N, G, D = 4, 2, 16  # flex wants head sizes of 16 or more

# (document lengths, counted columns): gaps, documents without queries, a single column, an edge of two blocks of 128.
LAYOUTS = {
    "one document": ([6], [2, 3, 4]),
    "several, one without queries": ([4, 3, 5, 1], [1, 2, 7, 8, 10]),
    "first and last column": ([3, 3], [0, 5]),
    "longer than a block": ([70, 90], [*range(60, 69), *range(100, 160, 7)]),
}


class Case:
    def __init__(
        self,
        name: str,
        own: int,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
        window: int | None = None,
    ) -> None:
        lengths, columns = LAYOUTS[name]
        self.window = window
        generator = torch.Generator().manual_seed(7)
        self.columns = columns
        self.document_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
        t, m = sum(lengths), len(columns)
        shapes = [(m, N, D), (t, G, D), (t, G, D), *[(m, G, D)] * (2 * own)]
        tensors = [2 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        self.inputs = [x.to(device, dtype).requires_grad_() for x in tensors]
        self.d_out = torch.randn(m, N, D, generator=generator, dtype=torch.float64).to(device, dtype)

    def parts(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
        q, k0, v0, *rest = self.inputs
        return q, k0, v0, rest[0::2], rest[1::2]

    def run(self, backend: str) -> Tensor:
        device = self.document_ids.device
        layout = ColumnLayout.build(torch.tensor(self.columns), self.document_ids.cpu(), device, self.window)
        return unrolled_attention(*self.parts(), layout, backend)

    def gradients(self, out: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(out, self.inputs, self.d_out, allow_unused=True, materialize_grads=True))

    def reference(self) -> Tensor:
        q, k0, v0, own_k, own_v = self.parts()
        rows = []
        window = self.window or 1 << 20
        for m, column in enumerate(self.columns):
            position, own = column + len(own_k), [j for j in range(1, len(own_k) + 1) if len(own_k) - j < window]
            seen = [c for c in range(column + 1) if self.document_ids[c] == self.document_ids[column]]
            seen = [c for c in seen if position - c < window]
            heads = []
            for n in range(N):
                g = n // (N // G)
                keys = torch.stack([k0[c, g] for c in seen] + [own_k[j - 1][m, g] for j in own])
                values = torch.stack([v0[c, g] for c in seen] + [own_v[j - 1][m, g] for j in own])
                heads.append(torch.softmax(keys @ q[m, n] / math.sqrt(D), 0) @ values)
            rows.append(torch.stack(heads))
        return torch.stack(rows)


@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_forward_and_backward(backend: str, layout: str, own: int) -> None:
    case = Case(layout, own)
    found, expected = case.run(backend), case.reference()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(case.gradients(found), case.gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize("window", [1, 2, 5, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_window(
    backend: str, layout: str, window: int, own: int, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_parts:
        monkeypatch.setattr(column_attention, "_MOST_SCORES", 5)
        monkeypatch.setattr(column_attention, "_WINDOW_QUERIES", 3)
    case = Case(layout, own, window=window)
    found, expected = case.run(backend), case.reference()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(case.gradients(found), case.gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_parts_of_a_long_document_take_the_keys_of_their_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_attention, "_MOST_SCORES", 1 << 16)
    layout = ColumnLayout.build(torch.arange(5000), torch.zeros(5000, dtype=torch.long), window=300)
    assert all(span.key_end - span.key_start <= 300 + span.end - span.start for span in layout.spans)
    assert sum(span.end - span.start for span in layout.spans) == 5000 and len(layout.spans) < 30


@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_long_documents_in_parts_that_backward_does_again(
    backend: str, layout: str, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_attention, "_MOST_SCORES", 5)
    monkeypatch.setattr(column_attention, "_PART_SCORES", 200)  # two queries of a hundred keys
    case = Case(layout, own)
    found, expected = case.run(backend), case.reference()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(case.gradients(found), case.gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 2, 5, 40])
def test_flex_forward(layout: str, own: int, window: int | None) -> None:
    case = Case(layout, own, torch.float32, window=window)
    case.inputs = [x.detach() for x in case.inputs]  # it has no backward pass on a CPU
    torch.testing.assert_close(case.run("flex"), case.reference(), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention has no backward pass on a CPU")
@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flex_on_a_gpu_forward_and_backward(layout: str, own: int) -> None:
    case = Case(layout, own, torch.float32, "cuda")
    found, expected = case.run("flex"), case.reference()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(case.gradients(found), case.gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex"])
def test_without_queries_there_is_nothing(backend: str, own: int) -> None:
    document_ids = torch.tensor([0, 0, 1])
    q, k, own_k = torch.zeros(0, N, D), torch.randn(3, G, D), [torch.zeros(0, G, D)] * own
    out = unrolled_attention(
        q, k, k, own_k, own_k, ColumnLayout.build(torch.zeros(0, dtype=torch.long), document_ids), backend
    )
    assert out.shape == (0, N, D)


def test_one_layout_serves_several_calls() -> None:
    """Masks are kept in the layout; steps of different depth must not disturb each other."""
    layout = ColumnLayout.build(torch.tensor(LAYOUTS["one document"][1]), torch.zeros(6, dtype=torch.long))
    for backend in ("eager", "sdpa"):
        for own in (0, 2, 1, 0):
            case = Case("one document", own)
            torch.testing.assert_close(
                unrolled_attention(*case.parts(), layout, backend), case.reference(), rtol=1e-10, atol=1e-12
            )
