"""Devices that ``plan`` knows, and the section of the configuration that chooses one.

Figures are those of the makers' data sheets for dense arithmetic (without sparsity), for one device:

* MI300X: AMD Instinct MI300X data sheet (192 GB HBM3, 5.3 TB/s; 1,307.4 TFLOPS bfloat16, 163.4 float32 matrix)
* MI325X: AMD Instinct MI325X data sheet (256 GB HBM3E, 6 TB/s; arithmetic as MI300X)
* MI355X: AMD Instinct MI355X data sheet (288 GB HBM3E, 8 TB/s; 2,516.6 TFLOPS bfloat16, 157.3 float32 matrix)
* A100 80 GB SXM: NVIDIA A100 data sheet (2,039 GB/s; 312 TFLOPS bfloat16, 19.5 float32)
* H100 SXM: NVIDIA H100 data sheet (80 GB, 3.35 TB/s; 989.4 TFLOPS bfloat16, 67 float32)
* H200 SXM: NVIDIA H200 data sheet (141 GB, 4.8 TB/s; arithmetic as H100)

Gigabytes are 10⁹ bytes. Most devices have up to a fourteenth more (2³⁰), which their runtime takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from spectrain.config.keys import ANY_COUNT, Section, key

DeviceName = Literal["auto", "mi300x", "mi325x", "mi355x", "a100_80gb", "h100", "h200", "cpu"]


@dataclass(frozen=True)
class Device:
    """What one device has."""

    label: str
    memory_bytes: float
    bytes_per_s: float
    bfloat16_flops: float
    float32_flops: float
    per_node: int = 8

    def peak_flops(self, precision: str) -> float:
        """Operations/s of matrix products in this type, a multiply-add counting as two."""
        return self.float32_flops if precision == "float32" else self.bfloat16_flops


DEVICES: dict[str, Device] = {
    "mi300x": Device("AMD Instinct MI300X", 192e9, 5.3e12, 1307.4e12, 163.4e12),
    "mi325x": Device("AMD Instinct MI325X", 256e9, 6.0e12, 1307.4e12, 163.4e12),
    "mi355x": Device("AMD Instinct MI355X", 288e9, 8.0e12, 2516.6e12, 157.3e12),
    "a100_80gb": Device("NVIDIA A100 80 GB", 80e9, 2.039e12, 312e12, 19.5e12),
    "h100": Device("NVIDIA H100 SXM", 80e9, 3.35e12, 989.4e12, 67e12),
    "h200": Device("NVIDIA H200 SXM", 141e9, 4.8e12, 989.4e12, 67e12),
}
MEASURED = ("auto", "cpu")  # no line of the table: what this machine does is measured
assert {*DEVICES, *MEASURED} == {*get_args(DeviceName)}


@dataclass(frozen=True)
class PlanConfig(Section, name="plan"):
    """What ``plan`` reckons with."""

    device: DeviceName = key(
        "auto",
        "device that the run is planned for, of which this machine needs to have none; auto: this machine's, cpu: its "
        "processor, whose speed is measured",
    )
    utilisation: float = key(
        0.4, "share of a named device's peak operations/s that matrix products reach, over all", above=0, at_most=1
    )
    prompts: int | None = key(
        None,
        "training prompts that are reckoned with, each like the mean of those of data; null: those of data",
        at_least=1,
        at_most=ANY_COUNT,
        example="50000",
    )
