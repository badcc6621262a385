"""From documents to batches on the device that trains: packing, the loader and its workers."""

from mutation import Mutation

DATA = "spectrain/data/"
PACKING = "tests/unit/test_packing.py"

MUTATIONS = (
    Mutation(
        "a batch is read before its copy has ended",
        DATA + "device_copies.py",
        "computing.wait_stream(self._stream)",
        "pass",
        ("tests/unit/test_device_copies.py",),
    ),
    Mutation(
        "batches are copied when they are needed, not ahead",
        "spectrain/training/trainer.py",
        "                batches.copy_next()\n",
        "",
        ("tests/unit/test_device_copies.py",),
    ),
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
        "enough = rooms >> need\n        if enough:\n            room = need +",
        "enough = rooms >> (need + 1)\n        if enough:\n            room = need + 1 +",
        (PACKING,),
    ),
    Mutation(
        "a row is one token too long",
        DATA + "packing.py",
        "room, row, rows = packed_length, rows, rows + 1",
        "room, row, rows = packed_length + 1, rows, rows + 1",
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
        "batch = pack_batch(documents, request.max_tokens, request.draw, join)",
        "batch = pack_batch(documents, request.max_tokens, None, join)",
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
        "8 bits travel as four times as many",
        DATA + "loader.py",
        "self._source.as_stored(number)",
        "self._source[number]",
        ("tests/unit/test_loader.py::test_8_bits_travel_as_they_are_and_become_what_a_reader_sees",),
    ),
    Mutation(
        "a slot is given to the next batch while this one is still in use",
        DATA + "batch_slots.py",
        "weakref.finalize(part, self._free.append, laid.slot).atexit = False",
        "self._free.append(laid.slot)",
        ("tests/unit/test_batch_slots.py::test_a_slot_is_free_when_the_last_tensor_in_it_is_gone",),
    ),
    Mutation(
        "batches travel in fresh memory",
        DATA + "loader.py",
        "slot=slots.take() if _tokens(request, source) <= most else None",
        "slot=None",
        ("tests/unit/test_batch_slots.py::test_a_training_goes_on_in_the_same_few_slots",),
    ),
    Mutation(
        "workers are told to end although one was killed and may hold the lock",
        DATA + "loader.py",
        "or not any(worker.exitcode for worker in workers):",
        "or workers:",
        ("tests/unit/test_loader.py::test_a_worker_that_dies_while_the_trainer_is_busy_is_told_of_too",),
    ),
    Mutation(
        "a document that cannot be read goes unnamed",
        DATA + "loader.py",
        'return _Failure(what if key in what else f"the hidden states of document {key} cannot be read: {what}")',
        "raise",
        ("tests/unit/test_loader.py::test_a_document_that_cannot_be_read_is_named",),
    ),
    Mutation(
        "8 bits reach the device without their values",
        DATA + "packing.py",
        "non_blocking=True))._decoded()",
        "non_blocking=True))",
        ("tests/unit/test_loader.py",),
    ),
)
