"""What torch itself brings on ROCm: hipBLASLt."""

from __future__ import annotations

from ds_runtime.api import ReferenceLinear


class LinearHipblas(ReferenceLinear):
    """y = x · Wᵀ in the compute dtype."""

    tag = "rocm.hipblas_linear"
