"""Which target is at hand, by every name under which it may have been recorded, so that what was made for a target (a
drafter, a measurement) can be told from what was made for another one.

The same weights have several revisions: the commit on the Hub, the fingerprint of the folder they were copied to, the
digest of the GGUF they were converted from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from spectrain.target.bundled import converted_from
from spectrain.target.resolve import TargetSource, tokenizer_digest, weights_fingerprint

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORT = 12  # digits of a revision that a person is shown


@dataclass(frozen=True)
class TargetIdentity:
    """``name``: what a person calls it, ``id`` and ``revision``: what this run records of it. ``revisions``: all of the
    same weights, some cut to their first digits. ``tokenizer``: digest of its files; None while they are not here.
    """

    name: str
    id: str
    revision: str
    revisions: frozenset[str]
    tokenizer: str | None

    def has_revision(self, revision: str) -> bool:
        """Whether ``revision`` is one of these weights."""
        return any(revision == known or revision[:_SHORT] == known for known in self.revisions)

    def is_target(self, id: str, revision: str) -> bool:
        """Whether a target that was recorded so is this one; by its id alone only while this one's revision is not
        known.
        """
        return self.has_revision(revision) if self.revision else id == self.id

    @property
    def fingerprints(self) -> bool:
        """Whether the weights are here, so that a fingerprint tells whether they are the same."""
        return self.tokenizer is not None

    def __str__(self) -> str:
        return described(self.name, self.revision)


def described(name: str, revision: str | None) -> str:
    """A target in a sentence."""
    return f"{name} at {revision[:_SHORT]}" if revision else name


def identify(source: TargetSource, name: str) -> TargetIdentity:
    """The target of ``source``. Reads samples of its weights where they are here (``weights_fingerprint``)."""
    if source.folder is None:
        return TargetIdentity(name, source.id, source.revision, frozenset({source.revision} - {""}), None)
    return identify_folder(source.folder, name, source.id, source.revision)


def identify_folder(folder: Path, name: str, id: str = "", revision: str = "") -> TargetIdentity:
    """The target in a folder, by default under the names of ``locate_target``."""
    folder = folder.expanduser().resolve()
    fingerprint, converted = weights_fingerprint(folder), converted_from(folder)
    revisions = {revision or fingerprint, fingerprint}
    if _COMMIT.fullmatch(folder.name):  # a snapshot in the Hub's cache
        revisions.add(folder.name)
    if converted is not None:
        revisions.add(converted)
    return TargetIdentity(
        name, id or folder.name, revision or fingerprint, frozenset(revisions), tokenizer_digest(folder)
    )
