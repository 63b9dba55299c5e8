"""What would run is said before it runs."""

import jax.numpy as jnp
import pytest
from layers import TINY_D, random_weights

import nemotron_moe as nm


def test_explain_names_what_runs():
    explanation = nm.explain(TINY_D, tokens=7)
    assert [step.name for step in explanation.steps] == ["experts_up", "experts_down"]
    assert {step.implementation for step in explanation.steps} == {"xla"}
    assert explanation.steps[0].shapes == "bfloat16[14, 64] x bfloat16[8, 48, 64]"
    assert "experts_down" in str(explanation) and explanation.device in str(explanation)
    reference = nm.explain(TINY_D, tokens=7, implementation="reference")
    assert {step.implementation for step in reference.steps} == {"reference"}
    half = nm.explain(TINY_D, tokens=7, dtype=jnp.float16, weights=random_weights(TINY_D))
    assert half.steps[1].shapes == "float32[14, 48] x float32[8, 64, 48]"


def test_explain_refuses_what_the_layer_refuses():
    with pytest.raises(ValueError, match=r"implementation is 'cuda'.*'xla'"):
        nm.explain(TINY_D, tokens=7, implementation="cuda")
