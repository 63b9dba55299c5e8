"""The reference is held to the same contract as what is measured by it."""

from kernels.grouped_matmul_contract import GroupedMatmulContract


class TestReference(GroupedMatmulContract):
    implementation = "reference"
