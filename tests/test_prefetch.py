"""Batches that are placed ahead: their order, their errors, their number, their end."""

import gc
import time
import weakref

import grain
import jax
import numpy as np
import pytest
from oracle import STRATEGIES, assert_same, linear, regression, train_step

import nnx_dp


def batches(count, rows=8):
    for seed in range(count):
        yield regression(rows, seed)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_on_prefetched_batches(strategy):
    dp_step = nnx_dp.data_parallel(train_step, strategy=strategy, devices=4)
    state, plain = linear(), linear()
    seen = 0
    for (x, y), (plain_x, plain_y) in zip(dp_step.prefetch(batches(4)), batches(4), strict=True):
        assert len(x.sharding.device_set) == 4
        assert_same(dp_step(*state, x, y), train_step(*plain, plain_x, plain_y))
        seen += 1
    assert_same(state, plain)
    assert seen == 4


@pytest.mark.parametrize(("uneven", "rows"), [("auto", 11), ("drop", 11), ("replicate", 7)])
def test_uneven_batches(uneven, rows):
    dp_step = nnx_dp.data_parallel(train_step, strategy="jit", devices=4, uneven=uneven)
    state, plain = linear(), linear()
    with pytest.warns() if uneven != "auto" else _nothing():
        for x, y in dp_step.prefetch(batches(2, rows)):
            dp_step(*state, x, y)
    for x, y in batches(2, rows):
        kept = slice(0, rows - rows % 4 if uneven == "drop" else rows)
        train_step(*plain, x[kept], y[kept])
    assert_same(state, plain)


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.mark.parametrize("size", [1, 2, 5])
def test_no_more_are_read_than_asked_for(size):
    read = []

    def reading():
        for i in range(20):
            read.append(i)
            yield np.full((8, 2), i)

    with nnx_dp.prefetch(reading(), size, devices=4) as ahead:
        for i in range(10):
            assert float(next(ahead)[0, 0]) == i
            time.sleep(0.02)
            assert len(read) <= i + 1 + size
    assert len(read) <= 10 + size


def test_error_is_raised_at_its_step_and_ends_the_iteration():
    def failing():
        yield from batches(2)
        raise OSError("the disk is gone")

    ahead = nnx_dp.prefetch(failing(), 5, devices=4)
    for _ in range(2):
        next(ahead)
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(ahead)


def test_batch_that_cannot_be_placed():
    ahead = nnx_dp.prefetch([np.zeros((8, 2)), np.array([object()] * 8)], devices=4)
    next(ahead)
    with pytest.raises(TypeError):
        next(ahead)


@pytest.mark.parametrize("early", [True, False])
def test_the_source_is_closed(early):
    closed = []

    def source():
        try:
            yield from batches(50)
        finally:
            closed.append(True)

    with nnx_dp.prefetch(source(), devices=4) as ahead:
        next(ahead)
        if not early:
            assert sum(1 for _ in ahead) == 49
    assert closed == [True]
    with pytest.raises(StopIteration):
        next(ahead)
    assert not ahead._thread.is_alive()


def test_forgotten_prefetch_stops_its_thread_and_frees_its_batches():
    ahead = nnx_dp.prefetch(batches(50), devices=4)
    first = next(ahead)
    thread, reference = ahead._thread, weakref.ref(first[0])
    del ahead, first
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
    assert reference() is None


def test_leaves_of_every_kind():
    batch = {"x": np.zeros((8, 2)), "name": "train", "lr": 0.1, "none": None, "odd": np.ones(7)}
    (placed,) = nnx_dp.prefetch([batch], devices=4)
    assert placed["name"] == "train"
    assert placed["none"] is None
    assert float(placed["lr"]) == np.float32(0.1)
    assert placed["odd"].sharding.is_fully_replicated
    assert not placed["x"].sharding.is_fully_replicated


def test_grain_loader():
    source = grain.MapDataset.source(np.arange(64, dtype=np.float32)).shuffle(seed=1).batch(8)
    expected = [np.asarray(batch) for batch in source]
    actual = [np.asarray(batch) for batch in nnx_dp.prefetch(source.to_iter_dataset(), devices=4)]
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None])
def test_size_that_is_refused(size):
    with pytest.raises(ValueError, match="write a positive int"):
        nnx_dp.prefetch([], size)


def test_arrays_of_a_prefetched_batch_are_in_place():
    dp_step = nnx_dp.data_parallel(train_step, devices=4)
    (batch,) = dp_step.prefetch(batches(1))
    assert all(a is b for a, b in zip(dp_step.shard(batch), batch, strict=True))
    assert all(isinstance(leaf, jax.Array) for leaf in batch)
