"""``spectrain doctor``: what is wrong is found, has a remedy, and decides the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_tools import turn_to
from local_hub import local_hub

from spectrain import cli
from spectrain.config.schema import LoggerConfig, RunConfig, SpectrainConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.stages import attention_check, machine_checks
from spectrain.stages.attention_check import check_attention_kernels
from spectrain.stages.findings import Finding, found_by, within


def levels(findings: Any) -> dict[str, str]:
    return {finding.name: finding.level for finding in findings}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch):
    """Without what takes long and has tests of its own."""
    monkeypatch.setattr(
        attention_check, "check_attention_kernels", lambda: iter([Finding("attention", "ok", "left out")])
    )
    monkeypatch.setattr(machine_checks, "_TEST_BYTES", 1 << 20)


def test_the_command_prints_json_and_succeeds(quick: None, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is True
    names = {finding["name"] for finding in said["findings"]}
    assert names >= {"interpreter", "torch", "processor", "all-reduce", "vllm", "transformers", "attention", "disk"}
    assert names >= {"locks", "hub", "wandb", "open files", "shared memory", "memory maps"}
    assert all(finding["remedy"] for finding in said["findings"] if finding["level"] == "warning")


def test_a_failure_is_an_exit_code(quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(machine_checks, "_locks", lambda path: False)
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr()
    assert "failure" in said.out and said.err.strip().splitlines()[-1].endswith("locks")


@pytest.mark.parametrize(
    ("device_map", "level"),
    [(None, None), ("balanced", "ok"), ({"model": "cpu"}, "ok"), ({"model": "cuda:31"}, "failure")],
)
def test_the_device_map(device_map: Any, level: str | None):
    config = SpectrainConfig(target=TargetConfig(device_map=device_map))
    found = list(machine_checks.check_device_map(config))
    assert [finding.level for finding in found] == ([level] if level else [])
    assert all("cuda:31" in finding.text and finding.remedy for finding in found if level == "failure")


def test_a_check_that_breaks_down_is_a_failure_and_stops_no_other():
    def check():
        yield Finding("one", "ok", "fine")
        raise OSError("boom")

    assert [(finding.level, "boom" in finding.text) for finding in found_by("two", check)] == [
        ("ok", False),
        ("failure", True),
    ]


def test_nothing_is_waited_for_without_end():
    with pytest.raises(TimeoutError):
        within(0.01, lambda: __import__("time").sleep(1))
    with pytest.raises(KeyError):
        within(5, lambda: {}["x"])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_right_kernels_pass_and_a_wrong_one_is_found(monkeypatch: pytest.MonkeyPatch):
    found = levels(check_attention_kernels())
    cpu = {name: level for name, level in found.items() if name.endswith("on cpu")}
    assert len(cpu) == 4 and set(cpu.values()) == {"ok"}
    right = torch.nn.functional.scaled_dot_product_attention

    def wrong(*inputs: Any, **how: Any) -> Any:
        """Its values are right, its gradients are not."""
        out = right(*inputs, **how)
        return out.detach() + 0.9 * (out - out.detach())

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong)
    found = levels(check_attention_kernels(("sdpa",)))
    assert found["attention unrolled sdpa on cpu"] == found["attention block sdpa on cpu"] == "failure"


@pytest.mark.slow
def test_the_sum_over_two_processes():
    assert machine_checks.all_reduce(2, "gloo") > 0


def test_an_old_vllm_lacks_kinds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    models = tmp_path / "vllm" / "model_executor" / "models"
    models.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    (models / "registry.py").write_text('{"LlamaForCausalLMEagle3": 1, "DFlashDraftModel": 2}')
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "vllm")]})
    monkeypatch.setattr(machine_checks.importlib.util, "find_spec", lambda name: spec)
    (finding,) = machine_checks.check_vllm()
    assert finding.level == "warning" and finding.remedy
    before, _, after = finding.text.partition(", not ")
    assert "eagle3" in before and "dspark" in after and "dflash2" in after and "eagle3" not in after


@pytest.mark.parametrize(("kind", "level"), [("llama", "ok"), ("no_such_model", "failure")])
def test_a_target_that_transformers_does_not_know(tmp_path: Path, kind: str, level: str, monkeypatch):
    from spectrain.target import resolve

    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "transformers_version": "9.0"}))
    source = resolve.TargetSource("folder", "t", "r", tmp_path, "")
    monkeypatch.setattr(resolve, "locate_target", lambda config, unreachable_ok: source)
    (finding,) = machine_checks.check_transformers(SpectrainConfig(target=TargetConfig(path="t")))
    assert (finding.level, kind in finding.text, "9.0" in finding.text) == (level, True, True)


def test_a_disk_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine_checks.tempfile, "NamedTemporaryFile", refuse)
    (finding,) = machine_checks.check_disk(SpectrainConfig(run=RunConfig(dir=str(tmp_path / "new"))))
    assert finding.level == "failure" and "Permission denied" in finding.text and not (tmp_path / "new").exists()


def test_the_login_to_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with local_hub() as hub:
        for token, level in (("hf_wrong", "warning"), (None, "warning")):
            turn_to(hub, monkeypatch, tmp_path, token)
            (finding,) = machine_checks.check_hub()
            assert finding.level == level and "hf auth login" in finding.remedy
        turn_to(hub, monkeypatch, tmp_path)
        (finding,) = machine_checks.check_hub()
        assert finding.level == "ok" and "tester" in finding.text


@pytest.mark.parametrize(
    ("trackers", "offline", "level"), [(("wandb",), True, "ok"), (("wandb",), False, "failure"), ((), False, "ok")]
)
def test_the_login_to_wandb(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    trackers: Any,
    offline: bool,
    level: str,
):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    config = SpectrainConfig(logger=LoggerConfig(trackers=trackers, offline=offline))
    (finding,) = machine_checks.check_wandb(config)
    assert finding.level == level
    assert capfd.readouterr().err == ""  # the table alone


def test_small_limits_are_warned_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine_checks.resource, "getrlimit", lambda which: (1024, 1 << 20))
    found = {finding.name: finding for finding in machine_checks.check_limits()}
    assert found["open files"].level == "warning" and "ulimit -n 4096" in found["open files"].remedy
    monkeypatch.setattr(machine_checks.resource, "getrlimit", lambda which: (-1, -1))
    assert levels(machine_checks.check_limits())["open files"] == "ok"
