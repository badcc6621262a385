"""Every recipe composes and plans without a network, with figures that a calculation by hand confirms."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_tokenizer
from transformers import Qwen3Config

from spectrain import cli
from spectrain.config.commands import COMMANDS
from spectrain.config.folders import group_options, shipped_folder
from spectrain.config.key_reference import part, part_in
from spectrain.config.loading import compose
from spectrain.config.target_schema import TargetConfig
from spectrain.drafters.registry import find_method
from spectrain.stages import plan, recipe_table
from spectrain.stages.checks import prepare, target_spec
from spectrain.stages.recipe_table import PART, markdown, recipe_rows
from spectrain.target.resolve import TargetSource

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
BLOCK = ["dflash_quickstart", "dspark_quickstart"]
STEPS = ["quickstart", "peagle_quickstart"]
QWEN3 = ["dflash_qwen3", "dspark_qwen3", "dflash2_qwen3"]


def write_config(folder: Path) -> None:
    Qwen3Config(**QWEN3_8B, dtype="bfloat16").save_pretrained(folder)


@pytest.fixture(scope="module")
def qwen3_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of Qwen3-8B, with next to no weights: a dry run reads none."""
    folder = tmp_path_factory.mktemp("qwen3") / "Qwen3-8B"
    folder.mkdir()
    write_config(folder)
    header = json.dumps({"model.norm.weight": {"dtype": "BF16", "shape": [4096], "data_offsets": [0, 8192]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8192))
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = cli.main(["plan", *arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert not list(Path.cwd().iterdir())
    return " ".join(captured.out.split())


def test_all_recipes_are_known() -> None:
    assert {*group_options("recipe")} >= {*STEPS, *BLOCK, *QWEN3}


# --- on the CPU target ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe", [STEPS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in (*STEPS[1:], *BLOCK))]
)
def test_quickstarts_plan_from_the_installed_package(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spectrain.target.resolve._cached_snapshot", lambda config: None)
    monkeypatch.setattr("spectrain.target.resolve._ask_hub", lambda config: TimeoutError("no network"))
    out = dry_run(capsys, f"recipe={recipe}")
    method = recipe.split("_")[0].replace("quickstart", "eagle3")
    assert f"drafter {method}, taps [2, " in out and "30 layers, hidden size 576, 49,152 tokens" in out
    assert "352 training, 48 held out" in out
    for text in ("B of hidden states", "memory target", "M trained parameters", "in all"):
        assert text in out
    fewer = dry_run(capsys, f"recipe={recipe}", "decoding.num_speculative_tokens=2")
    blocks = "" if recipe in STEPS else " of the 3 that it can give"
    assert f"drafts 2 tokens a round{blocks}, judged at temperature 0" in fewer


@pytest.mark.parametrize("recipe", BLOCK)
def test_block_quickstarts(recipe: str) -> None:
    config = compose([f"recipe={recipe}"])
    drafter = config.drafter
    assert (
        drafter.num_layers,
        find_method(drafter.method).max_drafts(drafter),
        config.decoding.num_speculative_tokens,
    ) == (2, 3, 3)
    assert ({name: weight for name, weight in drafter.loss.weights.items() if weight}, drafter.init) == (
        {"kl": 1.0},
        "closed_form",
    )
    assert drafter.taps == (2, 9, 16, 23, 30)
    assert config.engine.name == "hf"


# --- Qwen3-8B, as published ----------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("recipe", "block", "drafts"), [("dflash_qwen3", 16, 15), ("dspark_qwen3", 7, 7), ("dflash2_qwen3", 8, 7)]
)
def test_published_settings(
    recipe: str, block: int, drafts: int, capsys: pytest.CaptureFixture[str], qwen3_8b: Path
) -> None:
    config = compose([f"recipe={recipe}"])
    drafter, trainer = config.drafter, config.trainer
    assert (drafter.method, drafter.num_layers, drafter.taps) == (recipe.split("_")[0], 5, (2, 10, 18, 26, 34))
    assert (drafter.block.block_size, drafter.block.anchors) == (block, 512)
    assert (find_method(drafter.method).max_drafts(drafter), config.decoding.num_speculative_tokens) == (drafts, drafts)
    assert {name: weight for name, weight in drafter.loss.weights.items() if weight} == {"ce": 0.1, "tv": 0.9}
    assert (trainer.learning_rate, trainer.schedule, trainer.warmup_fraction) == (6e-4, "cosine", 0.04)
    assert (config.target.path, config.engine.name, config.capture.during_generation) == ("Qwen/Qwen3-8B", "vllm", True)
    out = dry_run(capsys, f"recipe={recipe}", f"target.path={qwen3_8b}", "target.dtype=bfloat16")
    assert "36 layers, hidden size 4096, 151,936 tokens, bfloat16" in out
    assert f"drafter {drafter.method}, taps [2, 10, 18, 26, 34]" in out
    assert "memory target 16 GB" in out  # 8.19 billion parameters


def estimate(recipe: str, folder: Path, *more: str) -> tuple[Any, plan.Estimate]:
    context = prepare(
        compose([f"recipe={recipe}", f"target.path={folder}", "target.dtype=bfloat16", *more]),
        COMMANDS["plan"],
        fetch=False,
    )
    return context, plan.estimate(context)


@pytest.mark.vllm
def test_figures_of_a_block_drafter(qwen3_8b: Path) -> None:
    context, numbers = estimate("dflash_qwen3", qwen3_8b)
    layer = 4096 * 128 * (32 + 2 * 8) + 32 * 128 * 4096 + 3 * 4096 * 12288
    assert numbers.drafter_parameters == 5 * layer + 5 * 4096 * 4096
    # Five taps and the last hidden state in bfloat16, with ids, mask and normaliser.
    assert 6 * 4096 * 2 < numbers.states_bytes / numbers.tokens < 6 * 4096 * 2 + 32
    # Weights, gradients, moments and the target's two matrices make 21.8 GB; a row's activations come to a few more.
    steady = 16 * numbers.drafter_parameters + 4 * 2 * 151936 * 4096
    assert steady + 1e9 < numbers.train_bytes < steady + 20e9

    speed = plan.MachineSpeed(flops_per_s=1e12, bytes_per_s=1e11)
    seconds = plan.stage_seconds(context, numbers, speed)
    assert seconds["capture"] == 0  # the states come with the answers
    outputs = 512 / 3072 * 16 * numbers.tokens
    context_flops = 6 * numbers.tokens * (5 * 4096 * 4096 + 5 * 2 * 4096 * 128 * 8)
    head_flops = 2 * 151936 * 4096 * (3 * outputs + numbers.generated_tokens)
    expected = 6 * 340 / 380 * (context_flops + 6 * 5 * layer * outputs + head_flops) / (1e12 * 0.5)
    assert seconds["fit"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.vllm
def test_figures_follow_the_block(qwen3_8b: Path) -> None:
    fits, memory = [], []
    for anchors in (128, 256):
        context, numbers = estimate("dflash_qwen3", qwen3_8b, f"drafter.block.anchors={anchors}")
        fits.append(plan.stage_seconds(context, numbers, plan.MachineSpeed(1e12, 1e11))["fit"])
        memory.append(plan.training_memory(context).moments["forward"])
    assert 1.5 < fits[1] / fits[0] < 2
    assert memory[1] > memory[0]
    _, dspark = estimate("dspark_qwen3", qwen3_8b)
    _, dflash = estimate("dflash_qwen3", qwen3_8b)
    assert (
        dspark.drafter_parameters - dflash.drafter_parameters == 2 * 151936 * 256 + 4096 + 256
    )  # Markov's tables, the confidence head


# --- with nothing here ---------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, no cache of the Hub, no packages with weights, no vLLM."""

    def unreachable(*arguments: Any, **options: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr("socket.socket.connect", unreachable)
    monkeypatch.setattr("spectrain.target.resolve._cached_snapshot", lambda config: None)
    monkeypatch.setattr("spectrain.target.resolve.find_gguf", lambda package: None)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it, or looking for it, fails


# Every kind of target and of hardware; the others compose and plan in test_every_recipe.
@pytest.mark.parametrize(
    "recipe", ["quickstart", *BLOCK, *QWEN3, "eagle3_qwen3", "dspark_kimi_k2_5", "dflash_gpt_oss_120b"]
)
def test_recipes_plan_without_vllm_network_and_weights(
    recipe: str, capsys: pytest.CaptureFixture[str], nothing_here: None
) -> None:
    out = dry_run(capsys, f"recipe={recipe}", "trainer.devices=8", "plan.device=mi300x")
    assert "planned by its dimensions" in out or "tiny target" in out  # which the recipe makes itself
    assert "memory of one rank of 8" in out
    assert "ddp fits one AMD Instinct MI300X" in out and "of 192 GB" in out


@pytest.mark.slow
def test_every_recipe(nothing_here: None) -> None:
    """Each composes, has its file's name, plans from configurations alone, fits its hardware, and stands in the README
    with just what the command lists.
    """
    rows = [*recipe_rows(shipped_only=True)]
    assert len(rows) >= 40 and {row.recipe for row in rows} >= {"eagle3_qwen3", *QWEN3, *BLOCK}
    for row in rows:
        named = "MI3" in row.hardware or "H100" in row.hardware
        assert row.disk and bool(row.hours) == named, row
        assert bool(row.tau) == (row.recipe in ("quickstart", "dflash_quickstart")), row
    readme = shipped_folder("recipes") / "README.md"  # type: ignore[operator]
    assert part_in(readme.read_text(encoding="utf-8"), PART) == part(PART, markdown(rows)), "run make recipes"


@pytest.mark.parametrize("recipe", ["eagle3_minimax_m3_mxfp8", "dflash_qwen3_5_122b_a10b", "dspark_deepseek_v3_2"])
def test_targets_and_drafters_fit_their_hardware(recipe: str, nothing_here: None) -> None:
    config = compose([f"recipe={recipe}"])
    assert config.run.name == recipe
    context = prepare(config, COMMANDS["plan"], fetch=False)
    numbers, device = plan.estimate(context), context.planned_device
    assert device is not None
    share = numbers.target_bytes / config.engine.tensor_parallel_size
    assert share < 0.75 * device.memory_bytes  # of 85 %: the rest is for keys and values
    assert numbers.train_bytes < 0.9 * device.memory_bytes
    spec = context.spec
    spread = {"eagle3": [2, spec.num_layers // 2, spec.num_layers - 3]}.get(config.drafter.method)
    last = spec.num_layers - 2
    assert [*context.taps] == (spread or [round(2 + i * (last - 2) / 4) for i in range(5)])


def test_plans_for_more_prompts_than_there_are(qwen3_8b: Path) -> None:
    """Twice the prompts of data: twice the tokens, bytes and seconds of what grows with them; the drafter stays."""
    _, one = estimate("dflash_qwen3", qwen3_8b)
    context, two = estimate("dflash_qwen3", qwen3_8b, "plan.prompts=680")
    assert (two.documents, two.drafter_parameters) == (2 * one.documents, one.drafter_parameters)
    assert two.tokens == pytest.approx(2 * one.tokens, abs=1)
    assert two.states_bytes == pytest.approx(2 * one.states_bytes, abs=1)
    speed = plan.MachineSpeed(1e12, 1e11)
    assert plan.stage_seconds(context, two, speed)["fit"] == pytest.approx(
        2 * plan.stage_seconds(context, one, speed)["fit"], rel=1e-6
    )


def test_the_list_of_recipes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own are listed, too; words choose. Of the shipped ones three are composed, to save time."""
    few = {"mine", "quickstart", "dspark_qwen3", "eagle3_gpt_oss_20b"}
    options = recipe_table.group_options
    monkeypatch.setattr(recipe_table, "group_options", lambda g: {n: p for n, p in options(g).items() if n in few})
    own = tmp_path / "recipes" / "recipe"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /target: qwen3_4b\n  - override /method: dspark\n"
        "  - override /hardware: mi355x_8\nrun:\n  name: mine\n"
    )
    assert cli.main(["recipes", "mine"]) == 0
    out = capsys.readouterr().out
    assert any({"mine", "Qwen3-4B", "DSpark", "MI355X,"} <= set(line.split()) for line in out.splitlines())
    assert "quickstart" not in out


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """512 anchors in each of four packed sequences: masks and activations beyond 80 GB."""
    out = dry_run(capsys, "recipe=dflash_qwen3", "plan.device=h100", "trainer.micro_batch_size=8")
    assert "ddp DOES NOT FIT one NVIDIA H100 SXM" in out


# --- a target that is still on the Hub -----------------------------------------------------------------------------


def test_a_plan_without_the_hub_says_what_is_not_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a target whose dimensions do not ship."""
    monkeypatch.setattr("spectrain.target.resolve._cached_snapshot", lambda config: None)
    monkeypatch.setattr("spectrain.target.resolve._ask_hub", lambda config: TimeoutError("no network"))
    out = dry_run(capsys, "recipe=dflash_qwen3", "target.path=Somebody/Else")
    assert "Somebody/Else, not in the Hub's cache, and the Hub cannot be reached" in out
    assert "its dimensions are not known here" in out
    assert "340 training, 40 held out" in out


@pytest.mark.vllm
def test_a_plan_needs_only_the_configuration_of_a_target_on_the_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(repo: str, name: str, revision: str, local_dir: Path, **options: Any) -> str:
        assert (repo, name, revision) == ("Somebody/Else", "config.json", "c0ffee")
        write_config(Path(local_dir))
        return str(Path(local_dir) / name)

    info = SimpleNamespace(sha="c0ffee", siblings=[SimpleNamespace(rfilename="model.safetensors")])
    monkeypatch.setattr("spectrain.target.resolve._cached_snapshot", lambda config: None)
    monkeypatch.setattr("spectrain.target.resolve._ask_hub", lambda config: info)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    out = dry_run(capsys, "recipe=dspark_qwen3", "target.path=Somebody/Else", "target.dtype=bfloat16")
    assert "memory target 16 GB" in out and "drafter dspark, taps [2, 10, 18, 26, 34]" in out

    def broken(*arguments: Any, **options: Any) -> str:
        raise OSError("gone")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", broken)
    source = TargetSource("hub", "Qwen/Qwen3-8B", "c0ffee", None, "")
    assert target_spec(SimpleNamespace(target=TargetConfig(path="Qwen/Qwen3-8B")), source) is None  # type: ignore[arg-type]
