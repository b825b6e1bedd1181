"""`ds_runtime_kit.checks.numerics`."""

from ds_runtime_kit.checks.numerics import *
