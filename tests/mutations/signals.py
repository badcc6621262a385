"""What signals keep, and that what goes on after one ends as it would have."""

from mutation import Mutation

SIGNALS = "tests/unit/test_signals.py"
STOPS = "tests/faults/test_stops.py"

MUTATIONS = (
    Mutation(
        "a signal does not wait for a change under way",
        "spectrain/signals.py",
        "    with _lock:\n        _here.depth = _depth() + 1",
        "    with threading.RLock():\n        _here.depth = _depth() + 1",
        (f"{SIGNALS}::test_a_change_under_way_is_finished_first",),
    ),
    Mutation(
        "an error of what was ended is reported",
        "spectrain/cli.py",
        "        signals.wait_if_signalled(_SIGNAL_S if error.exit_code == 1 else 0.0)\n",
        "",
        (f"{SIGNALS}::test_errors_of_what_was_ended_are_not_reported",),
    ),
    Mutation(
        "nohup is overruled",
        "spectrain/signals.py",
        "if signal.getsignal(number) is not signal.SIG_IGN:",
        "if True:",
        (f"{SIGNALS}::test_an_ignored_signal_stays_ignored",),
    ),
    Mutation(
        "finished answers are lost with a signal",
        "spectrain/stages/generate.py",
        "            with signals.keeping(keep):\n",
        "            with signals.keeping(lambda: ''):\n",
        (f"{STOPS}::test_every_stage_of_a_run",),
    ),
    Mutation(
        "an interrupted evaluation counts as made",
        "spectrain/training/trainer.py",
        "self.done, self.evaluated, self.last_loss = step + 1, False,",
        "self.done, self.evaluated, self.last_loss = step + 1, True,",
        (f"{STOPS}::test_training_goes_on_exactly",),
    ),
    Mutation(
        "a capture that goes on runs other batches",
        "spectrain/stages/capture.py",
        "context.engine.capture(responses, context.taps, context.states_dtype, stored, layers)",
        "context.engine.capture(todo, context.taps, context.states_dtype, stored, layers)",
        (f"{STOPS}::test_every_stage_of_a_run",),
    ),
    Mutation(
        "Slurm's warning ends the command at once",
        "spectrain/signals.py",
        "signal.SIGINT, signal.SIGUSR1)",
        "signal.SIGINT)",
        (f"{SIGNALS}::test_what_is_in_memory_is_kept_and_one_line_says_so",),
    ),
    Mutation(
        "a follower does not wait for its leader",
        "spectrain/signals.py",
        "    while _leader.is_running():\n        time.sleep(0.05)\n",
        "",
        (f"{SIGNALS}::test_a_follower_has_its_leader_keep_and_ends_after_it",),
    ),
    Mutation(
        "a signal does not wait for those who work together",
        "spectrain/signals.py",
        "    _wait_for_the_others()\n",
        "",
        (f"{SIGNALS}::test_those_who_work_together_end_where_they_meet_whoever_was_asked",),
    ),
    Mutation(
        "whoever is met by nobody waits for ever",
        "spectrain/signals.py",
        "_apart.wait(0.05) and time.monotonic() < end_s:",
        "_apart.wait(0.05):",
        (f"{SIGNALS}::test_a_leader_whom_nobody_meets_keeps_what_it_has_by_itself",),
    ),
    Mutation(
        "an evaluation that one rank left counts",
        "spectrain/training/simulated_acceptance.py",
        "    if sum(map(len, parts)) < len(documents):\n        raise signals.StopAsked\n",
        "    documents = documents[: sum(map(len, parts))]\n",
        ("tests/unit/test_served_drafter.py::test_a_rank_that_is_asked_to_stop_breaks_the_evaluation_off_for_all",),
    ),
    Mutation(
        "ranks that were asked to stop save what was due alone",
        "spectrain/training/trainer.py",
        "        if self.done and self._saved != (self.done, self.evaluated):\n            tensors",
        "        if False:\n            tensors",
        ("tests/pipeline/test_ranks.py::test_signals_where_each_rank_holds_a_share",),
    ),
    Mutation(
        "a process that got an owner's number keeps others out",
        "spectrain/processes.py",
        'return started == self.started and state not in ("Z", "X")',
        'return state not in ("Z", "X")',
        ("tests/unit/test_run_lock.py", f"{SIGNALS}::test_a_process_is_known_from_another_that_got_its_number"),
    ),
    Mutation(
        "an owner that is silent for long is followed without asking",
        "spectrain/stages/run_lock.py",
        "    if owner.has_ended(this):\n",
        "    if owner.has_ended(this) or silent_s > _SILENT_S:\n",
        ("tests/unit/test_run_lock.py::test_an_owner_on_another_machine",),
    ),
    Mutation(
        "the lock of one machine is trusted on a network's file system",
        "spectrain/stages/run_lock.py",
        'if file_system(folder) in (*_LOCAL.split(), ""):',
        "if True:",
        ("tests/unit/test_run_lock.py::test_an_owner_on_another_machine",),
    ),
    Mutation(
        "two follow an owner that has ended",
        "spectrain/stages/run_lock.py",
        "    if not _appears(fresh, taking):\n",
        "    if False:\n",
        ("tests/unit/test_run_lock.py::test_of_many_that_find_an_ended_owner_one_goes_on",),
    ),
)
