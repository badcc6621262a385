"""Commands on targets that are not what they say: what cannot be computed right is refused before anything is written,
and what turns out wrong on the way stops the stage at the first answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_targets import quantise
from safetensors.torch import load_file, save_file
from tiny import tiny_target

from spectrain import cli
from spectrain.config.commands import PIPELINE
from spectrain.drafters.drafter_folder import load_drafter


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target("llama", tmp_path_factory.mktemp("llama") / "target")


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"turns": [f"Say {number}."]}) for number in range(6)]
    Path("p.jsonl").write_text("\n".join(lines))
    return [
        *("run.dir=run", "target=local", "data=jsonl", "data.train=[p.jsonl]", "target.max_length=100"),
        *("sampling.max_new_tokens=8", "sampling.temperature=0", "trainer.packed_length=256", "trainer.epochs=1"),
        *("suite.max_prompts=2", "suite.baselines=[]", "drafter=eagle3"),
    ]


def run(capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> tuple[int, str]:
    code = cli.main([*command.split(), *arguments])
    return code, " ".join(capsys.readouterr().err.split())


def lose(folder: Path, source: Path, name: str) -> Path:
    tiny_target("llama", folder)
    tensors = load_file(source / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("command", ["run --dry-run", "run --dry-run engine=vllm", *PIPELINE[:3], "run"])
def test_a_tensor_that_is_missing_is_named_before_anything_is_written(
    command: str, llama: Path, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = lose(tmp_path / "t", llama, "model.layers.2.mlp.up_proj.weight")
    code, said = run(capsys, command, *arguments, f"target.path={folder}")
    assert (code, Path("run").exists()) == (2, False)
    assert "model.layers.2.mlp.up_proj.weight" in said


@pytest.mark.parametrize("name", ["modelopt", "gptq", "awq", "bitsandbytes nf4", "compressed-tensors nvfp4"])
def test_a_scheme_that_the_embedded_engine_cannot_read_is_named(
    name: str, llama: Path, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = quantise(name, llama, tmp_path / "t")
    code, said = run(capsys, "run --dry-run", *arguments, f"target.path={folder}")
    assert (code, Path("run").exists()) == (2, False)
    assert f"quantised by {name.split()[0]}" in said
    assert "engine=vllm" in said
    by_vllm = ["run --dry-run", *arguments, f"target.path={folder}", "engine=vllm"]
    read = name not in ("gptq", "bitsandbytes nf4")  # what the drafter begins with; this GPTQ's columns have an order
    code, said = run(capsys, *by_vllm)
    assert (code, "begins at random" in said) == (0, not read)
    assert read or "model.layers.3.mlp.gate_proj.weight" in said
    code, said = run(capsys, *by_vllm, "drafter.init=target")
    assert code == (0 if read else 2)
    assert read or "drafter.init=closed_form" in said


def test_partial_rotary_and_longrope_give_a_drafter(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Phi-4-mini: no drafter can turn its heads by the target's lists, so they turn plainly."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.2],
        "long_factor": [1.0, 3.0, 9.0],
        "original_max_position_embeddings": 128,
    }
    folder = tiny_target(
        "phi3", tmp_path / "t", rope_parameters=rope, original_max_position_embeddings=128, partial_rotary_factor=0.75
    )
    assert run(capsys, "fit", *arguments, f"target.path={folder}")[0] == 0
    assert load_drafter("run/drafter").shape.layer.rope_kind == "default"
    metadata = json.loads(Path("run/drafter/config.json").read_text())["spectrain"]
    assert metadata["max_model_len"] == 128


# --- numbers -------------------------------------------------------------------------------------------------------


def hot(folder: Path) -> Path:
    """Activations that 16-bit floats cannot hold, and 32-bit ones can."""
    tiny_target("llama", folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("mlp.up_proj.weight", "mlp.down_proj.weight")):
            tensors[name] = tensor * 400
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_numbers_that_are_not_finite_stop_generation_and_name_the_type(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hot(tmp_path / "t")
    code, said = run(capsys, "generate", *arguments, f"target.path={folder}", "target.dtype=float16")
    assert code == 1
    assert "not finite in float16: use target.dtype=bfloat16" in said
    assert not list(Path("run").rglob("*.parquet"))
    assert run(capsys, "generate", *arguments, f"target.path={folder}", "run.dir=wide")[0] == 0


def test_they_stop_capture_before_its_self_check(
    llama: Path, arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that were generated otherwise: one position of one document overflows."""
    from spectrain.target.model import TargetModel

    assert run(capsys, "generate", *arguments, f"target.path={llama}")[0] == 0
    plain = TargetModel.run

    def overflowing(self: TargetModel, *given: Any, **named: Any) -> Any:
        output = plain(self, *given, **named)
        output.last_hidden_BSH[0, 3, 1] = torch.inf
        return output

    monkeypatch.setattr(TargetModel, "run", overflowing)
    code, said = run(capsys, "capture", *arguments, f"target.path={llama}")
    assert code == 1
    assert "last hidden states that are not finite in float32" in said
    assert "self-check" not in said


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_ids_beyond_the_embedding_name_prompt_token_and_size(
    command: str, llama: Path, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer with a token that the target never saw."""
    folder = tiny_target("llama", tmp_path / "t")
    if command == "eval":
        assert run(capsys, "fit", *arguments, f"target.path={folder}")[0] == 0
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(
        {"id": 310, "content": "<|new|>", "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    Path("q.jsonl").write_text(
        json.dumps({"id": "odd", "turns": ["Say <|new|> 7."]}) + "\n" + Path("p.jsonl").read_text()
    )
    source = ["data.train=[q.jsonl]"] if command == "generate" else ["suite=jsonl", "suite.prompts=q.jsonl"]
    code, said = run(capsys, command, *arguments, f"target.path={folder}", *source)
    assert code == 2
    for part in ("q.jsonl:1", "odd", "<|new|>", "304"):
        assert part in said
