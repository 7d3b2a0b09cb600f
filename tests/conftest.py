"""Eight fake CPU devices for every test, made before JAX starts."""

import gc
import zlib

import chex
import jax
import pytest

chex.set_n_cpu_devices(8)

# Every program here runs a handful of times: compiling it is what takes the time.
jax.config.update("jax_disable_most_optimizations", True)

# Tracing makes small objects by the million, hardly any of them in a cycle.
gc.set_threshold(50_000, 20, 50)


@pytest.fixture
def optimised():
    """For tests that look at compiled programs: those that a user's run would have."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def pytest_addoption(parser):
    parser.addoption(
        "--share",
        type=int,
        default=1,
        metavar="N",
        help="run every test function, but of the parameters of each only about one in N",
    )


def pytest_collection_modifyitems(config, items):
    share = config.getoption("--share")
    functions = {}
    for item in items:
        functions.setdefault(item.nodeid.split("[")[0], []).append(item)
    kept = set()
    for same in functions.values():
        drawn = [item for item in same if zlib.crc32(item.nodeid.encode()) % share == 0]
        kept.update(drawn or same[:1])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
