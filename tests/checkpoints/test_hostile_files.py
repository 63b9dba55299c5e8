"""Files made to mislead, and files damaged by accident: always a CheckpointError that says where."""

import json
import os

import numpy as np
import pytest
from fixtures_io import layer_tensors, moe_config, shuffled, write_checkpoint, write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import CheckpointError, layer_files, list_moe_layers, load_layer
from checkpoints.safetensors_file import SafetensorsFile


def file_of(header: bytes | str | dict, data: bytes = b"", length: int | None = None) -> bytes:
    raw = json.dumps(header) if isinstance(header, dict) else header
    raw = raw.encode() if isinstance(raw, str) else raw
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(dtype="U8", shape=(4,), offsets=(0, 4), **more) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


HOSTILE = {
    "empty file": (b"", "truncated"),
    "shorter than the length field": (b"\0\0\0", "truncated"),
    "header longer than the file": (file_of("{}", length=3), "header of 3"),
    "header of 2^64 - 1 bytes": (file_of("{}", length=2**64 - 1), "header of 18446744073709551615"),
    "a pickle": (b"\x80\x04\x95\x0b\0\0\0\0\0\0\0\x8c\x07builtins\x94.", "no safetensors file"),
    "a zip": (b"PK\x03\x04" + bytes(60), "no safetensors file"),
    "a web page": (b"<!DOCTYPE html><html>Sign in</html>", "no safetensors file"),
    "header not UTF-8": (file_of(b'{"\xff": 1}'), "as JSON"),
    "header not JSON": (file_of("{'a': 1}"), "as JSON"),
    "header cut off": (file_of('{"a": {"dtype"'), "as JSON"),
    "header nested without end": (file_of('{"a":' + "[" * 200_000), "as JSON"),
    "header a list": (file_of("[]"), "JSON list"),
    "header a number of 5000 digits": (file_of('{"a": ' + "9" * 5000 + "}"), "as JSON"),
    "duplicate tensor": (file_of('{"a": %s, "a": %s}' % ((json.dumps(entry()),) * 2), b"1234"), "'a' more than once"),
    "duplicate key in an entry": (
        file_of('{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], "shape": [2]}}', b"1234"), "'shape' more"
    ),
    "entry not an object": (file_of({"a": [1]}), "a in"),
    "entry without offsets": (file_of({"a": {"dtype": "U8", "shape": [4]}}), "data_offsets"),
    "entry with more": (file_of({"a": entry(pickle="x")}, b"1234"), "wanted dtype"),
    "unknown dtype": (file_of({"a": entry("F3")}, b"1234"), "unknown dtype F3"),
    "dtype not a string": (file_of({"a": entry(["U8"])}, b"1234"), "unknown dtype"),
    "negative shape": (file_of({"a": entry(shape=(-2, -2))}, b"1234"), "none negative"),
    "shape not whole": (file_of({"a": entry(shape=(4.0,))}, b"1234"), "integers"),
    "shape of truth values": (file_of({"a": entry(shape=(4, True))}, b"1234"), "integers"),
    "shape a string": (file_of('{"a": {"dtype": "U8", "shape": "4", "data_offsets": [0, 4]}}', b"1234"), "integers"),
    "shape that wraps to 4 in 64 bits": (file_of({"a": entry(shape=(2**62 + 1, 4))}, b"1234"), "takes"),
    "shape of a million axes": (file_of({"a": entry(shape=(1,) * 1_000_000)}, b"1"), "at most"),
    "shape larger than the bytes": (file_of({"a": entry(shape=(5,))}, b"1234"), "takes 5"),
    "shape smaller than the bytes": (file_of({"a": entry("U16", shape=(1,))}, b"1234"), "takes 2"),
    "half a byte": (file_of({"a": entry("F4", shape=(7,), offsets=(0, 3))}, b"123"), "takes 3.5"),
    "offsets backwards": (file_of({"a": entry(shape=(0,), offsets=(4, 0))}, b"1234"), "-4 bytes"),
    "offsets negative": (file_of({"a": entry(offsets=(-4, 0))}, b"1234"), "none negative"),
    "three offsets": (file_of({"a": entry(offsets=(0, 2, 4))}, b"1234"), "two integers"),
    "offsets behind the end": (file_of({"a": entry(offsets=(2, 6))}, b"1234"), "gap"),
    "overlap": (file_of({"a": entry(), "b": entry(offsets=(2, 6))}, b"123456"), "b .* overlaps a"),
    "same bytes twice": (file_of({"a": entry(), "b": entry()}, b"1234"), "overlaps"),
    "a gap": (file_of({"a": entry(), "b": entry(offsets=(6, 10))}, b"1234567890"), "gap after a"),
    "bytes behind the last tensor": (file_of({"a": entry()}, b"12345"), "1 bytes behind"),
    "truncated": (file_of({"a": entry(), "b": entry(offsets=(4, 8))}, b"123456"), "truncated.* b is cut.*incomplete"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:5f\nsize 77296\n", "LFS .*incomplete"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_and_named(tmp_path, case):
    raw, message = HOSTILE[case]
    (tmp_path / "shard-x.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"(?s){message}") as caught:
        SafetensorsFile(tmp_path / "shard-x.safetensors")
    assert "shard-x.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_names_in_messages_are_printable_and_short(tmp_path):
    name = "\x1b[31m\ud800" + "x" * 10_000
    (tmp_path / "x.safetensors").write_bytes(file_of({name: entry("F3")}, b"1234"))
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(tmp_path / "x.safetensors")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


def test_what_is_no_regular_file_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("pipe.safetensors", "folder.safetensors"):
        with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
            SafetensorsFile(tmp_path / name)


def test_a_header_beyond_the_formats_limit_is_refused_unread(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((150_000_000).to_bytes(8, "little"))
    os.truncate(path, 200_000_000)  # Takes no room on disk.
    with pytest.raises(CheckpointError, match="header of 150000000 bytes; the format allows"):
        SafetensorsFile(path)


def test_a_file_that_shrinks_while_open_is_an_error(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", {"a": np.arange(1000)})
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        os.truncate(tmp_path / "x.safetensors", 500)
        with pytest.raises(CheckpointError, match="became shorter"):
            file.read("a")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_damage_to_a_header_gives_a_checkpoint_error_or_a_file_that_reads(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "x.safetensors"
    write_safetensors(
        path, {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": np.ones(3, np.float32)}, {"format": "pt"}
    )
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.sampled_from([len(raw), len(raw) - 1, len(raw) // 2]))])
    try:
        with SafetensorsFile(path) as file:
            for name in file.tensors:
                file.read(name)
    except CheckpointError as error:
        assert "x.safetensors" in str(error) or "elements" in str(error)


# The index and the folder.


@pytest.fixture
def folder(tmp_path):
    config = moe_config()
    tensors = layer_tensors("backbone.layers.1.", config) | {"lm_head.weight": np.zeros((2, 16), np.float32)}
    return write_checkpoint(tmp_path / "checkpoint", shuffled(tensors, 3), config)


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    changed = change(index["weight_map"])
    path.write_text(changed if isinstance(changed, str) else json.dumps(index))


NORM = "backbone.layers.1.norm.weight"


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "..\\secret.safetensors",
        "C:secret.safetensors", "", "..", "a\0.safetensors", "pytorch_model.bin", 7, None, ["x.safetensors"],
    ],
)  # fmt: skip
def test_an_index_entry_that_is_no_plain_file_name_is_refused(folder, name):
    # The file is there, so nothing but the name speaks against it.
    write_safetensors(folder.parent / "secret.safetensors", {NORM: np.zeros(16, np.float32)})
    edit_index(folder, lambda weight_map: weight_map.update({NORM: name}))
    for call in (load_layer, layer_files):
        with pytest.raises(CheckpointError, match=r"norm.weight into .* plain name"):
            call(folder, 1)
    with pytest.raises(CheckpointError, match="plain name"):
        list_moe_layers(folder)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[]", "JSON list"),
        ("{}", "no weight_map"),
        ('{"weight_map": ["a"]}', "no weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' more than once"),
        ("{", "as JSON"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:5f\nsize 7\n", "LFS pointer"),
    ],
)
def test_a_bad_index_is_refused_and_named(folder, text, message):
    edit_index(folder, lambda _: text)
    with pytest.raises(CheckpointError, match=rf"index\.json.*{message}"):
        load_layer(folder, 1)


def test_an_index_entry_with_an_endless_name_is_a_missing_file(folder):
    edit_index(folder, lambda weight_map: weight_map.update({NORM: "x" * 5000 + ".safetensors"}))
    with pytest.raises(CheckpointError, match=r"lacks xxx.*incomplete"):
        load_layer(folder, 1)


def test_an_index_that_points_to_the_wrong_shard_is_named(folder):
    def move(weight_map):
        files = sorted(set(weight_map.values()))
        weight_map[NORM] = files[(files.index(weight_map[NORM]) + 1) % 3]

    edit_index(folder, move)
    with pytest.raises(CheckpointError, match=r"norm.weight is in model-\S+, but it is in model-"):
        load_layer(folder, 1)


def test_an_index_that_lists_what_no_shard_has_is_named(folder):
    extra = "backbone.layers.1.mixer.experts.8.up_proj.weight"
    edit_index(folder, lambda weight_map: weight_map.update({extra: weight_map[NORM]}))
    with pytest.raises(CheckpointError, match=r"experts\.8\.up_proj\.weight is in model-\S+, but it is not there"):
        load_layer(folder, 1)


def test_a_tensor_that_the_index_does_not_list_is_named(folder):
    edit_index(folder, lambda weight_map: weight_map.pop(NORM) and None)
    with pytest.raises(CheckpointError, match=r"does not list backbone\.layers\.1\.norm\.weight"):
        load_layer(folder, 1)


def test_a_tensor_in_two_shards_is_named_with_both(tmp_path):
    config = moe_config()
    tensors = layer_tensors("backbone.layers.1.", config)
    first = dict(list(tensors.items())[:9])
    shards = {"a.safetensors": first, "b.safetensors": dict(list(tensors.items())[8:])}
    write_checkpoint(tmp_path, shards, config)
    with pytest.raises(
        CheckpointError, match=r"experts\.\d\.\w+\.weight is in two files, a.safetensors and b.safetensors"
    ):
        load_layer(tmp_path, 1)


@pytest.mark.quick
def test_truncated_shard_is_named_R78(folder):
    shard = layer_files(folder, 1)[1]
    os.truncate(folder / shard, (folder / shard).stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{shard} is truncated.*incomplete"):
        load_layer(folder, 1)


def test_missing_shards_are_all_named_R78(folder):
    for shard in layer_files(folder, 1)[:2]:
        (folder / shard).unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003.safetensors, model-00002-of-.*incomplete"):
        load_layer(folder, 1)


def test_shards_without_an_index_are_an_incomplete_download(folder):
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003.*no model\.safetensors\.index\.json.*incomplete"):
        load_layer(folder, 1)


def test_a_config_that_asks_for_endless_experts_is_refused_at_once(folder):
    (folder / "config.json").write_text(json.dumps(moe_config(n_routed_experts=10**12)))
    with pytest.raises(CheckpointError, match="should have 1000000000000 experts, but it has only 21 tensors"):
        load_layer(folder, 1)
