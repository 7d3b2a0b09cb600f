"""Eight fake CPU devices for every test, made before JAX starts."""

import chex
import jax
import pytest

chex.set_n_cpu_devices(8)

# Every program here runs a handful of times: compiling it is what takes the time.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def optimised():
    """For tests that look at compiled programs: those that a user's run would have."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
