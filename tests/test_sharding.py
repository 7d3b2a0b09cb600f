"""State that is not whole on every device: ZeRO-1, and a mesh with a second axis."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import assert_same, linear, refused, regression, train_step

import nnx_dp


class Wide(nnx.Module):
    def __init__(self, partitioned=False):
        rngs, init = nnx.Rngs(0), nnx.initializers.lecun_normal()
        over = (lambda spec: nnx.with_partitioning(init, spec)) if partitioned else lambda _: init
        self.up = nnx.Linear(3, 512, kernel_init=over((None, "model")), rngs=rngs)
        self.mid = nnx.Linear(512, 64, kernel_init=over(("model", None)), rngs=rngs)
        self.down = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.mid(nnx.tanh(self.up(x)))))


def wide(**options):
    model = Wide(**options)
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def specs(node):
    return {
        "/".join(map(str, path)): tuple(leaf.get_raw_value().sharding.spec)
        for path, leaf in nnx.to_flat_state(nnx.state(node))
    }


BATCHES = [regression(24, seed) for seed in range(3)]


@pytest.mark.parametrize(
    ("devices", "strategy"), [(1, "jit"), (2, "auto"), (3, "jit"), (8, "jit"), (8, "auto")]
)
def test_sharded_optimizer_equals_one_device(devices, strategy):
    dp_step = nnx_dp.data_parallel(
        train_step, strategy=strategy, devices=devices, shard_optimizer=True, check_every=2
    )
    state, plain = wide(), wide()
    for batch in BATCHES:
        assert_same(dp_step(*state, *batch), train_step(*plain, *batch), rtol=1e-4)
        assert_same(state, plain, rtol=1e-3, atol=1e-5)
    nnx_dp.assert_replicated(state[0])


def test_each_device_holds_its_part_of_the_optimizer(optimised):
    def argument_bytes(**options):
        dp_step = nnx_dp.data_parallel(train_step, strategy="jit", devices=4, **options)
        program = dp_step.lower(*wide(), *BATCHES[0]).compile()
        memory = program.memory_analysis()
        return memory.argument_size_in_bytes, memory.output_size_in_bytes

    params = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(wide()[0], nnx.Param)))
    saved = 2 * params * 3 / 4  # mu and nu, but for a quarter
    for whole, divided in zip(argument_bytes(), argument_bytes(shard_optimizer=True), strict=True):
        assert 0.97 * saved <= whole - divided <= saved


def test_what_is_small_or_indivisible_stays_whole():
    dp_step = nnx_dp.data_parallel(train_step, devices=3, shard_optimizer=True)
    state = wide()
    dp_step(*state, *BATCHES[0])
    found = specs(state[1])
    divided = {path for path, spec in found.items() if any(spec)}
    # Of (3, 512) and (512, 64) only the first has an axis that 3 devices divide.
    assert {path.split("/", 3)[-1] for path in divided} <= {
        path.split("/", 3)[-1] for path in found if path.endswith("up/kernel")
    }
    assert len(divided) == 2
    assert found[divided.pop()] == ("data",)


def test_sharded_optimizer_donated():
    dp_step = nnx_dp.data_parallel(train_step, devices=4, shard_optimizer=True, donate=True)
    state, plain = wide(), wide()
    for batch in BATCHES:
        dp_step(*state, *batch)
        train_step(*plain, *batch)
    assert_same(state, plain, rtol=1e-3, atol=1e-5)


def test_checkpoints_to_and_from_the_replicated_form(tmp_path):
    def save(name, state):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / name, nnx.state(nnx.List(state)))

    def restored(name):
        state = wide()
        with ocp.StandardCheckpointer() as checkpointer:
            like = nnx.state(nnx.List(state))
            nnx.update(nnx.List(state), checkpointer.restore(tmp_path / name, like))
        return state

    sharded = nnx_dp.data_parallel(train_step, devices=4, shard_optimizer=True)
    whole = nnx_dp.data_parallel(train_step, devices=2)
    plain = wide()
    for batch in BATCHES:
        train_step(*plain, *batch)
    first = wide()
    sharded(*first, *BATCHES[0])
    save("sharded", first)
    second = restored("sharded")
    whole(*second, *BATCHES[1])
    save("whole", second)
    third = restored("whole")
    sharded(*third, *BATCHES[2])
    assert_same(third, plain, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"strategy": "shard_map"}, {"strategy": "pmap"}, {"grad_dtype": jnp.bfloat16}]
)
def test_sharded_optimizer_needs_jit(options):
    with pytest.raises(ValueError, match="shard_optimizer=True needs XLA to partition the step"):
        nnx_dp.data_parallel(train_step, shard_optimizer=True, **options)


# ---------------------------------------------------------------------------------------------
# A mesh with two axes


def two_axes(kind):
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(kind,) * 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("made", ["in the mesh", "before the mesh", "placed by hand"])
def test_parameters_keep_their_own_sharding(kind, made):
    mesh = two_axes(kind)
    if made == "in the mesh":
        with jax.set_mesh(mesh):
            state = wide(partitioned=True)
    else:
        with nnx.use_eager_sharding(False):
            state = wide(partitioned=made == "before the mesh")
    if made == "placed by hand":
        over = {"up": P(None, "model"), "mid": P("model")}
        for name, spec in over.items():
            kernel = getattr(state[0], name).kernel
            kernel.set_raw_value(jax.device_put(kernel[...], NamedSharding(mesh, spec)))
    dp_step = nnx_dp.data_parallel(train_step, strategy="jit", mesh=mesh)
    plain = wide()
    for batch in BATCHES:
        assert_same(dp_step(*state, *batch), train_step(*plain, *batch), rtol=1e-4)
        assert_same(state, plain, rtol=1e-3, atol=1e-5)
        found = specs(state[0])
        assert found["up/kernel"] == (None, "model")
        assert found["mid/kernel"][:1] == ("model",)
        assert not any(found["down/kernel"])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_mesh_that_is_set_is_used(kind):
    mesh, plain = two_axes(kind), wide()
    with jax.set_mesh(mesh):
        state = wide(partitioned=True)
        dp_step = nnx_dp.data_parallel(train_step, strategy="jit")
        for batch in BATCHES:
            dp_step(*state, *batch)
            train_step(*plain, *batch)
        assert dp_step.mesh.shape == {"data": 4, "model": 2}
        assert specs(state[0])["up/kernel"] == (None, "model")
    assert_same(state, plain, rtol=1e-3, atol=1e-5)


def test_replicate_and_shard_of_a_step_place_beforehand():
    model, optimizer = linear()
    step = nnx_dp.data_parallel(train_step, devices=4)
    assert step.replicate(model, optimizer) == (model, optimizer)
    assert len(model.kernel[...].sharding.device_set) == 4
    nnx_dp.assert_replicated((model, optimizer))
    x, y = step.shard(regression())
    assert x.sharding.shard_shape(x.shape) == (2, 3)
    expected = linear()
    assert_same(step(model, optimizer, x, y), train_step(*expected, *regression()))
    assert_same((model, optimizer), expected)


def test_axes_that_a_mesh_lacks_are_left_out_of_a_parameters_own():
    """`nnx.with_partitioning` names axes of the largest mesh that a model is meant for."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    init = nnx.with_partitioning(nnx.initializers.ones, (("expert", "model"), "pipeline"))

    def make():
        with nnx.use_eager_sharding(False):
            model = nnx.Linear(4, 1, kernel_init=init, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    x, y = regression(features=4)
    state, expected = make(), make()
    step = nnx_dp.data_parallel(train_step, mesh=mesh)
    assert_same(step(*state, x, y), train_step(*expected, x, y))
    assert_same(state, expected)
    assert state[0].kernel[...].sharding.shard_shape((4, 1)) == (2, 1)


def test_sharded_optimizer_beside_a_model_axis():
    mesh, plain = two_axes(AxisType.Auto), wide()
    with jax.set_mesh(mesh):
        state = wide(partitioned=True)
    dp_step = nnx_dp.data_parallel(train_step, strategy="jit", mesh=mesh, shard_optimizer=True)
    for batch in BATCHES:
        assert_same(dp_step(*state, *batch), train_step(*plain, *batch), rtol=1e-4)
    assert_same(state, plain, rtol=1e-3, atol=1e-5)
    found = {path: spec for path, spec in specs(state[1]).items() if path.endswith("mid/kernel")}
    assert set(found.values()) == {("model", "data")}


@pytest.mark.parametrize("strategy", ["shard_map", "pmap"])
def test_sharded_parameters_are_refused_where_each_device_has_all(strategy):
    mesh = two_axes(AxisType.Auto)
    with jax.set_mesh(mesh):
        state = wide(partitioned=True)
    dp_step = nnx_dp.data_parallel(train_step, strategy=strategy, mesh=mesh)
    with refused(ValueError, "kernel is sharded as P.*'model'", *state):
        dp_step(*state, *BATCHES[0])


def test_state_of_a_step_on_an_explicit_mesh_is_usable_outside():
    mesh = two_axes(AxisType.Explicit)
    state, plain = linear(), linear()
    dp_step = nnx_dp.data_parallel(train_step, strategy="jit", mesh=mesh)
    dp_step(*state, *BATCHES[0])
    train_step(*plain, *BATCHES[0])
    np.testing.assert_allclose(state[0](BATCHES[0][0]), plain[0](BATCHES[0][0]), rtol=1e-5)


@pytest.mark.parametrize("strategy", ["auto", "jit", "shard_map"])
@pytest.mark.parametrize("how", ["reshard", "out_sharding", "explicit_axes"])
def test_a_step_that_names_an_explicit_axis_is_told_so(strategy, how):
    mesh, state = jax.make_mesh((4, 2), ("data", "model")), linear()

    def step(model, optimizer, x, y):
        del optimizer, y
        if how == "reshard":
            return jax.sharding.reshard(model(x), P("data", None))
        if how == "out_sharding":
            return jnp.einsum("bi,ij->bj", x, model.kernel[...], out_sharding=P("data", None))
        spread = jax.sharding.explicit_axes(lambda x: x * 2, in_sharding=P("data", None))
        return spread(x)

    dp_step = nnx_dp.data_parallel(step, strategy=strategy)
    if how == "explicit_axes" and strategy != "shard_map":
        with jax.set_mesh(mesh):  # which makes the axes Explicit for a part of the step
            assert_same(dp_step(*state, *regression()), regression()[0] * 2)
        return
    with jax.set_mesh(mesh), refused((ValueError, RuntimeError), "an Explicit axis", *state):
        dp_step(*state, *regression())


def test_a_constraint_over_the_mesh_of_the_step_is_kept():
    mesh, state = jax.make_mesh((4, 2), ("data", "model")), wide()

    def step(model, x):
        spread = NamedSharding(dp_step.mesh, P("data", "model"))
        return jax.lax.with_sharding_constraint(model.mid(model.up(x)), spread)

    dp_step = nnx_dp.data_parallel(step, mesh=mesh)
    x, _ = regression()
    out = dp_step(state[0], x)
    assert out.sharding.spec == P("data", "model")
    assert_same(out, step(state[0], x))


@pytest.mark.parametrize("strategy", ["jit", "shard_map", "pmap"])
def test_what_a_step_returns_can_be_used_under_an_explicit_mesh(strategy):
    state, plain_state = linear(), linear()
    dp_step = nnx_dp.data_parallel(
        lambda *args: (train_step(*args), args[0](args[2])), strategy=strategy
    )
    for seed in range(3):
        batch = regression(seed=seed)
        expected = train_step(*plain_state, *batch)
        with jax.set_mesh(jax.make_mesh((8,), ("data",))):
            loss, rows = dp_step(*state, *batch)
            assert_same(loss / 2, expected / 2)
            assert_same(state[0](batch[0]), rows)
        assert_same(state, plain_state)
    loss, _ = dp_step(*state, *regression(seed=9))  # and outside again
    assert_same(loss, train_step(*plain_state, *regression(seed=9)))
