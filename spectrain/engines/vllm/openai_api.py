"""What is said over HTTP: a ``Request`` as vLLM's ``/v1/completions`` takes it, its reply as a ``Completion``, and
which model a server has.

Token ids go in and come back (``return_token_ids``); the text that a server sends along is never looked at. The fields
are those of vLLM 0.32 (``vllm/entrypoints/openai/completion/protocol.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import httpx2

from spectrain.engines.vllm.requests import Completion, ReportedRound, Request
from spectrain.errors import ConfigError, RunError

_PATIENCE_S = 20.0


def completion_body(model: str, request: Request) -> dict[str, Any]:
    """The JSON of a request. Everything that changes the distribution is said, because a server may have defaults of
    its own.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt_ids,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        # The end tokens are ours, so that every engine stops alike; vLLM gives back the one that ended an answer.
        "stop_token_ids": list(request.stop_ids),
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if request.seed is not None:
        body["seed"] = request.seed
    if request.states is not None:
        body["kv_transfer_params"] = request.states
    return body


class InterruptedRequestError(Exception):
    """The server gave the request up half-way, as it does when it is told to end: ask again, or elsewhere."""


def parse_completion(request: Request, reply: Any, seconds: float) -> Completion:
    """What a reply with status 200 holds. Raises InterruptedRequestError, or RunError where it does not complete
    ``request``.
    """
    try:
        choice = reply["choices"][0]
        ids, prompt_ids, reason = choice["token_ids"], choice["prompt_token_ids"], choice["finish_reason"]
        kv_params = reply.get("kv_transfer_params") or {}
        speculation = (reply.get("metrics") or {}).get("speculative_decoding") or {}
    except (KeyError, IndexError, TypeError, AttributeError):
        ids = prompt_ids = reason = None
    if reason in ("abort", "error"):
        raise InterruptedRequestError(f"finish reason {reason}")
    if not ids or reason not in ("stop", "length"):
        raise RunError(
            f"the server's answer has no token ids or no finish reason ({reason}): a vLLM server of version 0.32 is "
            f"needed"
        )
    if prompt_ids != request.prompt_ids:
        raise RunError("the server answered another prompt than it was sent: it must not add or cut tokens")
    return Completion(request.id, ids, reason, seconds, _rounds(speculation), kv_params.get("hidden_states_path"))


def _rounds(speculation: Mapping[str, Any]) -> list[ReportedRound]:
    """From a server with ``--per-request-spec-decode-metrics detailed``; others do not tell."""
    drafted, accepted = speculation.get("per_step_drafted") or [], speculation.get("per_step_accepted") or []
    return [ReportedRound(*counts) for counts in zip(drafted, accepted, strict=True)]


def error_text(response: httpx2.Response) -> str:
    """What a server says of a failure, in a line."""
    try:
        said = response.json()
        said = said.get("error", said)
        said = said.get("message", said)
    except (ValueError, AttributeError):
        said = response.text
    return f"status {response.status_code}: {' '.join(str(said).split())[:400]}"


def base_url(url: str) -> str:
    """A server's address without the path of its API."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def check_server_model(url: str, names: Collection[str], max_length: int, original_length: int | None = None) -> str:
    """The name under which the server at ``url`` has the target.

    names: all that the target goes by (what it was given as, its id, its folder). original_length: where the target
    turns otherwise beyond it (``served_rope.py``). Raises RunError if the server does not answer, and ConfigError if it
    serves something else, or documents of ``max_length`` tokens are too long for it, or turn otherwise there.
    """
    try:
        with httpx2.Client(timeout=_PATIENCE_S) as client:
            response = client.get(f"{base_url(url)}/v1/models")
    except (httpx2.TransportError, httpx2.InvalidURL) as error:
        raise RunError(
            f"engine.urls: {url} does not answer ({error or type(error).__name__}): start the server, or remove it"
        ) from error
    try:
        models = response.json()["data"] if response.status_code == 200 else []
        offered = {model["id"]: model for model in models}
    except (ValueError, KeyError, TypeError):
        offered = {}
    if not offered:
        raise ConfigError(
            f"engine.urls: {url} is no server of models ({error_text(response)}): give the address of a vLLM server"
        )
    found = next((name for name, model in offered.items() if name in names or model.get("root") in names), None)
    if found is None:
        wanted = next(iter(names))
        raise ConfigError(
            f"engine.urls: {url} serves {', '.join(offered)}, not {wanted}: start it with that model, or with "
            f"--served-model-name {wanted} if it is the same one"
        )
    longest = offered[found].get("max_model_len")
    if isinstance(longest, int) and longest < max_length:
        raise ConfigError(
            f"engine.urls: {url} takes {longest} tokens, fewer than target.max_length={max_length}: start it with "
            f"--max-model-len {max_length} or more, or lower target.max_length"
        )
    if original_length is not None and isinstance(longest, int) and max_length <= original_length < longest:
        raise ConfigError(
            f"engine.urls: {url} takes {longest} tokens, so the target turns by other rotary factors there than with "
            f"target.max_length={max_length}: start it with --max-model-len {original_length}"
        )
    return found
