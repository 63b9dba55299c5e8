"""The one source of tolerances."""

import jax.numpy as jnp


def bound(dtype, terms: int, scale: float, *, roundings: int = 1) -> float:
    """Largest absolute error allowed for a sum of `terms` products.

    Accumulating in float32 in any order errs by at most `terms * eps32 * scale`, where `scale` bounds the sum of the
    products' magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1: gamma_n < n * eps).
    Rounding a value to `dtype` errs by at most half an eps of it. `roundings` counts the roundings to `dtype` on the
    way from the inputs to the result, the last one included; each is carried at most with weight `scale`.
    """
    eps32, eps = (float(jnp.finfo(d).eps) for d in (jnp.float32, dtype))
    return scale * (terms * eps32 + roundings * eps / 2)
