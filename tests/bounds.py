"""The one source of tolerances."""

import jax.numpy as jnp
import numpy as np

# The table "What must match" in tests/fixtures/README.md, which was written for layers of these tests' sizes.
FLOAT32_LAYER = 1e-5  # mixer_out, block_out and each_expert_out in float32, as `relative`
BFLOAT16_LAYER = 1e-2  # mixer_out and block_out in bfloat16, as `relative`, over the tokens whose ids agree
REFERENCES = 6e-7  # a float32 reference against float64, as `relative`
LOGITS = 3e-5  # router_logits in float32, absolute
WEIGHTS = 1e-5  # topk_weights in float32, absolute
MARGIN = 1e-5  # a gap between float32 choice scores, absolute: larger ones decide the choice


def bound(dtype, terms: int, scale: float, *, roundings: int = 1, accumulate=jnp.float32) -> float:
    """Largest absolute error allowed for a sum of `terms` products.

    Accumulating in float32 in any order errs by at most `terms * eps32 * scale`, where `scale` bounds the sum of the
    products' magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1: gamma_n < n * eps).
    Rounding a value to `dtype` errs by at most half an eps of it. `roundings` counts the roundings to `dtype` on the
    way from the inputs to the result, the last one included; each is carried at most with weight `scale`.
    """
    eps_sum, eps = (float(jnp.finfo(d).eps) for d in (accumulate, dtype))
    return scale * (terms * eps_sum + roundings * eps / 2)


def relative(seen, wanted) -> float:
    """Norm of the difference over norm of `wanted`; 0 where both are 0."""
    wanted = np.asarray(wanted).astype(np.float64)
    difference = np.linalg.norm(np.asarray(seen).astype(np.float64) - wanted)
    return float(difference / max(np.linalg.norm(wanted), np.finfo(np.float64).tiny))
