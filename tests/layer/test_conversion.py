"""Weights in other formats and layouts."""

import jax
import numpy as np
import pytest
from layers import TINY_L, random_weights

import nemotron_moe as nm
from pallas_kernels.formats import FORMATS


def test_weights_are_quantised_a_matrix_at_a_time_C19():
    weights = random_weights(TINY_L)
    formats = {
        "experts_up_proj": "nvfp4", "experts_down_proj": "fp8_block", "shared_experts_up_proj": "fp8_channel",
        "fc1_latent_proj": "fp8_tensor",
    }  # fmt: skip
    new = nm.quantize_weights(weights, formats)
    for name, leaf in weights.items().items():
        if name not in formats:
            assert getattr(new, name) is leaf
            continue
        seen, wanted = getattr(new, name), nm.quantize(leaf, formats[name])
        assert seen.format == formats[name] and seen.shape == leaf.shape
        jax.tree.map(np.testing.assert_array_equal, seen, wanted)
        error = nm.quantisation_error(seen, leaf)
        # An e2m1 number is off by a quarter at most, an e4m3 one by a sixteenth.
        assert 0 < error.relative < (2**-2 if formats[name] == "nvfp4" else 2**-4) and error.cosine > 0.98
    assert new.nbytes < weights.nbytes


def test_what_cannot_be_quantised_is_refused():
    weights = random_weights(TINY_L)
    for formats, message in (
        ({"gate": "fp8_tensor"}, "formats names 'gate'; wanted some of .'fc1_latent_proj'"),
        ({"experts": "nvfp4"}, "formats names 'experts'"),
        ({"experts_up_proj": "int4"}, "formats asks for experts_up_proj in 'int4'; wanted one of fp8_tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            nm.quantize_weights(weights, formats)
    with pytest.raises(ValueError, match="experts_up_proj is nvfp4 already"):
        packed = nm.quantize_weights(weights, {"experts_up_proj": "nvfp4"})
        nm.quantize_weights(packed, {"experts_up_proj": "fp8_tensor"})


@pytest.mark.parametrize("format", FORMATS)
def test_prepare_is_the_identity_C16(format):
    weights = nm.quantize_weights(random_weights(TINY_L), {"experts_up_proj": format})
    for implementation in (None, "xla"):
        assert nm.prepare(weights, implementation) is weights
    with pytest.raises(ValueError, match="implementation is 'cutlass'; wanted None or one of mosaic, xla"):
        nm.prepare(weights, "cutlass")
