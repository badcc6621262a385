"""Code of others ends in time and within memory, and leaves nothing behind."""

import resource
import signal
import threading
import time
from contextlib import suppress

import pytest

from spectrain.data.bounded import OutOfTimeError, bounded


def handlers():
    return (
        signal.getsignal(signal.SIGALRM),
        signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        resource.getrlimit(resource.RLIMIT_AS),
    )


def test_a_loop_without_end_ends():
    before = handlers()
    with pytest.raises(OutOfTimeError), bounded(0.2, 1 << 30):
        forever()
    assert handlers() == before


def forever():
    while True:
        pass


def stubborn():
    while True:
        with suppress(Exception):
            time.sleep(0.01)


def test_even_one_that_catches_every_exception():
    with pytest.raises(OutOfTimeError), bounded(0.2, 1 << 30):
        stubborn()


def test_memory_is_bounded():
    before = handlers()
    with pytest.raises(MemoryError), bounded(60, 1 << 28):
        _ = bytearray(1 << 30)
    assert handlers() == before
    assert len(bytearray(1 << 29)) == 1 << 29


def test_what_ends_in_time_goes_through():
    with bounded(60, 1 << 28):
        result = sum(range(10))
    assert result == 45


def test_another_threads_work_is_let_be():
    seen = []

    def work():
        with bounded(0.01, 1 << 28):
            time.sleep(0.05)
            seen.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]
