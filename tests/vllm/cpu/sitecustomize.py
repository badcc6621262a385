"""Repairs of vLLM's CPU build 0.32.0, for tests alone. Python imports this by itself in every process whose PYTHONPATH
holds this folder, vLLM's workers included. Nothing here is needed, or applied, on a GPU.

Each repair waits for the module that it mends: a process that does not import it pays nothing.
"""

import importlib.abc
import importlib.machinery
import os
import sys

REPAIRS = {}


def repairs(module):
    def register(function):
        REPAIRS[module] = function
        return function

    return register


@repairs("vllm.v1.sample.rejection_sampler")
def sampling_parameters_of_drafted_positions(module):
    """At temperature > 0 with speculation every position needs its request's temperature and top-p. The CPU version of
    this function writes them into a copy of another type, so the positions keep whatever the memory held, and tokens
    are drawn from a wrong distribution."""
    import torch

    def expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
        return torch.where(x == replace_from, torch.full_like(x, replace_to), x).repeat_interleave(counts)[:num_tokens]

    module.expand_batch_to_tokens = expand_batch_to_tokens


@repairs("vllm.model_executor.models.qwen3_dflash")
def context_key_norms_of_block_drafters(module):
    """Keys of the context are normalised for all layers at once, each with its own gains. The CPU kernel takes the
    first layer's for all, so drafters of several layers draft worse than they are."""
    import torch

    def normalize(self, keys):  # [layers, tokens, heads, head size]
        keys_float = keys.float()
        normed = keys_float * torch.rsqrt(keys_float.pow(2).mean(-1, keepdim=True) + self._rms_norm_eps)
        return (normed * self._k_norm_weights.float()[:, None, None, :]).to(keys.dtype)

    module.DFlashQwen3Model._normalize_context_k = normalize


@repairs("vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector")
def hidden_states_connector_without_cuda(module):
    """vLLM's own connector copies on a CUDA stream into pinned memory, and asks for a cache layout that CPUs do not
    have.
    """

    class Event:
        record = synchronize = lambda self, *args: None
        query = lambda self: True  # noqa: E731

    def submit(self, pending):
        slots = [block * self._block_size + offset for block in pending.block_ids for offset in range(self._block_size)]
        states = module.extract_from_kv_cache(
            self._kv_cache, module.torch.tensor(slots), len(pending.token_ids)
        ).contiguous()
        self._req_copy_events[pending.req_id] = Event()
        lock = self._lock_fds.pop(pending.req_id)
        self._write_tensors({"hidden_states": states, "token_ids": pending.token_ids}, Event(), pending.filename, lock)

    module.ExampleHiddenStatesConnector._submit_async_write = submit
    module.ExampleHiddenStatesConnector.get_required_kvcache_layout = classmethod(lambda cls, config: None)


@repairs("vllm.v1.spec_decode.gemma4")
def centroids_of_gemma4_assistants_without_cuda_graphs(module):
    """An assistant with centroids is loaded with CUDA graphs of its search, also where there is no CUDA. Without graphs
    it is searched directly, as vLLM does for batches that are larger than any graph.
    """
    module.Gemma4Proposer._setup_centroids_cuda_graphs = lambda self: None


if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    # vLLM's second model runner is written in Triton, which has no CPU backend here: its interpreter runs the kernels,
    # slowly.
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("TRITON_DEFAULT_BACKEND", "cpu")

    @repairs("triton.backends")
    def a_cpu_backend_for_triton(module):
        """The interpreter wants to be told of a device, too."""

        class Driver:
            @classmethod
            def is_active(cls):
                return True

            def get_current_device(self):
                return 0

            def get_current_stream(self, *_):
                return 0

            def get_current_target(self):
                from triton.backends.compiler import GPUTarget

                return GPUTarget("cpu", 0, 1)

            def get_device_interface(self):
                import torch

                return torch.cpu

            def get_active_torch_device(self):
                import torch

                return torch.device("cpu")

        module.backends.setdefault("cpu", module.Backend(compiler=None, driver=Driver))


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules to mend as everyone does, and mends them once they are executed."""

    def find_spec(self, name, path=None, target=None):
        if name not in REPAIRS:
            return None
        repair = REPAIRS.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                repair(module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
