"""The documents agree with what is there."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from fixtures_io import FIXTURES

import nemotron_moe as nm

ROOT = Path(__file__).parents[1]
README, ARCHITECTURE = ((ROOT / name).read_text() for name in ("README.md", "ARCHITECTURE.md"))
COMMANDS = ("pip install uv && uv run nemotron-moe demo", "pip install uv && uv run --isolated --group dev --group aot pytest")


def _tests():
    for path in (ROOT / "tests").rglob("*.py"):  # A contract that tests inherit is in no test file.
        yield from (node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def test_the_commands_are_on_the_first_screen():
    screen = "\n".join(README.splitlines()[:20])
    for command in (*COMMANDS, "uv run --extra cuda13 nemotron-moe demo", "pipx install uv"):
        assert command in screen


def test_the_continuous_integration_runs_the_readmes_tests():
    assert COMMANDS[1].split("&& ")[1] in (ROOT / ".ci" / "run").read_text()


def test_the_readmes_code_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 12
    exec(code.replace('"path/to/checkpoint", 3', f"{str(FIXTURES / 'bf16_latent')!r}, 0"), {})
    assert "(2, 128, 96) (2, 128, 6)" in capsys.readouterr().out


def test_every_file_has_one_sentence_and_every_sentence_a_file():
    rows = re.findall(r"(?m)^\| `([\w/]+\.py)` \| (.+) \|$", ARCHITECTURE)
    files = [path.relative_to(ROOT) for name in _packages() for path in (ROOT / name).rglob("*.py")]
    assert sorted(file for file, _ in rows) == sorted(file.as_posix() for file in files)
    # Files of the tests are named in prose.
    assert all((ROOT / file).exists() for file in re.findall(r"`(tests/[\w/.]+)`", ARCHITECTURE))


def _packages():
    return ("nemotron_moe", "pallas_kernels", "checkpoints")


def test_every_test_that_is_named_exists():
    named = re.findall(r"`(test_\w+)`", ARCHITECTURE)
    assert len(named) > 50 and set(named) - set(_tests()) == set()


@pytest.mark.parametrize("row", re.findall(r"(?m)^\| ([CRP]\d+) \|(?:.*)\|$", ARCHITECTURE))
def test_every_capability_and_every_fault_has_a_test(row):
    (line,) = re.findall(rf"(?m)^\| {row} \|.*$", ARCHITECTURE)
    assert "`test_" in line


def test_the_frozen_signatures_are_the_real_ones():
    (code,) = re.findall(r"```python\n(.*?)```", ARCHITECTURE, re.DOTALL)
    code = re.sub(r"\(\n\s+", "(", code)
    seen = dict(re.findall(r"(?m)^(?:pallas_kernels\.grouped_matmul\.)?([\w.]+)(\(.*?\))(?:\s|$)", code))
    for name, text in seen.items():
        if "..." not in text:
            assert text == _signature(name), name
    functions = {name for name in nm.__all__ if inspect.isfunction(getattr(nm, name))}
    assert functions | {"grouped_matmul"} <= seen.keys()
    assert all(name in code for name in nm.__all__ if name not in ("Plan", "CheckReport", "RoutingStats"))


def _signature(name):
    if name == "grouped_matmul":
        from pallas_kernels.grouped_matmul import grouped_matmul as value
    else:
        value = nm
        for part in name.split("."):
            value = getattr(value, part)
    parameters = inspect.signature(value).parameters.values()
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    text = str(inspect.Signature(plain))
    return re.sub(r"<class 'jax\.numpy\.(\w+)'>", r"jnp.\1", text)


def test_the_project_speaks_of_itself_alone():
    for path in (*ROOT.glob("*.md"), *(path for name in _packages() for path in (ROOT / name).rglob("*.py"))):
        assert not re.search(r"[Ii]ssue #?\d|/work/|\.\./shared", path.read_text()), path
