"""What a step will take on a device, from what its ops took there one by one."""
