"""The choice of an implementation, the ahead-of-time compile's complaint, and the benchmark's command line."""

import dataclasses
import json
import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot
from pallas_kernels.grouped_matmul import choose
from pallas_kernels.implementation import H200, Facts, select

FACTS = Facts(target=H200, dtypes={"lhs": jnp.float32}, sizes={"rows": 3})


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    reason: str | None = None

    def refuses(self, facts):
        return self.reason and self.reason.format(jnp.dtype(facts.dtypes["lhs"]))


TABLE = (Row("fast", "lhs is {}; it accepts bfloat16"), Row("any"), Row("slow"))


@pytest.mark.quick
def test_the_first_that_does_not_refuse_runs_and_the_reasons_are_kept(caplog):
    with caplog.at_level(logging.DEBUG, logger="pallas_kernels"):
        for _ in range(2):
            choice = select("an operation", TABLE, FACTS)
    assert choice.implementation.name == "any"
    assert choice.passed_over == (("fast", "lhs is float32; it accepts bfloat16"),)
    assert [r.getMessage() for r in caplog.records] == [
        "an operation runs 'any'; not 'fast': lhs is float32; it accepts bfloat16"
    ]


@pytest.mark.quick
def test_a_named_implementation_runs_or_says_what_it_would_accept():
    assert select("an operation", TABLE, FACTS, "slow").implementation.name == "slow"
    with pytest.raises(ValueError, match="'fast' refuses: lhs is float32; it accepts bfloat16"):
        select("an operation", TABLE, FACTS, "fast")
    with pytest.raises(ValueError, match=r"implementation is 'quick'; an operation has \['fast', 'any', 'slow'\]"):
        select("an operation", TABLE, FACTS, "quick")


def test_grouped_matmul_chooses_xla_from_shapes_alone():
    lhs, rhs = jax.ShapeDtypeStruct((3, 5), jnp.bfloat16), jax.ShapeDtypeStruct((2, 4, 5), jnp.bfloat16)
    assert choose(lhs, rhs).implementation.name == "xla"
    assert choose(lhs, rhs, implementation="reference").implementation.name == "reference"


def test_compiling_without_the_packages_says_what_to_type(monkeypatch):
    monkeypatch.setattr(aot, "PACKAGES", {"no_such.module": "no-such-package"})
    aot._topology.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"no-such-package.*uv sync --group dev --group aot"):
        aot.compile_for_h200(jnp.sin, jnp.ones(3))


def test_the_benchmark_prints_one_json_object_a_line():
    small = "--tokens 4 8 --experts 4 --top-k 2 --width 6 --inner 10 --rounds 2 --read-bytes 100000"
    command = [sys.executable, "-m", "pallas_kernels.bench", *small.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    measured = [("grouped_matmul", "xla"), ("scatter_rows", "xla"), ("top_k", "xla"), ("group_places", "sort")]
    seen = [(row["operation"], row["implementation"], row["tokens"]) for row in rows]
    assert seen == [(*names, tokens) for names in measured for tokens in (4, 8)]
    for row in rows:
        assert row["us"] >= row["least_us"] > 0 and row["share_of_reading"] > 0 and row["timer"] == "wall"
        assert row["jax"] == jax.__version__ and row["date"] and row["device"]
