"""The tensors' names: missing, misspelt, surplus and wrongly shaped ones; layers that are not there."""

import difflib
import json
import re

import numpy as np
import pytest
from fixtures_io import FIXTURES, layer_tensors, moe_config, stacked_by_hand, written

from checkpoints import CheckpointError, layer_files, load_layer
from checkpoints.errors import LISTED
from checkpoints.formats import Piece
from checkpoints.names import check_names
from checkpoints.safetensors_file import TensorInfo

P = "backbone.layers.1."
# That one loads: test_load_quantised.py.
BROKEN = [path for path in sorted((FIXTURES / "broken").iterdir()) if path.name != "uncalibrated_experts"]


@pytest.mark.parametrize("name", [path.name for path in BROKEN])
def test_a_broken_directory_is_refused_with_what_its_problem_asks_to_mention_R77_R78_P5(name):
    folder = FIXTURES / "broken" / name
    with pytest.raises(CheckpointError) as caught:
        load_layer(folder, 0)
    message = str(caught.value)
    wanted = json.loads((folder / "problem.json").read_text())["mention"]
    assert all(text in message for text in wanted), message
    assert ("incomplete" in message) == (name in ("lfs_pointer", "missing_shard"))


def test_a_missing_expert_is_named_R77(tmp_path):
    tensors = layer_tensors(P, moe_config())
    del tensors[f"{P}mixer.experts.6.down_proj.weight"]
    with pytest.raises(CheckpointError, match=r"missing: backbone\.layers\.1\.mixer\.experts\.6\.down_proj\.weight\.$"):
        load_layer(written(tmp_path, tensors), 1)


def test_a_surplus_expert_is_named_R77(tmp_path):
    tensors = layer_tensors(P, moe_config(n_routed_experts=9))
    tensors = {name: array[:8] if "gate" in name else array for name, array in tensors.items()}
    with pytest.raises(CheckpointError, match=r"surplus: (\S*experts\.8\.\S*_proj\.weight(, |\.$)){2}"):
        load_layer(written(tmp_path, tensors), 1)


def test_another_expert_is_no_near_match_R77(tmp_path):
    tensors = layer_tensors(P, moe_config())
    tensors[f"{P}mixer.experts.8.down_proj.weight"] = tensors.pop(f"{P}mixer.experts.6.down_proj.weight")
    with pytest.raises(
        CheckpointError, match=r"missing: \S*\.6\.down_proj\.weight; surplus: \S*\.8\.down_proj\.weight\.$"
    ):
        load_layer(written(tmp_path, tensors), 1)


def test_a_misspelt_name_is_given_its_near_match_R77(tmp_path):
    tensors = layer_tensors(P, moe_config())
    tensors[f"{P}mixer.experts.3.dwon_proj.weight"] = tensors.pop(f"{P}mixer.experts.3.down_proj.weight")
    with pytest.raises(
        CheckpointError, match=r"missing: \S*\.3\.down_proj\.weight \(is it \S*\.3\.dwon_proj\.weight\?\)"
    ):
        load_layer(written(tmp_path, tensors), 1)


def test_long_lists_of_names_are_cut_R77(tmp_path):
    tensors = layer_tensors(P, moe_config(n_routed_experts=40))
    folder = written(tmp_path, tensors, moe_config(n_routed_experts=60))
    with pytest.raises(
        CheckpointError, match=r"missing: (\S+, ){9}\S+ and 30 more; wrongly shaped: (.*wanted \[60.*){2}"
    ) as caught:
        load_layer(folder, 1)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("misspelt", ["experts.{}.dwon_proj.weight", "experts.7.down{}_proj.weight"])
def test_of_thousands_of_misspelt_names_only_those_shown_are_compared(monkeypatch, misspelt):
    # With letters for digits, all of the second kind have the numbers of one missing name.
    numbers = [str(number) for number in range(3000)]
    wanted = {f"{P}experts.{number}.down_proj.weight": Piece((), ((),), ("U8",)) for number in numbers}
    letters = str.maketrans("0123456789", "abcdefghij")
    tensors = {
        P + misspelt.format(number if "{}.dwon" in misspelt else number.translate(letters)): TensorInfo("U8", (), 0, 1)
        for number in numbers
    }
    compared = []

    def counted(name, others, *rest, plain=difflib.get_close_matches):
        compared.append(len(others))
        assert len(compared) <= LISTED
        return plain(name, others, *rest)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    with pytest.raises(CheckpointError, match=r"missing: .*\(is it \S+\?\).* and 2990 more; surplus: .* and 2990 more"):
        check_names(wanted, tensors, [], "It")
    assert sum(compared) <= 100 + LISTED


@pytest.mark.parametrize(
    "name",
    [
        "norm.weight",
        "mixer.gate.weight",
        "mixer.gate.e_score_correction_bias",
        "mixer.experts.7.up_proj.weight",
        "mixer.shared_experts.down_proj.weight",
    ],
)
def test_a_wrongly_shaped_tensor_is_named_with_both_shapes(tmp_path, name):
    tensors = layer_tensors(P, moe_config())
    right = list(tensors[P + name].shape)
    tensors[P + name] = np.concatenate([tensors[P + name]] * 2, axis=-1)
    wrong = [*right[:-1], 2 * right[-1]]
    with pytest.raises(CheckpointError, match=re.escape(f"wrongly shaped: {P}{name} {wrong} (wanted {right}).")):
        load_layer(written(tmp_path, tensors), 1)


def test_a_transposed_expert_is_wrongly_shaped(tmp_path):
    tensors, name = layer_tensors(P, moe_config()), f"{P}mixer.experts.0.up_proj.weight"
    tensors[name] = tensors[name].T
    with pytest.raises(CheckpointError, match=r"experts\.0\.up_proj\.weight \[16, 12\] \(wanted \[12, 16\]\)"):
        load_layer(written(tmp_path, tensors), 1)


def test_experts_given_stacked_and_one_by_one_are_surplus(tmp_path):
    tensors = layer_tensors(P, moe_config())
    tensors[f"{P}mixer.experts.up_proj"] = stacked_by_hand(tensors, P)["experts_up_proj"]
    with pytest.raises(CheckpointError, match=r"surplus: (\S*experts\.\d\.up_proj\.weight(, |\.)){8}"):
        load_layer(written(tmp_path, tensors), 1)


@pytest.mark.parametrize(
    "layer, message",
    [
        (0, "no MoE layer 0; its MoE layers are 1, 3"),
        (99, "layer 99"),
        (-1, "layer -1"),
        ("3", "layer '3'"),
        ("mtp.layers.1", "'mtp.layers.1'"),
        (True, "is True; wanted"),
        (1.0, "is 1.0; wanted"),
        (None, "is None; wanted"),
    ],
)
def test_what_is_no_moe_layer_is_refused_with_the_list(layer, message):
    for call in (load_layer, layer_files):
        with pytest.raises(ValueError, match=message):
            call(FIXTURES / "bf16_direct", layer)


def test_numpy_integers_name_layers():
    assert load_layer(FIXTURES / "bf16_direct", np.int64(3))[1].hidden_size == 64


def test_a_layer_that_the_config_does_not_call_moe_is_refused(tmp_path):
    folder = written(tmp_path, layer_tensors(P, moe_config()), moe_config(layers=("moe", "mamba")))
    with pytest.raises(ValueError, match="mamba"):
        load_layer(folder, 1)
