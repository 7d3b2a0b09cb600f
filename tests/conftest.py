"""Eight fake CPU devices for every test, made before JAX starts."""

import chex

chex.set_n_cpu_devices(8)
