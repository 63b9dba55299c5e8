"""conftest.py does what it says, seen in projects made for the purpose."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMMAND = "uv run --isolated --group dev --group aot pytest -n 2 --dist loadfile"
TESTS = """
import os, pytest

def test_plain(): pass

@pytest.mark.aot
def test_ahead_of_time(): pass

def test_dtypes():
    import jax.numpy as jnp
    jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.int32)

def test_ranks():
    import jax.numpy as jnp
    jnp.ones((2, 2)) + jnp.ones(2)

def test_environment():
    print("saw", os.environ.get("JAX_PLATFORMS"), os.environ.get("XLA_FLAGS"))
"""


@pytest.fixture
def project(tmp_path):
    """Runs pytest in a project with our conftest.py: (exit status, output)."""
    (tmp_path / "tests").mkdir()
    shutil.copy(HERE / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)

    def run(*arguments, dev="pytest", aot="pytest", env=None):
        groups = f'[dependency-groups]\ndev = ["{dev}>=1"]\naot = ["{aot}>=1"]\n'
        (tmp_path / "pyproject.toml").write_text(f'{groups}[tool.pytest.ini_options]\nmarkers = ["aot"]\n')
        clean = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
        command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=clean | (env or {}), capture_output=True, text=True, timeout=120
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_missing_aot_group_stops_a_run_that_needs_it_and_no_other(project):
    status, output = project("-k", "plain or ahead", aot="no-such-package")
    assert status == pytest.ExitCode.USAGE_ERROR and "passed" not in output
    assert "no-such-package" in output and f"Type: {COMMAND}" in output
    status, output = project("-k", "plain or ahead", "-m", "not aot", aot="no-such-package")
    assert status == 0 and "1 passed" in output
    status, output = project("-k", "plain or ahead", "--gpu", aot="no-such-package")
    assert status == 0 and "1 passed" in output
    assert project("-k", "plain or ahead")[0] == 0


def test_a_missing_dev_group_stops_the_run(project):
    status, output = project("-k", "plain", dev="no-such-package")
    assert status == pytest.ExitCode.USAGE_ERROR and "no-such-package" in output and f"Type: {COMMAND}" in output


@pytest.mark.parametrize("version, status", [("0.11.1", 4), ("0.9.20", 4), ("0.11.2", 0), ("0.12.0.1", 0), ("1.0", 0)])
def test_an_old_jax_is_refused(project, tmp_path, version, status):
    metadata = tmp_path / "packages" / f"jax-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: jax\nVersion: {version}\n")
    seen, output = project("-k", "plain", "--collect-only", env={"PYTHONPATH": str(tmp_path / "packages")})
    assert seen == status and (f"jax is {version}" in output) == (status == 4)


def test_the_platform_is_chosen_and_the_callers_flags_are_kept(project):
    flags = "--xla_force_host_platform_device_count=3 --xla_cpu_enable_fast_math=false"
    _, output = project("-k", "environment", env={"XLA_FLAGS": flags, "JAX_PLATFORMS": "cuda"})
    assert f"saw cpu {flags} --xla_force_host_platform_device_count=8" in output
    _, output = project("-k", "environment", "--gpu", env={"XLA_FLAGS": flags})
    assert f"saw None {flags}\n" in output


def test_promotion_is_strict(project):
    _, output = project("-k", "dtypes or ranks")
    assert re.search("TypePromotionError", output) and "rank promotion" in output and "2 failed" in output


def test_here_are_8_virtual_cpu_devices_unless_on_a_gpu(request):
    import jax

    if not request.config.getoption("--gpu"):
        assert (jax.default_backend(), len(jax.devices())) == ("cpu", 8)


def test_the_readme_gives_the_command():
    assert COMMAND in (HERE.parent / "README.md").read_text()
