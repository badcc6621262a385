"""All checks, in the order of the table: what fails first explains what fails later."""

from __future__ import annotations

from gpu_commands import check_ranks, check_served
from gpu_kernels import check_attention, check_graphs
from gpu_steps import (
    check_closed_form,
    check_copies,
    check_memory,
    check_speed,
    check_synchronisations,
    check_training,
    check_triton_loss,
)
from gpu_table import Check

CHECKS: tuple[tuple[str, Check], ...] = (
    ("attention", check_attention),
    ("graphs", check_graphs),
    ("training", check_training),
    ("Triton loss", check_triton_loss),
    ("copies", check_copies),
    ("closed form", check_closed_form),
    ("synchronisations", check_synchronisations),
    ("speed", check_speed),
    ("memory", check_memory),
    ("ranks", check_ranks),
    ("vLLM", check_served),
)
