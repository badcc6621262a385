"""A run that passes every check, for the tests here to spoil; none of them may hang."""

import json
import shutil
import signal

import pytest
from tiny import tiny_target

LONGEST_S = 60  # until a test that hangs is ended; nothing here takes a second


@pytest.fixture(scope="module")
def sound_target(tmp_path_factory):
    """7 layers, a vocabulary of 304, 512 positions."""
    return tiny_target("llama", tmp_path_factory.mktemp("target") / "tiny", num_hidden_layers=7)


@pytest.fixture(autouse=True)
def _cannot_hang():
    def give_up(number, frame):
        raise KeyboardInterrupt("hangs")  # nothing catches it

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LONGEST_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def workplace(tmp_path, monkeypatch, sound_target):
    """A working directory with prompts and a target of its own, and the arguments of a run that passes every check."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sound_target, tmp_path / "target")
    for name, numbers in (("train", range(8)), ("heldout", range(8, 12))):
        lines = [json.dumps({"turns": [f"Say {number}."]}) for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return [
        *("data=jsonl", "data.train=train.jsonl", "data.heldout=heldout.jsonl", "target.path=target"),
        *("target.max_length=256", "sampling.max_new_tokens=16", "run.dir=run", "drafter.draft_vocab_size=100"),
    ]
