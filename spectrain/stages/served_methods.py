"""The servers of ``eval serving``: what ``spectrain serve`` would run, and the same without the drafter."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from spectrain.config.evaluation_schema import BASELINES
from spectrain.console import say
from spectrain.drafters.serving_config import read_serving_config
from spectrain.engines.vllm.args import is_cpu_build, target_original_length
from spectrain.engines.vllm.openai_api import base_url, check_server_model
from spectrain.engines.vllm.server_process import PortServer
from spectrain.errors import ConfigError
from spectrain.stages.baselines import baseline_speculation
from spectrain.stages.context import Context
from spectrain.stages.drafter_checks import check_baselines
from spectrain.stages.serve import ServeCommand, serve_command

NONE = "none"
_MODEL = "target"  # what requests call it
_FLAG = "--speculative-config"


@dataclass(frozen=True)
class ServedMethod:
    """A method and what serves it. ``command`` None: a server that runs already, at ``url``."""

    name: str
    is_drafter: bool
    num_speculative_tokens: int
    model: str = _MODEL
    command: ServeCommand | None = None
    url: str = ""


def served_methods(context: Context) -> list[ServedMethod]:
    """What is measured, no speculation first. Raises ConfigError for a method that is not known, and for several where
    servers run already.
    """
    config = context.config
    drafter = read_serving_config(str(context.measured_drafter)).method
    names = config.serving.methods or ((drafter,) if config.engine.urls else (NONE, drafter))
    for name in names:
        if name not in (*BASELINES, drafter):
            raise ConfigError(
                f"serving.methods: {name} is not known here: use some of {', '.join((*BASELINES, drafter))}"
            )
    check_baselines(config, names)
    if config.engine.urls:
        return [_running(context, names, drafter)]
    command = serve_command(config, sorted(context.given | {"run.dir"}), ["--served-model-name", _MODEL])
    place = command.arguments.index(_FLAG)
    told = json.loads(command.arguments[place + 1])
    n = int(told["num_speculative_tokens"])
    ordered = [*(name for name in BASELINES if name in names), *((drafter,) if drafter in names else ())]
    found = []
    for name in ordered:
        speculation = told if name == drafter else baseline_speculation(config, name) | {"num_speculative_tokens": n}
        flags = [] if name == NONE else [_FLAG, json.dumps(speculation)]
        arguments = [*command.arguments[:place], *flags, *command.arguments[place + 2 :]]
        found.append(
            ServedMethod(
                name, name == drafter, 0 if name == NONE else n, command=ServeCommand(arguments, command.environment)
            )
        )
    return found


def _running(context: Context, names: Sequence[str], drafter: str) -> ServedMethod:
    config = context.config
    if len(names) > 1 or len(config.engine.urls) > 1:
        raise ConfigError(
            "engine.urls: a server that runs already does what it was started for: name one server, and one method "
            "(serving.methods), for each command"
        )
    folder, target = context.target.folder, config.target
    url = base_url(config.engine.urls[0])
    known = dict.fromkeys((target.path, str(folder), str(folder.resolve()), _MODEL))
    model = check_server_model(url, known, target.max_length, target_original_length(folder))
    n = 0 if names[0] == NONE else config.decoding.num_speculative_tokens
    say("note: the server at engine.urls does what it was started for: it is measured by itself, without speed-up")
    return ServedMethod(names[0], names[0] == drafter, n, model=model, url=url)


class Servers:
    """The servers of several methods: all at the same time, or one after the other."""

    def __init__(self, context: Context, together: bool) -> None:
        self._context = context
        self._together = together
        self._open: dict[str, PortServer] = {}

    def url(self, method: ServedMethod, others: Sequence[ServedMethod]) -> str:
        """Where ``method`` is served. ``others``: that will be asked for, too."""
        if method.command is None:
            return method.url
        if method.name not in self._open:
            if not self._together:
                self.close()
            self._start([method, *(others if self._together else ())])
        return self._open[method.name].url

    def _start(self, methods: Sequence[ServedMethod]) -> None:
        logs = self._context.logs
        missing = {method.name: method for method in methods if method.command and method.name not in self._open}
        say(f"serving: starting {', '.join(missing)}; output goes to {logs}")
        for name, method in missing.items():
            assert method.command is not None
            self._open[name] = PortServer(
                f"vLLM's server ({name})",
                [*method.command.arguments, "--disable-uvicorn-access-log"],
                method.command.environment,
                logs / f"vllm-serving-{name}.log",
            )
            self._open[name].start()
        end_s = time.monotonic() + self._context.config.engine.startup_timeout_s
        for name in missing:
            self._open[name].wait_ready(end_s)

    def why_ended(self, method: ServedMethod) -> str:
        """What its log says, where it has ended; empty while it runs."""
        server = self._open.get(method.name)
        return "" if server is None or server.exit_code is None else server.last_errors()

    def close(self) -> None:
        for server in self._open.values():
            server.end()
        for server in self._open.values():
            server.stop()
        self._open.clear()


@contextmanager
def servers(context: Context) -> Iterator[Servers]:
    wanted = context.config.serving.servers
    found = Servers(context, wanted == "together" or (wanted == "auto" and is_cpu_build()))
    try:
        yield found
    finally:
        found.close()
