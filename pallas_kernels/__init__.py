"""Operations on JAX arrays with more than one implementation. Each operation is a subpackage; import it from there."""
