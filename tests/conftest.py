"""Set-up of every test: the platform before jax is imported, and strict rules around every call into our packages.

Nothing is skipped: where a package is missing, the run stops at once and says what to type.
"""

import importlib.metadata
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

OLDEST_JAX = (0, 11, 2)
COMMAND = "uv run --isolated --group dev --group aot pytest -n 2 --dist loadfile"
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run on the machine's GPUs, not on 8 virtual CPU devices")


def pytest_configure(config):
    require_jax()
    if config.getoption("--gpu"):
        return  # On a machine whose Python is its own: what a test lacks there is an error when it is collected.
    require_group("dev")
    if "jax" in sys.modules:
        raise pytest.UsageError(
            "jax was imported before the tests could choose its platform; a pytest plugin did that."
        )
    os.environ["JAX_PLATFORMS"] = "cpu"
    # The last of two equal flags counts, and the caller's other flags stay.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()


def pytest_ignore_collect(collection_path, config):
    return True if collection_path == Path(__file__).parent / "gpu" and not config.getoption("--gpu") else None


@pytest.hookimpl(trylast=True)  # Once `-m` and `-k` have taken out what they take out.
def pytest_collection_modifyitems(config, items):
    compiling = [item for item in items if item.get_closest_marker("aot")]
    if config.getoption("--gpu"):  # Another machine's work: a GPU's need not have the compilers, nor 8 devices.
        others = [item for item in items if item in compiling or item.get_closest_marker("devices")]
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=others)
    elif compiling:
        require_group("aot")


def require_jax():
    """jax is new enough; it is not imported."""
    seen = importlib.metadata.version("jax")
    if tuple(map(int, re.findall(r"\d+", seen)[:3])) < OLDEST_JAX:
        oldest = ".".join(map(str, OLDEST_JAX))
        raise pytest.UsageError(f"jax is {seen}; this project needs {oldest} or newer. Type: {COMMAND}")


def require_group(group):
    """The packages of a dependency group are installed."""
    requirements = tomllib.loads(PYPROJECT.read_text())["dependency-groups"][group]
    if missing := [name for name in requirements if not _is_installed(re.match(r"[\w.-]+", name)[0])]:
        raise pytest.UsageError(f"Of the group {group!r}, {', '.join(missing)} is not installed. Type: {COMMAND}")


def _is_installed(distribution):
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(autouse=True)
def strict():
    """No implicit promotion of dtypes or ranks, in any test."""
    import jax

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """After each module: a compiled program maps memory, and Linux lets a process map 65530 pieces of it."""
    yield
    import jax

    jax.clear_caches()
