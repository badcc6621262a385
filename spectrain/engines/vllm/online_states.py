"""Hidden states asked of vLLM while a drafter is trained: document by document, each in a file that is removed once it
has been read.

What a trainer will want next it says beforehand (``expect``): at most ``ahead`` documents are under way or wait to be
read, so that neither the servers' queues nor their disk fill up when training is slower than they are. A document that
is asked for without having been expected is sent at once, whatever is under way: somebody waits for it.

The pool behind the client (``servers.py``) tries a request again and elsewhere. Here a document fails when the client
can do no more, when no answer comes in time, or when the answer is not its hidden states; asked for again, it is
another request with another file.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from spectrain.data.hidden_states import TargetStates
from spectrain.data.responses import Response
from spectrain.engines.vllm.capture_plan import CapturePlan, Document
from spectrain.engines.vllm.document_files import discard_document, read_document, with_normalizer
from spectrain.engines.vllm.requests import Completion, VLLMClient
from spectrain.errors import RunError
from spectrain.target.head import TargetHead

_WAIT_S = 1.0
_DRAIN_S = 10.0


class OnlineStates:
    """``Asker`` of a vLLM that captures by ``plan``, whose documents come apart.

    Args:
        head: for the log-normalizer, which a server does not know.
        ahead: documents that are under way or wait to be read, beside one that was not expected.
        timeout_s: until an answer.
    """

    def __init__(self, client: VLLMClient, plan: CapturePlan, head: TargetHead, ahead: int, timeout_s: float) -> None:
        self._client = client
        self._plan = plan
        self._head = head
        self._ahead = ahead
        self._timeout_s = timeout_s
        self._name = uuid.uuid4().hex[:12]  # of nobody else who asks the same servers
        self._count = 0
        self._expected: deque[Response] = deque()  # not sent yet
        self._request_of: dict[str, str] = {}  # key of a document -> its request, under way or answered
        self._documents: dict[str, Document] = {}  # by request
        self._answers: dict[str, Completion] = {}  # by request

    def expect(self, responses: Sequence[Response]) -> None:
        self._expected.extend(responses)
        self._send_expected()

    def ask(self, response: Response) -> list[TargetStates]:
        request = self._request_of.get(response.key)
        if request is None:
            with suppress(ValueError):
                self._expected.remove(response)
            request = self._send(response)
        try:
            answer = self._await(request)
            states = read_document(answer, self._documents[request], self._plan)
        finally:  # whatever became of it
            self._documents.pop(request)
            del self._request_of[response.key]
        self._send_expected()
        return [with_normalizer(states, self._head, self._plan.meta.dtype)]

    def close(self) -> None:
        """Remove what was answered and not read. What is under way is waited for a little."""
        end_s = time.monotonic() + _DRAIN_S
        with suppress(RunError):
            while len(self._answers) < len(self._documents) and time.monotonic() < end_s:
                self._collect()
        for answer in self._answers.values():
            discard_document(answer)

    def _send_expected(self) -> None:
        while self._expected and len(self._documents) < self._ahead:
            response = self._expected.popleft()
            if response.key not in self._request_of:
                self._send(response)

    def _send(self, response: Response) -> str:
        self._count += 1
        request = f"{self._name}-{self._count}"
        document = Document.of(response)
        self._client.submit(document.request(request))
        self._documents[request], self._request_of[response.key] = document, request
        return request

    def _await(self, request: str) -> Completion:
        end_s = time.monotonic() + self._timeout_s
        while request not in self._answers:
            if time.monotonic() > end_s:
                raise RunError(f"vLLM gave no answer in {self._timeout_s:g} s (engine.request_timeout_s)")
            self._collect()
        return self._answers.pop(request)

    def _collect(self) -> None:
        for completion in self._client.collect(_WAIT_S):
            if completion.id in self._documents:
                self._answers[completion.id] = completion
            else:  # of a request that was given up
                discard_document(completion)
