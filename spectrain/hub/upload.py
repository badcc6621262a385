"""A folder to the Hub, with its own client: one commit, so that nobody ever sees half a drafter.

An upload that breaks off goes on where it was when the same command runs again: weights that the Hub has are not sent
again (it knows them by their digests), files that are the same there are left out of the commit, and what is the same
as a whole makes no commit. What passes by itself (too many requests, a server's error, a broken connection, somebody
else's commit at the same moment) is tried again, after as long as the Hub asks for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import disable_progress_bars

from spectrain.console import say
from spectrain.errors import InputError, RunError, SpectrainError
from spectrain.files import file_digest

_ATTEMPTS = 5
_LONGEST_WAIT_S = 300.0
_FIRST_WAIT_S = 1.0
_PASSING = (408, 409, 412, 429, 500, 502, 503, 504)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Repository:
    """Where a folder goes, and who sees it. gated: auto, manual, open, or None (as it is)."""

    id: str
    branch: str = "main"
    private: bool = True
    gated: str | None = None
    collection: str | None = None


def upload(folder: Path, repository: Repository, message: str) -> str:
    """Upload every file of ``folder`` and return the commit.

    Raises InputError where the user is not logged in, or the repository is public where it should be private; RunError
    where the Hub refuses or does not answer.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()  # in a log they end up before whatever comes next
    hub = _Hub(HfApi(), repository)
    hub.check_login()
    hub.create()
    commit = hub.commit(folder, message)
    hub.check(folder, commit)
    hub.settle()
    return commit


class _Hub:
    """The client, with one repository in mind."""

    def __init__(self, api: HfApi, repository: Repository) -> None:
        self.api = api
        self.repository = repository
        self.id = repository.id

    def check_login(self) -> None:
        try:
            user = self._ask(self.api.whoami)
        except LocalTokenNotFoundError:
            raise InputError(f"publish.repo={self.id}: nobody is logged in to the Hub: run `hf auth login`") from None
        say(f"publish: logged in as {user['name']}")

    def create(self) -> None:
        wanted = self.repository
        made = self._ask(lambda: self.api.create_repo(self.id, private=wanted.private, exist_ok=True))
        self.id = made.repo_id  # a name without an owner is the user's own
        info = self._ask(lambda: self.api.model_info(self.id))
        if wanted.private and info.private is False:
            raise InputError(
                f"publish.repo={self.id} is there and public: set publish.private=false to upload what everybody sees"
            )
        if wanted.branch != "main":
            self._ask(lambda: self.api.create_branch(self.id, branch=wanted.branch, exist_ok=True))

    def commit(self, folder: Path, message: str) -> str:
        files = sorted(path for path in folder.rglob("*") if path.is_file())

        def attempt() -> str:
            # Made anew for each attempt: they remember what of them was uploaded.
            operations = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files]
            info = self.api.create_commit(self.id, operations, commit_message=message, revision=self.repository.branch)
            return str(info.oid)

        return self._ask(attempt)

    def check(self, folder: Path, commit: str) -> None:
        """The weights that the Hub has are those of the folder."""
        local = {path.name: file_digest(path) for path in folder.glob("*.safetensors")}
        found = self._ask(lambda: self.api.get_paths_info(self.id, list(local), revision=commit))
        there = {file.path: file.lfs.sha256 for file in found if getattr(file, "lfs", None) is not None}
        for name, digest in local.items():
            if there.get(name) != digest:
                raise RunError(
                    f"{name} on the Hub is not what was uploaded ({self.id} at {commit[:12]}): publish again"
                )

    def settle(self) -> None:
        """Who may download it, and its collection."""
        gated, collection = self.repository.gated, self.repository.collection
        if gated is not None:
            access = False if gated == "open" else gated
            self._ask(lambda: self.api.update_repo_settings(self.id, gated=access))
        if collection is not None:
            self._ask(lambda: self.api.add_collection_item(collection, self.id, "model", exists_ok=True))

    def _ask(self, call: Callable[[], _Result]) -> _Result:
        """The call's result, after several attempts where what failed may pass."""
        wait_s = _FIRST_WAIT_S
        for left in reversed(range(_ATTEMPTS)):
            try:
                return call()
            except (SpectrainError, LocalTokenNotFoundError):
                raise
            except OfflineModeIsEnabled:
                raise InputError(f"publish.repo={self.id}: HF_HUB_OFFLINE is set: unset it to upload") from None
            except HfHubHTTPError as error:
                if error.response.status_code not in _PASSING or not left:
                    raise self._refusal(error) from error
                told_s = _retry_after_s(error)
                reason = f"the Hub answers {error.response.status_code}"
            except (OSError, HTTPError) as error:  # the latter of the HTTP library: time-outs, broken connections
                if not left:
                    raise RunError(
                        f"publish.repo={self.id}: the Hub cannot be reached ({type(error).__name__}: "
                        f"{_one_line(error)}): {_AGAIN}"
                    ) from error
                told_s, reason = None, "the connection broke"
            except RuntimeError as error:  # of the client's uploads, which it has tried several times itself
                reason = _one_line(error.__cause__ or error)
                raise RunError(f"publish.repo={self.id}: the weights were not uploaded ({reason}): {_AGAIN}") from error
            except ValueError as error:  # the client's own checks, such as of the card's metadata
                raise RunError(f"publish.repo={self.id}: {_one_line(error)}") from error
            pause_s = min(wait_s if told_s is None else told_s, _LONGEST_WAIT_S)
            say(f"publish: {reason}: again in {pause_s:.0f} s")
            time.sleep(pause_s)
            wait_s *= 2
        raise AssertionError  # the last attempt returns or raises

    def _refusal(self, error: HfHubHTTPError) -> SpectrainError:
        """What the Hub's answer means, and what to do."""
        status, where = error.response.status_code, f"publish.repo={self.id}"
        told = _one_line(error.server_message or error)
        if status == 401:
            return InputError(f"{where}: the Hub does not accept the token (401): run `hf auth login`")
        if status == 403:
            return RunError(f"{where}: the token may not write there (403: {told}): use one with write access to it")
        if status == 404:
            return RunError(f"{where}: the Hub knows no such thing (404: {told}): correct repo, branch or collection")
        return RunError(f"{where}: the Hub answers {status} ({told}): {_AGAIN}")


_AGAIN = "what was uploaded is kept, the same command goes on from there"


def _retry_after_s(error: HfHubHTTPError) -> float | None:
    told = error.response.headers.get("Retry-After", "")
    return float(told) if told.isdigit() else None


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
