"""Benchmarks of the operations: `python -m pallas_kernels.bench OPERATION`. One JSON object a line, to keep."""
