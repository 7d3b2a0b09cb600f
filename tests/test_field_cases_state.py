"""Cases from the field about state, caches and compilation; the others: test_field_cases.py."""

import gc
import inspect

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from oracle import (
    STRATEGIES,
    assert_same,
    check_against_one_device,
    linear,
    refused,
    regression,
    train_step,
)

import nnx_dp

X, Y = regression()
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


@every_strategy
def test_module_that_is_captured_and_written_to(strategy):
    """https://github.com/google/flax/issues/3997, /5050: TraceContextError, and nothing leaks."""
    model, captured = linear()[0], linear(seed=1)[0]

    def step(model, x):
        captured.kernel[...] = model.kernel[...] * 2
        return model(x)

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    with refused(flax.errors.TraceContextError, "argument of the step", model, captured):
        dp_step(model, X)
    assert not isinstance(captured.kernel[...], jax.core.Tracer)
    assert_same(captured(X), linear(seed=1)[0](X))
    fine = nnx_dp.data_parallel(lambda model, x: model(x), strategy=strategy, devices=4)
    assert_same(fine(model, X), model(X))


@every_strategy
def test_gradient_over_a_merged_model(strategy):
    """https://github.com/pyro-ppl/numpyro/pull/2067: jax.grad over nnx.merge."""

    def step(model, x, y):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def loss_fn(params):
            return jnp.mean((nnx.merge(graphdef, params, rest)(x) - y) ** 2)

        grads = nnx_dp.grad(loss_fn)(params)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))

    check_against_one_device(step, lambda: linear()[:1], [(X, Y)] * 2, strategy=strategy)


@every_strategy
def test_error_in_the_middle_of_a_step(strategy):
    """The model is usable afterwards, by this step and by any other."""
    raising = [True]

    def step(model, optimizer, x, y):
        loss = train_step(model, optimizer, x, y)
        if raising[0]:
            raise KeyError("half way")
        return loss

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4)
    state, plain = linear(), linear()
    with refused(KeyError, "half way", *state):
        dp_step(*state, X, Y)
    grads = nnx.grad(lambda m: jnp.mean(m(X)))(state[0])
    assert_same(grads, nnx.grad(lambda m: jnp.mean(m(X)))(plain[0]))
    raising[0] = False
    for _ in range(2):
        assert_same(dp_step(*state, X, Y), train_step(*plain, X, Y))
    assert_same(state, plain)


@every_strategy
def test_batch_norm_called_twice(strategy):
    """https://github.com/google/flax/issues/4760: the first call worked, the second failed."""
    make = lambda: (nnx.BatchNorm(3, rngs=nnx.Rngs(0)),)  # noqa: E731
    _, (model,), _ = check_against_one_device(
        lambda model, x: model(x), make, [(X,), (X,), (2 * X,)], strategy=strategy
    )
    assert {leaf.shape for leaf in jax.tree.leaves(nnx.state(model))} == {(3,)}


@every_strategy
def test_donated_state_is_gone_and_nothing_warns(strategy):
    """https://github.com/jax-ml/jax/issues/15368: "donated buffers were not usable"."""
    dp_step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4, donate=True)
    state, plain = linear(), linear()
    mine = state[0].kernel[...]
    for _ in range(3):
        before = state[0].kernel[...]
        assert_same(dp_step(*state, X, Y), train_step(*plain, X, Y))
    assert before.is_deleted()
    assert not mine.is_deleted()
    assert_same(state, plain)


@every_strategy
def test_donation_spares_what_the_caller_put_in(strategy):
    """Arrays given from outside, at any call, are the caller's, and shared ones are given once."""
    dp_step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4, donate=True)
    state, plain = linear(), linear()
    saved = nnx_dp.replicate(nnx.clone(state[0]), mesh=dp_step.mesh).kernel[...]
    for _ in range(3):
        dp_step(*state, X, Y)
        train_step(*plain, X, Y)
        state[0].kernel[...] = saved
        plain[0].kernel[...] = np.asarray(saved)
    assert not saved.is_deleted()
    assert_same(state, plain)
    twin = nnx.clone(state[0])
    both = nnx_dp.data_parallel(
        lambda a, b, x: a(x) + b(x), strategy=strategy, devices=4, donate=True
    )
    for _ in range(2):
        assert_same(both(state[0], twin, X), 2 * plain[0](X))


@every_strategy
def test_donation_spares_what_a_step_returned(strategy):
    """An output is the caller's, even if it is a parameter, or is put into the state again."""

    def step(model, optimizer, x, y):
        train_step(model, optimizer, x, y)
        return model.kernel[...], jnp.mean(model.kernel[...]) * jnp.ones((3, 1))

    dp_step = nnx_dp.data_parallel(step, strategy=strategy, devices=4, donate=True)
    state, outputs, expected = linear(), [], []
    for _ in range(3):
        kernel, other = dp_step(*state, X, Y)
        outputs += [kernel, other]
        expected += [np.array(kernel), np.array(other)]
        state[0].kernel[...] = other
    assert not any(output.is_deleted() for output in outputs)
    assert_same(outputs, expected)


@every_strategy
def test_fresh_optimizers(strategy):
    """https://github.com/google/flax/issues/5548, google-deepmind/optax/issues/353: recompiles."""

    def count(make_tx, decorate):
        traces = []

        def step(model, optimizer, x, y):
            traces.append(1)
            return train_step(model, optimizer, x, y)

        decorated = decorate(step)
        for _ in range(3):
            model = linear()[0]
            optimizer = nnx.Optimizer(model, make_tx(), wrt=nnx.Param)
            for _ in range(2):
                decorated(model, optimizer, X, Y)
        return len(traces)

    ours = lambda f: nnx_dp.data_parallel(f, strategy=strategy, devices=4)  # noqa: E731
    shared = optax.adam(1e-3)
    once = count(lambda: shared, ours)
    # Fresh functions are another program, to nnx.jit too; a shared transformation is not.
    assert count(lambda: optax.adam(1e-3), ours) == 3 * once
    assert count(lambda: optax.adam(1e-3), nnx.jit) == 3


@every_strategy
def test_batches_of_one_axis_and_then_two(strategy):
    """https://github.com/jax-ml/jax/issues/21225: a second rank broke the first one's cache."""
    scale = lambda: (nnx.Param(jnp.full((), 2.0)),)  # noqa: E731
    batches = [(X[:, 0],), (X,), (X[:, 0],), (X,)]
    check_against_one_device(lambda s, x: x * s[...], scale, batches, strategy=strategy)


def test_replication_keeps_one_copy_on_each_device():
    """https://github.com/fermiflow/CoulombGas/issues/2: N copies were stacked on one device."""
    model = nnx.Linear(128, 128, rngs=nnx.Rngs(0))
    gc.collect()
    nnx_dp.replicate(model, devices=4)
    for leaf in jax.tree.leaves(nnx.state(model)):
        assert [shard.data.shape for shard in leaf.addressable_shards] == [leaf.shape] * 4
        assert len({shard.device for shard in leaf.addressable_shards}) == 4


@every_strategy
@pytest.mark.parametrize("inside", [True, False])
def test_optimizer_made_under_a_mesh(strategy, inside):
    """https://github.com/google/flax/issues/5172, /5105: it changed the sharding of the model."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    if inside:
        with jax.set_mesh(mesh):
            state = linear()
    else:
        state = linear()
    dp_step = nnx_dp.data_parallel(train_step, strategy=strategy, mesh=mesh)
    plain = linear()
    for _ in range(2):
        assert_same(dp_step(*state, X, Y), train_step(*plain, X, Y))
    for leaf in jax.tree.leaves(nnx.state(state)):
        assert leaf.sharding.is_fully_replicated
        assert len(leaf.sharding.device_set) == 4
    assert_same(state, plain)


def test_decorated_step_can_be_inspected():
    """https://github.com/jax-ml/jax/issues/32701: pmap lost __wrapped__."""

    def step(model: nnx.Module, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
        """Scales."""
        return x * scale

    dp_step = nnx_dp.data_parallel(step)
    assert dp_step.__wrapped__ is step
    assert inspect.signature(dp_step) == inspect.signature(step)
    assert (dp_step.__name__, dp_step.__doc__) == ("step", "Scales.")
    assert inspect.get_annotations(dp_step) == inspect.get_annotations(step)
