"""The reader of one safetensors file, on well-formed files."""

import json

import fixtures_io
import ml_dtypes
import numpy as np
import pytest
from fixtures_io import assert_same_bits, write_safetensors

from checkpoints.safetensors_file import DTYPES, SafetensorsFile

# One file written out by hand: a BF16, an F8_E4M3 and a U8 tensor.
HEADER = (
    b'{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"b":{"dtype":"F8_E4M3","shape":[3,1],"data_offsets":[4,7]},'
    b'"c":{"dtype":"U8","shape":[1,2],"data_offsets":[7,9]}}'
)
DATA = bytes([0x80, 0x3F, 0x20, 0xC1, 0x38, 0xC0, 0x7E, 0x01, 0xFF])


def test_bf16_fp8_and_bytes_are_read_without_torch_R45(tmp_path):
    path = tmp_path / "golden.safetensors"
    path.write_bytes(len(HEADER).to_bytes(8, "little") + HEADER + DATA)
    with SafetensorsFile(path) as file:
        a, b, c = (file.read(name) for name in "abc")
    assert (a.dtype, b.dtype, c.dtype) == (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.uint8)
    assert a.astype(np.float32).tolist() == [1.0, -10.0]
    assert b.astype(np.float32).tolist() == [[1.0], [-2.0], [448.0]]
    assert c.tolist() == [[1, 255]]


@pytest.mark.parametrize("name", [name for name, (_, dtype) in DTYPES.items() if dtype is not None])
def test_every_dtype_keeps_its_bits(tmp_path, name):
    bits, dtype = DTYPES[name]
    raw = bytes(value % 2 if name == "BOOL" else value * 37 % 256 for value in range(6 * bits // 8))
    header = json.dumps({"x": {"dtype": name, "shape": [2, 3], "data_offsets": [0, len(raw)]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw)
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        array = file.read("x")
    assert (array.shape, array.dtype, array.tobytes()) == ((2, 3), dtype, raw)


@pytest.mark.parametrize("bits, name, shape", [(4, "F4", [2, 3]), (6, "F6_E2M3", [4]), (6, "F6_E3M2", [8])])
def test_elements_smaller_than_a_byte_are_sized_but_not_read(tmp_path, bits, name, shape):
    size = int(np.prod(shape)) * bits // 8
    header = json.dumps({"x": {"dtype": name, "shape": shape, "data_offsets": [0, size]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert file.tensors["x"].nbytes == size
        with pytest.raises(ValueError, match=name):
            file.read("x")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_scalars_empty_tensors_and_metadata_are_legal(tmp_path, metadata):
    tensors = {
        "empty": np.zeros((0, 5), np.float32),
        "scalar": np.float32(3.5).reshape(()),
        "also empty": np.zeros((2, 0), np.int64),
        "vector": np.arange(3, dtype=np.int32),
    }
    write_safetensors(tmp_path / "x.safetensors", tensors, metadata)
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert list(file.tensors) == list(tensors)
        for name, array in tensors.items():
            assert_same_bits(file.read(name), array)


def test_a_file_without_tensors_is_legal(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", {})
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert file.tensors == {}


def test_a_transposed_view_is_written_with_the_contents_it_shows_P2(tmp_path):
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    views = {"transposed": matrix.T, "every other": matrix[:, ::2], "reversed": matrix[::-1]}
    write_safetensors(tmp_path / "x.safetensors", views)
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert file.read("transposed").tolist() == [[0, 3], [1, 4], [2, 5]]
        assert file.read("every other").tolist() == [[0, 2], [3, 5]]
        assert file.read("reversed").tolist() == [[3, 4, 5], [0, 1, 2]]


def test_only_what_is_asked_for_is_read_and_counted(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", {"a": np.zeros(100, np.uint8), "b": np.ones((4, 3), np.int16)})
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert file.bytes_read == 0
        file.read("b")
        assert file.bytes_read == 24


def test_one_matrix_of_a_stack_is_found_by_its_index(tmp_path):
    stack = np.arange(24, dtype=np.int16).reshape(4, 2, 3)
    write_safetensors(tmp_path / "x.safetensors", {"before": np.zeros(5, np.uint8), "stack": stack})
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        part = file.tensors["stack"].at(2)
        array = np.empty(part.shape, part.numpy_dtype)
        file.read_into(part.start, array)
    assert_same_bits(array, stack[2])


def test_the_real_files_are_read_to_the_last_tensor():
    for name in fixtures_io.manifest()["fixtures"]:
        assert fixtures_io.tensors_of(fixtures_io.FIXTURES / name)
