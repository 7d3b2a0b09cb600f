"""One of several processes of a test in test_processes.py: runs one scenario, writes what it saw.

python process_worker.py SCENARIO INDEX PROCESSES PORT FOLDER
"""

import pickle
import sys
from pathlib import Path

import jax

scenario, index, processes, port, folder = sys.argv[1:6]
INDEX, PROCESSES, FOLDER = int(index), int(processes), Path(folder)

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_disable_most_optimizations", True)
jax.distributed.initialize(
    f"127.0.0.1:{port}", PROCESSES, INDEX, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=20
)

import process_scenarios  # noqa: E402

seen = getattr(process_scenarios, scenario)(INDEX, PROCESSES, FOLDER)
(FOLDER / f"{scenario}-{INDEX}.pickle").write_bytes(pickle.dumps(seen))
