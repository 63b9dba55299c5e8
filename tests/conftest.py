"""Set-up of every test: the platform before jax is imported, and strict rules around every call into our packages."""

import os
import sys

import pytest


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run on the machine's GPUs, not on 8 virtual CPU devices")


def pytest_configure(config):
    if config.getoption("--gpu"):
        return
    assert "jax" not in sys.modules, "jax was imported before the tests could choose its platform"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"


@pytest.fixture(autouse=True)
def strict():
    """No implicit promotion of dtypes or ranks, in any test."""
    import jax

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
