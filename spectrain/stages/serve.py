"""``spectrain serve``: vLLM's server with a target and a drafter, as measured; or its command, to be started elsewhere.

The server runs under a guard (``engines/vllm/guard.py``), so that nothing of it is left when this command ends, by
itself or by a signal, even if it is killed. A signal ends the server in a second; where ``--shutdown-timeout`` says
that requests under way are to be finished, that is waited for. Whatever vLLM can do for those who serve (context
length, sampling defaults of the target, addresses, keys) stays as vLLM has it; what this command knows better is the
drafter, its method, how many tokens to draft, and the engine's settings.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spectrain import signals
from spectrain.config.drafter_schema import DrafterConfig
from spectrain.config.keys import refuse_dash
from spectrain.config.schema import SpectrainConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.console import say, stdout
from spectrain.drafters.drafter_digests import check_drafter_digests, weight_files
from spectrain.drafters.drafter_folder import check_vocab
from spectrain.drafters.hub_drafters import drafter_path
from spectrain.drafters.overlay import check_links, is_overlay, recorded_files, restore_links
from spectrain.drafters.registry import known_method, load_module
from spectrain.drafters.serving_config import ServingConfig, drafter_digest, read_serving_config
from spectrain.engines.vllm import args as vllm_options
from spectrain.engines.vllm.guard import guarded
from spectrain.errors import ConfigError, InputError, RunError
from spectrain.evaluation.recommend import Recommendation, recommend
from spectrain.evaluation.records import STAGE_PREFIX, EvaluationRecord, read_record
from spectrain.masking import MaskedText, is_secret_name, mask_text
from spectrain.stages.drafter_checks import refuse_other_method
from spectrain.stages.run_dir import RunDir
from spectrain.target.identity import TargetIdentity, identify_folder

# Arguments that spectrain sets for its own runs. A server keeps vLLM's: the target's whole context, and its own
# sampling defaults.
_OF_RUNS = ("max_model_len", "generation_config", "seed")
# Where the configuration says no more than vLLM by itself, the command stays short.
_VLLM_DEFAULTS: dict[str, Any] = {
    "dtype": "auto",
    "trust_remote_code": False,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "enforce_eager": False,
}
_GRACE_S = 15.0  # beyond that, for a server that ends in order
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class ServeCommand:
    """A server's command line and the variables it needs over those of this process."""

    arguments: list[str]
    environment: dict[str, str]

    def __str__(self) -> str:
        """For a shell. Secrets are variables of that shell."""
        variables = [f"{name}={_shown(name, value)}" for name, value in self.environment.items()]
        words, secret = [], ""
        for word in self.arguments:
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                secret = _variable(name) if is_secret_name(name) else ""
                words.append(f"{name}={_shown(secret, value)}" if secret and equals else shlex.quote(mask_text(word)))
            else:
                words.append(_shown(secret, word) if secret else shlex.quote(mask_text(word)))
        return " ".join([*variables, *words])

    @property
    def secrets(self) -> list[str]:
        """Variables that a shell needs to have for the printed command."""
        flags = [word.partition("=")[0] for word in self.arguments if word.startswith("--")]
        return [
            *(name for name, value in self.environment.items() if _is_secret(name, value)),
            *(_variable(flag) for flag in flags if is_secret_name(flag)),
        ]


def _is_secret(name: str, value: str) -> bool:
    return isinstance(value, MaskedText) or is_secret_name(name)


def _shown(name: str, value: str) -> str:
    return f'"${name}"' if _is_secret(name, value) else shlex.quote(value)


def _variable(flag: str) -> str:
    """``--api-key`` is API_KEY."""
    return flag.lstrip("-").replace("-", "_").upper()


def serve(config: SpectrainConfig, given: Sequence[str], flags: Sequence[str] = (), print_only: bool = False) -> None:
    """Run vLLM's server until it ends, or print its command.

    Args:
        given: the overrides of the command line; what they name wins over what the drafter and evaluation say.
        flags: for vLLM, as they are.

    Raises ConfigError or InputError before anything is started; RunError when the server has failed.
    """
    command = serve_command(config, given, flags)
    if print_only:
        stdout.print(str(command), markup=False, soft_wrap=True)
        if command.secrets:
            say(f"note: secrets are not printed: set {', '.join(command.secrets)} where the command is run")
        return
    say(f"serve: {command}")
    code = _run(command, _shutdown_s(config, flags))
    if code:
        raise RunError(f"vLLM's server ended with exit code {code}: its last lines above say why")


def _run(command: ServeCommand, shutdown_s: float) -> int:
    """The server's exit code. ``shutdown_s``: how long it may go on when a signal ends this command."""
    guard = subprocess.Popen(
        guarded(command.arguments, shutdown_s + _GRACE_S),
        stdin=subprocess.PIPE,  # its end is the guard's sign that we are gone
        env={**os.environ, **command.environment},
        start_new_session=True,  # Ctrl-C is for us
    )

    def finish() -> str:
        if shutdown_s and guard.stdin is not None:
            guard.stdin.close()
            guard.wait()
        return "the server has ended"

    def hurry() -> None:
        if not shutdown_s:
            guard.terminate()
            guard.wait()

    takes_back = signals.at_end(hurry)
    with signals.keeping(finish):
        code = guard.wait()
    takes_back()
    return code


def _shutdown_s(config: SpectrainConfig, flags: Sequence[str]) -> float:
    """Seconds in which vLLM finishes requests when it is told to end; 0 (its default): it drops them."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--shutdown-timeout", type=float, default=config.engine.args.get("shutdown_timeout", 0))
    try:
        return float(parser.parse_known_args(list(flags))[0].shutdown_timeout)
    except (argparse.ArgumentError, TypeError, ValueError):
        return 0.0  # vLLM says what is wrong with it


def serve_command(config: SpectrainConfig, given: Sequence[str], flags: Sequence[str] = ()) -> ServeCommand:
    """The command of ``serve``; everything that can be checked is checked. Arguments and errors as there."""
    keys = {override.partition("=")[0] for override in given}
    if "decoding.draft_policy" in keys:
        raise ConfigError(
            "decoding.draft_policy is our own loop's: vLLM verifies all drafts of a round, so leave it out for serve"
        )
    if "speculative_config" in config.engine.args:
        raise ConfigError(
            "engine.args.speculative_config is set by serve, from the drafter's folder and "
            "decoding.num_speculative_tokens"
        )
    path = _drafter_path(config, keys)
    drafter = read_serving_config(path, config.drafter.revision if path == config.drafter.path else None)
    if drafter.replaces_target and not os.path.isdir(drafter.path):
        folder = drafter_path(DrafterConfig(path=drafter.path, revision=drafter.revision))  # vLLM is given a folder
        drafter = replace(drafter, path=str(folder), revision=None)
    check_drafter_digests(Path(drafter.path))
    if known_method(drafter.method) is None:
        load_module(config.drafter.module)  # its kind may be one that vLLM does not have
    _check_vocab(drafter)
    refuse_other_method(Path(drafter.path), drafter.method, config.drafter.method, keys)
    target, target_config = _target(config, drafter, keys)
    refuse_dash("target.path", target)
    _check_fit(drafter, target, target_config)
    _check_links(drafter, target_config)
    identity = _identity(drafter, target, target_config)
    other = drafter.other_target(identity)
    if other is not None:
        say(f"note: {other}")
    number = _num_speculative_tokens(config, drafter, keys, identity)
    length = drafter.max_model_len
    served = length or config.engine.args.get("max_model_len")
    if isinstance(served, int):
        target_config = replace(target_config, max_length=served)
    args = vllm_options.engine_args(config.engine, target_config, target, drafter.engine_args(number))
    vllm_options.check_args(args)
    named = {*config.engine.args, *(() if length is None else ("max_model_len",))}
    ours = [*vllm_options.cli_flags(_kept(args, named)), *_template_flags(target_config)]
    return ServeCommand([*_server(args["model"]), *ours, *flags], _environment(config))


def _template_flags(target: TargetConfig) -> list[str]:
    """What chat requests are rendered with that say nothing else, as the drafter was trained."""
    if not target.template_kwargs:
        return []
    return ["--default-chat-template-kwargs", json.dumps(target.template_kwargs)]


def _server(target: str) -> list[str]:
    """``vllm serve TARGET``; by module, because not every build comes with a command that works."""
    # -P: a file of the working directory must not hide a package.
    if vllm_options.is_cpu_build():
        return [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", target]
    return [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", target]


def _kept(args: Mapping[str, Any], named: Container[str]) -> dict[str, Any]:
    """The engine arguments to name: those that have to be, and the rest where they say something."""
    kept = {}
    for name, value in args.items():
        ours = name not in named
        if name == "model" or (ours and (name in _OF_RUNS or _VLLM_DEFAULTS.get(name) == value)):
            continue
        kept[name] = value
    return kept


def _environment(config: SpectrainConfig) -> dict[str, str]:
    return vllm_options.environment(config.engine)


# --- drafter and target --------------------------------------------------------------------------------------------


def _drafter_path(config: SpectrainConfig, keys: set[str]) -> str:
    """drafter.path of the command line, or the run's own drafter. One that the run went on from is not what it
    trained.
    """
    if "drafter.path" in keys and config.drafter.path is not None:
        return config.drafter.path
    if "run.dir" not in keys:
        raise ConfigError("serve what? Name a run (run.dir=DIR) or a drafter (drafter.path=FOLDER_OR_HUB_ID)")
    folder = RunDir(config.run.dir).drafter
    if not folder.is_dir():
        raise InputError(
            f"run.dir={config.run.dir} holds no drafter: run spectrain fit first, or name one with drafter.path"
        )
    return str(folder)


def _target(config: SpectrainConfig, drafter: ServingConfig, keys: set[str]) -> tuple[str, TargetConfig]:
    """(folder or Hub id of the target, its settings with the revision to load): the one the user names, else the
    drafter's own.
    """
    named = bool(keys & {"target", "target.path", "recipe"})
    own = drafter.target
    if own is not None and not named:
        if os.path.isdir(own):
            return own, replace(config.target, path=own, revision=None)
        if not os.path.isabs(own):  # an id of the Hub
            commit = drafter.target_revision or ""  # of a target that came from elsewhere, this is no commit
            return own, replace(config.target, path=own, revision=commit if _COMMIT.fullmatch(commit) else None)
    if not config.target.path:
        known = "does not say what it was trained for" if own is None else f"was trained for {own}, which is not here"
        raise InputError(f"drafter {drafter.path} {known}: name the target with target.path=FOLDER_OR_HUB_ID")
    from spectrain.target.resolve import locate_target, resolve_target

    source = locate_target(config.target)
    if source.kind in ("hub", "cache"):
        return config.target.path, replace(config.target, revision=source.revision)
    folder = source.folder or resolve_target(config.target).folder
    return str(folder.resolve()), replace(config.target, revision=None)


def _check_vocab(drafter: ServingConfig) -> None:
    """A drafter whose weights are here numbers its vocabulary in one way. A target's own head has all of it."""
    method = known_method(drafter.method)
    numbered = method is not None and method.trainable and not method.serves_as_target
    if numbered and weight_files(Path(drafter.path)):
        check_vocab(Path(drafter.path))


def _check_fit(drafter: ServingConfig, target: str, config: TargetConfig) -> None:
    """A drafter for another target would end in an error of shapes, after the target was loaded. Checked where the
    target is here.
    """
    if not os.path.isdir(target):
        return
    from spectrain.target.spec import TargetSpec

    spec = TargetSpec.from_folder(Path(target), config.trust_remote_code)
    for name, ours, theirs in (
        ("hidden size", drafter.hidden_size, spec.hidden_size),
        ("vocabulary", drafter.vocab_size, spec.vocab_size),
    ):
        if ours != theirs:
            raise InputError(
                f"drafter {drafter.path} was trained for another target: its {name} is {ours:,}, that of {target} "
                f"{theirs:,}"
            )
    if drafter.last_tap is not None and drafter.last_tap > spec.num_layers:
        raise InputError(
            f"drafter {drafter.path} was trained for another target: it reads layer {drafter.last_tap}, {target} has "
            f"{spec.num_layers}"
        )


def _check_links(drafter: ServingConfig, target: TargetConfig) -> None:
    """A folder that is served in the target's place has the target's files."""
    from spectrain.target.resolve import locate_target, resolve_target

    folder = Path(drafter.path)
    if is_overlay(folder):
        source = locate_target(target, unreachable_ok=True).folder
        if source is None and not all((folder / name).exists() for name in recorded_files(folder)):
            source = resolve_target(target).folder
        if source is not None:
            restore_links(folder, source)
        check_links(folder)


def _identity(drafter: ServingConfig, target: str, config: TargetConfig) -> TargetIdentity:
    """Which target is served. Where its weights are not here, it is what its name and revision say."""
    if os.path.isdir(target):
        try:
            return identify_folder(Path(target), target)
        except InputError:  # a folder without weights, as far as we see; vLLM will say what it wants
            return TargetIdentity(target, target, "", frozenset(), None)
    revision = config.revision or (drafter.target_revision if target == drafter.target else None) or ""
    return TargetIdentity(target, target, revision, frozenset({revision} - {""}), None)


# --- how many tokens to draft --------------------------------------------------------------------------------------


def _num_speculative_tokens(
    config: SpectrainConfig, drafter: ServingConfig, keys: set[str], target: TargetIdentity
) -> int:
    """The number on the command line, else the one that evaluation recommends, else the drafter's own."""
    most = drafter.most_tokens
    if "decoding.num_speculative_tokens" in keys:
        number = config.decoding.num_speculative_tokens
        if most is not None and number > most:
            raise ConfigError(
                f"decoding.num_speculative_tokens={number}: drafter {drafter.path} drafts at most {most}: lower it"
            )
        return number
    measured = measured_records(config, drafter, keys)
    records = [record for record in measured if target.is_target(record.target, record.target_revision)]
    found = recommend(records, drafter.drafts_step_by_step)
    if found is None or (most is not None and found.num_speculative_tokens > most):
        what = "it was measured with another target" if measured and not records else "nothing else was measured"
        say(f"serve: {drafter.num_speculative_tokens} drafts a round, as the drafter's folder says ({what})")
        return drafter.num_speculative_tokens
    say(f"serve: {found.num_speculative_tokens} drafts a round: {found.reason}")
    if _loses(found):
        say("serve: note: no speculation at all was faster in that measurement")
    return found.num_speculative_tokens


def _loses(found: Recommendation) -> bool:
    return found.speedup is not None and found.speedup < 1


def measured_records(config: SpectrainConfig, drafter: ServingConfig, keys: set[str]) -> list[EvaluationRecord]:
    """Evaluation records of exactly these weights, in the run directory that was named, else in the one that the
    drafter lies in.
    """
    folder = Path(drafter.path)
    run_dir = RunDir(config.run.dir if "run.dir" in keys else folder.parent)
    stages = run_dir.manifest()["stages"]
    entries = [
        entry
        for name, entry in stages.items()
        if name.startswith(STAGE_PREFIX) and "record" in entry.get("outputs", {})
    ]
    if not entries or not folder.is_dir():
        return []
    digest = drafter_digest(folder)
    paths = [
        run_dir.path / entry["outputs"]["record"]
        for entry in entries
        if entry["inputs"]["fixed"].get("drafter") == digest
    ]
    return [record for record in (read_record(path) for path in paths if path.is_file()) if record.is_drafter]
