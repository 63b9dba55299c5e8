"""The XLA implementation: the contract, and what is its own."""

import jax.numpy as jnp
import numpy as np
import pytest
from bounds import bound
from kernels.arrays import assert_within, operands
from kernels.grouped_matmul_contract import UNEVEN, GeneralContract

from pallas_kernels.grouped_matmul import Tile, grouped_matmul
from pallas_kernels.grouped_matmul.tile import BATCH_BYTES, BLOCK_BYTES, default_tile
from pallas_kernels.implementation import H200, compiling_for


class TestXla(GeneralContract):
    implementation = "xla"

    @pytest.mark.parametrize(
        "rows, columns, batch",
        [
            (1, 1, 1),
            (4, 7, 1),
            (8, 24, 1),
            (37, 5, 1),
            (1000, 1000, 1),
            (1, 24, 2),
            (4, 7, 3),
            (8, 24, 4),
            (37, 5, 1000),
        ],
    )
    def test_every_tile_gives_the_same_product_and_gradient(self, rows, columns, batch, alignment):
        m = self.rows(UNEVEN, alignment=alignment)
        lhs, rhs = operands(m, 24, 40, 4, jnp.float32)
        sizes, options = jnp.array(UNEVEN), {"group_alignment": alignment}
        want, size = self.oracle(lhs, rhs, UNEVEN, alignment=alignment)
        tile = Tile(rows=rows, columns=columns, batch=batch)
        assert_within(self.gmm(lhs, rhs, sizes, tile=tile, **options), want, bound(jnp.float32, 40, size))
        dout = jnp.ones((m, 24))
        got, plain = (self.gradients(lhs, rhs, sizes, dout, tile=t, **options) for t in (tile, None))
        for a, b in zip(got, plain, strict=True):
            assert_within(a, np.asarray(b, np.float64), bound(jnp.float32, 40, 40 * float(jnp.abs(b).max())))

    def test_many_more_rows_than_a_tile_in_one_group(self):
        lhs, rhs = operands(700, 24, 40, 3, jnp.float32)
        for sizes in ((0, 700, 0), (1, 698, 1), (650, 0, 0)):
            want, size = self.oracle(lhs, rhs, sizes)
            got = self.gmm(lhs, rhs, jnp.array(sizes), tile=Tile(rows=64, columns=16))
            assert_within(got, want, bound(jnp.float32, 40, size))

    def test_many_more_groups_than_rows(self):
        lhs, rhs = operands(5, 6, 7, 200, jnp.float32)
        sizes = np.zeros(200, np.int32)
        sizes[[0, 17, 150, 199]] = 1, 2, 1, 1
        want, size = self.oracle(lhs, rhs, sizes)
        assert_within(self.gmm(lhs, rhs, jnp.asarray(sizes)), want, bound(jnp.float32, 7, size))


class TestXlaInBatches(GeneralContract):
    """What a GPU does by default, in batches and blocks that are small enough for more than one of each."""

    implementation = "xla"
    dtypes = (jnp.float32,)
    widths = ((464, 232),)

    tile = Tile(rows=8, columns=100, batch=4)

    @pytest.fixture(autouse=True)
    def choose_as_for_a_gpu(self):
        with compiling_for(H200):
            yield


def test_a_gpu_takes_many_tiles_at_once_and_any_other_platform_one():
    sizes = {"columns": 1856, "column_bytes": 2 * 2688, "row_bytes": 2 * 2688 + 4 * 1856}
    many = default_tile(platform="gpu", rows=49152, groups=128, **sizes)
    assert (many.rows, many.columns) == (512, 1856) and 10 <= many.batch <= 20
    few = default_tile(platform="gpu", rows=1536, groups=128, **sizes)
    assert (few.rows, few.columns) == (16, 1856) and 20 <= few.batch <= 30
    huge = default_tile(platform="gpu", rows=10, groups=2, columns=10**6, column_bytes=10**4, row_bytes=10**4)
    assert huge.batch == 1 and huge.columns * 10**4 <= BATCH_BYTES < (huge.columns + 1) * 10**4
    for platform in ("cpu", "tpu"):
        tile = default_tile(platform=platform, rows=49152, groups=128, **sizes)
        assert tile == Tile(rows=128, columns=BLOCK_BYTES // (2 * 2688), batch=1)


@pytest.mark.parametrize("bad", [{"rows": 0}, {"rows": 4.0}, {"rows": True}, {"columns": -1}, {"batch": 0}])
def test_a_tile_must_be_positive(bad):
    with pytest.raises(ValueError, match="wanted a positive integer"):
        Tile(**({"rows": 4, "columns": 4} | bad))


@pytest.mark.quick
@pytest.mark.parametrize(
    "change, message",
    [
        ({"lhs": [[1.0] * 5] * 4}, r"lhs is a list; wanted an array \[M, K\]"),
        ({"rhs": 3.0}, r"rhs is a float; wanted an array \[G, N, K\]"),
        ({"group_sizes": [2, 2]}, r"group_sizes is a list; wanted an array \[G\]"),
        ({"lhs": jnp.ones((2, 4, 5))}, r"lhs has shape \(2, 4, 5\); wanted \[M, K\]"),
        ({"rhs": jnp.ones((3, 5))}, r"rhs has shape \(3, 5\); wanted \[G, N, K\]"),
        ({"group_sizes": jnp.ones((2, 1), int)}, r"group_sizes has shape \(2, 1\); wanted \[G\]"),
        ({"rhs": jnp.ones((2, 5, 3))}, "lhs has K = 5 but rhs has K = 3"),
        ({"group_sizes": jnp.array([4])}, "group_sizes has 1 sizes but rhs has 2 groups"),
        ({"group_sizes": jnp.array([2.0, 2.0])}, "group_sizes is float32; wanted integers"),
        ({"lhs": jnp.ones((4, 5), int)}, "lhs is int32; wanted one of"),
        ({"rhs": jnp.ones((2, 3, 5), jnp.float8_e4m3fn)}, "rhs is float8_e4m3fn; wanted one of"),
        ({"out_dtype": jnp.int8}, "out_dtype is int8; wanted one of"),
        ({"out_dtype": "nonsense"}, r"out_dtype is 'nonsense'; wanted one of \['bfloat16', 'float16', 'float32'\]"),
        ({"activation": "gelu"}, "activation is 'gelu'; wanted one of"),
        ({"group_alignment": 0}, "group_alignment is 0; wanted a positive integer"),
        ({"group_alignment": -8}, "group_alignment is -8; wanted a positive integer"),
        ({"group_alignment": True}, "group_alignment is True; wanted a positive integer"),
        ({"group_alignment": 8.0}, "group_alignment is 8.0; wanted a positive integer"),
        ({"implementation": "cuda"}, r"implementation is 'cuda'; grouped_matmul has \['mosaic', 'xla', 'reference'\]"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    good = {"lhs": jnp.ones((4, 5)), "rhs": jnp.ones((2, 3, 5)), "group_sizes": jnp.array([2, 2])}
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**(good | change))


@pytest.mark.quick
def test_numpys_arrays_and_integers_are_taken():
    lhs, rhs, sizes = np.ones((4, 5), np.float32), np.ones((2, 3, 5), np.float32), np.array([2, 2])
    assert (grouped_matmul(lhs, rhs, sizes, group_alignment=np.int64(1)) == 5).all()
