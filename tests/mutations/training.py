"""The trainer: gradients, checkpoints, the best drafter, the order of documents."""

from mutation import Mutation

ACCUMULATION = "tests/equivalence/test_accumulation.py"
RESUME = "tests/equivalence/test_resume.py"
TRAINING = "spectrain/training/"

STRATEGIES = "tests/equivalence/test_strategies.py"

MUTATIONS = (
    Mutation(
        "srun's tasks of the job are taken for those of the step",
        TRAINING + "distributed.py",
        'os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS", "")',
        'os.environ.get("SLURM_NTASKS", "")',
        ("tests/unit/test_joining.py",),
    ),
    Mutation(
        "trainer.compile compiles nothing",
        TRAINING + "trainer.py",
        "with compiled_pieces(self.config.trainer.compile):",
        "with compiled_pieces(False):",
        ("tests/unit/test_compiled_pieces.py",),
    ),
    Mutation(
        "gradients are divided by the loss",
        TRAINING + "step_sums.py",
        "return self.flat[2]",
        "return self.flat[1]",
        ("tests/unit/test_host_synchronisations.py", ACCUMULATION),
    ),
    Mutation(
        "a teacher's bfloat16 products are rounded to bfloat16",
        "spectrain/target/wide_products.py",
        "linear(wide_TH, rows.float())",
        "linear(wide_TH, rows.float()).bfloat16().float()",
        ("tests/unit/test_target_head.py",),
    ),
    Mutation(
        "FSDP2 takes the norm of each rank's own share",
        TRAINING + "fsdp2.py",
        "norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)",
        "norm = torch.nn.utils.get_total_norm([p.grad.to_local() for p in parameters])\n"
        "        torch.nn.utils.clip_grads_with_norm_(parameters, self.config.max_grad_norm, norm)",
        (STRATEGIES,),
    ),
    Mutation(
        "ZeRO divides by the ranks once too often",
        TRAINING + "zero.py",
        "override_loss_scale(weight / self.accelerator.num_processes)",
        "override_loss_scale(weight)",
        (STRATEGIES,),
    ),
    Mutation(
        "ZeRO divides by the accumulation, too",
        TRAINING + "zero.py",
        "self.engine.backward(loss, scale_wrt_gas=False)",
        "self.engine.backward(loss)",
        (STRATEGIES,),
    ),
    Mutation(
        "every rank gets the first one's share of the moments",
        TRAINING + "zero.py",
        "padded[rank * part : (rank + 1) * part]",
        "padded[:part]",
        (STRATEGIES,),
    ),
    Mutation(
        "a rank with nothing left counts a document again",
        TRAINING + "trainer.py",
        "losses = losses if counts else losses.times(0)",
        "losses = losses",
        (ACCUMULATION,),
    ),
    Mutation(
        "a layer that runs again sees keys of later steps",
        "spectrain/drafters/autoregressive/unroll.py",
        "before_k, before_v = list(own_k), list(own_v)",
        "before_k, before_v = own_k, own_v",
        (ACCUMULATION + "::test_gradient_checkpointing_changes_nothing",),
    ),
    Mutation(
        "a checkpoint that is being written changes with the next step",
        TRAINING + "checkpointing.py",
        '.to("cpu", copy=True)',
        '.to("cpu")',
        ("tests/unit/test_checkpoint_writer.py",),
    ),
    Mutation(
        "the simulation scores a longer block than the server runs",
        TRAINING + "simulated_acceptance.py",
        "drafter.score(placed, shown, sampling, draft_sampling)",
        "drafter.score(placed, most, sampling, draft_sampling)",
        ("tests/equivalence/test_block_simulation.py",),
    ),
    Mutation(
        "ranks' gradients averaged once too often",
        TRAINING + "strategies.py",
        "scaled_gradients(self.drafter, self.accelerator.num_processes / weight)",
        "scaled_gradients(self.drafter, 1.0 / weight)",
        (ACCUMULATION,),
    ),
    Mutation(
        "mean of micro-batch means",
        TRAINING + "trainer.py",
        "self.strategy.backward(losses.loss, is_last)",
        "self.strategy.backward(losses.loss / losses.weight.clamp(min=1e-9) * 10, is_last)",
        (ACCUMULATION,),
    ),
    Mutation(
        "optimiser moves before the check",
        TRAINING + "trainer.py",
        "        self._check(step, sums)\n",
        "        for optimizer in self.strategy.optimizers:\n            optimizer.step()\n"
        "        self._check(step, sums)\n",
        ("tests/unit/test_trainer.py::test_a_loss_that_is_not_finite_stops_before_the_optimiser",),
    ),
    Mutation(
        "best drafter is the latest",
        TRAINING + "trainer.py",
        'if not length <= self.best["acceptance_length"]:',
        "if True:",
        ("tests/unit/test_trainer.py::test_a_worse_drafter_never_replaces_a_better_one",),
    ),
    Mutation(
        "a damaged checkpoint is loaded",
        TRAINING + "checkpointing.py",
        "next((path for path in reversed(_checkpoints(folder)) if damage(path) is None), None)",
        "next(reversed(_checkpoints(folder)), None)",
        ("tests/unit/test_checkpointing.py",),
    ),
    Mutation(
        "what lies behind the last step displaces checkpoints",
        TRAINING + "checkpointing.py",
        "own = [path for path in _checkpoints(folder) if _step(path) <= step]",
        "own = _checkpoints(folder)",
        ("tests/unit/test_checkpointing.py",),
    ),
    Mutation(
        "optimiser state not restored",
        TRAINING + "checkpointing.py",
        "    _restore_optimizers(model, optimizers, load_file(path / _OPTIMIZER), path)\n",
        "",
        (RESUME,),
    ),
    Mutation(
        "metrics of repeated steps kept twice",
        TRAINING + "metrics.py",
        'if entry["step"] <= step and',
        'if entry["step"] <= 10**9 and',
        (RESUME,),
    ),
    Mutation(
        "the tail of an epoch dropped",
        TRAINING + "sampler.py",
        "self.steps_per_epoch.append(-(-self._micro[-1] // per_step))",
        "self.steps_per_epoch.append(max(1, self._micro[-1] // per_step))",
        ("tests/unit/test_sampler.py",),
    ),
    Mutation(
        "a rank without rows sits a pass out",
        TRAINING + "sampler.py",
        "mine = [block[i] if i < len(block) else [] for i in range(self._rank, per_step, self._world)]",
        "mine = [block[i] for i in range(self._rank, len(block), self._world)]",
        ("tests/unit/test_sampler.py",),
    ),
    Mutation(
        "a training that goes on repeats what it consumed of the epoch",
        TRAINING + "sampler.py",
        "return Position(done, self._start.epoch + index, consumed + self._consumed(index))",
        "return Position(done, self._start.epoch + index, consumed)",
        ("tests/unit/test_sampler.py",),
    ),
    Mutation(
        "a position counts the steps of one number of ranks",
        TRAINING + "sampler.py",
        "range(first + consumed, last + consumed)",
        "range(first + self._start.step, last + self._start.step)",
        ("tests/unit/test_sampler.py",),
    ),
    Mutation(
        "what will be served in 16 bits is evaluated in float32",
        TRAINING + "served_drafter.py",
        "WholeCopy(drafter) if dtype in SIXTEEN_BITS else None",
        "None",
        ("tests/unit/test_served_drafter.py::test_an_evaluation_is_that_of_the_drafter_in_16_bits",),
    ),
    Mutation(
        "every rank simulates the first documents",
        TRAINING + "simulated_acceptance.py",
        "documents[ranks.index :: ranks.count]",
        "documents[:: ranks.count]",
        (ACCUMULATION,),
    ),
    Mutation(
        "rank 1 writes",
        "spectrain/stages/fit.py",
        "    if not context.ranks.is_first:\n        context.ranks.wait()\n        yield {}\n        return\n",
        "    context.run_dir._locked = True\n",
        ("tests/unit/test_run_dir.py",),
    ),
)
