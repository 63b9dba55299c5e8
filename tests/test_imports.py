"""Who may import whom, what importing does not do, and that the lazy names are told the same way everywhere."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nemotron_moe as nm

ROOT = Path(__file__).parents[1]
PACKAGES = ("checkpoints", "nemotron_moe", "pallas_kernels")
FILES = {path.relative_to(ROOT).as_posix(): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}

# The command line, and the one module whose names are lazy.
MAY_NAME_CHECKPOINTS = {"nemotron_moe/__init__.py", "nemotron_moe/cli.py", "nemotron_moe/demo.py"}
# Where the layer gets its kernels from; the other asks which of them would run.
MAY_NAME_KERNELS = {"nemotron_moe/kernels.py", "nemotron_moe/explanation.py"}  # the operations; array types anyone
# Benchmarks may use everything that they measure.
BENCHMARKS = {name for name in FILES if Path(name).name.startswith("bench")}
MAX_LINES = 400
HEAVY = ("flax", "orbax", "tensorstore", "matplotlib", "jax.experimental.pallas")


def imports(tree, *, at_import):
    """The modules that a file names; with `at_import`, those that importing it imports."""
    for node in tree.body if isinstance(tree, ast.Module) else ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction of dependency"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif at_import and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue  # Imported when it is called.
        elif at_import and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue  # Imported by type checkers.
        else:
            yield from imports(node, at_import=at_import)


def packages(name, *, at_import=False, but=None):
    """Our packages that a file names, its own and what begins with `but` aside."""
    modules = imports(ast.parse(FILES[name].read_text()), at_import=at_import)
    named = {module.split(".")[0] for module in modules if but is None or not module.startswith(but)}
    return named & set(PACKAGES) - {name.split("/")[0]}


def test_the_walk_sees_imports_wherever_they_are():
    text = (
        "import a\nfrom b import c\nif TYPE_CHECKING:\n import d\ntry:\n import e\nfinally:\n f\ndef g():\n import h\n"
    )
    assert list(imports(ast.parse(text), at_import=False)) == ["a", "b.c", "d", "e", "h"]
    assert list(imports(ast.parse(text), at_import=True)) == ["a", "b.c", "e"]
    assert len(FILES) > 30 and all(any(name.startswith(package) for name in FILES) for package in PACKAGES)


def test_dependencies_point_from_checkpoints_to_the_layer_to_the_kernels():
    assert {name for name in FILES if name.startswith("pallas_kernels/") and packages(name)} == set()
    naming = {name for name in FILES if name.startswith("nemotron_moe/") and "checkpoints" in packages(name)}
    assert naming - BENCHMARKS <= MAY_NAME_CHECKPOINTS
    assert {name for name in naming if "checkpoints" in packages(name, at_import=True)} == set()
    kernels = {name for name in FILES if packages(name, but="pallas_kernels.formats") & {"pallas_kernels"}}
    own = {name for name in kernels if name.startswith("nemotron_moe/")}
    assert own - BENCHMARKS <= MAY_NAME_KERNELS and "nemotron_moe/kernels.py" in own
    quantizing = {name for name, path in FILES.items() if re.search(r"formats import .*\bquantize\b", path.read_text())}
    lazy = {"nemotron_moe/__init__.py"}
    assert {name for name in quantizing if name.startswith("nemotron_moe/")} - lazy <= MAY_NAME_KERNELS


def test_our_files_import_nothing_that_is_not_a_dependency():
    allowed = {*sys.stdlib_module_names, *PACKAGES, "jax", "jaxlib", "ml_dtypes", "numpy", "rich"}
    seen = {
        name: {module.split(".")[0] for module in imports(ast.parse(path.read_text()), at_import=False)} - allowed
        for name, path in FILES.items()
    }
    assert {name: modules for name, modules in seen.items() if modules} == {}


@pytest.mark.parametrize("name", sorted(FILES))
def test_files_are_small_and_say_what_they_are(name):
    text = FILES[name].read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert ast.get_docstring(ast.parse(text)), "a file opens by saying what it is"


IMPORT = """
import json, os, sys, warnings
warnings.simplefilter("error")
import jax
before = dict(os.environ), dict(jax.config.values)
{code}
from jax._src import xla_bridge
print(json.dumps(dict(
    backend=xla_bridge.backends_are_initialized(),
    environment=dict(os.environ) != before[0],
    config=[name for name, value in jax.config.values.items() if before[1].get(name) != value],
    modules=sorted(sys.modules),
)))
"""


@pytest.mark.quick
@pytest.mark.parametrize(
    "code",
    [
        "import nemotron_moe",
        "import nemotron_moe as nm\nfor name in nm.__all__: getattr(nm, name)",
        "import checkpoints, pallas_kernels",
        "import nemotron_moe.cli, nemotron_moe.cli_output, nemotron_moe.demo",
    ],
    ids=["package", "every_name", "others", "command_line"],
)
def test_importing_does_nothing_R90(code):
    done = subprocess.run([sys.executable, "-c", IMPORT.format(code=code)], cwd=ROOT, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    seen = json.loads(done.stdout)
    assert (seen["backend"], seen["environment"], seen["config"]) == (False, False, [])
    heavy = [module for module in seen["modules"] if module.startswith(HEAVY)]
    assert heavy == []


@pytest.mark.quick
def test_importing_the_package_loads_none_of_its_parts():
    code = "import sys, nemotron_moe; print([name for name in sys.modules if name.split('.')[0] in {!r}])"
    done = subprocess.run(
        [sys.executable, "-c", code.format((*PACKAGES, "jax"))], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("['nemotron_moe']\n", "")


def _typed_names(name):
    """What the block for type checkers of a package says: names by module."""
    tree = ast.parse(FILES[f"{name}/__init__.py"].read_text())
    checking = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {}
    for node in checking.body:
        assert isinstance(node, ast.ImportFrom) and len(node.names) == 1 and node.names[0].asname == node.names[0].name
        typed.setdefault(node.module, set()).add(node.names[0].name)
    return typed


def test_the_lazy_names_and_those_for_type_checkers_are_the_same():
    wanted = {module: set(names) for module, names in nm._HOME.items()}
    assert _typed_names("nemotron_moe") == wanted | {"nemotron_moe": set(nm._SUBMODULES)}
    names = [name for names in nm._HOME.values() for name in names]
    assert sorted([*names, *nm._SUBMODULES]) == nm.__all__ == dir(nm)
    assert len(set(nm.__all__)) == len(nm.__all__)


@pytest.mark.quick
@pytest.mark.parametrize("name", nm.__all__)
def test_every_public_name_is_there_and_documented(name):
    value = getattr(nm, name)
    assert value.__doc__, f"nm.{name} has no docstring"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'moe_blok'"):
        nm.moe_blok  # noqa: B018
