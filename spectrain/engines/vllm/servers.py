"""A pool of vLLM servers as one ``VLLMClient``: who gets which request, and what happens when something fails.

* Each server has at most ``concurrency`` requests under way; the rest wait here, so that no server is given more than
  it can work on. The next request goes to the server with the most room.
* A request that fails (no connection, no answer in time, a status of 5xx) is sent again, up to ``retries`` times, after
  a wait that doubles and is spread at random, so that many requests do not come back at once. A server that says it is
  busy (429; 503 while it is healthy) is waited for instead. A request that is refused (4xx) is our mistake, and ends
  the run.
* When a request has failed to the end, its server is judged: dead if its process is gone, if it says so, or if it has
  answered nothing else meanwhile. The work of a dead server goes to the others. One that was started here is started
  once more. If no server is left, the run ends with the reason. If the server is alive, the request is tried elsewhere,
  and ends the run when it has failed everywhere.

All of this happens in one thread with an event loop, so nothing in it needs a lock; ``submit`` and ``collect`` are
called from another.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx2

from spectrain.console import say
from spectrain.engines.vllm.openai_api import InterruptedRequestError, completion_body, error_text, parse_completion
from spectrain.engines.vllm.requests import Completion, Request, VLLMClient
from spectrain.engines.vllm.server_process import ServerProcess
from spectrain.errors import RunError, SpectrainError

_CONNECT_S = 10.0
_HEALTH_S = 10.0
_LONGEST_WAIT_S = 30.0
_WATCH_S = 0.25
_KEEP_S = 2.0  # an idle connection is dropped before the server drops it (5 s): a request could fall between the two


@dataclass(eq=False)
class Endpoint:
    """One server. ``name``: for messages, its URL; ``model``: the target's name there; ``server``: its process if it
    was started here; ``socket``: where it listens if another process of this machine has started it.
    """

    name: str
    model: str
    concurrency: int
    server: ServerProcess | None = None
    socket: str | None = None
    up: bool = True
    restarts_left: int = 1
    restarting: bool = False
    answered: int = 0  # requests
    jobs: dict[asyncio.Task[None], Job] = field(default_factory=dict)  # under way
    client: httpx2.AsyncClient = field(init=False)

    def connect(self) -> None:
        """Open a client; called in the event loop. A server that was started again has another address."""
        limits = httpx2.Limits(
            max_connections=None, max_keepalive_connections=self.concurrency, keepalive_expiry=_KEEP_S
        )
        timeout = httpx2.Timeout(None, connect=_CONNECT_S)  # the rest is bounded for each request
        socket = self.socket if self.server is None else str(self.server.socket)
        if socket is None:
            self.client = httpx2.AsyncClient(base_url=self.name, limits=limits, timeout=timeout)
        else:
            transport = httpx2.AsyncHTTPTransport(uds=socket, limits=limits)
            self.client = httpx2.AsyncClient(base_url="http://localhost", transport=transport, timeout=timeout)

    def elsewhere(self) -> Endpoint:
        """The same server for another process of this machine, which does not start it again."""
        socket = self.socket if self.server is None else str(self.server.socket)
        return Endpoint(self.name, self.model, self.concurrency, socket=socket)

    @property
    def is_alive(self) -> bool:
        """Whether it is up or will be."""
        return self.up or self.restarting

    @property
    def room(self) -> float:
        """Share of its concurrency that is free; 0 if none is, or if it is not up."""
        return 1 - len(self.jobs) / self.concurrency if self.up else 0.0


@dataclass(eq=False)
class Job:
    """A request, the servers that it has failed at while they were healthy, and why it did."""

    request: Request
    failed_at: set[Endpoint] = field(default_factory=set)
    reason: str = ""


class _UnansweredError(Exception):
    """A request that all attempts at one server failed to get answered; the text says why."""


class ServerPool(VLLMClient):
    """``VLLMClient`` over one or many servers. Stops those it was given with a ``server`` when it is closed.

    Args:
        retries: of a request at one server.
        request_timeout_s: of one attempt, and the longest that a busy server is waited for.
        restart_timeout_s: until a server that was started again must be ready.
        backoff_s: mean wait before the first retry.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        retries: int,
        request_timeout_s: float,
        restart_timeout_s: float,
        backoff_s: float = 0.5,
    ) -> None:
        self.endpoints = list(endpoints)
        self._retries = retries
        self._timeout_s = request_timeout_s
        self._restart_timeout_s = restart_timeout_s
        self._backoff_s = backoff_s
        self._waiting: deque[Job] = deque()
        self._tasks: set[asyncio.Task[None]] = set()  # beside the requests
        self._closed = False
        # Shared with the caller's thread:
        self._news = threading.Condition()
        self._completions: list[Completion] = []
        self._error: SpectrainError | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="endpoints", daemon=True)
        self._thread.start()

    # --- in the caller's thread -------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Requests that the servers which are alive take together."""
        return max(1, sum(endpoint.concurrency for endpoint in self.endpoints if endpoint.is_alive))

    def submit(self, request: Request) -> None:
        """Have a request answered. Returns at once; beyond ``capacity`` requests wait here."""
        self._loop.call_soon_threadsafe(self._enqueue, Job(request))

    def collect(self, timeout_s: float) -> list[Completion]:
        """What was completed since the last call, waiting up to ``timeout_s`` for the first. Raises RunError when the
        pool cannot go on.
        """
        with self._news:
            self._news.wait_for(lambda: self._completions or self._error, timeout_s)
            completions, self._completions = self._completions, []
            if not completions and self._error is not None:
                raise self._error
            return completions

    def close(self) -> None:
        """Drop what is under way and stop the servers that were started here."""
        if self._closed:
            return
        self._closed = True
        servers = [endpoint.server for endpoint in self.endpoints if endpoint.server is not None]
        for server in servers:  # all at once, for each takes a while; also ends a restart that is under way
            server.end()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for server in servers:
            server.stop()

    # --- in the event loop ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        for endpoint in self.endpoints:
            endpoint.connect()
            if endpoint.server is not None:
                self._spawn(self._watch(endpoint, endpoint.server))
        self._loop.run_forever()
        self._loop.run_until_complete(self._finish())
        self._loop.close()

    async def _finish(self) -> None:
        tasks = [*self._tasks, *(task for endpoint in self.endpoints for task in endpoint.jobs)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for endpoint in self.endpoints:
            await endpoint.client.aclose()
        await self._loop.shutdown_default_executor()

    def _enqueue(self, job: Job) -> None:
        self._waiting.append(job)
        self._dispatch()

    def _dispatch(self) -> None:
        """Send waiting requests to servers that have room."""
        for job in list(self._waiting):
            if not any(endpoint.room > 0 for endpoint in self.endpoints):
                return
            hopeful = [endpoint for endpoint in self.endpoints if endpoint.is_alive and endpoint not in job.failed_at]
            if not hopeful:
                self._fail(
                    RunError(
                        f"request {job.request.id} fails at every server, though others are answered ({job.reason})"
                    )
                )
                return
            freest = max(hopeful, key=lambda endpoint: endpoint.room)
            if freest.room > 0:
                self._waiting.remove(job)
                task = self._loop.create_task(self._serve(freest, job))
                freest.jobs[task] = job
                task.add_done_callback(partial(self._done, freest))

    def _done(self, endpoint: Endpoint, task: asyncio.Task[None]) -> None:
        endpoint.jobs.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        if not self._closed:
            self._dispatch()

    async def _serve(self, endpoint: Endpoint, job: Job) -> None:
        """Get one request answered by one server, or see what to do about it."""
        answered_before = endpoint.answered
        try:
            completion = await self._ask(endpoint, job.request)
        except _UnansweredError as failure:
            if endpoint.answered == answered_before or not await self._is_healthy(endpoint):
                self._mark_dead(endpoint, str(failure))  # takes this request back, too
            else:
                job.failed_at.add(endpoint)
                job.reason = str(failure)
                self._waiting.appendleft(job)
            return
        endpoint.answered += 1
        with self._news:
            self._completions.append(completion)
            self._news.notify_all()

    async def _ask(self, endpoint: Endpoint, request: Request) -> Completion:
        """What one server answers. Raises _UnansweredError when the attempts are used up, RunError when the request is
        refused.
        """
        body = completion_body(endpoint.model, request)
        start_s, failures, busy = time.monotonic(), 0, 0
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    response = await endpoint.client.post("/v1/completions", json=body)
                if response.status_code == 200:
                    return parse_completion(request, response.json(), time.monotonic() - start_s)
                reason = error_text(response)
                if await self._is_busy(endpoint, response) and time.monotonic() - start_s < self._timeout_s:
                    busy += 1
                    await asyncio.sleep(max(self._wait_s(busy), _asked_wait_s(response)))
                    continue
                if response.status_code < 500 and response.status_code not in (408, 429):
                    raise RunError(f"{endpoint.name} refuses request {request.id}: {reason}")
            except TimeoutError:
                reason = f"no answer in {self._timeout_s:g} s (engine.request_timeout_s)"
            except (
                httpx2.RequestError,
                InterruptedRequestError,
                ValueError,
            ) as error:  # ValueError: a reply that is no JSON
                reason = f"{type(error).__name__} {error}".strip()
            failures += 1
            if failures > self._retries:
                raise _UnansweredError(reason)
            await asyncio.sleep(self._wait_s(failures))

    def _wait_s(self, count: int) -> float:
        """Doubles with every wait; half of it is chance."""
        return min(_LONGEST_WAIT_S, self._backoff_s * 2 ** (count - 1)) * random.uniform(0.5, 1.5)

    async def _is_busy(self, endpoint: Endpoint, response: httpx2.Response) -> bool:
        """vLLM says 503 both when its queue is full and when its engine is dead."""
        return response.status_code == 429 or (response.status_code == 503 and await self._is_healthy(endpoint))

    async def _is_healthy(self, endpoint: Endpoint) -> bool:
        if endpoint.server is not None and endpoint.server.exit_code is not None:
            return False
        try:
            async with asyncio.timeout(_HEALTH_S):
                return (await endpoint.client.get("/health")).status_code == 200
        except (httpx2.RequestError, TimeoutError):
            return False

    # --- life and death of servers ----------------------------------------------------------------------------------

    async def _watch(self, endpoint: Endpoint, server: ServerProcess) -> None:
        """Notice at once that a process has ended, not when its requests have failed to the end."""
        while True:
            await asyncio.sleep(_WATCH_S)
            if endpoint.up and server.exit_code is not None and not server.is_over:
                self._mark_dead(endpoint, f"exit code {server.exit_code}")

    def _mark_dead(self, endpoint: Endpoint, reason: str) -> None:
        """Mark a server dead: take its work back, and start it again if that may be done."""
        if not endpoint.up:
            return
        endpoint.up = False
        for task, job in list(endpoint.jobs.items()):
            if not task.done():  # else its answer is in already
                self._waiting.appendleft(job)
                task.cancel()
        if endpoint.server is not None and endpoint.restarts_left > 0:
            endpoint.restarts_left -= 1
            endpoint.restarting = True
            say(f"note: {endpoint.name} is dead ({reason}) and is started again; its log is {endpoint.server.log}")
            self._spawn(self._restart(endpoint, endpoint.server))
        else:
            self._give_up_on(endpoint, reason)

    async def _restart(self, endpoint: Endpoint, server: ServerProcess) -> None:
        try:
            await endpoint.client.aclose()
            await asyncio.to_thread(server.restart, self._restart_timeout_s)
        except RunError as error:
            endpoint.restarting = False
            self._give_up_on(endpoint, str(error))
            return
        endpoint.connect()
        endpoint.restarting, endpoint.up = False, True
        self._dispatch()

    def _give_up_on(self, endpoint: Endpoint, reason: str) -> None:
        """A server is gone for good."""
        left = sum(other.is_alive for other in self.endpoints)
        log = (
            f"; {endpoint.server.last_errors()}"
            if endpoint.server is not None and endpoint.server.log.name not in reason
            else ""
        )
        if left:
            say(f"note: {endpoint.name} is dead ({reason}); its work goes to the other {left}{log}")
            self._dispatch()
        else:
            self._fail(RunError(f"no server is left: {endpoint.name} is dead ({reason}){log}"))

    def _fail(self, error: BaseException) -> None:
        """End the run; the first reason counts."""
        if not isinstance(error, SpectrainError):
            error = RunError(
                f"the pool of servers failed ({type(error).__name__}: {error}); this is a bug of spectrain's"
            )
        with self._news:
            self._error = self._error or error
            self._news.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)


def _asked_wait_s(response: httpx2.Response) -> float:
    """The wait that a busy server asks for; 0 if it names none, or a date."""
    try:
        return min(_LONGEST_WAIT_S, float(response.headers.get("retry-after", 0)))
    except ValueError:
        return 0.0
