"""flex attention's compiled kernels: one compiled function for all drafters, its options, and no silent way around it.

Uncompiled, or where torch gave up compiling for yet another shape, it would hold all scores of all heads: right, and a
hundred times too large. So what cannot be compiled is an error here. On a CPU, where nothing trains with it, tests run
it uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from spectrain.errors import RunError

# Graphs that one process may compile for it: kinds of drafters, with and without gradients, and the coincidences of
# sizes by which torch tells shapes apart.
MOST_GRAPHS = 32
_SMALL_MEMORY = 64 << 10  # bytes of shared memory a workgroup: gfx942 (MI300X, MI325X)


@cache
def compiled_flex(backend: str) -> Callable[..., Any]:
    """flex_attention, compiled once for all shapes."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)


def kernel_options(shared_memory_bytes: int, head_dim: int, number_bytes: int) -> dict[str, int] | None:
    """Tiles that fit into the shared memory of a workgroup, where torch's own choice, made for larger ones, might not;
    None: as torch chooses. A tile of queries and one each of keys and values are there at a time.
    """
    if shared_memory_bytes > _SMALL_MEMORY:
        return None
    rows = 64
    while rows > 16 and 3 * rows * head_dim * number_bytes > shared_memory_bytes:
        rows //= 2
    half = max(16, rows // 2)  # backward holds gradients, too
    backward = {"BLOCK_M1": half, "BLOCK_N1": rows, "BLOCK_M2": rows, "BLOCK_N2": half}
    return {"BLOCK_M": rows, "BLOCK_N": rows, **backward, "num_stages": 1}


def attend_sparsely(
    q_1NQd: Tensor, k_1GKd: Tensor, v_1GKd: Tensor, mask: Any, with_lse: bool = False, compiler: str = "inductor"
) -> Any:
    """flex_attention of padded queries and keys; with ``with_lse`` a pair, whose second has the log-sum-exp ``lse``.
    ``compiler``: torch's backend; on a CPU inductor's kernels have no backward pass, so nothing is compiled by it.

    Raises RunError where its kernels cannot be compiled.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    arguments: dict[str, Any] = {"block_mask": mask, "enable_gqa": q_1NQd.shape[1] != k_1GKd.shape[1]}
    if with_lse:
        arguments["return_aux"] = AuxRequest(lse=True)
    if q_1NQd.device.type == "cpu" and compiler == "inductor":
        return flex_attention(q_1NQd, k_1GKd, v_1GKd, **arguments)
    if q_1NQd.is_cuda:
        arguments["kernel_options"] = _options_of(q_1NQd)
    return _compiled(compiler, q_1NQd, k_1GKd, v_1GKd, **arguments)


def _options_of(q_1NQd: Tensor) -> dict[str, int] | None:
    properties = torch.cuda.get_device_properties(q_1NQd.device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    return kernel_options(shared, q_1NQd.shape[-1], q_1NQd.element_size())


def _compiled(compiler: str, *arguments: Any, **options: Any) -> Any:
    """``compiled_flex`` with at most ``MOST_GRAPHS`` graphs. Raises RunError where it cannot be compiled."""
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    try:
        with config.patch(recompile_limit=MOST_GRAPHS, fail_on_recompile_limit_hit=True):
            return compiled_flex(compiler)(*arguments, **options)
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        reason = " ".join(str(error).split())[:200]
        raise RunError(
            f"flex attention could not be compiled for this device ({reason}): take drafter.attention=sdpa, and report "
            f"what `spectrain doctor` says of attention"
        ) from error
