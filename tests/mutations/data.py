"""Prompts' answers, hidden states in their store, batches, the draft vocabulary."""

from mutation import Mutation

DATA = "spectrain/data/"
PACKING = "tests/unit/test_packing.py"
STORE = "tests/unit/test_hidden_states.py"
VOCAB = "tests/unit/test_vocab.py"
RESPONSES = "tests/unit/test_responses.py"

MUTATIONS = (
    Mutation(
        "positions run on through a row",
        DATA + "packing.py",
        "position_ids_T=torch.cat([torch.arange(n) for n in lengths.tolist()])",
        "position_ids_T=torch.arange(int(lengths.sum()))",
        (PACKING,),
    ),
    Mutation(
        "a row that a document fits exactly is passed over",
        DATA + "packing.py",
        "fit = bisect.bisect_left(room, (need, -1))",
        "fit = bisect.bisect_left(room, (need + 1, -1))",
        (PACKING,),
    ),
    Mutation(
        "a row is one token too long",
        DATA + "packing.py",
        "fit = bisect.bisect_left(room, (need, -1))",
        "fit = bisect.bisect_left(room, (need - 1, -1))",
        (PACKING,),
    ),
    Mutation(
        "every epoch is packed alike",
        DATA + "packing.py",
        "rng = np.random.default_rng((seed, epoch))",
        "rng = np.random.default_rng(seed)",
        (PACKING,),
    ),
    Mutation(
        "every seed packs alike",
        DATA + "packing.py",
        "rng = np.random.default_rng((seed, epoch))",
        "rng = np.random.default_rng(epoch)",
        (PACKING,),
    ),
    Mutation(
        "a long document keeps the normalizers of the tail that it loses",
        DATA + "packing.py",
        "else torch.cat([n[cut] for n in normalizers",
        "else torch.cat([n for n in normalizers",
        (PACKING,),
    ),
    Mutation(
        "a batch forgets what its random choices are drawn from",
        DATA + "loader.py",
        "return pack_batch(documents, request.max_tokens, request.draw)",
        "return pack_batch(documents, request.max_tokens)",
        ("tests/unit/test_loader.py::test_batches_are_those_of_their_requests_in_order",),
    ),
    Mutation(
        "the loader draws from the random stream of the process",
        DATA + "loader.py",
        "generator=torch.Generator(),",
        "generator=None,",
        ("tests/unit/test_loader.py::test_workers_train_the_same_drafter_to_the_bit",),
    ),
    Mutation(
        "a document that cannot be read goes unnamed",
        DATA + "loader.py",
        'return _Failure(f"the hidden states of document {self._source.keys[number]} cannot be read: {what}")',
        "raise",
        ("tests/unit/test_loader.py::test_a_document_that_cannot_be_read_is_named",),
    ),
    Mutation(
        "where the target predicts is taken for what it said",
        DATA + "loss_mask.py",
        "return torch.cat([loss_mask_S[1:].bool(), loss_mask_S.new_zeros(1, dtype=torch.bool)])",
        "return loss_mask_S.bool()",
        ("tests/unit/test_loss_mask.py",),
    ),
    Mutation(
        "prompts count for the draft vocabulary as answers do",
        DATA + "vocab.py",
        "_PROMPT_WEIGHT = 0.05",
        "_PROMPT_WEIGHT = 1.0",
        (VOCAB,),
    ),
    Mutation(
        "of equally frequent tokens the higher id is kept",
        DATA + "vocab.py",
        "np.lexsort((np.arange(target_size), -score_V))",
        "np.lexsort((-np.arange(target_size), -score_V))",
        (VOCAB,),
    ),
    Mutation(
        "the draft vocabulary in the order of frequency",
        DATA + "vocab.py",
        "kept = np.sort(np.lexsort((np.arange(target_size), -score_V))[:size])",
        "kept = np.lexsort((np.arange(target_size), -score_V))[:size]",
        (VOCAB,),
    ),
    Mutation(
        "coverage counts what the target only expected",
        DATA + "vocab.py",
        "float(generated_V[kept].sum() / total)",
        "float(score_V[kept].sum() / score_V.sum())",
        (VOCAB,),
    ),
    Mutation(
        "a shard of a killed capture stays",
        DATA + "hidden_states_writer.py",
        "        self._remove_leftovers()\n",
        "",
        (STORE,),
    ),
    Mutation(
        "what is only gathered counts as stored",
        DATA + "hidden_states_writer.py",
        "return set(self._done)",
        "return set(self._known)",
        (STORE, "tests/unit/test_adopt_states.py"),
    ),
    Mutation(
        "a document is stored twice in one shard",
        DATA + "hidden_states_writer.py",
        "if states.key in self._known:",
        "if states.key in self._done:",
        (STORE,),
    ),
    Mutation(
        "what was gathered before an error is lost",
        DATA + "hidden_states_writer.py",
        "        self.close()  # after an error too",
        "        if error is None:\n            self.close()  # after an error too",
        (STORE,),
    ),
    Mutation(
        "a document that fills a shard exactly opens the next",
        DATA + "hidden_states_shard.py",
        "self.tokens + length <= self._capacity",
        "self.tokens + length < self._capacity",
        (STORE,),
    ),
    Mutation(
        "documents come in the order in which they were captured",
        DATA + "hidden_states.py",
        "documents = sorted(\n",
        "documents = list(\n",
        (STORE,),
    ),
    Mutation(
        "one scale for a whole document in int8",
        DATA + "hidden_states.py",
        "scale = x.float().abs().amax(dim=-1) / 127",
        "scale = (x.float().abs().amax() / 127).expand(x.shape[:-1])",
        (STORE,),
    ),
    Mutation(
        "int8 steps of 1/128",
        DATA + "hidden_states.py",
        "scale = x.float().abs().amax(dim=-1) / 127",
        "scale = x.float().abs().amax(dim=-1) / 128",
        (STORE,),
    ),
    Mutation(
        "another number of layers is no mismatch",
        DATA + "hidden_states.py",
        "for name, wanted in expected.items():",
        'for name, wanted in ((n, w) for n, w in expected.items() if n != "num_layers"):',
        (STORE,),
    ),
    Mutation(
        "a response is known without its seed",
        DATA + "responses.py",
        "how = asdict(sampling) if",
        'how = asdict(sampling) | {"seed": 0} if',
        (RESPONSES,),
    ),
    Mutation(
        "of two responses with one key the last is kept",
        DATA + "responses.py",
        "for response in reversed(responses)",
        "for response in responses",
        (RESPONSES,),
    ),
    Mutation(
        "responses in the order in which they were stored",
        DATA + "responses.py",
        "wanted = sorted(known) if keys is None else list(keys)",
        "wanted = sorted(known if keys is None else keys)",
        (RESPONSES,),
    ),
    Mutation(
        "a file takes its place although it is not on disk",
        "spectrain/files.py",
        "        partial.chmod(mode)  # safetensors makes files that only their owner may read, whatever the umask\n"
        "        sync(partial)\n",
        "        partial.chmod(mode)\n",
        ("tests/unit/test_files.py",),
    ),
    Mutation(
        "a kill between two renames loses the drafter",
        "spectrain/files.py",
        "    if old.exists() and not folder.exists():\n        os.replace(old, folder)\n",
        "",
        ("tests/unit/test_drafter_folder.py",),
    ),
)
