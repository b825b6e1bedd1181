"""`ds_runtime_kit.devices.fake`."""

from ds_runtime_kit.devices.fake import *
