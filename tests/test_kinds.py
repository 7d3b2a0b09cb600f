"""What `find_kinds` claims must hold: the pair of jaxprs, against the values of real devices."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from nnx_dp._jaxpr import Literal, open_jaxpr
from nnx_dp._kinds import find_kinds
from nnx_dp._kinds.algebra import (
    INDEX,
    KEY,
    SAME,
    ZERO,
    Kind,
    add,
    elementwise,
    join,
    linear,
    multiply,
    rows,
    same,
    unknown,
)
from nnx_dp._kinds.pair import batch_axis

BATCH = 0
"""Marks an argument that is split on axis 0."""


def _traced(function, args, axes, axis_size, shards):
    """Returns the body at the shapes of one of `shards` parts, and the constants it closes over."""

    def shape(array, axis):
        sizes = list(np.shape(array))
        if axis is not None:
            sizes[axis] //= shards
        return jax.ShapeDtypeStruct(tuple(sizes), array.dtype)

    mesh = AbstractMesh((axis_size,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    outer, values = open_jaxpr(jax.make_jaxpr(mapped)(*map(shape, args, axes)))
    (equation,) = [e for e in outer.eqns if e.primitive.name == "shard_map"]
    body = equation.params["jaxpr"]
    known = dict(zip(outer.constvars, values, strict=True))
    extra = equation.invars[: len(open_jaxpr(body)[0].invars) - len(args)]
    return body, [atom.val if isinstance(atom, Literal) else known[atom] for atom in extra]


def kinds_of(function, args, axes, devices=2, **options):
    local, constants = _traced(function, args, axes, devices, devices)
    whole, others = _traced(function, args, axes, 1, 1)
    found, _ = find_kinds(
        local,
        whole,
        [None] * len(constants) + list(axes),
        devices=devices,
        axis_name="data",
        constants=list(zip(constants, others, strict=True)),
        **options,
    )
    return found


def _values(function, args, axes, devices):
    """Returns every output of every device, stacked."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    specs = tuple(P() if axis is None else P(*[None] * axis, "data") for axis in axes)
    mapped = jax.shard_map(
        lambda *args: [jnp.asarray(value)[None] for value in jax.tree.leaves(function(*args))],
        mesh=mesh,
        in_specs=specs,
        out_specs=P("data"),
        check_vma=False,
    )
    return [np.asarray(value).astype(np.complex128) for value in jax.jit(mapped)(*args)]


def assert_true(found, function, args, axes, devices=2):
    """Checks every claim against the values on `devices` devices and on one."""
    local = _values(function, args, axes, devices)
    whole = _values(function, args, [None] * len(args), 1)
    for kind, parts, (value,) in zip(found, local, whole, strict=True):
        expected = value * float(devices) ** kind.power
        close = lambda actual, expected=expected: np.testing.assert_allclose(  # noqa: E731
            actual, expected, rtol=2e-4, atol=2e-5 * max(1, np.abs(expected).max(initial=0))
        )
        if kind.tag == "zero":
            assert not value.any()
            assert not parts.any()
        elif kind.tag == "same":
            for part in parts:
                close(part)
        elif kind.tag == "rows":
            close(np.concatenate(list(parts), kind.rows_axis))
        elif kind.tag == "linear":
            close(parts.sum(0))
        elif kind.tag in ("max", "min"):
            close((parts.real.max if kind.tag == "max" else parts.real.min)(0))


def check(function, args, axes, *expected, devices=(2,)):
    """Checks that the kinds are as expected, and true.  "?" stands for unknown."""
    for count in devices:
        found = kinds_of(function, args, axes, count)
        assert_true(found, function, args, axes, count)
        expected_kinds = [unknown("") if kind == "?" else kind for kind in expected]
        assert found == expected_kinds, [(kind, kind.why) for kind in found]


def _random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X = _random(8, 8)
"""On two devices, four rows each: as many as other things, so no size tells the batch axis."""
LABELS = np.array([0, 3, 1, 2, 2, 0, 3, 1], np.int32)
MEAN, SUM, ROWS = linear(1), linear(0), rows(0)


# ---------------------------------------------------------------------------------------------
# The algebra

_KINDS = [ZERO, SAME, same(-1), same(1), rows(0), rows(0, 1), rows(1), linear(0), linear(1)]
_KINDS += [Kind("max"), Kind("min"), KEY, INDEX, Kind("number", rows_axis=0), unknown("why")]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (SAME, SAME, SAME),
        (ZERO, MEAN, MEAN),
        (MEAN, SAME, MEAN),
        (SUM, SAME, "?"),
        (SUM, same(-1), SUM),
        (SUM, MEAN, "?"),
        (ROWS, SAME, ROWS),
        (ROWS, same(-1), "?"),
        (rows(0), rows(1), "?"),
        (Kind("max"), Kind("max"), "?"),
        (Kind("max"), SAME, "?"),
        (INDEX, INDEX, "?"),
    ],
)
def test_sums(first, second, expected):
    for result in (add(first, second, "why"), add(second, first, "why")):
        assert result == (unknown("why") if expected == "?" else expected)


@pytest.mark.parametrize(
    ("first", "second", "product", "quotient"),
    [
        (SUM, same(-1), linear(-1), MEAN),
        (MEAN, SAME, MEAN, MEAN),
        (SAME, same(-1), same(-1), same(1)),
        (ROWS, same(-1), rows(0, -1), rows(0, 1)),
        (ROWS, ROWS, ROWS, ROWS),
        (ROWS, rows(1), "?", "?"),
        (MEAN, MEAN, "?", "?"),
        (SAME, MEAN, MEAN, "?"),
        (ZERO, SAME, ZERO, ZERO),
        (ZERO, ROWS, ZERO, ROWS),
        (ZERO, MEAN, ZERO, "?"),
        (Kind("max"), SAME, "?", "?"),
        (KEY, SAME, "?", "?"),
    ],
)
def test_products_and_quotients(first, second, product, quotient):
    for sign, expected in ((1, product), (-1, quotient)):
        result = multiply(first, second, "why", sign)
        assert result == (unknown("") if expected == "?" else expected)


def test_elementwise_functions_keep_only_whole_values_and_rows():
    assert elementwise([SAME, ZERO], "why") == SAME
    assert elementwise([ROWS, SAME], "why") == ROWS
    for kind in (MEAN, same(-1), rows(0, 1), Kind("max"), KEY, INDEX, Kind("number", 0, 0)):
        assert elementwise([kind], "why").tag == "unknown"
    assert elementwise([rows(0), rows(1)], "why").tag == "unknown"


@pytest.mark.parametrize("first", _KINDS)
@pytest.mark.parametrize("second", _KINDS)
def test_join_is_symmetric_and_idempotent(first, second):
    assert join(first, first, "why") == first
    assert join(first, second, "why") == join(second, first, "why")
    if {first.tag, second.tag} == {"same", "rows"}:
        assert join(first, second, "why").tag == "unknown"


def test_the_first_reason_is_kept():
    kind = unknown("the sort")
    assert add(kind, SAME, "a sum").why == "the sort"
    assert multiply(SAME, kind, "a product").why == "the sort"
    assert elementwise([SAME, kind], "sin").why == "the sort"


@pytest.mark.parametrize("kind", _KINDS)
def test_every_kind_has_its_reason(kind):
    assert kind.reason


def test_reductions_over_devices():
    assert (SUM.reduction, MEAN.reduction, same(-1).reduction) == ("sum", "mean", "sum")
    assert (Kind("max").reduction, Kind("min").reduction) == ("max", "min")
    for kind in (SAME, ZERO, ROWS, same(1), linear(-1), linear(2), KEY, unknown("")):
        assert kind.reduction is None


def test_batch_axis():
    assert batch_axis((4, 4), (8, 4), 2) == 0
    assert batch_axis((4, 1), (4, 3), 3) == 1
    assert batch_axis((4, 4), (4, 4), 2) is None
    assert batch_axis((4, 4), (8, 8), 2) == -1
    assert batch_axis((4,), (12,), 2) == -1
    assert batch_axis((4,), (4, 1), 2) == -1


# ---------------------------------------------------------------------------------------------
# Claims that were false, or nearly: each of these is a trap


def _pads_linear(x):
    return jnp.pad(x.sum(0), 1, constant_values=1.0)


def _updates_a_corner(x):
    return lax.dynamic_update_slice(x, jnp.ones((4, 1)), (0, 0))


def _pools_with_a_function_of_its_own(x):
    combine = lambda a, b: a * b * 1.0  # noqa: E731
    return lax.reduce_window(x, 1.0, combine, (3, 1), (1, 1), "SAME")


def _writes_to_a_ref(x):
    ref = jax.new_ref(jnp.zeros(8))
    ref[...] = lax.psum(x.mean(0), "data")
    return ref[...]


TRAPS = {
    "remainders": lambda x: lax.div(jnp.sum(x.astype(int) * 3), 2),
    "truth of a sum": lambda x: jnp.sum(x > 0, 0).astype(bool).astype(float),
    "rounded sum": lambda x: jnp.sum(x, 0).astype(int),
    "narrow integers": lambda x: jnp.sum(
        (x * 100).astype(jnp.int8), 0, dtype=jnp.int8, promote_integers=False
    ).astype(jnp.float32),
    "padded sum": _pads_linear,
    "corner of as many rows as a device has": _updates_a_corner,
    "rows and columns numbered": lambda x: x[jnp.arange(len(x)), jnp.arange(len(x))],
    "rows and columns numbered at once": lambda x: lax.gather(
        x,
        lax.broadcasted_iota(jnp.int32, (len(x), 2), 0),
        lax.GatherDimensionNumbers((), (0, 1), (0, 1)),
        (1, 1),
    ),
    "numbered from the end": lambda x: x[-jnp.arange(len(x))],
    "numbered in part": lambda x: x.reshape(-1)[jnp.arange(len(x))],
    "numbered too far": lambda x: x.at[jnp.arange(2 * len(x))].get(mode="fill", fill_value=0),
    "one number": lambda x: x[jnp.broadcast_to(jnp.arange(len(x))[1:2], (len(x),))],
    "exponent": lambda x: x ** len(x),
    "column": lambda x: x[:, len(x) - 1],
    "column slice": lambda x: lax.slice(x, (0, len(x) - 1), (len(x), len(x))),
    "columns of a split": lambda x: jnp.split(x, [len(x) // 4, len(x) // 4 + 2], axis=1)[1],
    "other operand": lambda x: jnp.sin(2 * x if len(x) > 4 else x + 0 * jnp.sin(x)),
    "which": lambda x: (lambda a, b: jnp.exp(a if len(x) > 4 else b))(x * 2, x * 3),
    "direction": lambda x: lax.scan(
        lambda c, row: (c * 0.5 + row, c), x[:, 0], x.T, reverse=len(x) > 4
    )[0],
    "transposed rows": lambda x: lax.reshape(x, (len(x) * 8,), dimensions=(1, 0)),
    "pooling over examples": _pools_with_a_function_of_its_own,
    "product of sums": lambda x: lax.reduce(x.sum(0), 1.0, lambda a, b: a * b * 1.0, (0,)),
    "quotient of nothing": lambda x: 0 * jnp.ones(8) / jnp.sum((x > 1.5) * 1.0, 0),
    "written to a Ref": _writes_to_a_ref,
    "half of the examples": lambda x: x[: len(x) // 2],
    "every other example": lambda x: x[::2],
    "reversed": lambda x: x[::-1],
    "rolled": lambda x: jnp.roll(x, 1, 0),
    "twice": lambda x: jnp.concatenate([x, x]),
    "Gram matrix": lambda x: x @ x.T,
    "merged the other way": lambda x: x.T.reshape(-1),
    "normalised over the batch": lambda x: jax.nn.softmax(x, 0),
    "sorted": lambda x: jnp.sort(x, 0),
    "cumulative": lambda x: jnp.cumsum(x, 0),
    "variance": lambda x: x.var(0),
    "largest of a mean": lambda x: jnp.max(x.mean(0)),
    "product": lambda x: jnp.prod(x, 0),
    "row zero": lambda x: x[0],
    "median": lambda x: jnp.median(x, 0),
    "ordered": lambda x: jnp.argsort(x[:, 0]),
    "taken": lambda x: x[jnp.argmax(x, 1)],
    "one device of many": lambda x: lax.psum(x, "data"),
    "sum of a maximum": lambda x: jnp.max(x, 0).sum(),
    "a maximum and more": lambda x: jnp.max(x, 0) + 1,
    "branch": lambda x: lax.cond(x.sum() > 0, lambda: 1.0, lambda: 2.0),
    "loop": lambda x: lax.while_loop(lambda c: c < x.sum(), lambda c: c + 1, 0.0),
    "scanned": lambda x: lax.scan(lambda c, row: (c * 0.5 + row, c), jnp.zeros(8), x)[0],
}


@pytest.mark.parametrize("name", TRAPS)
def test_traps(name):
    found = kinds_of(TRAPS[name], (X,), (BATCH,))
    assert_true(found, TRAPS[name], (X,), (BATCH,))
    assert not any(kind.same or kind.axis is not None or kind.reduction for kind in found)


def test_which_argument_depends_on_the_batch_size():
    def function(x, v, w):
        return jnp.sin(v if len(x) > 4 else w), v if len(x) > 4 else w

    check(function, (X, X[0], X[1]), (BATCH, None, None), "?", "?")


def test_constants_that_depend_on_the_batch_size():
    def function(x):
        size = len(x)
        return (
            x @ (np.ones(8, np.float32) / size),
            jnp.sin(np.ones(3, np.float32) / size),
            x.sum(0) * (np.ones(8, np.float32) / size),
            x + np.arange(size, dtype=np.float32)[:, None],
            x + np.ones((size, 1), np.float32),
            x * np.float32(np.nan),
            x[np.arange(size), jnp.argmax(x, 1)],
        )

    check(function, (X,), (BATCH,), rows(0, 1), "?", MEAN, "?", ROWS, ROWS, ROWS)


def test_collectives_inside_an_operation_that_is_not_known():
    def function(x):
        w = jnp.full(8, 2.0)
        total = lambda v: lax.psum(v, "data")  # noqa: E731
        return lax.custom_linear_solve(
            total, w, lambda f, b: b / lax.psum(1.0, "data"), symmetric=True
        )

    check(function, (X,), (BATCH,), "?")


def test_zero_to_the_power_of_nothing():
    check(lambda x: lax.integer_pow(jnp.zeros(3), 0), (X,), (BATCH,), SAME)


def test_padding_nothing_with_something():
    check(
        lambda x: (lax.pad(jnp.zeros(3), 1.0, [(1, 1, 0)]), lax.pad(0 * x, 1.0, [(0, 0, 0)] * 2)),
        (X,),
        (BATCH,),
        SAME,
        ROWS,
    )


def test_a_negative_maximum_is_a_minimum():
    check(
        lambda x: (-jnp.max(x, 0), -jnp.min(x), 0 - jnp.max(x), jnp.zeros(8) - jnp.min(x, 0)),
        (X,),
        (BATCH,),
        Kind("min"),
        Kind("max"),
        Kind("min"),
        Kind("max"),
        devices=(2, 8),
    )


# ---------------------------------------------------------------------------------------------
# Rules, each with what it is for


def test_sums_means_counts_and_extremes():
    check(
        lambda x: (
            x.sum(),
            x.mean(0),
            jnp.asarray(len(x)),
            x.sum(0) / len(x),
            jnp.max(x, 0),
            jnp.min(x),
            jnp.sum(x > 0),
            jnp.mean(x > 0),
            x.mean() + 0.5 * jnp.sum(jnp.ones(3)),
            x.mean(1).sum(),
        ),
        (X,),
        (BATCH,),
        SUM,
        MEAN,
        same(-1),
        MEAN,
        Kind("max"),
        Kind("min"),
        SUM,
        MEAN,
        MEAN,
        SUM,
        devices=(2, 8),
    )


def test_three_devices_and_a_batch_axis_elsewhere():
    x = _random(3, 6, 3)
    check(
        lambda x: (x.mean(1), x * 2, x.T, x.sum((0, 1)), x.reshape(-1, 3)),
        (x,),
        (1,),
        MEAN,
        rows(1),
        rows(1),
        SUM,
        "?",
        devices=(2, 3, 6),
    )


def test_one_example_on_each_device():
    check(
        lambda x: (
            x * 2,
            x.mean(),
            x + jnp.arange(8.0),
            x.sum(0),
            jnp.broadcast_to(x[:, :1], x.shape),
        ),
        (X,),
        (BATCH,),
        ROWS,
        MEAN,
        ROWS,
        SUM,
        ROWS,
        devices=(8,),
    )


def test_reshapes_and_transposes():
    check(
        lambda x: (
            x.reshape(-1),
            x.reshape(len(x), 2, 4),
            x.reshape(len(x) // 2, 16),
            x.T,
            x.reshape(len(x), 2, 4).transpose(1, 2, 0),
            x[:, None],
            jnp.squeeze(x[:, None], 1),
            jnp.stack([x, x]),
            jnp.stack([x, x], 1),
            jnp.unstack(x, axis=1)[2],
            jnp.split(x, 2, axis=1)[1],
        ),
        (X,),
        (BATCH,),
        ROWS,
        ROWS,
        ROWS,
        rows(1),
        rows(2),
        ROWS,
        ROWS,
        rows(1),
        ROWS,
        ROWS,
        ROWS,
    )


def test_slices_pads_and_joins_beside_the_batch():
    check(
        lambda x: (
            x[:, 1:7:2],
            x[:, ::-1],
            jnp.roll(x, 3, 1),
            jnp.pad(x, ((0, 0), (1, 2)), constant_values=7.0),
            jnp.pad(x.sum(0), 2),
            jnp.concatenate([x, jnp.zeros((len(x), 1)), jnp.ones((len(x), 2))], 1),
            jnp.concatenate([x.mean(0), jnp.ones(2)]),
            jnp.tile(x, (1, 2)),
            jnp.repeat(x, 2, axis=1),
            jnp.tile(jnp.arange(3.0), (len(x), 1)),
            lax.dynamic_slice(x, (0, 2), (len(x), 3)),
            lax.dynamic_update_slice(x, x[:, :2] * 2, (0, 3)),
            x.at[:, 2].set(0.0),
        ),
        (X,),
        (BATCH,),
        *[ROWS] * 4,
        SUM,
        ROWS,
        MEAN,
        *[ROWS] * 6,
    )


def test_look_ups():
    table = _random(4, 3, seed=1)
    check(
        lambda x, y: (
            x[jnp.arange(len(x)), y],
            jnp.take_along_axis(x, y[:, None], 1),
            jnp.asarray(table)[y],
            jnp.take(jnp.asarray(table), y, axis=0),
            jnp.take(x, jnp.array([0, 3]), axis=1),
            jax.vmap(lambda row, i: row[i])(x, y),
            jax.vmap(lambda row, i: lax.dynamic_index_in_dim(row, i, keepdims=False))(x, y),
            x[jnp.arange(len(x))],
            x.sum(0)[jnp.array([1, 2])],
            jnp.zeros(4)[y],
            x[:, 3],
        ),
        (X, LABELS),
        (BATCH, BATCH),
        *[ROWS] * 8,
        SUM,
        ROWS,
        ROWS,
    )


def test_scatters_and_counts():
    check(
        lambda x, y: (
            jnp.bincount(y, length=4),
            jax.ops.segment_sum(x, y, num_segments=4),
            jnp.zeros((4, 4)).at[y, (y + 1) % 4].add(1),
            jnp.zeros(4).at[jnp.array([0, 1])].add(x.mean(0)[:2]),
            jax.nn.one_hot(y, 4),
            jnp.zeros((4, 8)).at[y].add(x) / len(x),
            jnp.ones(4).at[y].add(1.0),
            jnp.zeros(4).at[y].set(1.0),
            jax.grad(lambda x: jnp.take_along_axis(jnp.sin(x), y[:, None], 1).sum())(x),
        ),
        (X, LABELS),
        (BATCH, BATCH),
        SUM,
        SUM,
        SUM,
        MEAN,
        ROWS,
        MEAN,
        "?",
        "?",
        ROWS,
    )


def test_choices():
    check(
        lambda x: (
            jnp.where(x > 0, x, 0.0),
            jnp.where(x > 0, 1.0, 2.0),
            jnp.where(jnp.arange(8) > 3, x.mean(0), 1.0),
            jnp.where(jnp.arange(8) > 3, x.sum(0), 1.0),
            jnp.sum(x, where=x > 0),
            jnp.mean(x, where=x > 0),
            jnp.clip(x, -1, 1),
            jnp.maximum(jnp.max(x), 0.0),
        ),
        (X,),
        (BATCH,),
        ROWS,
        ROWS,
        MEAN,
        "?",
        SUM,
        "?",
        ROWS,
        Kind("max"),
    )


def test_operations_along_the_other_axis():
    check(
        lambda x: (
            jnp.sort(x, 1),
            jnp.argsort(x, 1),
            lax.top_k(x, 2)[0],
            jnp.cumsum(x, 1),
            jnp.cumsum(x.sum(0)),
            jax.nn.logsumexp(x, 1),
            x.var(1),
            x.std(1),
            jnp.argmax(x, 1),
            jax.nn.softmax(x),
            jnp.cumprod(x, 1),
            lax.cummax(x, 1),
            jnp.any(x > 0, 1),
        ),
        (X,),
        (BATCH,),
        *[ROWS] * 4,
        SUM,
        *[ROWS] * 8,
    )


def test_products():
    w = _random(8, 3, seed=1)
    check(
        lambda x, w: (
            x @ w,
            x.T @ x,
            (w.T @ x.T),
            jnp.einsum("bi,bj->bij", x, x),
            jnp.einsum("bi,bi->b", x, x),
            jnp.einsum("bi,bj->ij", x, x) / len(x),
            x.mean(0) @ w,
            jnp.einsum("bi,ci->bc", x, x),
            jnp.einsum("bij,bjk->bik", x[:, :, None], x[:, None, :]),
        ),
        (X, w),
        (BATCH, None),
        ROWS,
        SUM,
        rows(1),
        ROWS,
        ROWS,
        MEAN,
        MEAN,
        "?",
        ROWS,
    )


def test_convolutions_and_pooling():
    images, kernel = _random(4, 6, 6, 2), _random(3, 3, 2, 3, seed=1)

    def convolve(x, k):
        return lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    check(
        lambda x, k: (
            convolve(x, k),
            jax.grad(lambda k: convolve(x, k).sum())(k),
            nnx.max_pool(x, (2, 2), (2, 2)),
            nnx.avg_pool(x, (2, 2), (2, 2)),
            jax.grad(lambda x: nnx.max_pool(x, (2, 2), (2, 2)).sum())(x),
            convolve(x.transpose(1, 0, 2, 3), k),
        ),
        (images, kernel),
        (BATCH, None),
        ROWS,
        SUM,
        ROWS,
        ROWS,
        ROWS,
        "?",
    )


def test_linear_algebra_and_fft():
    x = _random(4, 3, 3) + 3 * np.eye(3, dtype=np.float32)
    check(
        lambda x: (
            jnp.linalg.cholesky(x @ x.transpose(0, 2, 1)),
            jnp.linalg.svd(x, compute_uv=False),
            jnp.linalg.det(x),
            jnp.abs(jnp.fft.fft(x)),
            jnp.real(jnp.fft.fft(x.mean(0))),
            jnp.real(jnp.fft.fft(x, axis=0)),
            jnp.linalg.svd(x[:, 0], compute_uv=False),
        ),
        (x,),
        (BATCH,),
        *[ROWS] * 4,
        MEAN,
        "?",
        "?",
    )


def test_dtypes():
    check(
        lambda x: (
            x.astype(jnp.bfloat16).astype(jnp.float32),
            x.mean(0).astype(jnp.complex64),
            (x > 0).astype(int),
            jnp.sum(x > 0).astype(jnp.float32),
            jnp.sum(x > 0).astype(jnp.uint32),
            jnp.mean((x * 3).astype(jnp.int8)),
            x.astype(jnp.int32) // 2,
            x.astype(jnp.int32) % 2,
        ),
        (X.astype(np.float16).astype(np.float32),),
        (BATCH,),
        ROWS,
        MEAN,
        ROWS,
        SUM,
        SUM,
        MEAN,
        ROWS,
        ROWS,
    )


def test_collectives():
    check(
        lambda x: (
            lax.psum(x.sum(0), "data"),
            lax.pmean(x.mean(0), "data"),
            lax.psum(x.mean(0), "data"),
            lax.pmean(x.sum(0), "data"),
            lax.pmax(jnp.max(x), "data"),
            lax.pmax(jnp.min(x), "data"),
            lax.all_gather(x, "data", tiled=True),
            lax.all_gather(x, "data", tiled=True, axis=1),
            lax.psum(jnp.ones(3), "data"),
            lax.psum(jnp.zeros(3), "data"),
            lax.psum(len(x), "data"),
            lax.axis_index("data"),
            lax.psum(x.sum(0), "data") / lax.psum(len(x), "data"),
            lax.ppermute(jnp.ones(3), "data", []),
            jnp.exp(lax.pmean(x.mean(0), "data")),
        ),
        (X,),
        (BATCH,),
        SAME,
        SAME,
        same(1),
        same(-1),
        SAME,
        "?",
        SAME,
        "?",
        same(1),
        ZERO,
        SAME,
        INDEX,
        SAME,
        "?",
        SAME,
    )


def test_without_collectives_only_what_each_example_gives():
    found = kinds_of(
        lambda x: (x * 2, lax.pmean(x.mean(0), "data"), lax.pmean(jnp.ones(2), "data")),
        (X,),
        (BATCH,),
        through_collectives=False,
    )
    assert [kind.tag for kind in found] == ["rows", "unknown", "same"]


def test_loops_and_branches():
    x = _random(4, 5, 3)
    check(
        lambda x: (
            lax.scan(lambda c, t: (0.5 * c + t, c), jnp.zeros((len(x), 3)), x.swapaxes(0, 1)),
            lax.scan(lambda c, t: (c + t.sum(), None), 0.0, x.swapaxes(0, 1))[0],
            lax.fori_loop(0, 3, lambda i, c: c * 0.5, x.mean()),
            lax.fori_loop(0, 3, lambda i, c: c + x.mean(), 0.0),
            lax.cond(jnp.ones(()) > 0, lambda: x.mean(), lambda: 1.0),
            lax.cond(jnp.ones(()) > 0, lambda: x * 2, lambda: x),
            lax.scan(lambda c, t: ((c[1], x.sum()), c[0]), (1.0, 1.0), None, length=4)[1],
            jax.vmap(lambda r: lax.cond(r.sum() > 0, lambda: r, lambda: -r))(x),
            lax.scan(
                lambda c, i: (c, x[i, 0]),
                0.0,
                lax.broadcasted_iota(jnp.int32, (3, len(x)), 1),
            )[1],
        ),
        (x,),
        (BATCH,),
        ROWS,
        rows(1),
        SUM,
        MEAN,
        MEAN,
        MEAN,
        ROWS,
        "?",
        ROWS,
        rows(1),
    )


def test_calls_are_followed():
    @jax.custom_vjp
    def scaled(x):
        return x * 2

    scaled.defvjp(lambda x: (scaled(x), None), lambda _, ct: (ct,))
    check(
        lambda x: (
            jax.jit(lambda v: v.mean(0))(x),
            jax.checkpoint(jnp.sin)(x),
            jax.nn.relu(x),
            scaled(x).sum(),
            jax.grad(lambda w: (scaled(x) @ w).sum())(jnp.ones(8)),
        ),
        (X,),
        (BATCH,),
        MEAN,
        ROWS,
        ROWS,
        SUM,
        SUM,
    )


def test_random_draws():
    key = jax.random.key(0)

    def function(x):
        own = jax.random.fold_in(key, lax.axis_index("data"))
        return (
            jax.random.normal(key, (3,)),
            jax.random.normal(own, x.shape),
            jax.random.normal(own, (3,)),
            jax.random.permutation(own, x),
            jax.random.gamma(own, 2.0, (len(x),)),
        )

    tags = [kind.tag for kind in kinds_of(function, (X,), (BATCH,))]
    assert tags == ["same", "rows", "unknown", "unknown", "rows"]


def test_constant_keys_are_compared():
    keys = [jax.random.key(i) for i in range(9)]
    found = kinds_of(
        lambda x: (jax.random.normal(keys[0], (3,)), jax.random.normal(keys[len(x)], (3,))),
        (X,),
        (BATCH,),
    )
    assert [kind.tag for kind in found] == ["same", "unknown"]


def test_kernels():
    def run(kernel, *args):
        shape = jax.ShapeDtypeStruct(args[0].shape, args[0].dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(*args)

    def doubled(a, out):
        out[...] = a[...] * 2

    def function(x, w):
        def scaled(a, out):
            out[...] = a[...] * len(x)

        return run(doubled, x), run(doubled, x.mean(0)), run(scaled, w)

    check(function, (X, X[0]), (BATCH, None), ROWS, "?", "?")


def test_callbacks_are_unknown():
    def function(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: x, shape, x)

    assert kinds_of(function, (X,), (BATCH,))[0].tag == "unknown"


def test_zeros_for_each_example_are_rows():
    check(lambda x: (jnp.zeros(len(x)), jnp.zeros(3)), (X,), (BATCH,), ROWS, ZERO)


# ---------------------------------------------------------------------------------------------
# Ordinary losses, metrics and layers


LOSSES = {
    "softmax": lambda x, y: optax.softmax_cross_entropy_with_integer_labels(x, y),
    "one-hot": lambda x, y: optax.softmax_cross_entropy(x, jax.nn.one_hot(y, 8)),
    "smoothed": lambda x, y: optax.softmax_cross_entropy(
        x, optax.smooth_labels(jax.nn.one_hot(y, 8), 0.1)
    ),
    "sigmoid": lambda x, y: optax.sigmoid_binary_cross_entropy(x, jax.nn.one_hot(y, 8)),
    "huber": lambda x, y: optax.huber_loss(x[:, 0], y.astype(float)),
    "squared": lambda x, y: optax.squared_error(x[:, 0], y.astype(float)),
    "log cosh": lambda x, y: optax.log_cosh(x[:, 0], y.astype(float)),
    "cosine": lambda x, y: optax.cosine_distance(x, jax.nn.one_hot(y, 8)),
    "hinge": lambda x, y: optax.hinge_loss(x[:, 0], 2.0 * (y > 1) - 1),
    "focal": lambda x, y: optax.sigmoid_focal_loss(x, jax.nn.one_hot(y, 8)),
    "kl": lambda x, y: optax.kl_divergence(jax.nn.log_softmax(x), jax.nn.softmax(2 * x)),
    "poly": lambda x, y: optax.losses.poly_loss_cross_entropy(x, jax.nn.one_hot(y, 8)),
    "log-likelihood": lambda x, y: -jax.nn.log_softmax(x)[jnp.arange(len(y)), y],
    "numbered by NumPy": lambda x, y: -jax.nn.log_softmax(x)[np.arange(len(y)), y],
    "accuracy": lambda x, y: x.argmax(-1) == y,
    "top-5": lambda x, y: (lax.top_k(x, 5)[1] == y[:, None]).any(-1),
    "ctc": lambda x, y: optax.ctc_loss(
        x.reshape(len(x), 4, 2).repeat(2, 1),
        jnp.zeros((len(x), 8)),
        jnp.ones((len(x), 2), int),
        jnp.zeros((len(x), 2)),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_metrics(name):
    def function(x, y):
        each = LOSSES[name](x, y)
        return each, jnp.mean(each), jnp.sum(each)

    check(function, (X, LABELS), (BATCH, BATCH), ROWS, MEAN, SUM)


def test_perplexity_and_masked_means_are_no_plain_means():
    def function(x, y):
        losses = optax.softmax_cross_entropy_with_integer_labels(x, y)
        mask = y > 0
        total, count = lax.psum((jnp.sum(losses * mask), mask.sum()), "data")
        return jnp.exp(losses.mean()), jnp.sum(losses * mask) / mask.sum(), total / count

    check(function, (X, LABELS), (BATCH, BATCH), "?", "?", SAME)


def test_token_losses_are_means_over_tokens():
    x = _random(4, 5, 7)
    y = np.random.default_rng(0).integers(0, 7, (4, 5), np.int32)

    def function(x, y):
        losses = optax.softmax_cross_entropy_with_integer_labels(x, y)
        flat = optax.softmax_cross_entropy_with_integer_labels(x.reshape(-1, 7), y.reshape(-1))
        shifted = optax.softmax_cross_entropy_with_integer_labels(x[:, :-1], y[:, 1:])
        return losses.mean(), flat.mean(), shifted.sum(1).mean()

    check(function, (x, y), (BATCH, BATCH), MEAN, MEAN, MEAN)


def _apply(layer, x):
    return layer(x)


def _with_layer(layer, call=_apply):
    """Returns a function of a batch that holds a layer of replicated parameters."""
    graphdef, state = nnx.split(layer)
    return lambda x, *more: call(nnx.merge(graphdef, state, copy=True), x, *more)


IMAGES, SEQUENCES = _random(4, 4, 4, 4), _random(4, 5, 4)
LAYERS = {
    "Linear": (lambda r: nnx.Linear(4, 3, rngs=r), SEQUENCES),
    "Conv": (lambda r: nnx.Conv(4, 3, (3, 3), strides=2, rngs=r), IMAGES),
    "grouped Conv": (lambda r: nnx.Conv(4, 4, (3, 3), feature_group_count=2, rngs=r), IMAGES),
    "ConvTranspose": (lambda r: nnx.ConvTranspose(4, 3, (3, 3), rngs=r), IMAGES),
    "Embed": (lambda r: nnx.Embed(5, 3, rngs=r), np.arange(20, dtype=np.int32).reshape(4, 5) % 5),
    "LayerNorm": (lambda r: nnx.LayerNorm(4, rngs=r), SEQUENCES),
    "RMSNorm": (lambda r: nnx.RMSNorm(4, rngs=r), SEQUENCES),
    "GroupNorm": (lambda r: nnx.GroupNorm(4, num_groups=2, rngs=r), IMAGES),
    "InstanceNorm": (lambda r: nnx.InstanceNorm(4, rngs=r), IMAGES),
    "BatchNorm": (lambda r: nnx.BatchNorm(4, axis_name="data", rngs=r), IMAGES),
    "Einsum": (lambda r: nnx.Einsum("bti,io->bto", (4, 3), (3,), rngs=r), SEQUENCES),
    "attention": (lambda r: nnx.MultiHeadAttention(2, 4, decode=False, rngs=r), SEQUENCES),
    "LSTM": (lambda r: nnx.RNN(nnx.LSTMCell(4, 3, rngs=r)), SEQUENCES),
    "GRU": (lambda r: nnx.RNN(nnx.GRUCell(4, 3, rngs=r), reverse=True), SEQUENCES),
    "SpectralNorm": (lambda r: nnx.SpectralNorm(nnx.Linear(4, 3, rngs=r), rngs=r), SEQUENCES),
}
CALLS = {
    "attention": lambda layer, x: layer(x, mask=nnx.make_causal_mask(x[..., 0])),
    "SpectralNorm": lambda layer, x: layer(x, update_stats=True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    make, x = LAYERS[name]
    function = _with_layer(make(nnx.Rngs(0)), CALLS.get(name, _apply))
    check(function, (x,), (BATCH,), ROWS)


def test_rnn_with_lengths():
    function = _with_layer(
        nnx.RNN(nnx.SimpleCell(4, 3, rngs=nnx.Rngs(0))),
        lambda rnn, x, lengths: rnn(x, seq_lengths=lengths),
    )
    check(function, (SEQUENCES, np.array([1, 5, 3, 2], np.int32)), (BATCH, BATCH), ROWS)


def test_dropout():
    def function(x):
        key = jax.random.fold_in(jax.random.key(0), lax.axis_index("data"))
        return nnx.Dropout(0.5)(x, deterministic=False, rngs=nnx.Rngs(dropout=key))

    assert kinds_of(function, (X,), (BATCH,)) == [ROWS]


def test_gradients_with_respect_to_the_batch():
    def function(x, y):
        loss = lambda x: optax.softmax_cross_entropy_with_integer_labels(x, y).sum()  # noqa: E731
        return jax.grad(loss)(x), x + 0.1 * jnp.sign(jax.grad(loss)(x))

    check(function, (X, LABELS), (BATCH, BATCH), ROWS, ROWS)


# ---------------------------------------------------------------------------------------------
# Random programs

UNARY = {
    "sin": jnp.sin,
    "neg": lambda v: -v,
    "abs": jnp.abs,
    "square": jnp.square,
    "cube": lambda v: lax.integer_pow(v, 3),
    "affine": lambda v: 0.5 * v + 1,
    "half": lambda v: v * 0.5,
    "by size": lambda v: v / v.size,
    "by rows": lambda v: v / len(v) if v.ndim else v,
    "sum 0": lambda v: v.sum(0),
    "sum last": lambda v: v.sum(-1),
    "mean 0": lambda v: v.mean(0),
    "mean": jnp.mean,
    "max 0": lambda v: v.max(0),
    "min": jnp.min,
    "cumsum": lambda v: jnp.cumsum(v, 0),
    "cumsum last": lambda v: jnp.cumsum(v, -1),
    "sort": lambda v: jnp.sort(v, 0),
    "sort last": lambda v: jnp.sort(v, -1),
    "softmax": lambda v: jax.nn.softmax(v, -1),
    "logsumexp": lambda v: jax.nn.logsumexp(v, -1),
    "argmax": lambda v: 1.0 * jnp.argmax(v, -1),
    "var": lambda v: v.var(-1),
    "flat": lambda v: v.reshape(-1),
    "split": lambda v: v.reshape(-1, 4),
    "merge": lambda v: v.reshape(-1, v.shape[-1]),
    "T": lambda v: v.T,
    "swap": lambda v: jnp.swapaxes(v, 0, 1),
    "head": lambda v: v[:4],
    "tail": lambda v: v[..., 1:],
    "stride": lambda v: v[..., ::2],
    "rows stride": lambda v: v[::2],
    "last": lambda v: v[-1],
    "flip": lambda v: v[::-1],
    "flip last": lambda v: v[..., ::-1],
    "roll": lambda v: jnp.roll(v, 1, -1),
    "pad last": lambda v: jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(1, 0)], constant_values=2.0),
    "pad 0": lambda v: jnp.pad(v, [(0, 1)] + [(0, 0)] * (v.ndim - 1)),
    "tile": lambda v: jnp.tile(v, (2,) + (1,) * (v.ndim - 1)),
    "repeat": lambda v: jnp.repeat(v, 2, 0),
    "repeat last": lambda v: jnp.repeat(v, 2, -1),
    "spread": lambda v: jnp.broadcast_to(v, (4, *v.shape)),
    "column": lambda v: v[..., None],
    "row": lambda v: v[None],
    "relu": jax.nn.relu,
    "round": jnp.round,
    "int": lambda v: (3 * v).astype(int) * 1.0,
    "floor half": lambda v: ((3 * v).astype(int) // 2) * 1.0,
    "truth": lambda v: (v > 0) * 1.0,
    "number": lambda v: v[jnp.arange(len(v))],
    "diagonal": lambda v: v[jnp.arange(len(v)), jnp.arange(len(v)) % v.shape[1]],
    "pick": lambda v: v[jnp.arange(len(v)), jnp.argmax(v, 1)],
    "along": lambda v: jnp.take_along_axis(v, jnp.argmin(v, 1, keepdims=True), 1),
    "take": lambda v: v[jnp.array([0, 1, 1])],
    "one-hot": lambda v: jax.nn.one_hot(jnp.argmax(v, -1), 4),
    "count": lambda v: jnp.bincount(jnp.argmax(v, -1), length=4) * 1.0,
    "segments": lambda v: jax.ops.segment_sum(v, jnp.argmax(v, -1), 4),
    "scatter": lambda v: v.at[0].set(1.0),
    "scatter last": lambda v: v.at[..., 0].add(1.0),
    "top": lambda v: lax.top_k(v, 2)[0],
    "psum": lambda v: lax.psum(v, "data"),
    "pmean": lambda v: lax.pmean(v, "data"),
    "pmax": lambda v: lax.pmax(v, "data"),
    "gather": lambda v: lax.all_gather(v, "data", tiled=True),
    "gram": lambda v: v @ v.T,
    "covariance": lambda v: v.T @ v,
    "fft": lambda v: jnp.abs(jnp.fft.fft(v)),
    "fft linear": lambda v: jnp.real(jnp.fft.fft(v)),
    "scan": lambda v: lax.scan(lambda c, r: (0.5 * c + r, c), jnp.zeros_like(v[0]), v)[1],
    "scan last": lambda v: lax.scan(
        lambda c, r: (0.5 * c + r, c), jnp.zeros_like(v[..., 0]), jnp.moveaxis(v, -1, 0)
    )[0],
    "loop": lambda v: lax.fori_loop(0, 2, lambda i, c: 0.5 * c + v, v),
    "until": lambda v: lax.while_loop(lambda c: c.sum() > 3, lambda c: 0.5 * c, v),
    "grad": jax.grad(lambda v: jnp.sum(jnp.tanh(v) ** 2)),
    "vmap": jax.vmap(lambda r: r / (1 + jnp.abs(r).sum())),
    "pool": lambda v: lax.reduce_window(v, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"),
    "pool 0": lambda v: lax.reduce_window(v, 0.0, lax.add, (2, 1), (1, 1), "SAME"),
    "conv": lambda v: lax.conv(v[:, None], jnp.ones((2, 1, 2)), (1,), "SAME")[:, 1],
}
BINARY = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": lambda a, b: a / (2 + jnp.abs(b)),
    "bare div": lambda a, b: a / b,
    "maximum": jnp.maximum,
    "where": lambda a, b: jnp.where(a > 0, a, b),
    "where zero": lambda a, b: jnp.where(b > 0, a, 0.0),
    "matmul": lambda a, b: a @ b,
    "outer": lambda a, b: a[..., None] * b[..., None, :],
    "einsum": lambda a, b: jnp.einsum("ij,ij->j", a, b),
    "concatenate": lambda a, b: jnp.concatenate([a, b]),
    "concatenate last": lambda a, b: jnp.concatenate([a, b], -1),
    "stack": lambda a, b: jnp.stack([a, b]),
    "stack last": lambda a, b: jnp.stack([a, b], -1),
    "cond": lambda a, b: lax.cond(jnp.sum(a) > 0, lambda: b, lambda: 0.5 * b),
    "choose": lambda a, b: lax.cond(jnp.ones(()) > 0, lambda: a, lambda: b),
    "update": lambda a, b: lax.dynamic_update_slice(a, b, (0,) * a.ndim),
    "look up": lambda a, b: a[jnp.argmax(b, -1)],
    "carry": lambda a, b: lax.scan(lambda c, _: ((c[1], b), c[0]), (a, a), None, length=3)[1],
}
OPERATIONS = {**UNARY, **BINARY}

CASES = [
    dict(devices=2, shape=(8, 4), axis=0),
    dict(devices=2, shape=(8, 8), axis=0),
    dict(devices=2, shape=(4, 8), axis=1),
    dict(devices=3, shape=(3, 4), axis=0),
    dict(devices=3, shape=(12, 4), axis=0),
    dict(devices=8, shape=(8, 2, 4), axis=0),
    dict(devices=2, shape=(2, 8, 4), axis=1),
]


@dataclasses.dataclass
class Program:
    """Steps (operation, operands), each of which is valid at the shapes of both traces."""

    steps: list

    def __call__(self, x, w):
        values = [x, w, jnp.float32(2.0)]
        for name, *places in self.steps:
            values.append(OPERATIONS[name](*(values[place] for place in places)))
        return values[3:]


@st.composite
def _programs(draw):
    case = draw(st.sampled_from(CASES))
    steps = []
    shapes = [_shapes(case, local) for local in (True, False)]
    for _ in range(draw(st.integers(1, 7))):
        name = draw(st.sampled_from(list(OPERATIONS)))
        last = len(shapes[0]) - 1
        near = st.one_of(st.integers(0, last), st.integers(max(0, last - 1), last))
        places = [draw(near) for _ in range(2 if name in BINARY else 1)]
        try:
            results = [_shape_of(name, [known[i] for i in places]) for known in shapes]
        except Exception:  # not an operation on such shapes: another one, then
            continue
        if max(result.size for result in results) > 2000:
            continue
        steps.append((name, *places))
        for known, result in zip(shapes, results, strict=True):
            known.append(result)
    hypothesis.assume(steps)
    return case, Program(steps)


def _shapes(case, local):
    shape = list(case["shape"])
    shape[case["axis"]] //= case["devices"] if local else 1
    return [jax.ShapeDtypeStruct(s, jnp.float32) for s in (tuple(shape), (4, 4), ())]


def _shape_of(name, operands):
    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        OPERATIONS[name], mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    return jax.eval_shape(mapped, *operands)


@hypothesis.settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(_programs())
def test_whatever_is_claimed_of_a_program_is_true(drawn):
    case, program = drawn
    args, axes = (_random(*case["shape"]), _random(4, 4, seed=1)), (case["axis"], None)
    found = kinds_of(program, args, axes, case["devices"])
    if any(kind.tag != "unknown" for kind in found):
        assert_true(found, program, args, axes, case["devices"])


# A program's first values are the batch, weights, a scalar, a mean and a maximum over the batch.
_PLACES = {len(UNARY): ([0], [3]), len(BINARY): ([0, 0], [0, 1], [4, 0], [3, 4])}


@pytest.mark.parametrize("names", [UNARY, BINARY], ids=["unary", "binary"])
@pytest.mark.parametrize("case", [CASES[1], CASES[2]], ids=["rows first", "rows last"])
def test_whatever_is_claimed_of_one_operation_is_true(names, case):
    shapes = [_shapes(case, local) for local in (True, False)]
    steps = [("mean 0", 0), ("max 0", 0)]
    for known in shapes:
        known += [_shape_of(name, [known[place] for place in places]) for name, *places in steps]
    for name in names:
        for places in _PLACES[len(names)]:
            try:
                for known in shapes:
                    _shape_of(name, [known[place] for place in places])
            except Exception:  # not an operation on such shapes
                continue
            steps.append((name, *places))
    args, axes = (_random(*case["shape"]), _random(4, 4, seed=1)), (case["axis"], None)
    found = kinds_of(Program(steps), args, axes, case["devices"])
    assert_true(found, Program(steps), args, axes, case["devices"])
