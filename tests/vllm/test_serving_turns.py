"""``eval serving`` without any vLLM at work: which measurements are made, in which order, what is kept, what refused.
Servers and vLLM's client are stand-ins.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer
from finished_runs import arguments, finished, run_dir

from spectrain import cli
from spectrain.engines.vllm.bench_client import Load
from spectrain.errors import RunError
from spectrain.evaluation.records import read_records
from spectrain.stages import eval_serving, served_methods

__all__ = ["arguments", "finished", "run_dir"]

ASKED = [
    *("serving.concurrency=[1,2]", "serving.request_rates=[4]", "serving.requests=4", "serving.repeats=2"),
    *("suite.max_prompts=3", "suite.max_new_tokens=8", "decoding.num_speculative_tokens=2"),
    "serving.limit_ttft_s=0.15",
]
TOKENS, PIECES = 7, 4


class Client:
    """Answers at once: with speculation in half of the time."""

    loads: list[Load] = []
    fails_at = -1

    def __init__(self, environment: Any, log: Path) -> None:
        assert log.name == "vllm-bench.log"

    def measure(self, load: Load, timeout_s: float) -> dict[str, Any]:
        if len(Client.loads) == Client.fails_at:
            raise RunError("told to fail")
        Client.loads.append(load)
        count, drafts = len(load.messages), "eagle3" in load.url
        gap = 0.1 if drafts else 0.2
        return {
            "duration": 2.0 if drafts else 4.0,
            "output_lens": [TOKENS] * count,
            "ttfts": [0.1 + 0.1 * number for number in range(count)],
            "itls": [[gap] * (PIECES - 1)] * count,
            "latencies": [0.1 + 0.1 * number + gap * (PIECES - 1) for number in range(count)],
            "generated_texts": ["the same"] * count,
            "spec_decode_num_drafts": 12 if drafts else None,
            "spec_decode_draft_tokens": 24 if drafts else None,
            "spec_decode_accepted_tokens": 9 if drafts else None,
            "spec_decode_per_position_acceptance_rates": [0.5, 0.25] if drafts else None,
        }

    def close(self) -> None:
        pass


class Server:
    """Of ``PortServer``: what it was started with."""

    started: list[list[str]] = []
    exit_code = None

    def __init__(self, name: str, command: list[str], environment: Any, log: Path) -> None:
        self.url = f"http://{name.partition('(')[2].removesuffix(')')}"
        Server.started.append(command)

    def start(self) -> None: ...
    def wait_ready(self, end_s: float) -> None: ...
    def end(self) -> None: ...
    def stop(self) -> None: ...


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    Client.loads, Client.fails_at, Server.started = [], -1, []
    monkeypatch.setattr(eval_serving, "BenchClient", Client)
    monkeypatch.setattr(served_methods, "PortServer", Server)


def asked(run_dir: Path, *more: str) -> int:
    return cli.main(["eval", "serving", f"run.dir={run_dir}", *ASKED, *more])


def urls() -> list[str]:
    return [load.url.removeprefix("http://") for load in Client.loads]


def test_methods_take_turns_and_records_are_what_the_client_saw(run_dir: Path, capsys: Any) -> None:
    assert asked(run_dir, "serving.servers=together") == 0
    assert urls() == ["none", "eagle3"] * 6  # two repeats of each of three loads
    assert [(load.concurrency, load.request_rate) for load in Client.loads[::4]] == [(1, None), (2, None), (None, 4.0)]
    assert {load.max_tokens for load in Client.loads} == {8} and {len(load.messages) for load in Client.loads} == {4}
    assert Client.loads[0].messages[0] == Client.loads[0].messages[3]  # three prompts, asked in their order
    plain, speculative = Server.started
    place = speculative.index("--speculative-config")
    assert speculative[:place] + speculative[place + 2 :] == plain
    assert json.loads(speculative[place + 1])["num_speculative_tokens"] == 2
    found = {(r.method, r.concurrency, r.request_rate): r for r in read_records(run_dir / "eval" / "serving")}
    assert len(found) == 6
    mine, theirs = found["eagle3", 2, None], found["none", 2, None]
    assert (mine.rounds, mine.drafted_tokens, mine.accepted_tokens) == (24, 48, 18)
    assert mine.acceptance_length == 1.75 and mine.acceptance_per_position == (0.5, 0.25)
    assert mine.conditional_acceptance_per_position == (0.5, 0.5)
    assert mine.output_tokens_per_s == 2 * 4 * TOKENS / 4.0 and mine.baseline_tokens_per_s == 2 * 4 * TOKENS / 8.0
    assert mine.speedup == pytest.approx((1.0 + 4 * 0.6) / (1.0 + 4 * 0.3))  # latencies of 0.1 … 0.4 and three gaps
    assert theirs.speedup is None and theirs.num_speculative_tokens == 0 and mine.num_prompts == 3
    figures = mine.serving
    assert figures is not None and (figures.requests, figures.repeats) == (8, 2)
    assert figures.requests_per_s == 2.0 and figures.goodput_requests_per_s == 0.5  # one of four within 0.15 s
    assert figures.ttft_s.mean == pytest.approx(0.25) and figures.ttft_s.p50 == pytest.approx(0.25)
    assert figures.tpot_s is not None and figures.tpot_s.p99 == pytest.approx(0.3 / (TOKENS - 1))
    assert figures.itl_s is not None and figures.itl_s.p90 == pytest.approx(0.1)
    page = (run_dir / "report.html").read_text()
    assert "<h2>Examples" in page  # of the evaluation before
    assert "As clients see it" in page and "the first token within 0.15 s" in page
    assert {"serving-tokens-concurrency.svg", "serving-ttft-concurrency.png"} <= {
        path.name for path in (run_dir / "eval" / "serving" / "pictures").iterdir()
    }
    assert "250 / 400" in page  # milliseconds
    shown = capsys.readouterr().out
    assert "EAGLE-3" in shown and "4 a second" in shown and "250 /" in shown and "1.55×" in shown
    assert cli.main(["eval", "compare", str(run_dir), str(run_dir)]) == 0


def test_one_server_at_a_time_there_and_back(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    measure = Client.measure

    def slower(client: Client, load: Load, timeout_s: float) -> dict[str, Any]:
        """From the tenth measurement on, which is the second of no speculation, the machine is."""
        found = measure(client, load, timeout_s)
        return found | {"duration": found["duration"] * (1.25 if len(Client.loads) > 9 else 1.0)}

    monkeypatch.setattr(Client, "measure", slower)
    assert asked(run_dir, "serving.servers=in_turn") == 0
    assert urls() == ["none"] * 3 + ["eagle3"] * 6 + ["none"] * 3
    assert len(Server.started) == 3  # not started again where the next turn is its own
    assert "changed by -20.0% to -20.0% in tokens/s" in capsys.readouterr().err


def test_what_was_stopped_goes_on_and_what_changed_is_measured_again(run_dir: Path, capsys: Any) -> None:
    Client.fails_at = 5
    assert asked(run_dir) == 1
    assert "told to fail" in capsys.readouterr().err
    Client.fails_at = -1
    assert asked(run_dir) == 0
    assert len(Client.loads) == 12 and "12 measurements, 5 of them made already" in capsys.readouterr().err
    runs = sorted((run_dir / "eval" / "serving" / "runs").glob("*.json"))
    runs[0].unlink()
    runs[3].write_text("{")
    assert asked(run_dir) == 0 and len(Client.loads) == 14
    assert "is damaged: it is measured again" in capsys.readouterr().err
    assert asked(run_dir) == 0 and len(Client.loads) == 14
    # Limits are counted anew from what is there.
    assert asked(run_dir, "serving.limit_ttft_s=0.25") == 0 and len(Client.loads) == 14
    assert read_records(run_dir / "eval" / "serving")[0].serving.goodput_requests_per_s == 0.5  # type: ignore[union-attr]
    assert asked(run_dir, "suite.max_new_tokens=7") == 0 and len(Client.loads) == 26


def test_a_server_that_runs_already_is_measured_by_itself(run_dir: Path, arguments: list[str], capsys: Any) -> None:
    target = next(word for word in arguments if word.startswith("target.path=")).partition("=")[2]
    with FakeServer(models=[{"id": "theirs", "root": target, "max_model_len": 256}]) as server:
        options = [f"engine.urls=[{server.url}]", "engine=vllm_server", "serving.concurrency=[1]"]
        assert asked(run_dir, *options, "serving.methods=[none]") == 0
        assert {load.url for load in Client.loads} == {server.url} and Client.loads[0].model == "theirs"
        assert Server.started == []
        capsys.readouterr()
        assert asked(run_dir, *options) == 1  # the stand-in has no rounds there
        assert "reports no rounds of speculation" in capsys.readouterr().err
        assert asked(run_dir, *options, "serving.methods=[none,eagle3]") == 2
    assert "name one server, and one method" in capsys.readouterr().err
    assert asked(run_dir, *options) == 1
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("serving.methods=[eagle]", "serving.methods: eagle is not known here"),
        ("serving.concurrency=[1,1]", "names one of them twice"),
        ("serving.limit_ttft_s=0", "serving.limit_ttft_s"),
        ("suite.path=absent.jsonl", "absent.jsonl"),
    ],
)
def test_what_is_refused(run_dir: Path, option: str, named: str, capsys: Any) -> None:
    assert asked(run_dir, option) == 2
    assert named in capsys.readouterr().err and not Client.loads
