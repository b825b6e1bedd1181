"""`ds_runtime_kit.kit`."""

from ds_runtime_kit.kit import *
