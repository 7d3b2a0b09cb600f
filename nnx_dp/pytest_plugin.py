"""A pytest plugin that makes several devices out of the CPU, before JAX starts.

In `conftest.py`::

    pytest_plugins = ["nnx_dp.pytest_plugin"]

and, in `pyproject.toml`, if eight are not the right number::

    [tool.pytest.ini_options]
    fake_devices = 4

A test that asks for the fixture `fake_devices` gets them, as a list.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from nnx_dp.testing import fake_devices as _fake_devices


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("fake_devices", "how many devices to make out of the CPU", default="8")


def pytest_configure(config: pytest.Config) -> None:
    # If JAX has started with fewer, the fixture says so, in the tests that need the devices.
    with contextlib.suppress(RuntimeError):
        _fake_devices(int(config.getini("fake_devices")))


@pytest.fixture
def fake_devices(request: pytest.FixtureRequest) -> list[Any]:
    """The devices; fails, and says where to ask for them, if JAX has started with fewer."""
    return _fake_devices(int(request.config.getini("fake_devices")))
