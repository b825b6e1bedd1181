"""`ds_runtime_kit.devices.null`."""

from ds_runtime_kit.devices.null import *
