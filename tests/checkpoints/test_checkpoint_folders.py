"""Folders: partial downloads, the hub's cache, and paths that are no checkpoint."""

import re
import shutil

import fixtures_io
import jax
import pytest
from fixtures_io import (
    FIXTURES,
    assert_holds,
    layer_tensors,
    moe_config,
    stacked_by_hand,
    write_checkpoint,
)

from checkpoints import CheckpointError, layer_files, list_moe_layers, load_layer, load_layers
from nemotron_moe import cli

P = "backbone.layers.1."


def test_only_the_shards_of_the_layer_are_needed_and_listed_from_the_index_alone(tmp_path):
    folder = tmp_path / "partial"
    shutil.copytree(FIXTURES / "bf16_direct", folder)
    assert layer_files(folder, 3) == ["model-00003-of-00003.safetensors"]
    for shard in ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"):
        (folder / shard).unlink()
    weights, _ = load_layer(folder, 3)
    assert_holds(weights, stacked_by_hand(fixtures_io.tensors_of(folder), "backbone.layers.3."))
    (folder / "model-00003-of-00003.safetensors").unlink()
    assert layer_files(folder, 3) == ["model-00003-of-00003.safetensors"]
    assert layer_files(folder, 1) == ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"]
    assert list_moe_layers(folder) == [1, 3]


def test_one_file_needs_no_index(tmp_path):
    config = moe_config()
    tensors = layer_tensors(P, config)
    folder = write_checkpoint(tmp_path, {"model.safetensors": tensors}, config)
    (folder / "model.safetensors.index.json").unlink()
    assert (list_moe_layers(folder), layer_files(folder, 1)) == ([1], ["model.safetensors"])
    assert_holds(load_layer(str(folder), 1)[0], stacked_by_hand(tensors, P))


def hub_cache(tmp_path, *commits):
    """The hub's cache: blobs, and snapshots of links to them."""
    repository = tmp_path / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    for file in (FIXTURES / "bf16_direct").glob("*.*"):
        shutil.copy(file, repository / "blobs" / f"blob-{file.name}")
        for commit in commits:
            (repository / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
            (repository / "snapshots" / commit / file.name).symlink_to(f"../../blobs/blob-{file.name}")
    return repository


def test_the_hubs_cache_folder_and_its_snapshot_folder_load(tmp_path):
    repository = hub_cache(tmp_path, "abc")
    wanted = stacked_by_hand(fixtures_io.tensors_of(FIXTURES / "bf16_direct"), P)
    for folder in (repository, repository / "snapshots" / "abc"):
        assert_holds(load_layer(folder, 1)[0], wanted)


def test_of_several_snapshots_main_is_taken_and_without_it_they_are_listed(tmp_path):
    repository = hub_cache(tmp_path, "abc", "def")
    shutil.rmtree(repository / "snapshots" / "abc")
    (repository / "snapshots" / "abc").mkdir()
    with pytest.raises(CheckpointError, match=r"2 snapshots.*abc, def"):
        load_layer(repository, 1)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("def\n")
    assert load_layer(repository, 1)[1].hidden_size == 64


def test_a_link_whose_target_was_not_downloaded_is_a_missing_shard(tmp_path):
    repository = hub_cache(tmp_path, "abc")
    (repository / "blobs" / "blob-model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00003\.safetensors.*incomplete"):
        load_layer(repository, 1)


def test_a_hub_name_gets_the_commands_that_download_one_layer():
    name = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    local = name.split("/")[1]
    for call, layers, shown in [
        (list_moe_layers, [], "N"),
        (load_layers, [], "N"),
        (load_layers, [[3, 1]], "3"),
        (load_layer, [3], "3"),
        (layer_files, ["mtp.layers.1"], "mtp.layers.1"),
        (layer_files, ["; ls"], "'; ls'"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            call(name, *layers)
        index, shards, alone = re.findall("`(.*?)`", str(caught.value))
        assert index == f"hf download {name} config.json model.safetensors.index.json --local-dir {local}"
        listing = f"nemotron-moe info {local} --layer {shown} --files"
        assert shards == f"hf download {name} $({listing}) --local-dir {local}"
        assert alone == f"hf download {name} config.json model.safetensors --local-dir {local}"


def test_a_layers_files_are_listed_from_the_hubs_cache_with_nothing_but_the_index(tmp_path, capsys):
    repository = hub_cache(tmp_path, "abc")
    for blob in (repository / "blobs").glob("*.safetensors"):
        blob.unlink()
    for folder in (repository, repository / "snapshots" / "abc"):
        assert layer_files(folder, 3) == ["model-00003-of-00003.safetensors"]
        assert cli.main(["info", str(folder), "--layer", "3", "--files"]) == 0
        assert capsys.readouterr() == ("model-00003-of-00003.safetensors\n", "")


def test_other_paths_that_are_no_checkpoint_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    lone = tmp_path / "lone.safetensors"
    fixtures_io.write_safetensors(lone, layer_tensors(P, moe_config()))
    for path, message in {
        tmp_path / "nothing": "nothing is not a folder",
        "../org/name": r"\.\./org/name is not a folder\.$",
        tmp_path / "empty": r"neither model\.safetensors\.index\.json nor any \.safetensors file",
        lone: r"lone\.safetensors is a file; pass the checkpoint's folder",
        tmp_path: r"has no config\.json",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            load_layer(path, 1)


@pytest.mark.devices
def test_wrong_arguments_are_refused_before_anything_is_opened():
    mesh = jax.make_mesh((8,), ("ep",))
    for arguments, message in [
        ({"layers": 1}, r"layers is 1; wanted a list, as in \[1\]"),
        ({"layers": "mtp.layers.1"}, "wanted a list"),
        ({"progress": True}, "progress is True; wanted a function"),
        ({"mesh": mesh.abstract_mesh}, "mesh is AbstractMesh"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_layers("no/where", **arguments)
