"""What leaves this machine, and comes from others: publish, convert, doctor and trackers."""

from mutation import Mutation

PUBLISH, CONVERT = "tests/pipeline/test_publish.py", "tests/unit/test_layout_writers.py"

MUTATIONS = (
    Mutation(
        "published without the parity check",
        "spectrain/stages/publish.py",
        "    if not verified and not config.publish.unverified:\n",
        "    if False:\n",
        (f"{PUBLISH}::test_unverified_weights_need_to_be_called_so",),
    ),
    Mutation(
        "a prompt goes up with the rest",
        "spectrain/stages/publish.py",
        "        drafter_facts=list(facts.shape),\n",
        "        drafter_facts=[*facts.shape, *((turn, turn) for turn in _prompts(run_dir))],\n",
        (f"{PUBLISH}::test_nothing_of_the_machine_is_in_any_file",),
    ),
    Mutation(
        "a folder of this machine as the published target",
        "spectrain/hub/published_folder.py",
        '    verifier = {**speculation["verifier"], "name_or_path": base_model}\n',
        '    verifier = {**speculation["verifier"]}\n',
        (f"{PUBLISH}::test_nothing_of_the_machine_is_in_any_file",),
    ),
    Mutation(
        "the target itself goes up with its tuned head",
        "spectrain/hub/published_folder.py",
        ' if "without" in entry]',
        "]",
        ("tests/pipeline/test_mtp_run.py::test_the_head_alone_is_published_and_served_from_the_hub",),
    ),
    Mutation(
        "a tuned head is served beside its target, by a name that vLLM would fetch",
        "spectrain/stages/serve.py",
        "    if drafter.replaces_target and not os.path.isdir(drafter.path):\n",
        "    if False:\n",
        ("tests/pipeline/test_mtp_run.py::test_the_head_alone_is_published_and_served_from_the_hub",),
    ),
    Mutation(
        "a prompt with quotes passes the search in a page",
        "spectrain/hub/published_folder.py",
        ", str(escape(text))}",
        "}",
        ("tests/unit/test_published_folder.py",),
    ),
    Mutation(
        "the Hub's Retry-After is not kept",
        "spectrain/hub/upload.py",
        "                told_s = _retry_after_s(error)\n",
        "                told_s = None\n",
        (f"{PUBLISH}::test_what_passes_is_tried_again",),
    ),
    Mutation(
        "layer ids of z-lab and DeepSpec written as ours",
        "spectrain/drafters/block/block_method.py",
        "    return [tap - 1 for tap in taps]\n",
        "    return list(taps)\n",
        (CONVERT,),
    ),
    Mutation(
        "a layout that says something else is written all the same",
        "spectrain/drafters/layout_writers.py",
        "    if different or method.name",
        "    if False and method.name",
        (f"{CONVERT}::test_what_a_layout_cannot_say_is_an_error",),
    ),
    Mutation(
        "only the first of several weight files is compared with its digest",
        "spectrain/drafters/drafter_digests.py",
        "    for path in weight_files(folder):\n        wanted",
        "    for path in weight_files(folder)[:1]:\n        wanted",
        (f"{CONVERT}::test_one_file_of_several_that_changed_or_went_is_noticed",),
    ),
    Mutation(
        "the self-test of attention looks at the output alone",
        "spectrain/stages/attention_check.py",
        "    if not backward:\n",
        "    if True:\n",
        ("tests/unit/test_doctor.py::test_right_kernels_pass_and_a_wrong_one_is_found",),
    ),
    Mutation(
        "a tracker that failed is asked again at every step",
        "spectrain/training/trackers.py",
        "            self.open.pop(name, None)\n",
        "",
        ("tests/unit/test_trackers.py",),
    ),
)
