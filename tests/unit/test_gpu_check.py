"""``make gpu-check`` where there is no GPU, and its checks at work on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

GPU = Path(__file__).resolve().parents[1] / "gpu"


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(GPU), *sys.path])
    spec = util.spec_from_file_location("gpu_check_command", GPU / "__main__.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(gpu_check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "gpu-check: there is no GPU here (torch.cuda.is_available() is false): nothing was checked"
    ]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.slow
def test_the_checks_of_steps_pass_on_a_cpu(gpu_check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        gpu_check.main(["--device", "cpu", "--only", "graphs", "training", "copies", "synchronisations", "memory"]) == 0
    )
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [row[1] for row in rows] == ["ok"] * 17
    assert [row[0] for row in rows][1:6] == [
        f"| losses of {kind}" for kind in ("eagle3", "peagle", "dflash", "dspark", "dflash2")
    ]
    assert "| synchronisations of dspark | ok | 0 in forward and backward |" in [" | ".join(row) for row in rows]


def test_a_check_that_fails_stops_no_other(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_table
    from gpu_table import Row, Skipped, markdown, rows_of

    clock = SimpleNamespace(monotonic=iter([0.0, 1.0, 2.0, 3.0, 11.0]).__next__)
    monkeypatch.setattr(gpu_table, "time", clock)

    def broken(device: str) -> Iterator[Row]:
        yield Row("first half", "ok", "1 | 2")
        raise RuntimeError("no kernel\nfor this device")

    def absent(device: str) -> Iterator[Row]:
        raise Skipped("vLLM is not installed")
        yield

    def passes(device: str) -> Iterator[Row]:
        yield Row("passes", "ok", device)

    found = list(rows_of([("a", broken), ("b", absent), ("c", passes), ("d", passes)], "cuda", 10.0))
    assert [(row.name, row.status, row.figure) for row in found] == [
        ("first half", "ok", "1 | 2"),
        ("a", "failed", "RuntimeError: no kernel for this device"),
        ("b", "skipped", "vLLM is not installed"),
        ("passes", "ok", "cuda"),
        ("d", "skipped", "10 s were over"),
    ]
    assert "| first half | ok | 1 / 2 |" in markdown(found)
