"""What would run is said before it runs."""

import jax.numpy as jnp
import pytest
from layers import TINY_D, random_weights

import nemotron_moe as nm
from pallas_kernels.implementation import H200, compiling_for


def test_explain_names_what_runs():
    explanation = nm.explain(TINY_D, tokens=7)
    assert [step.name for step in explanation.steps] == [
        *("router", "plan", "dispatch", "experts_up", "experts_down", "shared_expert"),
    ]
    assert [step.implementation for step in explanation.steps] == ["xla", "sort", *["xla"] * 4]
    assert [step.shapes for step in explanation.steps] == [
        "float32[7, 8]",
        "int32[14]",
        "bfloat16[7, 64] x int32[7, 2]",
        "bfloat16[14, 64] x bfloat16[8, 48, 64]",
        "bfloat16[14, 48] x bfloat16[8, 64, 48]",
        "bfloat16[7, 64] x bfloat16[96, 64]",
    ]
    assert "not on cpu" in explanation.steps[3].reasons["mosaic"]
    assert "experts_down" in str(explanation) and explanation.device in str(explanation)
    reference = nm.explain(TINY_D, tokens=7, implementation="reference")
    assert [step.implementation for step in reference.steps] == ["reference", "sort", *["reference"] * 3, "xla"]
    half = nm.explain(TINY_D, tokens=7, dtype=jnp.float16, weights=random_weights(TINY_D))
    assert half.steps[4].shapes == "float32[14, 48] x float32[8, 64, 48]"


def test_on_an_h200_the_kernels_run_where_they_serve():
    with compiling_for(H200):
        for config in (nm.presets.NANO, nm.presets.SUPER, nm.presets.ULTRA):
            steps = nm.explain(config, tokens=512).steps
            assert [step.implementation for step in steps] == ["mosaic", "compare", *["mosaic"] * 3, "xla"]
            assert "512 rows" in steps[5].reasons["mosaic"]
            assert nm.explain(config, tokens=8192).steps[5].implementation == "mosaic"
            named = nm.explain(config, tokens=512, implementation="xla")
            assert {step.implementation for step in named.steps} == {"xla", "compare"}
        wide = nm.explain(nm.presets.NANO, tokens=512, dtype=jnp.float32).steps
        assert [step.implementation for step in wide] == ["mosaic", "compare", *["xla"] * 4]
        assert wide[3].reasons == {"mosaic": "lhs is float32; it takes bfloat16"}
        with pytest.raises(ValueError, match="'mosaic' refuses: columns is 48; it takes multiples of 64"):
            nm.explain(TINY_D, tokens=7, implementation="mosaic")


def test_explain_refuses_what_the_layer_refuses():
    with pytest.raises(ValueError, match=r"implementation is 'cuda'.*'xla'"):
        nm.explain(TINY_D, tokens=7, implementation="cuda")
