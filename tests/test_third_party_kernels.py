"""Flash attention that others wrote, as an `attention_fn`: two from JAX, one from PyPI.

The two from JAX run in Pallas's interpreters; the other is plain JAX with a gradient of its own.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flash_attention_jax import causal_flash_attention
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention as tpu_attention
from oracle import STRATEGIES, check_against_one_device

import nnx_dp

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import attention as gpu_attention

ROWS, LENGTH, FEATURES, HEADS = 4, 128, 32, 2

# On eight fake devices and two cores, JAX's TPU interpreter did not come to an end.
DEVICES = 2


@nnx_dp.per_device
def gpu(query, key, value, *, is_causal=False, **options):
    scale = query.shape[-1] ** -0.5
    return gpu_attention.mha(
        query, key, value, None, sm_scale=scale, causal=is_causal, interpret=True
    )


@nnx_dp.per_device
def tpu(query, key, value, *, is_causal=False, **options):
    scale = query.shape[-1] ** -0.5
    heads_first = [array.swapaxes(1, 2) for array in (query, key, value)]
    out = tpu_attention.flash_attention(*heads_first, causal=is_causal, sm_scale=scale)
    return out.swapaxes(1, 2)


@nnx_dp.per_device
def pypi(query, key, value, *, is_causal=False, **options):
    assert is_causal
    heads_first = [array.swapaxes(1, 2) for array in (query, key, value)]
    return causal_flash_attention(*heads_first).swapaxes(1, 2)


def batch(seed, rows=ROWS):
    x = np.random.default_rng(seed).standard_normal((rows, LENGTH, FEATURES)).astype(np.float32)
    return (x * np.arange(1, rows + 1, dtype=np.float32)[:, None, None] / 2,)


def train_step(layer, x):
    def loss_fn(layer):
        return jnp.mean(layer(x, is_causal=True) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(layer)
    params = nnx.state(layer, nnx.Param)
    nnx.update(layer, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
    return loss


def check(kernel, strategy, *, heads=HEADS, rows=ROWS, plain=train_step):
    def make():
        return (
            nnx.MultiHeadAttention(
                num_heads=heads,
                in_features=FEATURES,
                decode=False,
                attention_fn=kernel,
                rngs=nnx.Rngs(0),
            ),
        )

    check_against_one_device(
        train_step,
        make,
        [batch(0, rows), batch(1, rows)],
        strategy=strategy,
        devices=DEVICES,
        plain=plain,
        rtol=1e-3,
        atol=1e-5,
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kernel", [gpu, pypi])
def test_flash_attention_forward_and_backward(kernel, strategy):
    check(kernel, strategy)


# Op by op, each operation of the interpreter would be a compilation.
compiled_step = nnx.jit(train_step)


def plain_tpu_step(layer, x):
    loss = compiled_step(layer, x)
    # The interpreter has one memory for all: programs on different devices must not overlap.
    jax.effects_barrier()
    return loss


@pytest.fixture
def tpu_interpreter():
    assert jax.device_count() > DEVICES
    with pltpu.force_tpu_interpret_mode():
        yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.usefixtures("tpu_interpreter")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tpu_flash_attention_forward_and_backward(strategy):
    check(tpu, strategy, heads=1, rows=DEVICES, plain=plain_tpu_step)
