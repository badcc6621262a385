"""The table of commands. Nothing else tells commands apart by their names: the command line, its help and all checks
ask the entry.
"""

from __future__ import annotations

from dataclasses import replace

from spectrain.config.command_entry import PIPELINE as PIPELINE
from spectrain.config.command_entry import SWITCHES as SWITCHES
from spectrain.config.command_entry import Command, Option, known
from spectrain.config.eval_commands import EVAL_KEYS, EVAL_WITH_WORDS
from spectrain.errors import ConfigError


def _limit(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--limit must be a whole number of at least 1, got {text!r}")
    return int(text)


def _split(text: str) -> str:
    return known(text, ("train", "heldout"), "split")


_PROMPT_KEYS = ("data.train", "data.heldout", "data.max_train", "data.max_heldout", "data.system")
_SAMPLING_KEYS = ("sampling.temperature", "sampling.max_new_tokens", "sampling.seed")
_DRAFTER_KEYS = (
    "drafter.taps",
    "drafter.draft_vocab_size",
    "drafter.num_layers",
    "drafter.init",
    "drafter.loss.weights",
    "drafter.path",
)
_TRAINER_KEYS = (
    "trainer.epochs",
    "trainer.learning_rate",
    "trainer.optimizer",
    "trainer.packed_length",
    "trainer.precision",
)

_GENERATE = Command(
    name="generate",
    summary="let the target answer the prompts",
    detail="Answers every training and held-out prompt, in the target's own chat template. What is answered already is "
    "kept.",
    function="spectrain.stages.generate:generate",
    reads="prompt files (JSON lines)",
    writes="responses/",
    sections=("target", "data", "sampling", "engine"),
    keys=("target.path", *_PROMPT_KEYS, *_SAMPLING_KEYS, "engine.batch_size"),
    examples=("spectrain generate recipe=quickstart data=jsonl data.train=prompts.jsonl run.dir=runs/mine",),
    stages=PIPELINE[:1],
)
_CAPTURE = Command(
    name="capture",
    summary="store the target's hidden states on its answers",
    detail="Runs the target once over every response and stores the taps (auxiliary hidden-state layers) and the last "
    "hidden state of each token.",
    function="spectrain.stages.capture:capture",
    reads="responses/",
    writes="hidden_states/",
    sections=("target", "hidden_states", "engine", "drafter"),
    keys=(
        *("drafter.taps", "hidden_states.dtype", "hidden_states.shard_bytes", "engine.capture_tokens"),
        *("capture.during_generation", "target.max_length"),
    ),
    examples=("spectrain capture run.dir=runs/mine hidden_states.dtype=int8",),
    stages=PIPELINE[:2],
    captures=True,
)
_FIT = Command(
    name="fit",
    summary="train a drafter on the stored hidden states",
    detail="Trains the drafter and keeps the one with the greatest acceptance length on held-out text, measured as a "
    "server would.",
    function="spectrain.stages.fit:fit",
    reads="hidden_states/",
    writes="drafter/ (the folder a server loads), checkpoints/, metrics.jsonl",
    sections=("drafter", "trainer", "strategy", "states", "decoding", "logger"),
    keys=(*_DRAFTER_KEYS, *_TRAINER_KEYS, "states.source", "decoding.num_speculative_tokens"),
    examples=(
        "spectrain fit recipe=quickstart trainer.learning_rate=5e-4 drafter.draft_vocab_size=16384",
        "spectrain fit -m recipe=quickstart trainer.learning_rate=5e-4,1e-3,2e-3",
        "spectrain fit recipe=quickstart drafter=mine drafter.module=my_package.my_drafter",
    ),
    stages=PIPELINE[:3],
    trains=True,
)
_SERVE = Command(
    name="serve",
    summary="start vLLM with the target and a drafter",
    detail="Becomes vLLM's server: target, drafter, method and the number of drafts that evaluation recommends are "
    "set; flags behind `--` are vLLM's own. The target is the one the drafter was trained for, unless one is named.",
    function="spectrain.cli:serve_drafter",
    reads="drafter/ (or drafter.path, a folder or a Hub id), eval/",
    sections=("target", "engine"),
    keys=(
        *("run.dir", "drafter.path", "target.path", "decoding.num_speculative_tokens"),
        *("engine.tensor_parallel_size", "engine.args"),
    ),
    examples=(
        "spectrain serve run.dir=runs/mine -- --port 8000",
        "spectrain serve drafter.path=FOLDER_OR_HUB_ID engine.tensor_parallel_size=2 --print",
    ),
    options=(Option("--print", "show vLLM's command line instead of starting it"),),
    needs_prompts=False,
    needs_drafter=True,
    keeps_config=True,
    touches_run_dir=False,
    takes_multirun=False,
    takes_flags=True,
)
_RUN = Command(
    name="run",
    summary="generate, capture, fit and eval, one after the other",
    detail="The whole pipeline over one run directory. Stages whose inputs have not changed are skipped.",
    function="spectrain.stages.run:run",
    reads="prompt files (JSON lines)",
    writes="everything in the run directory; report.html is the page to read",
    sections=("recipe", "target", "data", "sampling", "engine", "drafter", "trainer", "strategy", "decoding", "suite"),
    keys=(
        *(
            "run.dir",
            "capture.during_generation",
            *_PROMPT_KEYS[:2],
            *_SAMPLING_KEYS[:2],
            *_DRAFTER_KEYS[:2],
        ),
        *(*_TRAINER_KEYS[:2], *EVAL_KEYS[:2]),
    ),
    examples=(
        "spectrain run recipe=quickstart run.dir=runs/quickstart",
        "spectrain run recipe=quickstart run.dir=runs/mine data=jsonl data.train=A.jsonl data.heldout=B.jsonl",
    ),
    stages=PIPELINE,
    captures=True,
    trains=True,
    measures=True,
)
_RESPONSES = Command(
    name="inspect responses",
    summary="print stored responses with what a drafter learns from marked",
    detail="Prints documents; what the target generated, and a drafter is trained on, is coloured.",
    function="spectrain.cli:inspect_responses",
    reads="responses/",
    sections=("run",),
    keys=("run.dir",),
    examples=("spectrain inspect responses run.dir=runs/quickstart --limit 5 --split heldout",),
    options=(
        Option("--limit", "how many are printed at most", _limit, "N", 3),
        Option("--split", "train or heldout alone", _split, "SPLIT"),
    ),
    needs_prompts=False,
    touches_run_dir=False,
    takes_multirun=False,
)
_INSPECT = replace(
    _RESPONSES,
    name="inspect",
    summary="look at stored responses",
    detail="`spectrain inspect responses` prints documents; what the target generated, and a drafter is trained on, is "
    "coloured.",
    words=(_RESPONSES,),
    needs_word=True,
)
_PLAN = Command(
    name="plan",
    summary="estimate disk, memory and hours of a run",
    detail="Prints what the whole pipeline would need here, or on a device that is named: memory of a rank part by "
    "part, operations, hours, disk. Loads no weights and writes nothing; needs no vLLM, and of the targets that ship "
    "with spectrain no network.",
    reads="prompt files, the target's configuration",
    sections=(
        "recipe",
        "target",
        "data",
        "engine",
        "hidden_states",
        "states",
        "drafter",
        "trainer",
        "strategy",
        "plan",
    ),
    keys=(
        *("plan.device", "plan.utilisation", "trainer.devices", "data.train", "sampling.max_new_tokens"),
        *("hidden_states.dtype", "states.source", "drafter.taps", "trainer.epochs"),
    ),
    examples=(
        "spectrain plan recipe=quickstart",
        "spectrain plan recipe=dflash_qwen3 trainer.devices=8 plan.device=mi300x",
    ),
    stages=PIPELINE,
    looks_only=True,
    takes_multirun=False,
)
_RECIPES = Command(
    name="recipes",
    summary="list the recipes: target, method, hardware, disk, hours, measured acceptance",
    detail="Lists the recipes, those beside the working directory too, with what `plan` says of them and what was "
    "measured. Words choose among them: `spectrain recipes eagle3 mi300x`.",
    function="spectrain.stages.recipe_table:list_recipes",
    reads="recipes, targets, prompt files",
    sections=("recipe", "method", "hardware"),
    examples=("spectrain recipes", "spectrain recipes qwen3 dspark"),
    needs_prompts=False,
    touches_run_dir=False,
    takes_multirun=False,
    takes_topics=True,
)
_PUBLISH = Command(
    name="publish",
    summary="upload a run's drafter to the Hub, with its card",
    detail="Writes a folder with the drafter, a model card made of what the run recorded, and on request the report; "
    "then uploads it. Refused where the parity check has not passed for exactly these weights, unless "
    "publish.unverified=true. Private unless publish.private=false.",
    function="spectrain.stages.publish:publish",
    reads="drafter/, eval/, manifest.json",
    writes="publish/ (or publish.out), and the repository on the Hub",
    sections=("publish",),
    keys=(
        *("run.dir", "publish.repo", "publish.dry_run", "publish.base_model", "publish.private", "publish.unverified"),
        *("publish.license", "publish.datasets", "publish.report", "publish.gated", "publish.collection"),
    ),
    examples=(
        "spectrain publish run.dir=runs/mine publish.repo=ORG/NAME publish.dry_run=true",
        "spectrain publish run.dir=runs/mine publish.repo=ORG/NAME publish.license=apache-2.0 publish.private=false",
    ),
    needs_prompts=False,
    touches_run_dir=False,
    takes_config=True,
    takes_multirun=False,
)
_CONVERT = Command(
    name="convert",
    summary="write a drafter's folder in another project's layout",
    detail="Reads a folder, or a drafter on the Hub, in any layout that is known and writes it in another: the tensors "
    "keep their bits, and what a layout cannot say is an error.",
    function="spectrain.stages.convert:convert",
    reads="drafter.path, a folder or a Hub id",
    writes="convert.out",
    sections=("convert",),
    keys=("drafter.path", "convert.to", "convert.out", "convert.max_shard_bytes", "target.path"),
    examples=(
        "spectrain convert drafter.path=runs/mine/drafter convert.to=eagle convert.out=drafter-eagle",
        "spectrain convert drafter.path=ORG/NAME@main convert.to=speculators convert.out=drafter",
    ),
    needs_prompts=False,
    touches_run_dir=False,
    takes_config=True,
    takes_multirun=False,
)
_DOCTOR = Command(
    name="doctor",
    summary="check this machine, and a run directory",
    detail="Checks interpreter, torch, devices and their connection, vLLM, transformers, attention kernels, disk, "
    "logins and limits of the system; with run.dir=DIR also that directory's digests, shards and lineage. Exit code 1 "
    "where something fails.",
    function="spectrain.stages.doctor:doctor",
    reads="this machine, and the run directory that is named",
    sections=("run",),
    keys=("run.dir", "target.path", "logger.trackers"),
    examples=("spectrain doctor --json", "spectrain doctor run.dir=runs/mine"),
    options=(Option("--json", "print JSON instead of a table"),),
    needs_prompts=False,
    touches_run_dir=False,
    takes_config=True,
    takes_multirun=False,
)
_HELP = Command(
    name="help",
    summary="explain a key, a section, a group or a command",
    detail="Explains a key (type, default, bounds, meaning), a section of the configuration, a group with its options, "
    "or a command.",
    function="spectrain.cli:explain_topics",
    reads="nothing",
    examples=("spectrain help drafter.taps", "spectrain help trainer", "spectrain help recipe", "spectrain help fit"),
    needs_prompts=False,
    touches_run_dir=False,
    takes_multirun=False,
    takes_topics=True,
)

COMMANDS = {
    command.name: command
    for command in (
        *(
            _GENERATE,
            _CAPTURE,
            _FIT,
            EVAL_WITH_WORDS,
            _SERVE,
            _RUN,
            _PUBLISH,
            _CONVERT,
            _INSPECT,
            _PLAN,
            _RECIPES,
            _DOCTOR,
            _HELP,
        ),
    )
}
