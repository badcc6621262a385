"""The entries of ``eval`` and of the words that may follow it."""

from __future__ import annotations

from dataclasses import replace

from spectrain.config.command_entry import PIPELINE, Command, Option
from spectrain.errors import ConfigError


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--suites={text}: name suites, each once, with commas between them")
    return names


EVAL_KEYS = (
    "decoding.num_speculative_tokens",
    "decoding.temperature",
    "suite.prompts",
    "suite.max_prompts",
    "suite.baselines",
)
_POLICY_KEYS = ("decoding.draft_policy", "decoding.threshold", "suite.policies", "suite.batches")

EVAL = Command(
    name="eval",
    summary="measure a drafter in the speculative loop",
    detail="Decodes the prompts of a suite with the drafter, by n-gram lookup and without speculation, and compares "
    "them: in our own loop, or by vLLM (engine=vllm, engine=vllm_server).",
    function="spectrain.stages.eval:evaluate",
    reads="drafter/ (or drafter.path), prompts of the suite",
    writes="eval/, report.html",
    sections=("suite", "decoding", "engine", "target", "drafter"),
    keys=(
        *("drafter.path", *EVAL_KEYS, "suite.max_new_tokens", "suite.concurrency", "decoding.proposal_policy"),
        *_POLICY_KEYS,
    ),
    examples=(
        "spectrain eval run.dir=runs/quickstart decoding.num_speculative_tokens=5",
        "spectrain eval drafter.path=FOLDER target=smollm2_135m suite=jsonl suite.prompts=prompts.jsonl",
    ),
    stages=PIPELINE[3:],
    needs_prompts=False,
    needs_drafter=True,
    keeps_config=True,
    measures=True,
)
_PARITY = replace(
    EVAL,
    name="eval parity",
    summary="check that vLLM drafts and accepts what our loop does",
    detail="Lets vLLM decode the prompts of a suite with the drafter, and checks round by round that it drafts and "
    "accepts what our own loop does.",
    function="spectrain.stages.eval_parity:parity",
    keys=("drafter.path", "decoding.num_speculative_tokens", "suite.prompts", "suite.max_prompts"),
    examples=("spectrain eval parity run.dir=runs/quickstart engine=vllm",),
    takes_multirun=False,
    compares=True,
)
_SWEEP = replace(
    EVAL,
    name="eval sweep",
    summary="measure methods and numbers of drafts over suites, and recommend",
    detail="Measures every combination of methods, numbers of drafts, suites, concurrencies, temperatures and lengths "
    "of context, a file each, and says which method and number of drafts to serve with, what another costs, and where "
    "speculation does not pay. Goes on where it was stopped.",
    function="spectrain.stages.sweep:sweep",
    sweeps=True,
    writes="eval/sweep/, report.html",
    sections=("sweep", "suite", "decoding", "engine"),
    keys=(
        *("sweep.num_speculative_tokens", "sweep.methods", "sweep.drafters", "sweep.engines", "sweep.suites"),
        *("sweep.concurrency", "sweep.temperatures", "sweep.context_tokens", "sweep.baseline", "sweep.shares"),
        *("suite.max_prompts", "suite.max_new_tokens"),
    ),
    examples=(
        "spectrain eval sweep run.dir=runs/mine sweep.num_speculative_tokens=[1,2,4] sweep.methods=[eagle3,ngram,none] "
        "sweep.suites=[heldout,gsm8k:gsm8k.jsonl] sweep.concurrency=[1,8]",
    ),
    takes_multirun=False,
)
_SIMULATE = replace(
    EVAL,
    name="eval simulate",
    summary="simulate acceptance on stored answers, for every number of drafts",
    detail="Computes, without decoding, the acceptance that a drafter would have on the run's stored answers: for "
    "every number of drafts, by position, by kind of text, by place in the answer and by length of context.",
    function="spectrain.stages.eval_simulate:simulate_answers",
    reads="drafter/ (or drafter.path), responses/, hidden_states/",
    writes="eval/simulation/",
    sections=("decoding", "drafter"),
    keys=("drafter.path", "decoding.num_speculative_tokens", "decoding.temperature", "data.max_heldout"),
    examples=("spectrain eval simulate drafter.path=FOLDER run.dir=runs/mine",),
    measures=False,
    needs_prompts=True,
    takes_multirun=False,
)
_SERVING = replace(
    EVAL,
    name="eval serving",
    summary="vLLM's server as its clients see it, with and without speculation",
    detail="Starts vLLM's servers as `spectrain serve` would, with the drafter and without speculation, and lets "
    "vLLM's benchmark client ask them a suite's prompts: so many at a time, or so many a second. Tokens a second, time "
    "to the first token and for each further one, and how many answers keep the limits. Goes on where it was stopped.",
    function="spectrain.stages.eval_serving:measure_serving",
    writes="eval/serving/, report.html",
    sections=("serving", "suite", "decoding", "engine"),
    keys=(
        *("drafter.path", "serving.concurrency", "serving.request_rates", "serving.requests", "serving.repeats"),
        *("serving.methods", "serving.limit_ttft_s", "serving.limit_tpot_s", "decoding.num_speculative_tokens"),
        *("decoding.temperature", "suite.max_prompts", "suite.max_new_tokens"),
    ),
    examples=(
        "spectrain eval serving run.dir=runs/mine serving.concurrency=[1,8] serving.limit_ttft_s=0.5",
        "spectrain eval serving run.dir=runs/mine serving.concurrency=[] serving.request_rates=[0.5,1,2]",
    ),
    takes_multirun=False,
)
_COMPARE = replace(
    EVAL,
    name="eval compare",
    summary="compare records, runs or published drafters, with paired intervals",
    detail="Shows what two or more measured, side by side, over the prompts that both answered. Records that were "
    "measured under other conditions are refused by what differs.",
    function="spectrain.cli:compare_records",
    reads="records (eval/*.json, eval/sweep/*.json)",
    writes="nothing",
    sections=(),
    keys=(),
    examples=("spectrain eval compare runs/one runs/other", "spectrain eval compare runs/one ORG/NAME@v2 --anyway"),
    options=(Option("--anyway", "compare records of other conditions, too"),),
    needs_drafter=False,
    measures=False,
    touches_run_dir=False,
    takes_multirun=False,
    takes_names=True,
)

_MATRIX = replace(
    _COMPARE,
    name="eval matrix",
    summary="which data helps which task: several runs' drafters on several suites",
    detail="Prints a table with a row for each run and a column for each suite: acceptance lengths with their "
    "intervals, and which differ by more than chance. What follows are run directories, or the folder of a multirun. "
    "With --suites it measures first what is missing, as `eval sweep` does, into the runs' own eval/sweep/; key=value "
    "beside it says how.",
    function="spectrain.cli:data_matrix",
    writes="--out: table and picture (Markdown, SVG, PNG); --suites: eval/sweep/ of each run",
    examples=(
        "spectrain eval matrix runs/mixes --suites support,varied suite.max_prompts=40 --out mixes",
        "spectrain eval matrix runs/one runs/other",
    ),
    options=(
        Option("--suites", "suites that are measured where they are not yet: NAME or NAME:FILE", _names, "A,B"),
        Option("--out", "folder for the table and the picture", str, "FOLDER"),
    ),
)

# ``eval`` as the table holds it.
EVAL_WITH_WORDS = replace(EVAL, words=(_PARITY, _SIMULATE, _SWEEP, _SERVING, _COMPARE, _MATRIX))
