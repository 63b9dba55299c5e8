"""The benchmark: its rows, floors, checks and table, on a tiny layer and whatever device is here."""

import dataclasses
import json
import shlex
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers import TINY_D, TINY_L

from nemotron_moe import bench, bench_check, bench_data, bench_measure, bench_rivals, bench_table, cli
from nemotron_moe.bench_programs import Shape
from nemotron_moe.bench_work import PARTS, Product, floor_us, products
from pallas_kernels.bench import device
from pallas_kernels.bench.rivals import NotPresentError

QUICK = {"pause": 0.0, "heat": 0.0, "read_bytes": 1 << 16, "draws": 2, "rounds": 2, "say": lambda line: None}


def options(**changes):
    return bench.Options(**QUICK | {"models": {"tiny": TINY_L}, "tokens": (24,), "commit": "abc"} | changes)


@pytest.fixture
def absent(monkeypatch):
    """No rival is here, whatever is installed."""

    def find(*_):
        raise NotPresentError("not installed")

    monkeypatch.setattr("pallas_kernels.bench.rivals.find", find)
    monkeypatch.setattr(bench_rivals, "find", find)


def test_a_row_for_each_part_pass_and_implementation(absent):
    said = []
    rows = list(bench.run(options(passes=("cool", "hot"), say=said.append)))
    ran = [row for row in rows if "status" not in row]
    assert [(row["pass"], row["part"]) for row in ran] == [(which, part) for which in bench.PASSES for part in PARTS]
    for row in rows:
        assert tuple(row)[: len(bench.KEYS)] == bench.KEYS and set(row) - set(bench.KEYS) <= {"status", "reason"}
        assert json.loads(json.dumps(row, allow_nan=False)) == row
        assert (row["commit"], row["model"], row["tokens"], row["format"]) == ("abc", "tiny", 24, "bf16")
    for row in ran:
        assert row["us"] > 0 and row["timer"] in (device.timer(), "wall") and row["implementation"] in ("xla", "mosaic")
        assert row["rel_error"] <= bench_check.LIMIT and row["poisoned"] is False
        # It did run in bfloat16, and was compared with something better.
        assert row["rel_error"] == 0 if row["part"] == "plan" else row["rel_error"] > 1e-4
        if row["part"] != "plan":
            assert row["share"] == pytest.approx(row["ceiling"] / row["us"], abs=1e-3)
    absent_rows = {(row["implementation"], row["part"]) for row in rows if row.get("status") == "not present"}
    assert absent_rows == {(name, part) for name in ("torch_grouped_mm", "tokamax") for part in bench.RIVALS[name]}
    assert all(row["reason"] == "not installed" and row["us"] is None for row in rows if "status" in row)
    assert bench.passed(rows) and any("routed" in line for line in said)


def test_other_routings_are_measured_and_right():
    alone = {"tiny": dataclasses.replace(TINY_D, moe_shared_expert_intermediate_size=None)}
    parts = {"parts": ("routed", "block"), "passes": ("hot",), "implementations": ("auto",)}
    asked = options(models=alone, routings=("zipf", "one"), **parts)
    rows = list(bench.run(asked))
    assert [row["routing"] for row in rows] == ["zipf", "zipf", "one", "one"] and bench.passed(rows)


def test_a_wrong_result_and_an_unwritten_one_do_not_pass(monkeypatch):
    right = Shape.product

    def wrong(self, *arguments, activation):
        return right(self, *arguments, activation=activation).at[:, 3].multiply(jnp.bfloat16(1.5))

    def unwritten(self, *arguments, activation):
        return right(self, *arguments, activation=activation).at[-1, 3].set(jnp.bfloat16(jnp.nan))

    asked = options(parts=("up",), passes=("hot",), implementations=("auto",))
    for broken, reason, poisoned in ((wrong, "rel_error", False), (unwritten, "NaN", True)):
        monkeypatch.setattr(Shape, "product", broken)
        (row,) = bench.run(asked)
        assert (row["status"], row["poisoned"]) == ("wrong", poisoned) and reason in row["reason"]
        assert not bench.passed([row])


def test_what_fails_is_a_row_and_the_rest_is_measured(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of\nregisters")

    monkeypatch.setattr(Shape, "product", fail)
    rows = list(bench.run(options(parts=("up", "plan"), passes=("hot",), implementations=("auto",))))
    assert [row.get("status") for row in rows] == ["failed", None]
    assert rows[0]["reason"] == "RuntimeError: out of registers" and rows[0]["us"] is None
    assert not bench.passed(rows)


def test_a_layer_that_does_not_fit_is_rows_and_the_next_is_measured(monkeypatch):
    make = bench.random_layer

    def too_large(config):
        if config == TINY_L:
            raise MemoryError("9 GiB")
        return make(config)

    monkeypatch.setattr(bench, "random_layer", too_large)
    models = {"large": TINY_L, "small": TINY_D}
    rows = list(bench.run(options(models=models, parts=("plan",), implementations=("auto",))))
    assert [(row["model"], row["pass"], row.get("status")) for row in rows] == [
        *(("large", "cool", "failed"), ("large", "hot", "failed")),
        *(("small", "cool", None), ("small", "hot", None)),
    ]
    assert rows[0]["reason"] == "MemoryError: 9 GiB" and tuple(rows[0])[: len(bench.KEYS)] == bench.KEYS


def test_the_floor_of_a_cell_by_hand():
    # 4 tokens, 2 experts each, 3 of the 8 experts hit; H = 64, I = 48, S = 96.
    up, down = Product(m=8, n=48, k=64, matrices=3), Product(m=8, n=64, k=48, matrices=3, squared=True)
    assert products("routed", TINY_D, 4, 3) == (up, down) and products("plan", TINY_D, 4, 3) == ()
    assert up.flops == 2 * 8 * 48 * 64 and up.bytes == 2 * (3 * 48 * 64 + 8 * 64 + 8 * 48) == 20224
    # At 1 TB/s the bytes of up take 0.020224 us, less than its dense product; those of down as many, more than its.
    dense = {(8, 48, 64): 0.5, (8, 64, 48): 0.01}
    assert floor_us((up, down), dense, 1.0) == pytest.approx(0.5 + 0.020224)
    block = [product.shape for product in products("block", TINY_D, 4, 3)]
    assert block == [(4, 8, 64), (4, 96, 64), (4, 64, 96), (8, 48, 64), (8, 64, 48)]
    assert [product.shape for product in products("block", TINY_L, 4, 3)][1:3] == [(4, 32, 64), (4, 64, 32)]


def test_routings_are_what_they_are_called():
    config, tokens = dataclasses.replace(TINY_L, n_routed_experts=64, num_experts_per_tok=4), 4096
    loads = {}
    for routing in bench_data.ROUTINGS:
        ids = bench_data.random_ids(routing, config, tokens, seed=0)
        assert ids.dtype == np.int32 and all(np.unique(row).size == 4 for row in ids)
        loads[routing] = np.sort(np.bincount(ids.ravel(), minlength=64))[::-1]
    assert loads["uniform"][0] < 1.5 * loads["uniform"][-1]
    assert (loads["one"][:4] == tokens).all() and loads["one"][4:].sum() == 0
    # The first draw of a token is the best expert's with probability 1 / (1 + 1/2 + ... + 1/64).
    assert loads["zipf"][0] > tokens / (1 / np.arange(1, 65)).sum() > 4 * loads["zipf"][32]
    assert (bench_data.random_ids("zipf", config, 8, 0) != bench_data.random_ids("zipf", config, 8, 1)).any()


def test_a_wrong_band_of_columns_is_seen():
    lhs, rhs = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in ((0, (40, 32)), (1, (4, 200, 32))))
    sizes = np.asarray([8, 0, 16, 16])
    starts = np.append(0, np.cumsum(sizes))[:-1]
    windows = jnp.asarray(bench_check.windows(sizes, starts, 40))
    assert set(np.asarray(windows)[:, 0].tolist()) <= {0, 2, 3} and (windows[:, 3] > windows[:, 2]).all()
    out = jnp.concatenate([lhs[:8] @ rhs[0].T, lhs[8:24] @ rhs[2].T, lhs[24:] @ rhs[3].T])
    error, unwritten = bench_check.product_error(out, lhs, rhs, windows, activation=None)
    assert error < 1e-5 and not unwritten
    error, _ = bench_check.product_error(out.at[30:, 130].set(0.0), lhs, rhs, windows, activation=None)
    assert error > 0.03  # of 64 columns one is wrong, in less than half of the rows
    _, unwritten = bench_check.product_error(out.at[39, 0].set(jnp.nan), lhs, rhs, windows, activation=None)
    assert unwritten


def launch(*kernels):
    return lambda: LAUNCHED.extend(kernels)


LAUNCHED: list = []


@pytest.fixture
def recorder(monkeypatch):
    """A GPU whose kernels are those that `launch` says, and one at each mark."""

    def recorded(run):
        LAUNCHED.clear()
        run()
        return list(LAUNCHED)

    for module in (device, bench, bench_measure):
        monkeypatch.setattr(module, "timer", lambda: device.CUPTI)
    monkeypatch.setattr(device, "_recorded", recorded)
    monkeypatch.setattr(device, "_marker", lambda: launch(("wrapped_atan2", 0.5)))


def test_kernels_are_told_apart_by_marks(recorder):
    one = device.prepare([launch(("a", 1.0), ("b", 2.0)), launch(("b", 2.0), ("a", 3.0))])  # in any order
    other = device.prepare([launch(("c", 5.0))])
    timings = device.device_times([one, other, one], before=launch(("heat", 9.0), ("heat", 9.0)))
    assert [timing.us for timing in timings] == [(3.0, 5.0), (5.0,), (3.0, 5.0)]
    assert timings[0].median == 4.0 and timings[0].kernels == (("a", 2.0), ("b", 2.0))
    assert device.time_alone(device.prepare([launch(("c", 5.0))]), before=launch(("heat", 9.0))).us == (5.0,)


@pytest.mark.parametrize(
    "second, kernels",
    [
        ([("a", 3.0)], (("a", 2.0), ("memcpy32_post", 2.0))),  # a copy that is no kernel this time
        ([("memcpy32_post", 1.0), ("a", 2.0), ("a", 2.0)], (("a", 2.5), ("memcpy32_post", 2.5))),
        ([("a", 1.0), ("b", 3.0)], (("a", 1.0), ("memcpy32_post", 2.0), ("b", 1.5))),  # as many, but others
        ([], (("a", 0.5), ("memcpy32_post", 2.0))),
    ],
)
def test_calls_that_launch_different_kernels_are_timed_by_their_mean(recorder, second, kernels):
    calls = [launch(("a", 1.0), ("memcpy32_post", 4.0)), launch(*second)]
    same = device.prepare([launch(("c", 5.0))] * 2)
    group = device.prepare(calls)
    timings = device.device_times([same, group, same])
    assert [timing.us for timing in (timings[0], timings[2])] == [(5.0, 5.0)] * 2
    for timing in (timings[1], device.time_alone(group)):
        assert (timing.timer, timing.median) == ("cupti", pytest.approx(sum(us for _, us in kernels)))
        assert timing.kernels == kernels


def test_without_records_the_time_that_passes_counts(recorder, monkeypatch):
    kernel, none = device.Group([launch(("c", 5.0))]), device.Group([launch()])
    with pytest.raises(device.LaunchError, match="No kernel of 1 calls is recorded"):
        device.device_times([kernel, none])
    assert device.time_alone(none).timer == "wall" and device.time_alone(kernel).timer == "cupti"
    monkeypatch.setattr(device, "_marker", lambda: launch())
    with pytest.raises(device.LaunchError, match="0 marks are recorded; wanted 2"):
        device.device_times([kernel])

    def broken(run):
        run()
        raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")

    monkeypatch.setattr(device, "_recorded", broken)
    assert device.time_alone(kernel).timer == "wall"
    rows = list(bench.run(options(parts=("plan", "routed"), implementations=("auto",))))
    assert len(rows) == 4 and all(row["timer"] == "wall" and row["us"] > 0 for row in rows) and bench.passed(rows)
    assert all(row["share"] is None for row in rows)  # a floor by another clock would tell nothing


def test_one_failure_while_timing_leaves_the_others(recorder, monkeypatch):
    """A rival whose call breaks after it was checked."""

    def recorded(run):
        run()
        return [("wrapped_atan2", 1.0)]  # Nothing is told apart.

    monkeypatch.setattr(device, "_recorded", recorded)
    calls = iter(range(1000))

    def breaks():
        if next(calls) > 1:
            raise RuntimeError("illegal address")

    entry = bench.Entry("plan", "torch_grouped_mm", [breaks], lambda: (0.0, False))
    monkeypatch.setattr(bench, "RIVALS", {"torch_grouped_mm": ("plan",)})
    monkeypatch.setattr(bench, "rival", lambda *_: entry)
    rows = list(bench.run(options(parts=("plan", "up"), passes=("hot",), implementations=("auto", "torch_grouped_mm"))))
    assert [(row["part"], row.get("status")) for row in rows] == [("plan", None), ("plan", "failed"), ("up", None)]
    assert rows[1]["reason"] == "RuntimeError: illegal address"


def test_a_failure_within_a_cell_repeats_no_row(monkeypatch):
    part = bench._part

    def breaks(options, ceilings, name, *rest):
        if name == "up":
            raise RuntimeError("no floor")
        return part(options, ceilings, name, *rest)

    monkeypatch.setattr(bench, "_part", breaks)
    rows = list(bench.run(options(parts=("plan", "up"), passes=("hot",), implementations=("auto",))))
    assert [(row["part"], row.get("status")) for row in rows] == [("plan", None), ("up", "failed")]


def test_runs_with_the_same_lock_measure_one_after_the_other(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    lock, said = tmp_path / "lock", []
    asked = {"lock": str(lock), "parts": ("plan",), "passes": ("hot",), "implementations": ("auto",)}
    with ThreadPoolExecutor(1) as pool, open(lock, "a") as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # The other compiles, too.
        found = pool.submit(lambda: list(bench.run(options(**asked, say=said.append))))
        while not any(line.startswith("compiled in") for line in said) and not found.done():
            time.sleep(0.01)
        time.sleep(0.5)
        assert said[-1].startswith("compiled in")
        fcntl.flock(other, fcntl.LOCK_UN)
        assert len(found.result()) == 1
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # It is free again.


ROW = {
    **dict.fromkeys(bench.KEYS),
    **{"date": "2026-12-01", "commit": "abc", "device": "NVIDIA H200", "driver": "580", "jax": "0.11.2"},
    **{"model": "nano", "tokens": 512, "part": "routed", "format": "bf16", "routing": "uniform", "pass": "hot"},
    **{"implementation": "mosaic", "us": 700.0, "ceiling": 560.0, "share": 0.8, "timer": "cupti"},
}


def test_the_table_takes_the_latest_row_of_a_cell():
    rows = [
        ROW | {"us": 900.0},
        ROW | {"implementation": "torch_grouped_mm", "us": 1050.0},
        ROW,
        ROW | {"tokens": 8192, "us": 2000.0, "ceiling": 1600.0},
        ROW | {"pass": "cool", "us": 1.0},
        ROW | {"status": "wrong", "reason": "it is", "tokens": 128},
    ]
    lines = bench_table.table(rows).splitlines()
    assert lines[2:4] == ["| 512 | 700 | 1.25x | 1.50x | - | - | - |", "| 8192 | 2000 | 1.25x | - | - | - | - |"]
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert all(word in lines[-1] for word in ("NVIDIA H200", "580", "0.11.2", "2026-12-01", "abc"))
    assert bench_table.table([]) == "No GPU has been measured yet."


def test_the_readmes_table_is_the_one_that_is_generated():
    readme = bench_table.README.read_text()
    assert bench_table.section(readme) == bench_table.table(bench_table.recorded())
    assert bench_table.section(bench_table.replaced(readme, "new")) == "new"
    with pytest.raises(ValueError, match="no section between"):
        bench_table.section("nothing")


def test_the_command_appends_its_rows(monkeypatch, capsys, tmp_path, absent):
    monkeypatch.setattr("nemotron_moe.presets.NANO", TINY_D)
    run, seen = bench.run, []

    def quickly(asked):
        seen.append(asked)
        return run(dataclasses.replace(asked, **QUICK | {"say": asked.say}))

    monkeypatch.setattr(bench, "run", quickly)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")  # It is put back after the test.
    output = tmp_path / "rows.jsonl"
    output.write_text("{}\n")
    command = "bench --models nano --tokens 16 --parts plan up --passes hot --commit abc"
    assert cli.main([*shlex.split(command), "--output", str(output)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "PASS" and "Routing uniform, hot pass" in out and "tokamax up: not present" in out
    assert max(map(len, out.splitlines())) <= 80 and "nano 16 uniform hot up" in err
    assert seen[0].models == {"nano": TINY_D} and (seen[0].rounds, seen[0].passes) == (2, ["hot"])
    first, *rows = map(json.loads, output.read_text().splitlines())
    assert first == {} and [row["part"] for row in rows] == ["plan", "up", "up", "up"]
    monkeypatch.setattr(bench, "run", lambda asked: iter([ROW | {"status": "failed", "reason": "it broke"}]))
    assert cli.main(["bench", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["passed"] is False and shown["rows"][0]["reason"] == "it broke"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--models", "nani"], ["models has ['nani']", "'nano', 'super', 'ultra'"]),
        (["--parts", "upp"], ["parts has ['upp']", "'routed'"]),
        (["--passes", "warm"], ["passes has ['warm']", "'cool', 'hot'"]),
        (["--routings", "zip"], ["routings has ['zip']", "'zipf'"]),
        (["--implementations", "mosaic"], ["implementations has ['mosaic']", "'auto'"]),
        (["--tokens", "0"], ["tokens is 0", "1 or more"]),
        (["--rounds", "-1"], ["rounds is -1", "1 or more"]),
        (["--output", "/nowhere/at/all"], ["/nowhere/at/all"]),
    ],
)
def test_bad_arguments_are_told_in_one_line(monkeypatch, capsys, arguments, words):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    monkeypatch.setattr(bench, "run", lambda _: pytest.fail("it ran"))
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and all(word in err for word in words), err
