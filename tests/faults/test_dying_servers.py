"""vLLM servers that die while they answer: stand-ins without a model, whose answers follow from the prompt."""

from __future__ import annotations

import random
import threading

import pytest
from contents import contents
from fake_server import DROP, FakeServer, completion
from tiny import tiny_tokenizer

from spectrain import cli

END = tiny_tokenizer().convert_tokens_to_ids("<|im_end|>")


class Server(FakeServer):
    """Answers, until ``dies_after`` requests have come: then it drops connections and is not healthy."""

    def __init__(self, folder, dies_after=None):
        models = [{"id": "tiny", "root": str(folder), "max_model_len": 256}]
        super().__init__(self.answer, models=models)
        self.left = threading.Semaphore(1 << 30 if dies_after is None else dies_after)

    def answer(self, body, count):
        if not self.left.acquire(blocking=False):
            self.health = 500
            return DROP
        draw = random.Random(str(body["prompt"]))
        ids = [draw.randrange(10, 250) for _ in range(draw.randrange(1, 9))] + [END]
        kept = ids[: body["max_tokens"]]
        return 200, completion(body, token_ids=kept, finish_reason="stop" if kept == ids else "length")


@pytest.fixture
def generate(arguments, tmp_path, capsys):
    """Exit code and what was said."""
    target = next(argument.partition("=")[2] for argument in arguments if argument.startswith("target.path="))

    def run(name, *dies_after):
        servers = [Server(target, after) for after in dies_after]
        for server in servers:
            server.__enter__()
        try:
            given = ["engine=vllm_server", f"engine.urls=[{','.join(server.url for server in servers)}]"]
            given += ["engine.retries=0", "engine.concurrency=2", f"run.dir={tmp_path / name}"]
            code = cli.main(["generate", *arguments, *given])
        finally:
            for server in servers:
                server.__exit__()
        return code, capsys.readouterr().err, [len(server.bodies) for server in servers]

    return run


def test_a_server_that_dies_is_given_up_on_and_its_work_is_done_by_the_other(generate, tmp_path):
    assert generate("undisturbed", None)[0] == 0
    code, said, asked = generate("run", None, 5)
    assert code == 0
    assert said.count("is dead") == 1 and "its work goes to the other 1" in said
    assert 5 < asked[1] <= 7  # what it had under way when it died, and no more
    assert contents(tmp_path / "run") == contents(tmp_path / "undisturbed")


def test_when_all_have_died_what_was_answered_is_kept_and_the_same_command_goes_on(generate, tmp_path):
    code, _, (whole,) = generate("undisturbed", None)
    assert code == 0
    code, said, _ = generate("run", 4, 6)
    assert code == 1
    assert [line for line in said.splitlines() if line.startswith("error")] == [said.splitlines()[-1]]
    assert "no server is left" in said
    kept = len(contents(tmp_path / "run")["responses"])
    assert kept > 0
    code, said, asked = generate("run", None)
    assert code == 0
    assert contents(tmp_path / "run") == contents(tmp_path / "undisturbed")
    assert asked[0] <= whole - kept  # what was kept is not asked again
