"""Loading quantised layers: values, bits, and the ways in which tools write the same matrix."""

import json

import fixtures_io
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from bounds import bound
from fixtures_io import (
    FIXTURES,
    QUANTISED,
    assert_same_bits,
    expected,
    layer_tensors,
    layers_of,
    moe_config,
    quantised_matrix,
    stacked_by_hand,
    tensors_of,
    with_quantised,
    written,
)

from checkpoints import layer_formats, load_layer
from nemotron_moe.cli import main
from nemotron_moe.weights import abstract_weights, dequantized
from pallas_kernels.formats import Quantised

P = "backbone.layers.1."
CONFIG = moe_config(
    hidden_size=64, moe_intermediate_size=80, moe_shared_expert_intermediate_size=96, n_routed_experts=4
)
LAYERS = [(name, layer) for name in QUANTISED for layer in layers_of(name)]
# The tensors of a module by the parts that they become.
FP8 = {"values": "weight", "scale": "weight_scale", "input_scale": "input_scale"}
NVFP4 = {"packed": "weight", "scale": "weight_scale", "global_scale": "weight_scale_2", "input_scale": "input_scale"}
NVFP4_CT = {
    "packed": "weight_packed",
    "scale": "weight_scale",
    "global_scale": "weight_global_scale",
    "input_scale": "input_global_scale",
}
MODULES = {
    "experts_up_proj": "mixer.experts.N.up_proj",
    "experts_down_proj": "mixer.experts.N.down_proj",
    "shared_experts_up_proj": "mixer.shared_experts.up_proj",
    "shared_experts_down_proj": "mixer.shared_experts.down_proj",
    "fc1_latent_proj": "mixer.fc1_latent_proj",
    "fc2_latent_proj": "mixer.fc2_latent_proj",
}


def parts_by_hand(tensors, prefix, field, experts):
    """The parts of a quantised field, by a route that has nothing in common with the loader's."""
    module = prefix + MODULES[field]
    first = module.replace(".N.", ".0.")
    names = NVFP4_CT if f"{first}.weight_packed" in tensors else NVFP4 if f"{first}.weight_scale_2" in tensors else FP8
    parts = {}
    for part, suffix in names.items():
        suffix = f"{suffix}_inv" if f"{first}.{suffix}_inv" in tensors else suffix
        if f"{first}.{suffix}" not in tensors:
            continue
        each = [tensors[f"{module.replace('.N.', f'.{expert}.')}.{suffix}"] for expert in range(experts)]
        # Scalars and columns of scales are stored with an axis more.
        each = [one[..., 0] if one.shape[-1:] == (1,) and "scale" in part else one for one in each]
        parts[part] = np.stack(each) if ".N." in module else each[0]
    return parts


def layer_bytes(tensors, prefix):
    own = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")
    return sum(a.nbytes for name, a in tensors.items() if name.startswith(prefix) and not name.endswith(own))


def numbers(array):
    """The float32 numbers of a quantised array; compiled, because op by op takes the tests minutes."""
    return np.asarray(dequantized(array, jnp.float32))


def one_matrix(tmp_path, tensors, **changes):
    """The layer with its shared up_proj replaced by these tensors."""
    config = CONFIG | changes
    rest = layer_tensors(P, config)
    rest.pop(f"{P}mixer.shared_experts.up_proj.weight")
    named = {f"{P}mixer.shared_experts.up_proj.{name}": array for name, array in tensors.items()}
    return load_layer(written(tmp_path, rest | named, config), 1)[0].shared_experts_up_proj


def plain(matrix):
    """The tensors of `quantised_matrix("m", ...)` without the module's name."""
    return {name.removeprefix("m."): array for name, array in matrix.items()}


# The fixtures.


@pytest.mark.quick
@pytest.mark.parametrize("name, layer", LAYERS)
def test_quantised_fixtures_are_the_numbers_and_the_bits_of_the_file_R02_R40(name, layer):
    row, tensors = layers_of(name)[layer], tensors_of(FIXTURES / name)
    weights, config = load_layer(FIXTURES / name, layer)
    fields, seen = weights.items(), set()
    for key, wanted in expected(name).items():
        if key.startswith(f"{row['key']}.dequant."):
            *group, number, last = ["", *key.removeprefix(f"{row['key']}.dequant.").split(".")]
            expert = number if number.isdigit() else None
            field = f"{group[-1]}_{last}" if expert else f"{number}_{last}".strip("_")
            array = numbers(fields[field]) if expert is None else numbers(fields[field])[int(expert)]
            difference = np.abs(array.astype(np.float64) - wanted)
            # The reciprocal of a scale, and two products, on either side.
            assert (difference <= bound(jnp.float32, 0, 1.0, roundings=6) * np.abs(wanted)).all(), key
            seen.add(field)
    quantised = {field: leaf for field, leaf in fields.items() if isinstance(leaf, Quantised)}
    assert quantised.keys() == seen
    for field, array in quantised.items():
        array.check(field)
        parts = parts_by_hand(tensors, row["prefix"], field, row["E"])
        assert array.parts().keys() == parts.keys()
        for part, wanted in parts.items():
            assert_same_bits(getattr(array, part), wanted)
        assert array.uncalibrated == ()
    unquantised = {name: a for name, a in tensors.items() if a.dtype.name not in ("uint8", "float8_e4m3fn")}
    unquantised |= {f"{row['prefix']}mixer.experts.{name}": np.zeros(0) for name in ("up_proj", "down_proj")}
    for field, wanted in stacked_by_hand(unquantised, row["prefix"]).items():
        if field not in quantised:
            assert_same_bits(fields[field], wanted)
    assert weights.gate_bias.dtype == jnp.float32
    assert weights.nbytes == layer_bytes(tensors, row["prefix"])
    assert {field: leaf.shape for field, leaf in fields.items()} == {
        field: leaf.shape for field, leaf in abstract_weights(config).items().items()
    }


@pytest.mark.parametrize("name", QUANTISED)
def test_formats_are_told_from_the_headers(name):
    published = {
        **{"nvfp4 (modelopt)": "NVFP4 (ModelOpt)", "nvfp4 (compressed-tensors)": "NVFP4 (compressed-tensors)"},
        **{"fp8 tensor": "FP8 per tensor", "fp8 block": "FP8 per block"},
        "fp8 channel (compressed-tensors)": "FP8 per channel",
        **{"bfloat16": "BF16", "float32": "F32"},
    }
    for layer, row in layers_of(name).items():
        formats = layer_formats(FIXTURES / name, layer)
        for module, told in fixtures_io.manifest()["fixtures"][name]["formats"][row["key"]].items():
            field = module.replace(".", "_")
            wanted = published.get(told, told)
            if name.startswith("w4a16") and "proj" in field:
                wanted = "NVFP4 (ModelOpt, weights only)"
            assert formats[field].published == wanted, field
            assert formats[field].agrees
            scales = formats[field].scales
            assert (formats[field].format is None) == (not scales) == (wanted in ("BF16", "F32"))
            assert all(tensors_of(FIXTURES / name)[one].shape == shape for one, (_, shape) in scales.items())


@pytest.mark.parametrize(
    "scheme, input_scale, maker",
    [("nvfp4", "input_scale", "ModelOpt"), ("nvfp4_ct", "input_global_scale", "compressed-tensors")],
)
def test_nvfp4_without_any_input_scale_is_for_weights_only_R40(tmp_path, scheme, input_scale, maker):
    config = CONFIG | {"quantization_config": {"quant_algo": "NVFP4"}}
    tensors = with_quantised(layer_tensors(P, config), scheme, "proj")
    names = [name for name in tensors if ".experts." in name and name.endswith(f"up_proj.{input_scale}")]
    for count, published in ((0, maker), (3, maker), (4, f"{maker}, weights only")):
        kept = {name: array for name, array in tensors.items() if name not in names[:count]}
        formats = layer_formats(written(tmp_path / str(count), kept, config), 1)
        one = formats["experts_up_proj"]
        assert (one.published, one.declared, one.agrees) == (f"NVFP4 ({published})", "NVFP4", True)
        assert formats["experts_down_proj"].published == f"NVFP4 ({maker})"


def test_experts_that_saw_no_token_in_calibration_load_and_are_told_R24():
    folder = FIXTURES / "broken" / "uncalibrated_experts"
    weights, _ = load_layer(folder, 0)
    up, down = weights.experts_up_proj, weights.experts_down_proj
    assert (up.input_scale, up.uncalibrated, down.uncalibrated) == (None, (2, 5), ())
    assert down.input_scale.shape == (8,)
    assert up[2:6].uncalibrated == (0, 3)
    parts = parts_by_hand(
        {n: a for n, a in tensors_of(folder).items() if "up_proj.input" not in n},
        "backbone.layers.0.",
        "experts_up_proj",
        8,
    )
    for part, wanted in parts.items():
        assert_same_bits(getattr(up, part), wanted)
    problem = json.loads((folder / "problem.json").read_text())["mention"]
    assert problem == [f"experts.{expert}.up_proj.input_scale" for expert in up.uncalibrated]


@pytest.mark.parametrize(
    "name, dtype",
    [("mixed_modelopt_latent", "bfloat16"), ("fp8_block_direct", "float16"), ("nvfp4_ct_direct", "float32")],
)
def test_a_dtype_dequantises_all_but_the_gate_and_its_bias(name, dtype):
    layer = next(iter(layers_of(name)))
    packed, _ = load_layer(FIXTURES / name, layer)
    weights, _ = load_layer(FIXTURES / name, layer, dtype=dtype)
    for field, leaf in weights.items().items():
        before = packed.items()[field]
        kept = field == "gate_bias" or (field == "gate" and before.dtype == jnp.float32)
        if isinstance(before, Quantised):
            before = numbers(before)
        assert_same_bits(leaf, np.asarray(before if kept else before.astype(dtype)))
    for field, leaf in packed.astype(dtype).items().items():
        assert_same_bits(leaf, np.asarray(weights.items()[field]))


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_channel", "fp8_block", "nvfp4"])
def test_dequantising_takes_no_memory_but_the_results(scheme):
    weights = abstract_weights(
        load_layer(FIXTURES / "bf16_direct", 1)[1], formats={"experts_up_proj": scheme}
    ).experts_up_proj
    program = jax.jit(lambda array: dequantized(array, jnp.bfloat16)).lower(weights).compile().memory_analysis()
    assert program.output_size_in_bytes == 2 * weights.size
    assert program.temp_size_in_bytes <= 1024


# Ways to write the same.


@pytest.mark.parametrize("scheme", ["fp8_tensor", "nvfp4"])
def test_scalar_scales_may_have_an_axis_R39(tmp_path, scheme):
    tensors = with_quantised(layer_tensors(P, CONFIG), scheme, "proj")
    scalars = {name: array.reshape(1) for name, array in tensors.items() if array.shape == ()}
    assert len(scalars) == 2 * (2 * 4 + 2)
    one, _ = load_layer(written(tmp_path / "scalar", tensors, CONFIG), 1)
    other, _ = load_layer(written(tmp_path / "vector", tensors | scalars, CONFIG), 1)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: assert_same_bits(a, np.asarray(b)), one, other)
    assert one.experts_up_proj.input_scale.shape == (4,)


def test_scales_may_be_raw_bytes(tmp_path):
    tensors = with_quantised(layer_tensors(P, CONFIG), "nvfp4", "proj")
    raw = {name: array.view(np.uint8) for name, array in tensors.items() if name.endswith("weight_scale")}
    one, _ = load_layer(written(tmp_path / "e4m3", tensors, CONFIG), 1)
    other, _ = load_layer(written(tmp_path / "raw", tensors | raw, CONFIG), 1)
    jax.tree.map(lambda a, b: assert_same_bits(a, np.asarray(b)), one, other)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("four", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_block_scales_have_two_axes_or_four_and_multiply(tmp_path, suffix, four, dtype):
    codes = np.full((300, 160), 0x38, np.uint8).view(ml_dtypes.float8_e4m3fn)  # Ones.
    scale = (2.0 ** np.arange(6).reshape(3, 2)).astype(dtype)
    stored = scale[:, None, :, None] if four else scale
    sizes = {"hidden_size": 160, "moe_shared_expert_intermediate_size": 300}
    array = one_matrix(tmp_path, {"weight": codes, suffix: stored}, **sizes)
    assert array.format == "fp8_block"
    assert_same_bits(array.scale, scale)
    wanted = np.kron(scale.astype(np.float32), np.ones((128, 128), np.float32))[:300, :160]
    np.testing.assert_array_equal(numbers(array), wanted)


@pytest.mark.parametrize(
    "rows, shape, granularity",
    [
        (1, (1,), "tensor"),
        (1, (1, 1), "tensor"),
        (96, (1, 1, 1, 1), "tensor"),
        (96, (96,), "channel"),
        (96, (96, 1), "channel"),
    ],
)
def test_a_scale_that_could_be_several_things_is_the_simplest(tmp_path, rows, shape, granularity):
    codes = np.full((rows, 64), 0x38, np.uint8).view(ml_dtypes.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": np.full(shape, 0.25, np.float32)}
    array = one_matrix(tmp_path, tensors, moe_shared_expert_intermediate_size=rows)
    assert array.granularity == granularity
    np.testing.assert_array_equal(numbers(array), np.full((rows, 64), 0.25))


def test_the_global_scale_of_compressed_tensors_divides_R30(tmp_path):
    matrix = plain(quantised_matrix("m", "nvfp4", (96, 64)))
    ours = matrix | {"weight_scale_2": np.float32(2.0**-9)}
    theirs = {
        "weight_packed": ours["weight"],
        "weight_scale": ours["weight_scale"],
        "weight_global_scale": np.full(1, 2.0**9, np.float32),
        "input_global_scale": np.full(1, 3, np.float32),
    }
    one, other = one_matrix(tmp_path / "a", ours), one_matrix(tmp_path / "b", theirs)
    assert (one.divides, other.divides) == (False, True)
    assert_same_bits(numbers(other), numbers(one))
    assert float(other.input_scale) == 3


def test_the_low_four_bits_come_first_R32_P5(tmp_path):
    codes = np.zeros((96, 32), np.uint8)
    codes[95, :8] = [0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0xF0]
    tensors = {
        "weight": codes,
        "weight_scale": np.full((96, 4), 0x38, np.uint8),
        "weight_scale_2": np.ones((), np.float32),
    }
    row = numbers(one_matrix(tmp_path, tensors))[95]
    wanted = np.array([0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, 0, -6], np.float32)
    assert row[:16].tobytes() == wanted.tobytes()
    assert not row[16:].any()


def scales_in_blocks(expert, grid):
    """A scale for each block of one expert; those beside it, and other experts', are others. All are exact in e4m3."""
    row, column = np.indices(grid)
    eighths = 8 + (row + row // 8 + column // 13 + expert) % 8
    return eighths * 2.0 ** ((row // 8 + 3 * column + 5 * expert) % 13 - 8)


@pytest.mark.parametrize("scheme", ["nvfp4", "nvfp4_ct", "fp8_tensor", "fp8_channel", "fp8_block"])
@pytest.mark.parametrize("last", ["up_proj", "down_proj"])
def test_every_scale_of_every_expert_is_used_once(tmp_path, scheme, last):
    """The codes are ones, so that the numbers are products of scales: a wrong one is another's, missing or squared."""
    config = CONFIG | {"n_routed_experts": 8, "hidden_size": 160, "moe_intermediate_size": 272}
    tensors = with_quantised(layer_tensors(P, config), scheme)
    shape = (272, 160) if last == "up_proj" else (160, 272)
    block = {"fp8_tensor": shape, "fp8_channel": (1, shape[1]), "fp8_block": (128, 128)}.get(scheme, (1, 16))
    outer, wanted = 2.0 ** (20 * np.arange(8) - 70), []
    for expert, own in enumerate(outer):
        module = f"{P}mixer.experts.{expert}.{last}."
        inner = scales_in_blocks(expert, [-(-size // length) for size, length in zip(shape, block, strict=True)])
        changes = {
            **{"weight": np.uint8(0x38), "weight_scale": inner * own, "input_scale": own / 2},
            **({"weight": np.uint8(0x22), "weight_scale": inner} if scheme.startswith("nvfp4") else {}),
            **{"weight_packed": np.uint8(0x22), "weight_scale_2": own, "weight_global_scale": 1 / own},
            "input_global_scale": own / 2,
        }
        for name, value in changes.items():
            if (array := tensors.get(module + name)) is not None:
                codes = name in ("weight", "weight_packed")
                array[...] = value.view(array.dtype) if codes else np.reshape(value, array.shape)
        wanted.append(np.kron(inner * own, np.ones(block))[: shape[0], : shape[1]])
    weights, _ = load_layer(written(tmp_path, tensors, config), 1)
    array = weights.items()[f"experts_{last}"]
    np.testing.assert_array_equal(numbers(array), wanted)
    np.testing.assert_array_equal(array.input_scale, outer / 2)


@pytest.mark.parametrize("hidden, inner", [(64, 80), (2688, 1856), (2880, 1600)])
def test_any_multiple_of_16_keeps_the_scales_of_later_experts_in_place_R34(tmp_path, hidden, inner):
    config = CONFIG | {"hidden_size": hidden, "moe_intermediate_size": inner, "moe_shared_expert_intermediate_size": 16}
    tensors = layer_tensors(P, config | {"moe_intermediate_size": 1})
    for name in [name for name in tensors if ".experts." in name]:
        shape = (inner, hidden) if "up_proj" in name else (hidden, inner)
        tensors |= quantised_matrix(name.removesuffix(".weight"), "nvfp4", shape, seed=len(tensors))
    weights, _ = load_layer(written(tmp_path, tensors, config), 1)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    last = numbers(weights.experts_up_proj[:, -5:])
    for expert in (1, 2, 3):
        module = f"{P}mixer.experts.{expert}.up_proj"
        codes, scale = (tensors[f"{module}.{name}"][-5:] for name in ("weight", "weight_scale"))
        wanted = np.empty((5, hidden), np.float32)
        wanted[:, ::2], wanted[:, 1::2] = table[codes % 16], table[codes // 16]
        wanted *= np.repeat(scale.astype(np.float32), 16, axis=1)
        # A code times its block's scale is exact, so that either side is rounded once.
        assert_same_bits(last[expert], wanted * tensors[f"{module}.weight_scale_2"])


def test_a_quantised_gate_becomes_float32_and_is_told(tmp_path, capsys):
    config, gate = CONFIG, f"{P}mixer.gate"
    tensors = layer_tensors(P, config)
    tensors.pop(f"{gate}.weight")
    codes = np.full((4, 64), 0x38, np.uint8).view(ml_dtypes.float8_e4m3fn)
    scale = (2.0 ** np.arange(4)).astype(ml_dtypes.bfloat16).reshape(4, 1)
    inputs = {f"{gate}.input_scale": np.ones((), np.float32)}
    folder = written(tmp_path, tensors | {f"{gate}.weight": codes, f"{gate}.weight_scale": scale} | inputs, config)
    for dtype in (None, "bfloat16"):
        weights, _ = load_layer(folder, 1, dtype=dtype)
        assert_same_bits(weights.gate, np.repeat(2.0 ** np.arange(4, dtype=np.float32), 64).reshape(4, 64))
        assert weights.gate_bias.dtype == jnp.float32
    assert layer_formats(folder, 1)["gate"].published == "FP8 per channel"
    assert main(["check", str(folder), "--layer", "1", "--report", str(tmp_path / "out.json")]) == 0
    assert "The router is FP8 per channel in the file; it was dequantised to float32." in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["tensors"]["gate"]["dequantised"]


def test_side_tensors_are_consumed_or_ignored_R26(tmp_path):
    config = CONFIG | {"moe_latent_size": 32}
    plain_tensors, one = layer_tensors(P, config), np.ones((), np.float32)
    tensors = with_quantised(plain_tensors, "nvfp4")
    latent = [f"{P}mixer.{name}_latent_proj" for name in ("fc1", "fc2")]
    stray = {f"{module}.input_scale": one for module in latent}
    stray |= {f"{P}mixer.experts.3.up_proj.output_scale": one, f"{P}mixer.gate.input_scale": one}
    stray |= {f"{P}mixer.k_proj.k_scale": one, f"{P}mixer.v_proj.v_scale": one}
    stray |= {"backbone.layers.0.mixer.in_proj.input_scale": one, "backbone.layers.0.mixer.in_proj.weight_scale": one}
    one_by_one, _ = load_layer(written(tmp_path / "a", tensors, config), 1)
    with_stray, _ = load_layer(written(tmp_path / "b", tensors | stray, config), 1)
    assert jax.tree.structure(one_by_one) == jax.tree.structure(with_stray)
    jax.tree.map(lambda a, b: assert_same_bits(a, np.asarray(b)), one_by_one, with_stray)
