"""The flash attention that JAX ships, in Pallas's interpreter, as an `attention_fn`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import check_against_one_device

import nnx_dp

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import attention as gpu_attention

ROWS, LENGTH, FEATURES, HEADS = 4, 128, 32, 2


def flash_attention(query, key, value, *, is_causal=False, **options):
    scale = query.shape[-1] ** -0.5
    return gpu_attention.mha(
        query, key, value, None, sm_scale=scale, causal=is_causal, interpret=True
    )


def batch(seed):
    x = np.random.default_rng(seed).standard_normal((ROWS, LENGTH, FEATURES)).astype(np.float32)
    return (x * np.arange(1, ROWS + 1, dtype=np.float32)[:, None, None] / 2,)


def train_step(layer, x):
    def loss_fn(layer):
        return jnp.mean(layer(x, is_causal=True) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(layer)
    params = nnx.state(layer, nnx.Param)
    nnx.update(layer, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
    return loss


@pytest.mark.parametrize("strategy", ["jit", "shard_map", "pmap", "auto"])
def test_flash_attention_forward_and_backward(strategy):
    attention_fn = nnx_dp.per_device(flash_attention)

    def make():
        return (
            nnx.MultiHeadAttention(
                num_heads=HEADS,
                in_features=FEATURES,
                decode=False,
                attention_fn=attention_fn,
                rngs=nnx.Rngs(0),
            ),
        )

    check_against_one_device(
        train_step, make, [batch(0), batch(1)], strategy=strategy, devices=2, rtol=1e-3, atol=1e-5
    )
