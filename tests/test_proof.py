"""What the replication proof must catch, and what it must let pass, in whole training steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from oracle import PER_DEVICE, STRATEGIES, check_against_one_device, linear, refused, regression

import nnx_dp

BATCHES = [regression(seed=0), regression(seed=1), regression(seed=2)]


class Codebook(nnx.Module):
    """The codebook of a VQ-VAE, updated by moving averages of what is assigned to each code."""

    def __init__(self, rngs):
        self.codes = nnx.Param(rngs.normal((4, 3)))
        self.counts = nnx.Variable(jnp.ones(4))

    def assign(self, x):
        distances = jnp.sum((x[:, None] - self.codes[...]) ** 2, -1)
        return jax.nn.one_hot(jnp.argmin(distances, -1), 4)


def codebook_update(codebook, x, y, total=lambda value: value):
    assigned = codebook.assign(x)
    counts, sums = total(assigned.sum(0)), total(assigned.T @ x)
    codebook.counts[...] = 0.9 * codebook.counts[...] + 0.1 * counts
    codebook.codes[...] = 0.9 * codebook.codes[...] + 0.1 * sums / (
        1 + codebook.counts[...][:, None]
    )


class Replay(nnx.Module):
    def __init__(self):
        self.next = nnx.Variable(jnp.zeros((), jnp.int32))
        self.stored = nnx.Variable(jnp.zeros((16, 3)))


def replay_store(replay, x, y):
    replay.stored[...] = lax.dynamic_update_slice(replay.stored[...], x, (replay.next[...], 0))
    replay.next[...] = (replay.next[...] + x.shape[0]) % 16


class Scaled(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(rngs.normal((3, 1)))
        self.scale = nnx.Param(jnp.ones(()))


def overwrite_with_a_batch_statistic(model, x, y):
    model.scale[...] = jnp.mean(jnp.abs(x))


def unsynchronised_gradient(model, x, y):
    graphdef, params = nnx.split(model)

    def loss_fn(params):
        return jnp.mean((x @ nnx.merge(graphdef, params).kernel[...] - y) ** 2)

    grads = jax.grad(loss_fn)(params)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))


@pytest.mark.parametrize("strategy", PER_DEVICE)
@pytest.mark.parametrize(
    ("make", "step", "path"),
    [
        (lambda: Codebook(nnx.Rngs(0)), codebook_update, r"codebook\.(codes|counts)"),
        (Replay, replay_store, r"replay\.(next|stored)"),
        (lambda: Scaled(nnx.Rngs(0)), overwrite_with_a_batch_statistic, r"model\.scale"),
        (lambda: Scaled(nnx.Rngs(0)), unsynchronised_gradient, r"model\.kernel"),
    ],
    ids=["codebook", "replay index", "batch statistic", "jax.grad"],
)
def test_drift_is_caught_by_path_and_line(make, step, path, strategy):
    state = make()
    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    with refused(ValueError, path + " would .*", state) as caught:
        dp_step(state, *BATCHES[0])
    assert "the batch (x)" in str(caught.value) or "one device computes" in str(caught.value)


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_unsynchronised_gradient_is_pointed_to_its_line(strategy):
    step = nnx_dp.data_parallel(unsynchronised_gradient, strategy=strategy, devices=4)
    with pytest.raises(ValueError, match=r"test_proof\.py:\d+.*\n.*nnx_dp\.value_and_grad"):
        step(Scaled(nnx.Rngs(0)), *BATCHES[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_codebook_with_collectives_is_exact(strategy):
    def step(codebook, x, y):
        codebook_update(codebook, x, y, total=nnx_dp.psum)

    check_against_one_device(
        step, lambda: (Codebook(nnx.Rngs(0)),), BATCHES, strategy=strategy, rtol=1e-4
    )


def apply_update(model, optimizer, grads):
    optimizer.update(model, grads)


def leave_alone(model, optimizer, grads):
    pass


def scaled_loss_step(model, optimizer, scale, x, y):
    """Loss scaling: the update is skipped, and the scale halved, where a gradient overflows."""

    def loss_fn(model):
        return jnp.mean((model(x) - y) ** 2) * scale[...]

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    grads = jax.tree.map(lambda g: g / scale[...], grads)
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
    nnx.cond(finite, apply_update, leave_alone, model, optimizer, grads)
    scale[...] = jnp.where(finite, scale[...], scale[...] / 2)
    return loss


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scale", [8.0, np.inf])
def test_loss_scaling_under_a_finite_check(scale, strategy):
    check_against_one_device(
        scaled_loss_step,
        lambda: (*linear(0.01), nnx.Variable(jnp.array(scale))),
        BATCHES,
        strategy=strategy,
        rtol=1e-4,
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weight_decay_mask_and_schedule(strategy):
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
    tx = optax.adamw(
        schedule, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    )

    def make():
        model, _ = linear()
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    check_against_one_device(step, make, BATCHES, strategy=strategy, rtol=1e-4)


@pytest.mark.parametrize("strategy", PER_DEVICE)
def test_check_false_leaves_it_to_the_caller(strategy):
    model = Scaled(nnx.Rngs(0))
    step = nnx_dp.data_parallel(
        overwrite_with_a_batch_statistic, strategy=strategy, devices=4, check=False
    )
    step(model, *BATCHES[0])
    with pytest.raises(AssertionError, match=r"scale differs"):
        nnx_dp.assert_replicated(model)


def raw_collective(model, x, y):
    return lax.pmean(model(x).mean(), "data")


def test_errors_of_jax_come_with_our_sentence_first():
    model, _ = linear()
    x, y = BATCHES[0]
    step = nnx_dp.data_parallel(raw_collective, strategy="jit", devices=4)
    with pytest.raises(NameError, match=r'over the axis "data".*nnx_dp\.psum') as caught:
        step(model, x, y)
    assert "unbound axis name" in str(caught.value.__cause__)
    assert np.isfinite(
        nnx_dp.data_parallel(raw_collective, strategy="shard_map", devices=4)(model, x, y)
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("Mosaic kernels cannot be automatically partitioned."), "nnx_dp.per_device"),
        (ValueError("sharding ... is not divisible by 4"), "split unevenly"),
        (ValueError("Received incompatible devices for jitted computation"), "committed to other"),
        (ValueError("context mesh A should match the mesh B"), "belongs to another mesh"),
        (ValueError("`in_axes` cannot contain `StateAxes` objects"), "graph_updates=True"),
    ],
)
def test_other_errors_of_jax(error, said):
    def broken(x):
        raise error

    with pytest.raises(ValueError, match=said) as caught:
        nnx_dp.data_parallel(broken, strategy="jit", devices=4)(np.ones((8, 3)))
    assert caught.value.__cause__ is error
