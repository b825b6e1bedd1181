"""What plugin authors test with: conformance of kernels, numeric helpers, the Null platform.

`conformance.check_kernel(kernel, facts)` runs one offered kernel over its op's samples against
the float64 oracle; `conformance.cases_for(kernels, facts)` feeds `pytest.mark.parametrize`.
"""
