"""Quantised files that are incomplete, damaged or in formats that are not read: an error that names the tensor."""

import re

import ml_dtypes
import numpy as np
import pytest
from fixtures_io import layer_tensors, moe_config, with_quantised, written

from checkpoints import CheckpointError, load_layer

P = "backbone.layers.1."
CONFIG = moe_config(
    hidden_size=64, moe_intermediate_size=80, moe_shared_expert_intermediate_size=96, n_routed_experts=4
)
UP = f"{P}mixer.experts.3.up_proj."
E4M3 = ml_dtypes.float8_e4m3fn
# The scales of every format.
SCALES = [
    *(("fp8_tensor", name) for name in ("weight_scale", "input_scale")),
    *(("fp8_channel", "weight_scale"), ("fp8_block", "weight_scale")),
    *(("nvfp4", name) for name in ("weight_scale", "weight_scale_2", "input_scale")),
    *(("nvfp4_ct", name) for name in ("weight_scale", "weight_global_scale", "input_global_scale")),
]


def quantised(scheme, config=CONFIG):
    tensors = with_quantised(layer_tensors(P, config), scheme)
    if scheme == "fp8_block":  # These are smaller than a block: a scale that could be the matrix's.
        tensors = {name: a.reshape(1, 1) if name.endswith("weight_scale") else a for name, a in tensors.items()}
    return {name: array.copy() for name, array in tensors.items()}


def refusal(tmp_path, tensors, config=CONFIG, **arguments):
    with pytest.raises(CheckpointError) as caught:
        load_layer(written(tmp_path, tensors, config), 1, **arguments)
    return str(caught.value)


@pytest.mark.parametrize("scheme, name", [case for case in SCALES if not case[1].startswith("input")])
def test_a_missing_scale_is_named_R77(tmp_path, scheme, name):
    tensors = quantised(scheme)
    del tensors[UP + name]
    assert f"missing: {UP}{name}." in refusal(tmp_path, tensors)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_2"])
def test_a_misspelt_scale_is_given_its_near_match_R77(tmp_path, name):
    tensors = quantised("nvfp4")
    tensors[f"{UP}{name}s"] = tensors.pop(UP + name)
    assert f"missing: {UP}{name} (is it {UP}{name}s?); surplus: {UP}{name}s." in refusal(tmp_path, tensors)


@pytest.mark.parametrize("scheme, name", [("nvfp4", "weight"), ("nvfp4_ct", "weight_packed"), ("fp8_tensor", "weight")])
def test_a_missing_weight_is_named_without_its_scales_R77(tmp_path, scheme, name):
    tensors = quantised(scheme)
    del tensors[UP + name]
    assert refusal(tmp_path, tensors).endswith(f" missing: {UP}{name}.")


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -0.0, -1.0])
@pytest.mark.parametrize("scheme, name", SCALES)
def test_a_scale_that_is_no_positive_number_is_named_with_its_place_P5(tmp_path, scheme, name, value):
    tensors = quantised(scheme)
    scale = tensors[UP + name]
    if scale.dtype == E4M3 and np.isinf(value):
        value = np.nan  # It has no infinity.
    place = tuple(size - 1 for size in scale.shape)
    tensors[UP + name] = scale = np.array(scale)
    scale[place] = value
    message = refusal(tmp_path, tensors)
    assert message.startswith(f"{UP}{name} has the scale {float(scale[place])} at {list(place)}, in ")


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0x81, 0xFE, 0xFF])
def test_bytes_that_are_no_positive_e4m3_are_found_and_the_extremes_are_not_P5(tmp_path, byte):
    tensors = quantised("nvfp4")
    bits = tensors[f"{UP}weight_scale"].view(np.uint8)
    bits[...] = np.where(np.arange(bits.size).reshape(bits.shape) % 2, 0x01, 0x7E)
    load_layer(written(tmp_path, tensors, CONFIG), 1)
    bits[7, 2] = bits[9, 1] = byte
    assert "experts.3.up_proj.weight_scale has the scale" in (message := refusal(tmp_path, tensors))
    assert "at [7, 2]" in message


@pytest.mark.parametrize(
    "scheme, name", [case for case in SCALES if case[0][:5] != "nvfp4" or case[1] != "weight_scale"]
)
def test_scales_with_which_codes_would_be_lost_are_refused_P5(tmp_path, scheme, name):
    tensors = quantised(scheme)
    for factor, accepted in ((1.0, True), (1.01, False)):
        for value in (2.0**-116 / factor, 2.0**116 * factor):
            tensors[UP + name] = np.full_like(tensors[UP + name], value)
            if accepted:
                load_layer(written(tmp_path, tensors, CONFIG), 1)
            else:
                assert f"{UP}{name} has the scale" in (message := refusal(tmp_path, tensors))
                assert "wanted a finite positive number, from 2^-116 to 2^116" in message


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_channel", "fp8_block"])
def test_fp8_numbers_that_are_nan_are_found_P5(tmp_path, scheme, byte):
    tensors = quantised(scheme)
    codes = tensors[f"{UP}weight"].view(np.uint8)
    codes[5, 7] = codes[79, 63] = byte
    assert f"{UP}weight is NaN at [5, 7] and 1 more places" in refusal(tmp_path, tensors)
    codes[5, 7] = codes[79, 63] = byte - 1  # the largest number
    load_layer(written(tmp_path, tensors, CONFIG), 1)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    "scheme, codes, outer",
    [("nvfp4", "weight", "weight_scale_2"), ("nvfp4_ct", "weight_packed", "weight_global_scale")],
)
def test_nvfp4_without_its_scales_is_told_which_are_missing(tmp_path, scheme, codes, outer, raw):
    tensors = quantised(scheme)
    del tensors[UP + outer]
    blocks, missing = tensors.pop(f"{UP}weight_scale"), f"{UP}{outer} (F32 [])"
    if raw:
        tensors[f"{UP}weight_scale"] = blocks.view(np.uint8)
    else:
        missing = f"{UP}weight_scale (F8_E4M3 [80, 4]), {missing}"
    wanted = f"{UP}{codes} is of dtype U8 without the scales of NVFP4, missing: {missing}; load_layer reads"
    assert refusal(tmp_path, tensors).startswith(wanted)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_place_of_a_bad_scale_is_that_in_the_file(tmp_path, dtype):
    config = CONFIG | {"moe_shared_expert_intermediate_size": 300}
    tensors, module = layer_tensors(P, config), f"{P}mixer.shared_experts.up_proj."
    tensors[f"{module}weight"] = np.full((300, 64), 0x38, np.uint8).view(E4M3)
    for shape, place in {(300, 1): (299, 0), (300,): (0,), (3, 1): (2, 0), (3, 1, 1, 1): (1, 0, 0, 0)}.items():
        tensors[f"{module}weight_scale"] = scale = np.ones(shape, dtype)
        scale[place] = np.nan
        assert f"at {list(place)}, in" in refusal(tmp_path, tensors, config)


@pytest.mark.parametrize(
    "name, shape", [("weight_scale", (128, 4)), ("weight_scale", (80 * 4,)), ("weight_scale", (1, 80, 4))]
)
def test_padded_and_swizzled_scales_are_told_what_is_wanted_R34(tmp_path, name, shape):
    tensors = quantised("nvfp4")
    tensors[UP + name] = np.ones(shape, E4M3)
    wanted = (
        f"wrongly shaped: {UP}{name} {list(shape)} (wanted [80, 4]: rows as they are, neither padded nor swizzled)."
    )
    assert wanted in refusal(tmp_path, tensors)


@pytest.mark.parametrize(
    "scheme, name, shape",
    [
        ("nvfp4", "weight", (80, 16)),
        ("nvfp4", "weight_scale_2", (2,)),
        ("nvfp4", "input_scale", (1, 1)),
        ("nvfp4_ct", "weight_global_scale", (80,)),
        ("fp8_tensor", "weight", (64, 80)),
        ("fp8_tensor", "weight_scale", (64,)),
        ("fp8_tensor", "weight_scale", (2, 2)),
        ("fp8_channel", "weight_scale", (1, 80)),
    ],
)
def test_wrongly_shaped_parts_are_named_with_both_shapes(tmp_path, scheme, name, shape):
    tensors = quantised(scheme)
    tensors[UP + name] = np.ones(shape, tensors[UP + name].dtype)
    assert f"wrongly shaped: {UP}{name} {list(shape)} (wanted [" in refusal(tmp_path, tensors)


@pytest.mark.parametrize(
    "scheme, name, dtype, wanted",
    [
        ("nvfp4", "weight_scale", np.float32, "F8_E4M3 or U8"),
        ("nvfp4", "weight_scale", ml_dtypes.float8_e5m2, "F8_E4M3 or U8"),
        ("nvfp4", "weight_scale_2", ml_dtypes.bfloat16, "F32"),
        ("nvfp4_ct", "input_global_scale", np.float16, "F32"),
        ("fp8_tensor", "weight_scale", np.float16, "F32 or BF16"),
        ("fp8_channel", "weight_scale", np.float64, "F32 or BF16"),
    ],
)
def test_scales_of_a_wrong_dtype_are_named(tmp_path, scheme, name, dtype, wanted):
    tensors = quantised(scheme)
    tensors[UP + name] = tensors[UP + name].astype(np.float32).astype(dtype)
    assert re.search(rf"of a wrong dtype: {re.escape(UP + name)} \S+ \(wanted {wanted}\)\.", refusal(tmp_path, tensors))


def test_formats_that_are_not_read_are_named(tmp_path):
    codes, blocks = np.zeros((80, 32), np.uint8), np.ones((80, 2), ml_dtypes.float8_e8m0fnu)
    weights = np.zeros((80, 64), E4M3)
    cases = [
        ({"weight": weights, "weight_scale": blocks}, "weight_scale is of dtype F8_E8M0: MXFP8"),
        ({"weight": weights, "weight_scale": blocks.view(np.uint8)}, "weight_scale is of dtype U8: MXFP8"),
        ({"weight": weights}, f"missing: {UP}weight_scale."),
        ({"weight": weights.astype(ml_dtypes.float8_e5m2), "weight_scale": blocks}, "weight is of dtype F8_E5M2"),
        ({"weight": codes, "weight_scale": blocks.view(np.uint8)}, "weight is of dtype U8"),
        (
            {"weight_packed": codes, "weight_scale": blocks.view(np.uint8)},
            "weight_packed is of dtype U8, in an unknown",
        ),
        (
            {"weight_packed": codes.view(np.int32), "weight_scale": blocks},
            "weight_packed is of dtype I32, in an unknown",
        ),
    ]
    rest = {name: array for name, array in layer_tensors(P, CONFIG).items() if not name.startswith(UP)}
    for parts, wanted in cases:
        message = refusal(tmp_path, rest | {UP + name: array for name, array in parts.items()})
        assert UP in message and wanted in message, message
        assert "missing" in message or "load_layer reads BF16, F16, F32, FP8" in message


def test_experts_packed_for_all_at_once_are_refused(tmp_path):
    rest = {name: a for name, a in layer_tensors(P, CONFIG).items() if ".experts." not in name or "down_proj" in name}
    stacked = {f"{P}mixer.experts.up_proj": np.zeros((4, 80, 64), E4M3)}
    assert f"{P}mixer.experts.up_proj is of dtype F8_E4M3, for all experts at once" in refusal(tmp_path, rest | stacked)


def test_nvfp4_with_rows_that_are_no_blocks_of_16_is_refused(tmp_path):
    config = CONFIG | {"moe_shared_expert_intermediate_size": 40}
    tensors, module = layer_tensors(P, config), f"{P}mixer.shared_experts.down_proj."
    tensors |= {f"{module}weight": np.zeros((64, 20), np.uint8), f"{module}weight_scale": np.ones((64, 3), E4M3)}
    message = refusal(tmp_path, tensors | {f"{module}weight_scale_2": np.ones((), np.float32)}, config)
    assert f"{module}weight is NVFP4, whose rows are blocks of 16, but its weight has rows of 40" in message


@pytest.mark.parametrize("extra", ["weight_scale_inv", "weight_scale_3", "weight_zero_point", "weight_shape"])
def test_tensors_with_an_unknown_part_in_the_weight_are_surplus_R26(tmp_path, extra):
    for scheme in ("fp8_tensor", "nvfp4"):
        if (scheme, extra) == ("fp8_tensor", "weight_scale_inv"):
            continue
        tensors = quantised(scheme) | {UP + extra: np.ones((), np.float32)}
        assert f"surplus: {UP}{extra}." in refusal(tmp_path, tensors)


def test_two_scales_of_one_matrix_are_refused(tmp_path):
    tensors = quantised("fp8_tensor") | {f"{UP}weight_scale_inv": np.ones((), np.float32)}
    assert f"surplus: {UP}weight_scale." in refusal(tmp_path, tensors)


@pytest.mark.parametrize("one", [None, "fp8_tensor", "nvfp4", "nvfp4_ct"])
@pytest.mark.parametrize("other", ["fp8_channel", "nvfp4_ct"])
def test_experts_in_different_formats_are_named(tmp_path, one, other):
    if one == other:
        return
    tensors, theirs = layer_tensors(P, CONFIG) if one is None else quantised(one), quantised(other)
    tensors = {name: array for name, array in tensors.items() if not name.startswith(UP)}
    tensors |= {name: array for name, array in theirs.items() if name.startswith(UP)}
    message = refusal(tmp_path, tensors)
    assert re.match(
        rf"{re.escape(UP)}weight\S* is .* but {P}mixer\.experts\.0\.up_proj\.weight\S* is .*; experts must", message
    )


def test_experts_whose_scales_differ_in_dtype_are_named(tmp_path):
    tensors = quantised("fp8_tensor")
    for name, called in (
        ("weight_scale", "weight_scale BF16 with input_scale F32"),
        ("input_scale", "input_scale BF16"),
    ):
        changed = tensors | {UP + name: tensors[UP + name].astype(ml_dtypes.bfloat16)}
        message = refusal(tmp_path, changed)
        assert message.startswith(f"{UP}weight is FP8 per tensor with ") and called in message, message


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("scheme, name", [case for case in SCALES if case[1].startswith("input")])
def test_input_scales_are_checked_though_other_experts_have_none_P5_R24(tmp_path, scheme, name, dtype):
    tensors = quantised(scheme)
    del tensors[f"{P}mixer.experts.1.up_proj.{name}"]
    for value in (0.0, -1.0, np.nan, np.inf):
        tensors[UP + name] = np.full_like(tensors[UP + name], value)
        assert f"{UP}{name} has the scale {value} at " in refusal(tmp_path, tensors, dtype=dtype)
    tensors[UP + name] = np.ones((3, 3), np.float32)
    assert f"wrongly shaped: {UP}{name} [3, 3]" in refusal(tmp_path, tensors, dtype=dtype)
    tensors[UP + name] = np.ones((), np.float32)
    weights, _ = load_layer(written(tmp_path, tensors, CONFIG), 1, dtype=dtype)
    if dtype is None:
        assert (weights.experts_up_proj.input_scale, weights.experts_up_proj.uncalibrated) == (None, (1,))


@pytest.mark.parametrize("name", ["input_scale", "input_global_scale", "output_scale"])
def test_an_unused_scale_that_is_no_single_number_is_named_R26(tmp_path, name):
    tensors = layer_tensors(P, CONFIG)
    for shape in ((), (1,), (1, 1)):
        load_layer(written(tmp_path, tensors | {UP + name: np.ones(shape, np.float32)}, CONFIG), 1)
    for shape in ((3, 3), (64,), (0,)):
        message = refusal(tmp_path, tensors | {UP + name: np.ones(shape, np.float32)})
        assert message.endswith(f"wrongly shaped: {UP}{name} {list(shape)} (wanted [] or [1]: one scale).")


def test_float16_that_would_overflow_is_refused(tmp_path):
    tensors = quantised("fp8_tensor")
    tensors[f"{UP}weight_scale"] = np.full((), 1e4, np.float32)
    assert "experts_up_proj has values that overflow float16" in refusal(tmp_path, tensors, dtype="float16")
    assert np.isfinite(load_layer(written(tmp_path, tensors, CONFIG), 1, dtype="bfloat16")[0].experts_up_proj).all()
