"""The signals that end a command: SIGTERM (a scheduler, ``kill``), SIGHUP (a closed terminal), SIGINT (Ctrl-C) and
SIGUSR1 (Slurm's warning before the time is up, ``--signal=USR1@120``).

What is on disk is whole at every moment (``files.py``), so a command may end anywhere. What is only in memory yet, a
stage declares with ``keeping``; when a signal comes it is written, one line says what was kept, and the exit code is
128 and the signal's number.

**Who does that.** Python runs signal handlers in the main thread, and only between two of its own instructions; there
the target may be in a pass of many seconds. So the system's handler only writes the signal's number into a pipe, and a
thread of its own does the rest. The main thread is not interrupted, hence no library sees an exception where it
expects none, but it must not change what is being written: it changes that only inside ``held``, which the thread waits
for, and which does not begin any more once a signal has come.

**How long it takes.** As long as writing takes what was declared, which is little: answers of the last seconds, at most
one shard of hidden states, a checkpoint of a drafter. Where that is more than a second and a half, a line says so, and
another signal then ends the command at once. Everything else (processes that were started, the terminal) gets what is
left of ``_LIMIT_S``.

**Several processes that work together** (``follow``): one of them, the leader, keeps what all have made and says so.
Whoever else gets a signal passes it on to the leader and works on, so that what the leader waits for comes, until the
leader has ended. Where the leader needs the others to keep something (each holds a share of it), a signal is a wish,
whichever of them got it (``together``): at moments of their own they ask each other whether one was ``asked``, bring
what there is to the leader, and end by the same signal (``end_together``).

Standard library only: it works before anything slow is imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from spectrain.processes import ProcessId

PARENT_DEATH_SIGNAL, CHILD_SUBREAPER = 1, 36  # of prctl
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
# What a follower passes on is a signal of its own, number for number: it never counts as the user's second one.
_PASSED_ON = {int(number): number + signal.SIGRTMIN for number in ENDING} if hasattr(signal, "SIGRTMIN") else {}
_ORIGINAL = {passed: number for number, passed in _PASSED_ON.items()}
# From the signal to the end, where nothing takes long to be written; and what is left for the rest where it does.
_LIMIT_S, _LEAST_S = 1.6, 0.2
# Another signal so much later is meant: a closed terminal sends two.
_AGAIN_S = 1.0
_LEADER_S = 20.0  # that a leader on another machine, which got the signal too, is given to end
_FOLLOW_S = 2.0  # the same of one that has kept everything
CONTINUES = "the same command continues"


class StopAsked(Exception):  # noqa: N818 (no error)
    """One of those that work together was asked to stop; raised by all of them alike."""


# Brings to disk what is only in memory, and says in a line what is kept now.
Keep = Callable[[], str]

_exiting = threading.Lock()
_lock = threading.RLock()  # held while what is to be kept changes, and from the signal to the end
_here = threading.local()  # .depth: how many ``held`` this thread is inside
_keeps: list[Keep] = []
_ends: list[Callable[[], None]] = []
_before_last_line: list[Callable[[], None]] = []
_handled: list[int] = []
speaks = True  # of several processes that train together one does
_follows = False
_leader: ProcessId | None = None  # None: on another machine
_beginning = threading.Lock()
_came: int | None = None  # the signal that came
_came_s = 0.0  # when
_number: int | None = None  # of the signal that is ending this process: what came, once the leader has ended
_together_s: float | None = None  # inside ``together``: how long a signal waits for the others
_apart = threading.Event()  # set: a signal waits for nobody (any more)
_apart.set()
_agreed: int | None = None  # the signal by which all end


# --- for stages ------------------------------------------------------------------------------------------------------


@contextmanager
def keeping(keep: Keep) -> Iterator[None]:
    """Inside, ``keep`` is called when a signal ends the command, in another thread, while no ``held`` is running.

    Of several, the innermost is called first, and its words are those that the user reads.
    """
    _keeps.append(keep)
    try:
        yield
    finally:
        with held():
            _keeps.remove(keep)


@contextmanager
def held() -> Iterator[None]:
    """Around what must happen whole or not at all: a change of what ``keeping`` would write, and writing itself. May be
    nested.

    Does not begin, and does not return, once a signal has come: the process ends meanwhile.
    """
    wait_if_ending()
    with _lock:
        _here.depth = _depth() + 1
        try:
            yield
        finally:
            _here.depth -= 1
    wait_if_ending()


def at_end(end: Callable[[], None]) -> Callable[[], None]:
    """``end`` is called when a signal ends the command: it ends a process that was started. It may be cut short and
    must be safe to call beside whatever this thread does. Returns what takes that back.
    """
    _ends.append(end)
    return lambda: _ends.remove(end) if end in _ends else None


def before_last_line(leave: Callable[[], None]) -> None:
    """``leave`` puts the terminal in order, before the line that says what was kept is written there."""
    _before_last_line.append(leave)


def wait_if_ending() -> None:
    """Does not return once a signal ends this process; except inside ``held``, which is to finish."""
    if _number is not None and not _depth():
        threading.Event().wait()


def wait_if_signalled(patience_s: float = 0.0) -> None:
    """Does not return if a signal has come, or comes within ``patience_s``: whoever signals a group of processes
    reaches one after the other.
    """
    deadline_s = time.monotonic() + (patience_s if _handled else 0.0)
    while _came is None and time.monotonic() < deadline_s:
        time.sleep(0.02)
    if _came is not None:
        threading.Event().wait()


def follow(leader: ProcessId) -> None:
    """From now on a signal to this process is one to ``leader``, which keeps what there is to keep; this one ends, in
    silence, when the leader has.
    """
    global speaks, _follows, _leader
    speaks, _follows, _leader = False, True, leader if leader.is_here else None


@contextmanager
def together(patience_s: float) -> Iterator[None]:
    """Inside, a signal does nothing by itself: the main thread looks for it with ``asked`` where it meets the other
    processes, and calls ``end_together``. A signal that is not heard within ``patience_s``, or before the end of this
    context, ends this process as anywhere else.
    """
    global _together_s
    with _beginning:
        if _came is None:
            _together_s = patience_s
            _apart.clear()
    try:
        yield
    finally:
        _together_s = None
        _set_apart()


def asked() -> int:
    """The number of the signal by which this process was asked to end; 0: none, or it is not ``together``."""
    return 0 if _together_s is None or _came is None else _came


def end_together(number: int) -> NoReturn:
    """End by this signal, whoever got it; the others call it, too. What the leader has to keep, it has now."""
    global _agreed
    _agreed = number
    _begin(number)
    _set_apart()
    threading.Event().wait()
    raise AssertionError("unreachable")


def _set_apart() -> None:
    """Let a signal that came act."""
    global _number
    with _beginning:
        if _came is not None and not _follows:
            _number = _agreed or _came  # nothing new is begun
        _apart.set()


def _depth() -> int:
    return getattr(_here, "depth", 0)


# --- for the command line --------------------------------------------------------------------------------------------


def install() -> None:
    """From now on these signals end this process in the way described above. Main thread only.

    A signal that is ignored stays ignored: so ``nohup`` and a shell's background jobs say it.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            # Any handler of Python's makes the number go into the pipe.
            for handled in (number, *([_PASSED_ON[number]] if number in _PASSED_ON else [])):
                signal.signal(handled, lambda number, frame: None)
                _handled.append(handled)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading,), name="signals", daemon=True).start()


def leave_to_others() -> None:
    """From now on signals are for whoever handles them next, as if ``install`` had not been called. In the main
    thread.
    """
    signal.set_wakeup_fd(-1)
    for number in _handled:
        signal.signal(number, signal.SIG_DFL)


def end_with_parent() -> None:
    """From now on this process gets SIGTERM when the one that started it ends, however it ends (on Linux)."""
    set_process(PARENT_DEATH_SIGNAL, signal.SIGTERM)


def set_process(option: int, value: int) -> None:
    """Linux's ``prctl``; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _watch(reading: int) -> None:
    global _number
    while True:
        for read in os.read(reading, 64):
            number = _ORIGINAL.get(read, read)
            if number not in ENDING:
                continue  # handled by others, such as torch
            if _begin(number):
                continue
            if read == number and time.monotonic() - _came_s > _AGAIN_S:
                _number = _came
                _exit(f"{signal.Signals(number).name} again: what was on disk is kept; {CONTINUES}")


def _begin(number: int) -> bool:
    """Whether this is the first signal: a thread does from now on what has to be done."""
    global _came, _came_s, _number
    with _beginning:
        if _came is not None:
            return False
        _came, _came_s = number, time.monotonic()
        if _apart.is_set() and not _follows:
            _number = number
    threading.Thread(target=_end, name="ending", daemon=True).start()
    return True


def _end() -> None:
    global _number
    assert _came is not None
    long = f"{signal.Signals(_came).name}: finishing what is under way; another signal ends the command without it"
    notice = _after(_came_s + _LIMIT_S, _say, long)
    _wait_for_the_others()
    number = _agreed or _came
    if _follows:
        _wait_for_leader(number)
        _number = number
        _exit("")
    _number = number
    _end_leader(signal.Signals(number).name, notice)


def _wait_for_the_others() -> None:
    """Until all end together, or this process has to end alone: nobody met it for long, or its leader has ended."""
    end_s = time.monotonic() + (_together_s or 0.0)
    while not _apart.wait(0.05) and time.monotonic() < end_s:
        if _leader is not None and not _leader.is_running():
            return


def _wait_for_leader(number: int) -> None:
    if _leader is None or number not in _PASSED_ON:
        time.sleep(_FOLLOW_S if _agreed else _LEADER_S)
        return
    with suppress(OSError):  # it may have ended
        os.kill(_leader.pid, _PASSED_ON[number])
    while _leader.is_running():
        time.sleep(0.05)


def _end_leader(name: str, notice: threading.Timer) -> None:
    ends = [threading.Thread(target=end, daemon=True) for end in _ends]
    for thread in ends:
        thread.start()
    with _lock:
        _here.depth = 1  # what is called may hold as well
        kept = _keep_all()
        notice.cancel()
        words = f"stopped by {name}: {kept}"
        limit_s = max(_came_s + _LIMIT_S, time.monotonic() + _LEAST_S)
        _after(limit_s, _exit, words)  # from here on nothing can be lost
        for thread in ends:
            thread.join(max(0.0, limit_s - time.monotonic()))
        for leave in _before_last_line:
            with suppress(Exception):
                leave()
        _exit(words)


def _keep_all() -> str:
    words = ""
    for keep in reversed(_keeps):
        try:
            said = keep()
        except Exception as error:  # a full disk: the line says so, and the command ends all the same
            said = f"what was not on disk yet is lost ({' '.join(str(error).split()) or type(error).__name__})"
        words = words or said
    return words or f"what was finished is kept; {CONTINUES}"


def _after(end_s: float, call: Callable[[str], None], words: str) -> threading.Timer:
    timer = threading.Timer(max(0.0, end_s - time.monotonic()), call, [words])
    timer.daemon = True
    timer.start()
    return timer


def _exit(words: str) -> None:
    """The last line, and the end: without unwinding, for the main thread may be anywhere."""
    assert _number is not None
    if _exiting.acquire(blocking=False):
        # Whoever reads the line may have stopped to do so.
        threading.Timer(_LEAST_S, os._exit, [128 + _number]).start()
        _say(words)
        os._exit(128 + _number)


def _say(words: str) -> None:
    """Past all locks of those who print."""
    if not speaks:
        return
    over = "\r\x1b[K" if os.isatty(2) else ""  # a "^C"
    with suppress(OSError):  # the terminal may be closed
        os.write(2, f"{over}{words}\n".encode())
