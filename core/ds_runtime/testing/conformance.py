"""`ds_runtime_kit.checks.conformance`."""

from ds_runtime_kit.checks.conformance import *
