"""Breaks each rule of the package in turn, and checks that a test fails for it.

    python tests/mutants.py                 # all of them, about fifteen minutes
    python tests/mutants.py --only gradient # those with this in their name
    python tests/mutants.py --jobs 2

Each mutant is one replacement in a copy of the package, and the tests that should notice.
`test_mutants.py` checks that what is replaced is still there.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One rule, broken.

    Attributes:
      name: what is broken.
      file: in `nnx_dp/`.
      old: occurs once in the file.
      new: takes its place.
      tests: arguments of pytest; one of these tests has to fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = [
    # --- Gradients
    Mutant(
        "the gradient is not reduced",
        "_grad_sync.py",
        'return total if reduce == "psum" else total / axis_size',
        "return cotangent",
        "test_gradients.py",
    ),
    Mutant(
        "the gradient of a mean is summed",
        "_grad_sync.py",
        'return total if reduce == "psum" else total / axis_size',
        "return total",
        "test_gradients.py",
    ),
    Mutant(
        "the gradient of a sum is averaged",
        "_grad_sync.py",
        'return "pmean" if self.losses[site] == "mean" else "psum"',
        'return "pmean"',
        "test_gradients.py",
    ),
    Mutant(
        "the gradient over the batch is averaged",
        "_grad_sync.py",
        "if (site, leaf) in self.batch_leaves:",
        "if False:",
        "test_gradients.py",
    ),
    Mutant(
        "the gradient over the batch is not scaled",
        "_grad_sync.py",
        'return "scale" if self.losses[site] == "mean" else "keep"',
        'return "keep"',
        "test_gradients.py",
    ),
    Mutant(
        "rows made in the step are taken for state",
        "_comparison.py",
        "if local_shapes != differentiated.get(key)",
        "if False",
        "test_gradients.py",
    ),
    Mutant(
        "the gradient of each example is averaged over devices",
        "_grad_sync.py",
        '        params["reduce"] = "keep"\n',
        "",
        "test_gradients.py",
    ),
    Mutant(
        "a sum is taken for a mean",
        "_kinds/algebra.py",
        'return {0: "sum", 1: "mean"}.get(self.power)',
        'return {0: "mean", 1: "mean"}.get(self.power)',
        "test_gradients.py test_outputs.py",
    ),
    Mutant(
        "a loss that is no mean is averaged",
        "_plan.py",
        "    if comparison.kinds is None:\n        raise",
        '    return "mean"\n    if comparison.kinds is None:\n        raise',
        "test_errors.py test_gradients.py",
    ),
    Mutant(
        "the dtype on the wire is ignored",
        "_grad_sync.py",
        "on_the_wire = cotangent.astype(grad_dtype)",
        "pass",
        "test_compiled.py test_gradients.py -k dtype or narrow or half or bytes",
    ),
    Mutant(
        "a backward pass that reduces already is not noticed",
        "_kinds/losses.py",
        'if cotangent.tag in ("same", "linear") and cotangent not in expected:',
        "if False:",
        "test_field_cases.py -k custom or vjp or backward or kernel",
    ),
    Mutant(
        "a second derivative is left as it is",
        "_grad_sync.py",
        "    return [grad_sync_p.bind(outer_cotangent, primal, **params), None]",
        "    return [outer_cotangent, None]",
        "test_gradients.py test_field_cases.py",
    ),
    Mutant(
        "a curved backward pass is let through",
        "_kinds/losses.py",
        "        if cotangent.curved and not trusted:\n",
        "        if False:\n",
        "test_gradients.py -k not_linear",
    ),
    Mutant(
        "a loss that is equal on all devices is taken for the global one",
        "_plan.py",
        "    if taint is None and alike:\n",
        "    if taint is None:\n",
        "test_gradients.py -k right_or_refused",
    ),
    Mutant(
        "a gradient over the batch keeps the scale of its device",
        "_kinds/walk.py",
        "0 if declared else cotangent.power - is_mean)",
        "cotangent.power)",
        "test_gradients.py -k right_or_refused",
    ),
    Mutant(
        "a second derivative of a sum is one of a mean",
        "_kinds/walk.py",
        "return same(cotangent.power - is_mean)",
        "return same(cotangent.power - 1)",
        "test_gradients.py -k right_or_refused",
    ),
    Mutant(
        "one row is taken for two",
        "_comparison.py",
        "if scale > 1 and not _alike_on_two_rows(",
        "if False and not _alike_on_two_rows(",
        "test_gradients.py -k one_example",
    ),
    Mutant(
        "a key that all devices hold draws their rows",
        "_kinds/opaque.py",
        "return not pair.shared_draws and pair.out_axis() is not None",
        "return False",
        "test_outputs.py test_kinds.py -k devices_own or draw",
    ),
    # --- What is the same on all devices
    Mutant(
        "a varying value is called replicated",
        "_replication.py",
        "        return [cause] * len(eqn.outvars)\n",
        "        return [None] * len(eqn.outvars)\n",
        "test_replication.py",
    ),
    Mutant(
        "a branch chosen by the batch is called replicated",
        "_replication.py",
        "outputs: list[Taint] = [predicate] * len(eqn.outvars)",
        "outputs: list[Taint] = [None] * len(eqn.outvars)",
        "test_replication.py",
    ),
    Mutant(
        "a loop is walked once",
        "_replication.py",
        "            if _same(before, operands):\n                return operands[consts:end]",
        "            if True:\n                return operands[consts:end]",
        "test_replication.py",
    ),
    Mutant(
        "devices that leave a loop at different times agree",
        "_replication.py",
        "operands[start:] = [old or new or stop for old",
        "operands[start:] = [old or new for old",
        "test_replication.py",
    ),
    Mutant(
        "what comes from outside the program agrees",
        "_replication.py",
        "or self._reaches_outside(eqn)\n",
        "\n",
        "test_replication.py",
    ),
    Mutant(
        "state that varies is written back",
        "_outputs.py",
        "    if not check:\n        return AS_IS\n",
        "    return AS_IS\n",
        "test_errors.py test_state.py",
    ),
    Mutant(
        "state that agrees on the wrong value is written back",
        "_outputs.py",
        "    if kind is not None and not kind.same:\n",
        "    if False:\n",
        "test_errors.py test_state.py test_collectives.py",
    ),
    # --- Outputs
    Mutant(
        "rows are not joined",
        "_outputs.py",
        'return Exit("concatenate", axis=changed[0])',
        "return AS_IS",
        "test_outputs.py",
    ),
    Mutant(
        "rows in another order are joined",
        "_outputs.py",
        "if shrank and (kind is None or kind.axis == changed[0]):",
        "if shrank:",
        "test_outputs.py test_kinds.py",
    ),
    Mutant(
        "an output that varies is one device's",
        "_outputs.py",
        'return Exit("reduce", rule=kind.reduction)',
        "return AS_IS",
        "test_outputs.py",
    ),
    Mutant(
        "out_reduce is ignored",
        "_plan.py",
        "reduction=reductions[leaf.position],",
        "reduction=None,",
        "test_outputs.py",
    ),
    Mutant(
        "a product of two sums is a sum",
        "_kinds/algebra.py",
        'if tags == ("linear", "same") or (tags == ("same", "linear") and sign == 1):',
        'if set(tags) <= {"linear", "same"}:',
        "test_kinds.py",
    ),
    Mutant(
        "unlike terms add up",
        "_kinds/algebra.py",
        "return linear(first_power) if equal else",
        "return linear(first_power) if True else",
        "test_kinds.py test_gradients.py",
    ),
    Mutant(
        "a sum over part of the rows is a sum",
        "_kinds/reductions.py",
        "        if result.rows_axis == along:\n            return mixed(pair, kinds)\n",
        "",
        "test_kinds.py",
    ),
    Mutant(
        "pooling may mix examples",
        "_kinds/reductions.py",
        "if not apart or any(",
        "if any(",
        "test_kinds.py",
    ),
    Mutant(
        "narrow integers do not overflow",
        "_kinds/elementwise.py",
        "_NARROW_BYTES = 4",
        "_NARROW_BYTES = 1",
        "test_kinds.py",
    ),
    # --- State
    Mutant(
        "BatchNorm sees one device's batch",
        "_batch_norm.py",
        "elif context.sync_batch_norm and axis_name is None:",
        "elif False:",
        "test_state.py test_oracle_matrix.py -k norm or Norm or bn",
    ),
    Mutant(
        "masked BatchNorm averages means of unlike counts",
        "_batch_norm.py",
        "return lax.psum(jnp.sum(v, axes, where=mask), axis_name) / count",
        "return lax.pmean(jnp.mean(v, axes, where=mask), axis_name)",
        "test_state.py test_field_cases.py -k mask",
    ),
    Mutant(
        "the device's index is not folded in",
        "_rngs.py",
        "    return fold(key, lax.axis_index(context.axis_name))",
        "    return key",
        "test_state.py test_arguments.py -k drop or draw or key or rng or random or stream",
    ),
    Mutant(
        "parameters are initialised differently on each device",
        "_rngs.py",
        'if rngs == "broadcast" or tag == PARAMS_STREAM:',
        'if rngs == "broadcast":',
        "test_state.py -k made_in_a_step",
    ),
    Mutant(
        "rngs= names no stream",
        "_rngs.py",
        "    return tag not in kept",
        "    return True",
        "test_state.py -k rng or stream or broadcast or draw",
    ),
    Mutant(
        "a metric counts one device's batch",
        "_metrics.py",
        "self.count[...] += lax.psum(count, context.axis_name)",
        "self.count[...] += count",
        "test_state.py test_oracle_matrix.py -k metric or average or count or accuracy",
    ),
    Mutant(
        "Welford's means of means are averaged",
        "_metrics.py",
        "self.m2[...] += m2 + delta * delta * count * before / self.count",
        "self.m2[...] += m2",
        "test_state.py -k welford or metric",
    ),
    Mutant(
        "a rule accumulates the whole value",
        "_state_reduce.py",
        "return old + lax.psum(new - old, axis_name)",
        "return lax.psum(new, axis_name)",
        "test_state.py -k rule or accumulate or reduce",
    ),
    Mutant(
        "the last rule that matches wins",
        "_state_reduce.py",
        "    for key, rule in rules:\n",
        "    for key, rule in reversed(rules):\n",
        "test_state.py -k rule or filter or first",
    ),
    Mutant(
        "a rule that varies between devices is accepted",
        "_plan.py",
        "(taint,) = find_variation(body, taints, axis_name=options.axis_name).outputs",
        "taint = None",
        "test_errors.py -k rule_that_leaves",
    ),
    # --- Writing back
    Mutant(
        "a Variable is forgotten on write-back",
        "_graph.py",
        "for holder, value in zip(self._flat.leaves, raw, strict=True):",
        "for holder, value in list(zip(self._flat.leaves, raw, strict=True))[1:]:",
        "test_oracle_matrix.py test_arguments.py",
    ),
    Mutant(
        "a repeated call forgets a Variable",
        "_snapshot.py",
        "value in pairs:\n                set_raw_value",
        "value in list(pairs)[1:]:\n                set_raw_value",
        "test_repeat.py",
    ),
    Mutant(
        "metadata is not written back",
        "_graph.py",
        "if metadata is not None and variable.get_metadata() != metadata:",
        "if False:",
        "test_repeat.py test_arguments.py -k metadata",
    ),
    Mutant(
        "a failed verification keeps the new state",
        "_data_parallel.py",
        "            call.state.replace(oracle.before)\n",
        "",
        "test_verify.py",
    ),
    Mutant(
        "Ctrl-C stops the writing",
        "_interrupt.py",
        "        write()\n        raise",
        "        raise",
        "test_robustness.py -k interrupt",
    ),
    # --- Calls that repeat others
    Mutant(
        "attributes are not looked at",
        "_snapshot.py",
        "                and _same(\n",
        "                and (lambda *_: True)(\n",
        "test_repeat.py",
    ),
    Mutant(
        "metadata is not looked at",
        "_snapshot.py",
        "                and [*map(_metadata, self.variables)] == self._metadata\n",
        "",
        "test_repeat.py",
    ),
    Mutant(
        "new attributes are not looked at",
        "_snapshot.py",
        "[*map(len, places), *map(len, self._lists)] == self._sizes",
        "True",
        "test_repeat.py",
    ),
    Mutant(
        "types are not looked at",
        "_snapshot.py",
        "                and [*map(type, modules), *map(type, self.variables)] == self._types\n",
        "",
        "test_repeat.py",
    ),
    Mutant(
        "shapes of the state are not looked at",
        "_repeat.py",
        "same_shapes = as_left or [*map(_shape, state)] == self._shapes",
        "same_shapes = True",
        "test_repeat.py test_arguments.py",
    ),
    Mutant(
        "True is 1",
        "_roles.py",
        "            and type(self.value) is type(other.value)\n",
        "",
        "test_arguments.py",
    ),
    # --- Arguments and batches
    Mutant(
        "in_axes is ignored",
        "_roles.py",
        "return Argument(path, Role.BATCH, _checked_axis(path, leaf, axis), why)",
        "return Argument(path, Role.BATCH, 0, why)",
        "test_arguments.py",
    ),
    Mutant(
        "an array given as replicated is split",
        "_roles.py",
        "    if axis is None or leaf.ndim == 0:\n",
        "    if leaf.ndim == 0:\n",
        "test_arguments.py",
    ),
    Mutant(
        "padding is left in the outputs",
        "_prepared.py",
        "        leaves = unpad(list(leaves), launch.padded_axes, self.bound.unpadded_size)\n",
        "",
        "test_uneven.py",
    ),
    Mutant(
        "padding may change an output",
        "_comparison.py",
        "if not kind.same and (leaf.is_state or kind.axis is None):",
        "if False:",
        "test_uneven.py",
    ),
    Mutant(
        "batch arrays may disagree on their size",
        "_uneven.py",
        "if len(set(sizes)) > 1:",
        "if False:",
        "test_errors.py test_arguments.py",
    ),
    Mutant(
        "a call inside a transform is let through",
        "_outermost.py",
        "    if traced:\n",
        "    if False:\n",
        "test_errors.py",
    ),
    # --- Strategies and placement
    Mutant(
        "auto partitions a kernel",
        "_strategies/auto.py",
        "        if name in KERNELS:\n",
        "        if False:\n",
        "test_kernels.py",
    ),
    Mutant(
        "nothing is donated",
        "_strategies/_interface.py",
        "return (0,) if self.donate else ()",
        "return ()",
        "test_compiled.py -k donat",
    ),
    Mutant(
        "arrays that the caller holds are donated",
        "_placement.py",
        "out.append(leaf if own else jnp.copy(leaf))",
        "out.append(leaf)",
        "test_arguments.py test_repeat.py test_field_cases_state.py -k donat",
    ),
    Mutant(
        "the optimizer is not divided",
        "_launches.py",
        "shard_optimizer=self._settings.shard_optimizer,",
        "shard_optimizer=False,",
        "test_sharding.py",
    ),
    Mutant(
        "a per_device kernel draws alike on all devices",
        "_kernel.py",
        "split_key(value, context) if split and is_key(value) and value.ndim == 0 else value",
        "value",
        "test_kernels.py -k key or draw or random",
    ),
    Mutant(
        "a failed copy of the state counts as the state",
        "_strategies/_interface.py",
        "check_kept(state_leaves, error)",
        "check_kept(donated, error)",
        "test_state.py -k fails_on_the_device",
    ),
    # --- Accumulation, collectives, checks
    Mutant(
        "microbatches are weighted alike",
        "_accumulate.py",
        "task, context) if counts.counted else None",
        "task, context) if False else None",
        "test_accumulate.py",
    ),
    Mutant(
        "accumulated gradients are not divided",
        "_accumulate.py",
        "        sums = [total / task.microbatches for total in sums]\n",
        "",
        "test_accumulate.py",
    ),
    Mutant(
        "microbatches are consecutive rows",
        "_accumulate.py",
        "    return jnp.swapaxes(strided, 0, 1)",
        "    return array.reshape(microbatches, -1, *array.shape[1:])",
        "test_accumulate.py",
    ),
    Mutant(
        "the derivative of a maximum goes everywhere",
        "_collectives.py",
        "    share = (x == largest).astype(tangent.dtype)\n",
        "    share = jnp.ones_like(tangent)\n",
        "test_collectives.py",
    ),
    Mutant(
        "a masked mean is a mean of means",
        "_collectives.py",
        "        total, count = psum((total, count))\n",
        "        return pmean((total / count).astype(dtype))\n",
        "test_collectives.py test_gradients.py",
    ),
    Mutant(
        "copies that differ are not noticed",
        "_verify.py",
        "            return largest == ~complement\n",
        "            return largest == largest\n",
        "test_verify.py",
    ),
    Mutant(
        "verify finds nothing",
        "_verify.py",
        "            if problem:\n",
        "            if False:\n",
        "test_verify.py",
    ),
    Mutant(
        "processes with unlike state go on",
        "_together.py",
        "        if differing:\n",
        "        if False:\n",
        "test_processes.py",
    ),
    Mutant(
        "flags are left out of the comparison of the copies",
        "_verify.py",
        "leaf = leaf.astype(jnp.uint8)",
        "leaf = jnp.zeros(leaf.shape, jnp.uint8)",
        "test_verify.py -k flags",
    ),
]


def run(mutant: Mutant) -> tuple[Mutant, bool, float]:
    """Returns a mutant, whether a test failed for it, and after how many seconds."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("nnx_dp", "tests", "docs"):
            ignored = shutil.ignore_patterns("__pycache__", "_build")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", copy)
        mutate(mutant, copy)
        files, _, chosen = mutant.tests.partition(" -k ")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += [f"tests/{name}" for name in files.split()]
        command += ["-k", chosen] if chosen else []
        result = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, "PYTHONPATH": folder},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    # 1: tests failed.  Anything else but 0, such as 4 or 5, is a mistake in the list above.
    if result.returncode not in (0, 1) or "error" in result.stdout.splitlines()[-1]:
        raise RuntimeError(f"{mutant.name}: pytest could not run\n{result.stdout}{result.stderr}")
    return mutant, result.returncode == 1, time.monotonic() - start


def mutate(mutant: Mutant, root: Path) -> None:
    """Breaks the rule in a copy of the package.

    Raises:
      ValueError: if what is to be replaced does not occur exactly once.
    """
    path = root / "nnx_dp" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: found {text.count(mutant.old)} times in {mutant.file}")
    mutated = text.replace(mutant.old, mutant.new)
    compile(mutated, str(path), "exec")
    path.write_text(mutated)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants with this in their name")
    parser.add_argument("--jobs", type=int, default=1, help="how many to run at once")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if arguments.only in mutant.name]
    survived = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for mutant, killed, seconds in pool.map(run, chosen):
            print(
                f"{'killed' if killed else 'SURVIVED':9}{seconds:5.0f} s  {mutant.name}", flush=True
            )
            if not killed:
                survived.append(mutant)
    print(f"{len(chosen) - len(survived)} of {len(chosen)} mutants killed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
