"""Commands on a target that nothing is known of: with Python code of its own, and a factor that only the code names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from workplace import make

from spectrain import cli
from spectrain.config.loading import compose
from spectrain.stages.machine_checks import check_transformers

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaModel):
    config_class = OwnConfig

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        return super().forward(inputs_embeds=3.0 * self.embed_tokens(input_ids), **kwargs)


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.post_init()
"""


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("own")
    words = make(place)
    folder = place / "target"
    (folder / "modeling_own.py").write_text(CODE)
    path = folder / "config.json"
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    fields = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": names}
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return [*words, "target.trust_remote_code=true", "trainer.epochs=1"]


@pytest.mark.parametrize("drafter", [["drafter=eagle3"], ["drafter=dflash", "drafter.draft_vocab_size=null"]], ids=str)
def test_it_runs_from_end_to_end(
    drafter: list[str], arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose embeddings are not what it says, no simulation would predict what the loop measures."""
    code = cli.main(["run", *arguments, *drafter, f"run.dir={tmp_path / 'run'}"])
    said = " ".join(capsys.readouterr().err.split())
    assert code == 0, said
    assert "model type 'own' is not among the known ones and takes the generic path" in said
    assert "embedding embed_tokens × 3," in said
    assert (tmp_path / "run" / "drafter" / "config.json").is_file()


def test_plan_and_doctor_say_what_was_found(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *arguments, "drafter=eagle3", f"run.dir={tmp_path / 'run'}"]) == 0
    assert "embedding embed_tokens × 3," in " ".join(capsys.readouterr().err.split())
    found = {finding.name: finding for finding in check_transformers(compose(arguments))}["target"]
    assert found.level == "ok" and "embedding embed_tokens × 3," in found.text
