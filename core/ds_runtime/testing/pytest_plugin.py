"""`ds_runtime_kit.pytest_plugin`."""

from ds_runtime_kit.pytest_plugin import *
