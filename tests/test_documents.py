"""The documents agree with what is there."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

from fixtures_io import FIXTURES

import nemotron_moe as nm

ROOT = Path(__file__).parents[1]
README, ARCHITECTURE = ((ROOT / name).read_text() for name in ("README.md", "ARCHITECTURE.md"))
COMMANDS = (
    "pip install uv && uv run nemotron-moe demo",
    "pip install uv && uv run --isolated --group dev --group aot pytest -n 2 --dist loadfile",
)
# What the layer can do, and the faults of other implementations that it must not have.
REQUIRED = set(
    re.findall(
        r"\w+",
        """C1 C2 C3 C4 C5 C6 C7 C8 C9 C10 C11 C12 C13 C14 C15 C16 C17 C18 C19 C20 C21 C22 C23 C24 C27 C48 C49 C50 C51
        R02 R04 R06 R08 R10 R12 R15 R17 R18 R19 R22 R23 R24 R26 R30 R32 R34 R39 R40 R43 R45
        R54 R57 R61 R63 R65 R70 R73 R75 R77 R78 R81 R82 R88 R90
        P2 P4 P5""",
    )
)


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


def test_every_test_that_is_named_is_collected(request):
    named = set(re.findall(r"`(test_\w+)`", ARCHITECTURE))
    missing = named - {item.originalname for item in request.session.items}
    if missing:  # Perhaps only because this run is of a part of the tests.
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert listed.returncode == 0, listed.stdout + listed.stderr
        missing = named - set(re.findall(r"::(test_\w+)", listed.stdout))
    assert len(named) > 50 and not missing


def test_every_capability_and_every_fault_has_a_test():
    rows = dict(re.findall(r"(?m)^\| ([CRP]\d+) (\|.*\|)$", ARCHITECTURE))
    assert rows.keys() >= REQUIRED
    assert [row for row, text in rows.items() if "`test_" not in text.split("|")[-2]] == []


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
    files = [*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / ".ci" / "run"]
    for folder in (*_packages(), "tests"):
        files += [path for ending in ("py", "md", "json") for path in (ROOT / folder).rglob(f"*.{ending}")]
    for path in files:
        # The brackets keep this file from being found.
        assert not re.search(r"[Ii]ssue #?\d|/wor[k]/|\.\./share[d]", path.read_text()), path
