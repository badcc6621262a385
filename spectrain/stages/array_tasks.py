"""``generate`` and ``capture`` shared out to tasks: processes on any number of machines, such as a Slurm array's.

Task ``run.task`` of ``run.tasks`` takes every ``run.tasks``-th prompt, beginning with its own number, and works in a
run directory of its own, ``tasks/TASK-of-TASKS`` in that of the run. So tasks share no file, wait for nobody, and each
is as resumable as any run: what one had in flight when it was killed, the same command does.

The next command without ``run.tasks`` merges: it takes over what the tasks have made, in the order of their numbers,
without writing it again (parts of responses are moved, shards linked), and makes what is missing by itself. A task that
is still at work is waited for by the user: a line names it. What a task has made is removed only when the run has it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from spectrain.console import say
from spectrain.data.hidden_states import INDEX_NAME, ShardFile, StoreIndex
from spectrain.data.hidden_states_writer import HiddenStatesWriter
from spectrain.data.responses import ResponseStore, further_documents
from spectrain.data.shard_damage import readable_shards, stored_keys
from spectrain.errors import InputError
from spectrain.files import file_digest, remove
from spectrain.stages.context import Context
from spectrain.stages.run_dir import TASKS, Inputs, RunDir

_NAME = re.compile(r"(\d+)-of-(\d+)")


# --- of a task -----------------------------------------------------------------------------------------------------


def take_share(context: Context) -> None:
    """Leave a task its own prompts, but for those that the run has everything of already. Raises InputError where tasks
    of another number have worked, whose shares would overlap.
    """
    run = context.config.run
    if run.tasks == 1:
        return
    whole = RunDir(run.dir)
    for other, count in _tasks(whole):
        if count != run.tasks:
            raise InputError(
                f"{other.path} is a task's of {count}, this one is of run.tasks={run.tasks}: let `spectrain "
                f"{context.command.name} run.dir={run.dir}`, without run.tasks, merge them first"
            )
    keys = iter(list(context.splits))
    prompts = context.prompts
    known = [[(c, next(keys)) for c in side] for side in (prompts.train, prompts.heldout)]
    done = _done(context, whole)
    train, heldout = ([c for c, key in side[run.task :: run.tasks] if key not in done] for side in known)
    context.keep_prompts(replace(prompts, train=train, heldout=heldout))
    share, total = len(train) + len(heldout), len(prompts.train) + len(prompts.heldout)
    say(
        f"task {run.task} of {run.tasks}: {share} of {total} prompts; what tasks make is merged by the next command "
        f"without run.tasks"
    )


def _done(context: Context, whole: RunDir) -> set[str]:
    """Keys of the conversations that the run has all of that this command makes."""
    stored = ResponseStore(whole.responses).keys()
    if "capture" not in context.command.stages:
        return stored
    if not _has_states(whole) or asdict(StoreIndex.load(whole.hidden_states).meta) != asdict(context.store_meta()):
        return set()
    captured, further = stored_keys(whole.hidden_states), further_documents(stored)
    return {key for key in stored if {key, *further.get(key, ())} <= captured}


def bring_responses(context: Context) -> None:
    """Give a task the responses of its share that the run has already, so that it only captures them."""
    if context.config.run.tasks == 1:
        return
    store, whole = ResponseStore(context.run_dir.responses), ResponseStore(RunDir(context.config.run.dir).responses)
    wanted = context.splits.keys() & whole.keys() - store.keys()
    splits = whole.documents({key: split for key, split in context.splits.items() if key in wanted})
    # The document with a conversation's own key comes last: where it is stored, all of them are.
    store.append(whole.load(sorted(splits, key=lambda key: "-" not in key), splits))


# --- merging -------------------------------------------------------------------------------------------------------


def has_work(context: Context) -> bool:
    """Whether tasks have left something to merge."""
    return context.config.run.tasks == 1 and context.data_dir.writable and bool(_tasks(context.data_dir))


def merge_responses(context: Context, store: ResponseStore) -> None:
    """Take over what the tasks have answered. Raises InputError for a task that is at work, or that worked with other
    settings.
    """
    for task, _ in _tasks(context.data_dir):
        with task.locked():
            _check_inputs(task, "generate", context.target_inputs())
            store.take_over(ResponseStore(task.responses))
            if not _has_states(task):
                remove(task.path)
    _remove_empty(context.data_dir)


def merge_states(context: Context, writer: HiddenStatesWriter, fixed: Mapping[str, Any]) -> None:
    """Take over what the tasks have captured, from these ``fixed`` inputs. Errors as ``merge_responses``."""
    for task, _ in _tasks(context.data_dir):
        with task.locked():
            _check_inputs(task, "capture", fixed)
            shards, _, broken = readable_shards(task.hidden_states) if _has_states(task) else ([], [], {})
            for shard in shards:
                if file_digest(shard.path) == shard.record.sha256:
                    _take_shard(writer, shard)
                else:
                    broken[shard.path.name] = f"{shard.path} does not have the checksum of the index"
            for problem in broken.values():
                say(f"capture: {problem}: its documents are captured again")
            remove(task.path)
    _remove_empty(context.data_dir)


def _take_shard(writer: HiddenStatesWriter, shard: ShardFile) -> None:
    documents = shard.documents(0)
    known = writer.done_keys()
    fresh = [document for document in documents if document.key not in known]
    if len(fresh) < len(documents):  # some are captured already, say by a merge that was killed
        for document in fresh:
            writer.add(shard.states(document))
        return
    # Linked, so that a kill before the index names it loses nothing; a leftover has a name that the writer removes.
    link = writer.folder / f".{shard.path.name}.partial"
    link.unlink(missing_ok=True)
    try:
        os.link(shard.path, link)
    except OSError:  # another file system, or one without links
        shutil.copyfile(shard.path, link)
    writer.adopt(link, [document.key for document in documents], shard.record.tokens, file_digest(link))


def _tasks(whole: RunDir) -> list[tuple[RunDir, int]]:
    """The directories of tasks, and the number of tasks that each is one of, in the order of their numbers."""
    folder = whole.path / TASKS
    named = [(match, path) for path in _entries(folder) if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    ordered = sorted(named, key=lambda entry: (int(entry[0][2]), int(entry[0][1])))
    return [(RunDir(path), int(match[2])) for match, path in ordered]


def _entries(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.is_dir() else iter(())


def _has_states(run_dir: RunDir) -> bool:
    return (run_dir.hidden_states / INDEX_NAME).is_file()


def _check_inputs(task: RunDir, stage: str, fixed: Mapping[str, Any]) -> None:
    entry = task.manifest()["stages"].get(stage)
    if entry is None:
        return
    wanted, found = Inputs(fixed, {}).to_json()["fixed"], entry["inputs"]["fixed"]
    differs = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    if differs:
        raise InputError(
            f"{task.path} was made with another {differs[0]} ({found.get(differs[0])}, this configuration has "
            f"{wanted.get(differs[0])}): set it back to merge, or remove that folder"
        )


def _remove_empty(whole: RunDir) -> None:
    folder = whole.path / TASKS
    for left in folder.glob(".*.removed"):  # by a kill
        shutil.rmtree(left, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
