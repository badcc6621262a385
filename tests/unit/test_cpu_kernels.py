"""The CPU's products by oneDNN: the same numbers as float64, the same parameters, gradients where they are
asked for.
"""

import pytest
import torch
from torch import nn

from spectrain.target.cpu_kernels import CpuLinear, linear, speed_up


@pytest.mark.parametrize("shape", [(1, 64), (4, 64), (2, 3, 64), (0, 64), (64,)])
@pytest.mark.parametrize("bias", [True, False])
def test_product_equals_float64(shape: tuple[int, ...], bias: bool) -> None:
    x, weight, offset = torch.randn(shape), torch.randn(48, 64), torch.randn(48) if bias else None
    with torch.no_grad():
        product = linear(x, weight, offset)
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    torch.testing.assert_close(product.double(), expected, rtol=0, atol=1e-4)


def test_strided_input() -> None:
    x, weight = torch.randn(6, 8, 64).transpose(0, 1)[:, ::2], torch.randn(48, 64)
    with torch.no_grad():
        torch.testing.assert_close(linear(x, weight), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_gradients_still_flow() -> None:
    x, weight = torch.randn(4, 64), torch.randn(48, 64, requires_grad=True)
    linear(x, weight).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, x.sum(0).expand(48, 64))


def test_speed_up_keeps_parameters_and_their_names() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4, bias=False))
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    speed_up(model)
    assert isinstance(model[0], CpuLinear)
    assert isinstance(model[2], CpuLinear)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
