"""One process at a time works in a run directory.

On a disk of this machine the operating system's lock (``flock``) says so; it ends with the process, however that ends.
On a file system that several machines share (NFS, Lustre, GPFS, BeeGFS, FUSE …) such a lock may be missing, or hold
among the processes of one machine alone. There, and wherever the type is not known, the owner is a file,
``.owner.json``, which appears whole or not at all (``link``, which such file systems do in one step), says who works
here, and is touched every so often. Whoever finds it goes on

* at once, where the owner has surely ended: its process is not there any more (on the same machine), its machine was
  started anew, or Slurm has started the same job again;
* not at all, where it runs, or has given a sign of life lately;
* not before the user has removed the file, where it has been silent for long on another machine: a line names it.

An owner that finds its file gone, or somebody else's, writes no more.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from spectrain import signals
from spectrain.errors import InputError
from spectrain.files import existing, sync
from spectrain.processes import ProcessId

LOCK, OWNER = ".lock", ".owner.json"
_BEAT_S = 20.0
_SILENT_S = 6 * _BEAT_S  # after which an owner on another machine counts as silent
# Types of file systems that one machine has to itself, so that its locks are known to everybody who writes there.
_LOCAL = """
    ext2 ext3 ext4 xfs btrfs zfs f2fs jfs reiserfs bcachefs nilfs2 tmpfs ramfs rootfs overlay aufs fuseblk vfat exfat
    ntfs3 hfsplus apfs ubifs
"""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)


@contextmanager
def locked(folder: Path) -> Iterator[Callable[[], bool]]:
    """Hold ``folder`` for this process. Yields what says whether it still does.

    Raises InputError if another process holds it, or if that cannot be told there; OSError if nothing can be written.
    """
    if file_system(folder) in (*_LOCAL.split(), ""):
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if _flock(descriptor, folder):
                yield lambda: True
                return
        finally:
            os.close(descriptor)
    with _owned(folder) as still:
        yield still


def file_system(path: Path) -> str:
    """The type of the file system that ``path`` is, or will be, on, as ``mount`` names it; empty where the system does
    not tell.
    """
    place, found = existing(path).resolve(), ("", "")
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        left, _, right = line.partition(" - ")
        mounted_on = left.split(" ")[4].encode().decode("unicode_escape")  # a space is written \040
        if place.is_relative_to(mounted_on) and len(mounted_on) >= len(found[0]):
            found = (mounted_on, right.split(" ")[0])
    return found[1]


# --- by the operating system -----------------------------------------------------------------------------------------


def _flock(descriptor: int, folder: Path) -> bool:
    """Whether the lock is held; False: this file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 64).decode(errors="replace").strip() or "unknown"
        raise _in_use(folder, f"process {holder}") from None
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    with suppress(OSError):  # for the user only; on a full disk what follows tells
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    return True


def _in_use(folder: Path, whom: str) -> InputError:
    return InputError(f"run.dir={folder} is in use by {whom}: wait for it, or use another run.dir")


# --- by a file -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Owner:
    """Who works in a folder. ``job``: Slurm's number of it, and how often Slurm has started it again."""

    process: ProcessId
    job: str = ""
    restarts: int = 0

    @classmethod
    def this(cls) -> _Owner:
        job = os.environ.get("SLURM_JOB_ID", "")
        restarts = os.environ.get("SLURM_RESTART_COUNT", "")
        return cls(ProcessId.of_this(), job, int(restarts) if restarts.isdecimal() else 0)

    @classmethod
    def read(cls, path: Path) -> _Owner:
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return cls(ProcessId(**fields["process"]), str(fields["job"]), int(fields["restarts"]))
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{path}, which says who works in {path.parent}, cannot be read ({error}): if nobody does, remove it"
            ) from error

    def has_ended(self, this: _Owner) -> bool:
        again = bool(self.job) and self.job == this.job and self.restarts < this.restarts
        return again or self.process.is_running() is False


@contextmanager
def _owned(folder: Path) -> Iterator[Callable[[], bool]]:
    path, this = folder / OWNER, _Owner.this()
    _take(path, this)
    ended, lost = threading.Event(), threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_S):
            try:
                if _Owner.read(path) != this:
                    lost.set()
                os.utime(path)
            except FileNotFoundError:
                lost.set()
            except (OSError, InputError):  # a server that does not answer for a while
                continue

    def release() -> str:
        ended.set()
        with suppress(OSError, InputError):
            if _Owner.read(path) == this:
                path.unlink()
        return ""

    threading.Thread(target=beat, name="owner", daemon=True).start()
    try:
        with signals.keeping(release):  # the outermost, hence the last: when everything else is written
            yield lambda: not lost.is_set()
    finally:
        release()


def _take(path: Path, this: _Owner) -> None:
    """Make ``path`` say that this process is the owner."""
    fresh = path.with_name(f".owner-{this.process.host}-{this.process.pid}.new")
    fresh.write_text(json.dumps(asdict(this)), encoding="utf-8")
    now_s = fresh.stat().st_mtime  # by the clock of the file system
    try:
        sync(fresh)
        while not _appears(fresh, path) and not _follow(path, fresh, this, now_s):
            pass
    finally:
        fresh.unlink(missing_ok=True)
    for left in path.parent.glob(".owner-*"):  # by kills
        with suppress(FileNotFoundError):
            if now_s - left.stat().st_mtime > _SILENT_S:
                left.unlink()


def _appears(fresh: Path, path: Path) -> bool:
    """Whether ``path`` is now what ``fresh`` is; False: there is one already."""
    try:
        os.link(fresh, path)
    except FileExistsError:
        # The answer of a server may be lost, and the question be asked again.
        return path.exists() and os.path.samefile(fresh, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(fresh.read_text(encoding="utf-8"))
        except FileExistsError:
            return False
        except OSError as unable:
            raise InputError(
                f"run.dir={path.parent} lies on a file system ({file_system(path) or 'of an unknown type'}) on which "
                f"no process can keep others out ({unable.strerror}): use another run.dir"
            ) from unable
    return True


def _follow(path: Path, fresh: Path, this: _Owner, now_s: float) -> bool:
    """Put ``fresh`` in the place of an owner that has surely ended. False: there is none any more, try again."""
    # One process at a time looks and replaces; whoever is killed meanwhile leaves a file that is old soon.
    taking = path.with_name(".owner-taking.new")
    with suppress(FileNotFoundError):
        if now_s - taking.stat().st_mtime > _SILENT_S:
            taking.unlink()
    if not _appears(fresh, taking):
        raise _in_use(path.parent, "another process, which has just begun")
    try:
        _check_ended(path, this, now_s)
        os.replace(fresh, path)
    except FileNotFoundError:
        return False
    finally:
        taking.unlink(missing_ok=True)
    return True


def _check_ended(path: Path, this: _Owner, now_s: float) -> None:
    """InputError unless the owner has surely ended."""
    owner, silent_s = _Owner.read(path), now_s - path.stat().st_mtime
    if owner.has_ended(this):
        return
    if owner.process.is_running() or silent_s < _SILENT_S:
        raise _in_use(path.parent, str(owner.process))
    raise InputError(
        f"run.dir={path.parent} was in use by {owner.process}, which has given no sign of life for "
        f"{silent_s / 60:.0f} minutes: if it has ended, remove {path}, and the same command continues"
    )
