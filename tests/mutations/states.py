"""Hidden states that are computed while training asks for them."""

from mutation import Mutation

COMPUTED = "spectrain/data/computed_states.py"
CACHE = "spectrain/data/states_cache.py"
ONLINE = "spectrain/engines/vllm/online_states.py"
UNIT = "tests/unit/test_computed_states.py"
ASKED = "tests/unit/test_online_states.py"
COMPANY = (
    "tests/unit/test_hf_capture.py::test_a_document_that_is_asked_for_brings_the_batch_that_capture_computes_it_in"
)

MUTATIONS = (
    Mutation(
        "computed hidden states are not rounded as stored ones",
        COMPUTED,
        "    taps, last = read(states.taps), meta.last_hidden_tap",
        "    taps, last = states.taps, meta.last_hidden_tap",
        (UNIT,),
    ),
    Mutation(
        "another document takes the place of one that failed",
        COMPUTED,
        "                if states.key == response.key:\n",
        "                if True:\n",
        (UNIT,),
    ),
    Mutation(
        "computed documents are numbered as they were answered",
        COMPUTED,
        "self._responses = sorted(responses, key=lambda response: response.key)",
        "self._responses = list(responses)",
        (UNIT,),
    ),
    Mutation(
        "a cache is for hidden states of any kind",
        CACHE,
        "self._folder = folder / hashlib.sha256(identity.encode()).hexdigest()[:16]",
        'self._folder = folder / "all"',
        (UNIT,),
    ),
    Mutation(
        "the newest document of a cache makes room",
        CACHE,
        "self._forget(next(iter(self._own)))",
        "self._forget(next(reversed(self._own)))",
        (UNIT,),
    ),
    Mutation(
        "a cached file that has changed is read",
        CACHE,
        "if shard.metadata().get(_SUMMED) != _sum(states):",
        "if False:",
        (UNIT,),
    ),
    Mutation(
        "documents are computed alone, not as capture computes them",
        "spectrain/engines/inprocess_states.py",
        "self._batches = list(capture_batches(target, responses, batch_tokens))",
        "self._batches = list(capture_batches(target, responses, 1))",
        (COMPANY,),
    ),
    Mutation(
        "servers are asked for everything at once",
        ONLINE,
        "while self._expected and len(self._documents) < self._ahead:",
        "while self._expected:",
        (ASKED,),
    ),
    Mutation(
        "what a server wrote stays",
        "spectrain/engines/vllm/document_files.py",
        "    path.unlink()  # the map stays\n",
        "",
        (ASKED,),
    ),
    Mutation(
        "a file with another document's tokens is taken",
        "spectrain/engines/vllm/document_files.py",
        "if found.key != document.key or states.input_ids.tolist() != document.ids:",
        "if False:",
        (ASKED,),
    ),
)
