"""Secrets of a configuration are in no file that others may read and in no line, and a run goes on with them."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from workplace import make

from spectrain import cli, masking
from spectrain.config.loading import compose
from spectrain.stages.run_dir import RunDir

TOKEN, LEVEL, KEY, PASSWORD, FROM_OUTSIDE = (
    "hf-very-secret-1",
    "DEBUG-LEVEL",
    "sk-very-secret-2",
    "pw-secret-3",
    "env-4-x",
)
SECRETS = (TOKEN, LEVEL, KEY, PASSWORD, FROM_OUTSIDE)
GIVEN = [
    f"engine.environment.HF_TOKEN={TOKEN}",
    f"engine.environment.VLLM_LEVEL={LEVEL}",
    f"engine.args.api_key={KEY}",
    f"engine.urls=[http://me:{PASSWORD}@host:8000]",
    "logger.project=${oc.env:MY_SECRET_PROJECT}",
]
Told = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_PROJECT", FROM_OUTSIDE)
    monkeypatch.setattr(masking, "_hidden", set())


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    def tell(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        code = cli.main(list(words))
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return tell


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*make(tmp_path_factory.mktemp("workplace")), "trainer.epochs=1", "suite.max_prompts=1"]


def leaks(folder: Path) -> list[str]:
    """Files that others may read and that hold a secret."""
    files = [path for path in folder.rglob("*") if path.is_file() and stat.S_IMODE(path.stat().st_mode) & 0o077]
    return [f"{path.name}: {secret}" for path in files for secret in SECRETS if secret.encode() in path.read_bytes()]


def test_a_run_keeps_its_secrets_and_goes_on_with_them(arguments: list[str], tmp_path: Path, told: Told) -> None:
    run = tmp_path / "run"
    code, text = told("run", *arguments, *GIVEN, f"run.dir={run}")
    assert code == 0, text
    assert leaks(tmp_path) == [] and not any(secret in text for secret in SECRETS)
    assert (run / "report.html").is_file()
    assert stat.S_IMODE((run / "private.yaml").stat().st_mode) == 0o600

    config = compose([f"run.dir={run}"])
    assert config.engine.environment == {"HF_TOKEN": TOKEN, "VLLM_LEVEL": LEVEL}
    assert config.engine.args == {"api_key": KEY}
    assert config.engine.urls == (f"http://me:{PASSWORD}@host:8000",)
    assert config.logger.project == FROM_OUTSIDE

    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    code, text = told("run", f"run.dir={run}", "engine.environment.HF_TOKEN=another-one-5")
    assert code == 0 and text.count("unchanged, skipped") >= 3, text
    after = {path: path.read_bytes() for path in before}
    assert {path.name for path in before if before[path] != after[path]} <= {"private.yaml"}
    assert compose([f"run.dir={run}"]).engine.environment["HF_TOKEN"] == "another-one-5"


def test_what_is_masked_has_to_be_there_or_to_be_given(arguments: list[str], tmp_path: Path, told: Told) -> None:
    """A run directory that was handed on without its private file."""
    run = tmp_path / "run"
    assert told("generate", *arguments, *GIVEN, f"run.dir={run}")[0] == 0
    (run / "private.yaml").unlink()
    code, text = told("generate", f"run.dir={run}")
    assert code == 2 and "engine.environment.HF_TOKEN" in text
    again = [f"engine.environment.HF_TOKEN={TOKEN}", f"engine.environment.VLLM_LEVEL={LEVEL}", "engine.urls=[]"]
    code, text = told("generate", f"run.dir={run}", *again)
    assert code == 2 and "engine.args.api_key" in text
    code, text = told("generate", f"run.dir={run}", *again, "engine.args={}")
    assert code == 0, text
    assert compose([f"run.dir={run}"]).engine.args == {}
    code, text = told("generate", f"run.dir={run}", "engine=hf")  # all settings of the engine anew
    assert code == 0, text
    assert not (run / "private.yaml").exists() or leaks(run) == []


def test_the_private_file_goes_when_nothing_is_masked(arguments: list[str], tmp_path: Path, told: Told) -> None:
    run = tmp_path / "run"
    assert told("generate", *arguments, GIVEN[0], f"run.dir={run}")[0] == 0
    assert (run / "private.yaml").is_file()
    assert told("generate", *arguments, f"run.dir={run}")[0] == 0
    assert not (run / "private.yaml").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        f"engine.environment={{HF_TOKEN: {TOKEN}",
        f"engine.environment={TOKEN}",
        f"engine.environment.HF_TOKEN={TOKEN}(",
        f"engine.args.api_key={KEY})",
        f"engine.environment.HF_TOKEN=[{TOKEN}]",
        f"engine.environment.HF_TOKEN={TOKEN},{KEY}",
        f"engine.urls=[ftp://me:{PASSWORD}@host]",
        f"engine.urls=[me:{PASSWORD}@host]",
        f"engine.environment.{{x}}={TOKEN}",
    ],
)
def test_an_error_names_the_key_and_not_the_secret(
    wrong: str, arguments: list[str], tmp_path: Path, told: Told
) -> None:
    code, text = told("fit", *arguments, wrong, f"run.dir={tmp_path / 'run'}")
    assert code == 2 and text.count("\n") == 1
    assert not any(secret in text for secret in SECRETS), text
    assert "engine." in text


def test_a_sweep_writes_no_secret_and_names_no_folder_by_one(arguments: list[str], tmp_path: Path, told: Told) -> None:
    sweep = [*GIVEN, f"engine.environment.OTHER={KEY},{TOKEN}", f"run.dir={tmp_path / 'runs' / 'sweep'}"]
    code, text = told("generate", "-m", *arguments, *sweep)
    assert code == 0, text
    assert leaks(tmp_path) == [] and not any(secret in text for secret in SECRETS)
    assert sorted(path.name for path in (tmp_path / "runs" / "sweep").iterdir() if path.is_dir()) == ["0", "1"]
    assert RunDir(tmp_path / "runs" / "sweep" / "1").private.is_file()


def test_text_that_only_looks_like_a_reference_survives_a_resume(
    arguments: list[str], tmp_path: Path, told: Told
) -> None:
    run = tmp_path / "run"
    project = "logger.project=${oc.env:MY_SECRET_PROJECT}"
    assert told("generate", *arguments, r"data.system=Write \${x}.", project, f"run.dir={run}")[0] == 0
    code, text = told("generate", f"run.dir={run}")
    assert code == 0 and "unchanged, skipped" in text, text
    assert compose([f"run.dir={run}"]).data.system == "Write ${x}."
