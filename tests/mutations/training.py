"""The trainer: gradients, checkpoints, the best drafter, the order of documents."""

from mutation import Mutation

ACCUMULATION = "tests/equivalence/test_accumulation.py"
RESUME = "tests/equivalence/test_resume.py"
TRAINING = "spectrain/training/"

MUTATIONS = (
    Mutation(
        "the simulation scores a longer block than the server runs",
        TRAINING + "simulated_acceptance.py",
        "drafter.score(placed, shown, sampling, draft_sampling)",
        "drafter.score(placed, most, sampling, draft_sampling)",
        ("tests/equivalence/test_block_simulation.py",),
    ),
    Mutation(
        "ranks' gradients averaged once too often",
        TRAINING + "trainer.py",
        "scale = self.accelerator.num_processes / sums.weight",
        "scale = 1.0 / sums.weight",
        (ACCUMULATION,),
    ),
    Mutation(
        "mean of micro-batch means",
        TRAINING + "trainer.py",
        "self.accelerator.backward(losses.loss)",
        "self.accelerator.backward(losses.loss / losses.weight.clamp(min=1e-9) * 10)",
        (ACCUMULATION,),
    ),
    Mutation(
        "optimiser moves before the check",
        TRAINING + "trainer.py",
        "        self._check(step, sums)\n",
        "        for optimizer in self.optimizers:\n            optimizer.step()\n        self._check(step, sums)\n",
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
        "self.steps_per_epoch.append(-(-len(self._micro[-1]) // per_step))",
        "self.steps_per_epoch.append(max(1, len(self._micro[-1]) // per_step))",
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
        "consumed + (self._start.consumed if index == 0 else 0)",
        "consumed",
        ("tests/unit/test_sampler.py",),
    ),
    Mutation(
        "a position counts the steps of one number of ranks",
        TRAINING + "sampler.py",
        "self._micro.append(micro[start.consumed if epoch == start.epoch else 0 :])",
        "self._micro.append(micro[start.step % max(1, len(micro)) if epoch == start.epoch else 0 :])",
        ("tests/unit/test_sampler.py",),
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
        ("tests/pipeline/test_ranks.py::test_one_rank_prints",),
    ),
)
