"""``run.smoke=true``: recipes from end to end on tiny targets. Which recipes, the commit decides; ``make smoke`` runs
all.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from smoke_recipes import sampled, smoke
from transformers import AutoConfig

from spectrain import cli
from spectrain.config.commands import COMMANDS
from spectrain.config.folders import group_options
from spectrain.config.loading import compose, given_keys
from spectrain.errors import ConfigError, InputError
from spectrain.stages.smoke import smoke_config
from spectrain.target.resolve import known_dimensions
from spectrain.target.tiny_targets import config_like

ON_ONE_CPU = ("quickstart", "dflash_quickstart", "dspark_quickstart")
_METHODS = ("eagle3", "dflash", "dflash2", "dspark", "mtp")
RECIPES = [name for name in group_options("recipe") if name.partition("_")[0] in _METHODS]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("recipe", sampled([name for name in RECIPES if name not in ON_ONE_CPU], 2))
def test_recipes_run_from_end_to_end(recipe: str, tmp_path: Path) -> None:
    assert smoke(recipe, tmp_path / "run") == ""
    values = json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())
    assert "smoke_target-" in json.dumps(values)  # what it was trained for
    # What it was, the run directory knows: the next command needs neither recipe nor smoke.
    assert cli.main(["eval", f"run.dir={tmp_path / 'run'}", "suite.max_prompts=1"]) == 0


@pytest.mark.parametrize("name", ["gemma4_26b_a4b", "qwen3_5_122b_a10b", "minimax_m3_mxfp8", "deepseek_v3_2", "glm4_5"])
def test_the_tiny_target_is_of_the_same_architecture(name: str) -> None:
    """Class, kinds of layers and the switches that decide which matrices there are."""
    known = known_dimensions(compose([f"target={name}", "data=support"]).target)
    real = AutoConfig.for_model(**dict(known or {}))
    tiny = config_like(real)
    assert type(tiny) is type(real)
    ours, theirs = tiny.get_text_config(decoder=True), real.get_text_config(decoder=True)
    assert type(ours) is type(theirs) and ours.num_hidden_layers == 8 and ours.hidden_size < 64
    kinds = [getattr(config, "layer_types", None) for config in (ours, theirs)]
    assert not kinds[1] or set(kinds[0]) == set(kinds[1])
    for switch in ("attention_k_eq_v", "enable_moe_block", "use_qk_norm", "attention_bias", "tie_word_embeddings"):
        assert getattr(ours, switch, None) == getattr(theirs, switch, None)


def test_what_the_command_line_sets_stays(tmp_path: Path) -> None:
    line = [
        "recipe=dspark_qwen3",
        "run.smoke=true",
        f"run.dir={tmp_path}",
        "trainer.epochs=2",
        "drafter.block.anchors=5",
    ]
    config = smoke_config(compose(line), COMMANDS["run"], given=given_keys(line))
    assert (config.trainer.epochs, config.drafter.block.anchors, config.drafter.block.block_size) == (2, 5, 7)
    assert (config.engine.name, config.trainer.devices, config.drafter.num_layers) == ("hf", "1", 2)
    assert Path(config.target.path).parent == tmp_path
    again = smoke_config(compose(line), COMMANDS["run"], given=given_keys(line))
    assert again.target.path == config.target.path and len([*tmp_path.iterdir()]) == 1


def test_without_a_folder_of_its_own_the_run_goes_beside_the_real_one(tmp_path: Path) -> None:
    config = smoke_config(compose(["recipe=eagle3_qwen3", "run.smoke=true"]), COMMANDS["run"])
    assert config.run.dir == "runs/eagle3_qwen3_smoke"


def test_a_plan_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "recipe=eagle3_gemma4_31b", "run.smoke=true"]) == 0
    assert "8 layers, hidden size 32" in " ".join(capsys.readouterr().out.split())
    assert not [*tmp_path.iterdir()]


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"target\.path=Somebody/Else"):
        smoke_config(compose(["recipe=quickstart", "target.path=Somebody/Else"]), COMMANDS["run"])
    with pytest.raises(InputError, match="'helium'"):
        config_like(AutoConfig.for_model("helium"))
    assert cli.main(["fit", "-m", "recipe=quickstart", "run.smoke=true", "trainer.epochs=1,2"]) == 2
    assert "takes no -m" in capsys.readouterr().err
