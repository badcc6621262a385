"""Engines: what is asked of the target, and what is made of its answers and hidden states."""

from mutation import Mutation

ENGINES = "spectrain/engines/"
VLLM = "spectrain/engines/vllm/"
PUMP = "tests/unit/test_vllm_engine.py"
ADOPT = "tests/unit/test_adopt_states.py"
CHECK = "tests/unit/test_check_states.py"
CONVERSATIONS = "tests/unit/test_conversations.py"
SERVERS = "tests/unit/test_servers.py"
PLACED = (
    "tests/unit/test_parity.py::test_rounds_lie_where_their_tokens_are",
    "tests/unit/test_parity.py::test_drafts_beyond_the_limit_did_not_become_text_and_the_round_is_cut",
    "tests/unit/test_parity.py::test_an_end_token_among_the_drafts_ends_a_complete_round",
    "tests/unit/test_parity.py::test_tokens_without_drafts_are_rounds_too",
)

MUTATIONS = (
    Mutation(
        "two OpenMPs loaded into vLLM's processes",
        "spectrain/engines/vllm/args.py",
        "if library and not _OPENMP.match(Path(library).name)",
        "if library",
        ("tests/unit/test_vllm_args.py",),
    ),
    Mutation(
        "one request more than vLLM has places",
        VLLM + "requests.py",
        "while under_way < client.capacity and",
        "while under_way <= client.capacity and",
        (PUMP,),
    ),
    Mutation(
        "a capacity that falls goes unnoticed",
        VLLM + "requests.py",
        "source, under_way = iter(requests), 0\n    while True:\n        while under_way < client.capacity and",
        "source, under_way, most = iter(requests), 0, client.capacity\n    while True:\n"
        "        while under_way < most and",
        (PUMP,),
    ),
    Mutation(
        "a request that cannot be sent is taken and lost",
        VLLM + "requests.py",
        "while under_way < client.capacity and (request := next(source, None)) is not None:",
        "while (request := next(source, None)) is not None and under_way < client.capacity:",
        (PUMP,),
    ),
    Mutation(
        "completions in the order in which they come",
        VLLM + "requests.py",
        "return [found[request.id] for request in requests]",
        "return list(found.values())",
        (PUMP,),
    ),
    Mutation(
        "the token of the prefill counts as a round",
        VLLM + "requests.py",
        "silent = max(0, tokens - 1 - reported)",
        "silent = max(0, tokens - reported)",
        PLACED,
    ),
    Mutation(
        "a served round lies one token late",
        VLLM + "requests.py",
        "Round(prompt_length + made - 1, round_.drafted",
        "Round(prompt_length + made, round_.drafted",
        PLACED,
    ),
    Mutation(
        "drafts that did not become text count as accepted",
        VLLM + "requests.py",
        "accepted = min(kept, round_.accepted)",
        "accepted = round_.accepted",
        PLACED,
    ),
    Mutation(
        "a round that is complete at the limit counts as cut",
        VLLM + "requests.py",
        "kept == accepted < round_.drafted",
        "kept == accepted",
        PLACED,
    ),
    Mutation(
        "a round that an end token ends counts as cut",
        VLLM + "requests.py",
        'cut = completion.finish_reason == "length" and made',
        "cut = made",
        PLACED,
    ),
    Mutation(
        "states of another text are adopted",
        VLLM + "adopt_states.py",
        'same_ids = torch.equal(tensors["input_ids"][rows], torch.from_numpy(response.input_ids))',
        'same_ids = len(tensors["input_ids"][rows]) == len(response.input_ids)',
        (ADOPT,),
    ),
    Mutation(
        "states with another loss mask are adopted",
        VLLM + "adopt_states.py",
        'if same_ids and torch.equal(tensors["loss_mask"][rows], torch.from_numpy(response.loss_mask)):',
        "if same_ids:",
        (ADOPT,),
    ),
    Mutation(
        "states of a document that changed its split are adopted",
        VLLM + "adopt_states.py",
        " or document.split != response.split:",
        ":",
        (ADOPT,),
    ),
    Mutation(
        "states that are stored already are adopted again",
        VLLM + "adopt_states.py",
        "            self._claimed |= self._writer.done_keys()\n",
        "",
        (ADOPT,),
    ),
    Mutation(
        "a document that a shard holds twice is adopted twice",
        VLLM + "adopt_states.py",
        "                    self._claimed.add(document.key)\n",
        "",
        (ADOPT,),
    ),
    Mutation(
        "states of other layers are adopted",
        VLLM + "adopt_states.py",
        "if json.loads(shard.metadata()[META]) != json.loads(json.dumps(dataclasses.asdict(meta))):",
        "if META not in shard.metadata():",
        (ADOPT,),
    ),
    Mutation(
        "normalizers where the token was generated, not where it is predicted",
        VLLM + "adopt_states.py",
        'needed_T[rows] = predicts_generated(tensors["loss_mask"][rows])',
        'needed_T[rows] = tensors["loss_mask"][rows].bool()',
        (ADOPT,),
    ),
    Mutation(
        "a shard's length field is not counted when it is written to",
        VLLM + "adopt_states.py",
        "file.seek(8 + header_bytes + begin)",
        "file.seek(header_bytes + begin)",
        (ADOPT,),
    ),
    Mutation(
        "a state that is not finite is adopted",
        VLLM + "adopt_states.py",
        "        _check_finite(shard, wanted)\n",
        "",
        (ADOPT,),
    ),
    Mutation(
        "a shard is written before its states were copied",
        VLLM + "shard_thread.py",
        "            document.event.synchronize()\n",
        "            pass\n",
        (ADOPT,),
    ),
    Mutation(
        "a writer that failed blocks the engine",
        VLLM + "shard_thread.py",
        "self._changed.wait_for(lambda: self._queued_bytes < self._queue_limit or self._failed)",
        "self._changed.wait_for(lambda: self._queued_bytes < self._queue_limit or self._failed, 5)\n"
        "            assert self._queued_bytes < self._queue_limit",
        (ADOPT,),
    ),
    Mutation(
        "the first batch is not checked",
        ENGINES + "hf.py",
        "if not self._checked:",
        "if self._checked:",
        (CHECK,),
    ),
    Mutation(
        "the self-check asks one token late",
        ENGINES + "check_states.py",
        "position = len(document.states.input_ids) - 2",
        "position = len(document.states.input_ids) - 1",
        (CHECK,),
    ),
    Mutation(
        "what storing explains is not taken off the difference",
        ENGINES + "check_states.py",
        "return (error_LS - _STORING * stored_LS).clamp_min(0.0)",
        "return error_LS",
        (CHECK,),
    ),
    Mutation(
        "every turn of a conversation is drawn alike",
        ENGINES + "conversations.py",
        'f"{seed}/{self.conversation.prompt_digest()}/{self.turn}"',
        'f"{seed}/{self.conversation.prompt_digest()}"',
        (CONVERSATIONS,),
    ),
    Mutation(
        "an end token at the limit counts as cut",
        ENGINES + "conversations.py",
        "        if token in end_ids:\n",
        "        if token in end_ids and self.room > 0:\n",
        (CONVERSATIONS,),
    ),
    Mutation(
        "an answer may be longer than what its document has left",
        ENGINES + "conversations.py",
        "min(self._sampling.max_new_tokens, self._max_length - len(dialogue.ids))",
        "self._sampling.max_new_tokens",
        (CONVERSATIONS,),
    ),
    Mutation(
        "a turn is opened that has no room for an answer",
        ENGINES + "conversations.py",
        "if len(prompt.ids) + prompt.continues * len(dialogue.ids) >= self._max_length:",
        "if len(prompt.ids) + prompt.continues * len(dialogue.ids) > self._max_length:",
        (CONVERSATIONS,),
    ),
    Mutation(
        "a server is asked once too rarely",
        VLLM + "servers.py",
        "if failures > self._retries:",
        "if failures >= self._retries:",
        (SERVERS + "::test_what_fails_is_asked_again",),
    ),
    Mutation(
        "what failed at every healthy server kills them",
        VLLM + "servers.py",
        "if endpoint.answered == answered_before or not await self._is_healthy(endpoint):",
        "if True:",
        (SERVERS + "::test_one_bad_request_kills_no_server",),
    ),
    Mutation(
        "an error comes before the answers that preceded it",
        VLLM + "servers.py",
        "if not completions and self._error is not None:",
        "if self._error is not None:",
        (SERVERS + "::test_answers_come_before_the_error",),
    ),
    Mutation(
        "a conversation counts as stored before its further documents",
        ENGINES + "conversations.py",
        "return [self.response(sampling), *reversed(self.finished)]",
        "return [*self.finished, self.response(sampling)]",
        (CONVERSATIONS,),
    ),
)
