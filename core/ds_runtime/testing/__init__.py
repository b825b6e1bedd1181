"""What plugin authors test with, under names that stay; the code is `ds_runtime_kit`.

`conformance.check_kernel(kernel, facts)` runs one offered kernel over its op's samples against
the float64 oracle; `conformance.cases_for(kernels, facts)` feeds `pytest.mark.parametrize`.
"""
