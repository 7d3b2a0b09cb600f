"""Several real processes, over gloo on the loopback, against one process with the whole batch."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from flax import nnx
from oracle import linear, regression, snapshot, train_step
from process_scenarios import ROWS, STRATEGIES, make_state, one_process, step

import nnx_dp

WORKER = Path(__file__).with_name("process_worker.py")


def start(scenario, processes, folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(WORKER.parent), *sys.path])}
    env.pop("XLA_FLAGS", None)
    started = []
    for i in range(processes):
        command = [sys.executable, WORKER, scenario, str(i), str(processes), str(port), str(folder)]
        with (folder / f"{scenario}-{i}.log").open("w") as log:
            started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    return started


def run(scenario, processes, folder, timeout=240):
    """Returns what each process saw."""
    started = start(scenario, processes, folder)
    try:
        for process in started:
            process.wait(timeout)
    finally:
        for process in started:
            process.kill()
    for i, process in enumerate(started):
        assert process.returncode == 0, (folder / f"{scenario}-{i}.log").read_text()[-3000:]
    return [
        pickle.loads((folder / f"{scenario}-{i}.pickle").read_bytes()) for i in range(processes)
    ]


def test_four_processes(tmp_path):
    check_training(run("train", 4, tmp_path))


def test_two_processes(tmp_path):
    """Starting processes takes longer than what they do: one start for all of it."""
    seen = run("everything", 2, tmp_path)
    check_training([of_process["train"] for of_process in seen])
    check_batches_that_are_global_already([of_process["global_arrays"] for of_process in seen])
    check_random_draws_differ_between_all_devices_of_all_processes(
        [of_process["random_draws"] for of_process in seen]
    )
    check_disagreement_is_an_error_on_every_process(
        [of_process["disagreements"] for of_process in seen]
    )


def check_training(seen):
    processes = len(seen)
    outputs, state = one_process()
    rows = ROWS // processes
    for index, of_process in enumerate(seen):
        for strategy in STRATEGIES:
            ours, our_state = of_process[strategy]
            for out, expected in zip(ours, outputs, strict=True):
                close = dict(rtol=1e-4, atol=1e-5, err_msg=f"{strategy} in process {index}")
                np.testing.assert_allclose(out["loss"], expected["loss"], **close)
                np.testing.assert_allclose(out["worst"], expected["worst"], **close)
                own = expected["out"][index * rows : (index + 1) * rows]
                np.testing.assert_allclose(out["out"], own, **close)
            assert our_state.keys() == state.keys()
            for path, value in state.items():
                np.testing.assert_allclose(
                    our_state[path], value, rtol=1e-3, atol=1e-4, err_msg=f"{strategy} {path}"
                )


def check_batches_that_are_global_already(seen):
    plain = linear()
    loss = [train_step(*plain, *regression(ROWS, seed)) for seed in range(2)][-1]
    expected = snapshot(nnx.state(plain))
    for of_process in seen:
        for strategy in STRATEGIES:
            ours, state = of_process[strategy]
            np.testing.assert_allclose(ours, loss, rtol=1e-5)
            for path, value in expected.items():
                np.testing.assert_allclose(state[path], value, rtol=1e-5)


def check_random_draws_differ_between_all_devices_of_all_processes(seen):
    for strategy in STRATEGIES:
        rows = [row for masks, _ in (s[strategy] for s in seen) for m in masks for row in m]
        assert len({row.tobytes() for row in rows}) == 2 * ROWS, strategy
        assert [count for _, count in (s[strategy] for s in seen)] == [2, 2]


def check_disagreement_is_an_error_on_every_process(seen):
    plain = linear()
    expected = [float(train_step(*plain, *regression(ROWS))) for _ in range(2)][-1]
    for of_process in seen:
        for strategy in STRATEGIES:
            sizes = of_process[strategy, "sizes"]
            assert "x has shape (2, 3) in process 0 and (4, 3) in process 1" in sizes
            told = {name: of_process[strategy, name] for name in ("scalar", "array scalar", "flag")}
            assert "rate is 0.1 in process 0 and 1.1 in process 1" in told["scalar"]
            assert "rate is 0.0 in process 0 and 1.0 in process 1" in told["array scalar"]
            assert "flag is True in process 0 and False in process 1" in told["flag"]
            dtypes = of_process[strategy, "dtype"]
            assert "x is float32[8, 3] in process 0 and float16[8, 3] in process 1" in dtypes
            assert "table differs between process 0 and process 1" in of_process[strategy, "table"]
            assert "x has 6 examples in 2 processes together" in of_process[strategy, "indivisible"]
            assert "model.kernel differs between process 0 and" in of_process[strategy, "state"]
            assert "2 processes have a part each" in of_process[strategy, "verify"]
            assert of_process[strategy, "unchanged"]
            np.testing.assert_allclose(of_process[strategy, "goes on"], expected, rtol=1e-5)


def test_a_run_goes_on_from_its_checkpoint_after_a_process_died(tmp_path):
    (tmp_path / "deadly").touch()
    started = start("train_and_save", 2, tmp_path)
    begun = time.monotonic()
    try:
        started[1].wait(120)
        died = time.monotonic()
        # Within the coordinator's timeout, 10 seconds in process_worker.py, and some for the noise.
        started[0].wait(60)
    finally:
        for process in started:
            process.kill()
    assert started[1].returncode == -signal.SIGKILL, time.monotonic() - begun
    assert started[0].returncode != 0, "the others end with an error"
    assert time.monotonic() - died < 60

    (tmp_path / "deadly").unlink()
    seen = run("train_and_save", 2, tmp_path)
    state = make_state()
    for seed in range(5):
        step(*state, *regression(ROWS, seed))
    expected = snapshot(nnx.state(state))
    for done, ours in seen:
        assert done == 3
        for path, value in expected.items():
            np.testing.assert_allclose(ours[path], value, rtol=1e-3, atol=1e-4, err_msg=path)


def test_local_in_one_process():
    x = nnx_dp.shard_batch(np.arange(16.0).reshape(8, 2), devices=4)
    assert nnx_dp.local({"x": x, "n": 3})["x"] is x
