"""Reduction kinds: how the devices' values of an array make up the value on one device.

`find_kinds` compares the jaxpr of the step at one device's shapes with the jaxpr of the same step
at the global shapes, equation by equation.
"""

from nnx_dp._kinds.algebra import Kind as Kind
from nnx_dp._kinds.opaque import KERNELS as KERNELS
from nnx_dp._kinds.walk import find_kinds as find_kinds
